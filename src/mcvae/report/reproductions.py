"""Reproductions on the page: their last values as a table, and the best method in words."""

import math

from mcvae.report.tables import LABELS, Answer, Table, plus_minus, table
from mcvae.runs.discovery import Reproduction
from mcvae.runs.records import Record, summarise

__all__ = ["record_answers", "record_table"]

_LOWER_IS_BETTER = ("nll", "negative_elbo", "energy_distance", "squared_error")


def _final(records: list[Record], *, and_the_papers: bool = False) -> list[Record]:
    """The records of the last epoch of everything measured, and perhaps those the paper has a number for."""
    last = dict[tuple[str, ...], int]()
    for each in records:
        last[_subject(each)] = max(last.get(_subject(each), 0), each.epoch or 0)
    return [e for e in records if (e.epoch or 0) == last[_subject(e)] or (and_the_papers and e.paper is not None)]


def _subject(record: Record) -> tuple[str, ...]:
    return record.dataset, record.method, record.metric, record.protocol


def record_table(found: Reproduction) -> Table:
    """A reproduction's table: mean and deviation over seeds, the paper's number beside them."""
    records = _final(found.records, and_the_papers=True)
    metrics = dict.fromkeys([*found.provenance.get("metrics", []), *(record.metric for record in records)])
    return table(found.name, records, list(metrics))


def record_answers(name: str, records: list[Record]) -> list[Answer]:
    """The method that explains each data set best, with the paper's number."""
    found, answers = [each for each in summarise(_final(records)) if math.isfinite(each.mean)], list[Answer]()
    for dataset in dict.fromkeys(each.dataset for each in found):
        by_metric = {m: [e for e in found if (e.dataset, e.metric) == (dataset, m)] for m in _LOWER_IS_BETTER}
        metric = next((metric for metric, members in by_metric.items() if len(members) > 1), None)
        if metric is not None:
            best = min(by_metric[metric], key=lambda each: each.mean)
            ours = plus_minus(best.mean, best.spread)
            beside = "" if best.paper is None else f" (the paper: {plus_minus(best.paper, best.paper_deviation, 2)})"
            answers.append(Answer(f"{name}, {dataset}: {best.method} has the lowest {LABELS[metric]}, {ours}{beside}."))
    return answers or [Answer(f"{name}: {len(found)} values were measured.")]
