"""Tables and charts of reproductions: ours, with the paper's number beside it."""

import math
from typing import NamedTuple

from mcvae.report.charts import Chart, Series, chart
from mcvae.report.comparison import Answer
from mcvae.report.tables import LABELS
from mcvae.runs.method import parse_key
from mcvae.runs.records import Record, Summary, summarise

__all__ = ["RecordRow", "record_answers", "record_charts", "record_rows"]

_LOWER_IS_BETTER = ("nll", "negative_elbo", "energy_distance", "squared_error")


class RecordRow(NamedTuple):
    """A row of a reproduction's table."""

    found: Summary
    measure: str
    ours: str
    paper: str
    difference: float | None


def _final(records: list[Record], *, and_the_papers: bool = False) -> list[Summary]:
    """Means over seeds at the last epoch of everything measured, perhaps with those the paper has a number for."""
    found, last = summarise(records), dict[tuple[str, ...], int]()
    for each in found:
        last[_subject(each)] = max(last.get(_subject(each), 0), each.epoch or 0)
    return [e for e in found if (e.epoch or 0) == last[_subject(e)] or (and_the_papers and e.paper is not None)]


def _subject(found: Summary) -> tuple[str, ...]:
    return found.dataset, found.method, found.metric, found.protocol


def record_rows(records: list[Record]) -> list[RecordRow]:
    """Rows of a reproduction's table: mean and deviation over seeds, the paper's number beside them."""
    return [
        RecordRow(
            found,
            LABELS.get(found.metric, found.metric),
            _plus_minus(found.mean, _spread(found)),
            _plus_minus(found.paper, found.paper_deviation),
            None if found.paper is None or not math.isfinite(found.mean) else found.mean - found.paper,
        )
        for found in _final(records, and_the_papers=True)
    ]


def _spread(found: Summary) -> float | None:
    """Deviation over seeds; of one seed, its standard error."""
    return found.standard_error if found.deviation is None else found.deviation


def _plus_minus(value: float | None, error: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "" if value is None else "not finite"
    digits = 2 if abs(value) >= 10 else 3
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def record_answers(name: str, records: list[Record]) -> list[Answer]:
    """The method that explains each data set best, with the paper's number."""
    found, answers = [each for each in _final(records) if math.isfinite(each.mean)], list[Answer]()
    for dataset in dict.fromkeys(each.dataset for each in found):
        by_metric = {m: [e for e in found if (e.dataset, e.metric) == (dataset, m)] for m in _LOWER_IS_BETTER}
        metric = next((metric for metric, members in by_metric.items() if len(members) > 1), None)
        if metric is not None:
            best = min(by_metric[metric], key=lambda each: each.mean)
            ours, paper = _plus_minus(best.mean, _spread(best)), _plus_minus(best.paper, best.paper_deviation)
            beside = f" (the paper: {paper})" if paper else ""
            answers.append(Answer(f"{name}, {dataset}: {best.method} has the lowest {LABELS[metric]}, {ours}{beside}."))
    return answers or [Answer(f"{name}: {len(found)} values were measured.")]


def record_charts(records: list[Record]) -> list[Chart]:
    """Values against K and against model evaluations, for every data set and metric."""
    charts, final = list[Chart | None](), _final(records)
    several = len({each.protocol for each in final}) > 1
    for dataset, metric in dict.fromkeys((each.dataset, each.metric) for each in final):
        label = LABELS.get(metric, metric)
        subject = f"{dataset}: {label}" if dataset else label
        lines, points = dict[str, list[tuple[float, Summary]]](), list[Series]()
        for each in [each for each in final if (each.dataset, each.metric) == (dataset, metric)]:
            suffix = f" ({each.protocol})" if several else ""
            if steps := _steps(each.method):
                lines.setdefault(each.method.removesuffix(f"-k{steps}") + suffix, []).append((float(steps), each))
            if each.evaluations:
                points.append(_line(each.method + suffix, len(points), [(each.evaluations, each)]))
        longer = [(name, members) for name, members in lines.items() if len(members) > 1]
        series = [_line(name, index, members) for index, (name, members) in enumerate(longer)]
        charts.append(chart(f"{subject} by K", "K", label, series))
        if len({point.x[0] for point in points}) > 1:
            charts.append(
                chart(f"{subject} by evaluations", "model evaluations", label, points, kind="points", log_x=True)
            )
    return [found for found in charts if found is not None]


def _steps(method: str) -> int:
    """K, of a key that ends with it; else 0."""
    try:
        steps = parse_key(method).num_steps
    except ValueError:
        return 0
    return steps if method.endswith(f"-k{steps}") else 0


def _line(name: str, index: int, members: list[tuple[float, Summary]]) -> Series:
    ordered = sorted(members, key=lambda member: member[0])
    return Series(
        name, index, [x for x, _ in ordered], [s.mean for _, s in ordered], [_spread(s) or 0.0 for _, s in ordered]
    )
