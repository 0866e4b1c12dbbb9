"""Tables and charts of reproductions: ours, with the paper's number beside it."""

import re
import statistics
from typing import Any

from mcvae.report.charts import Chart, Series, chart
from mcvae.report.comparison import Answer
from mcvae.runs.plain import Row, number

__all__ = ["record_answers", "record_charts", "record_rows"]

_LOWER_IS_BETTER = ("nll", "negative_elbo")

_SAME = ("experiment", "dataset", "method", "metric", "protocol")


def _key(record: Row) -> tuple[str, ...]:
    return tuple(record.get(name) or "" for name in _SAME)


def _final(records: list[Row], *, and_the_papers: bool = False) -> list[Row]:
    """The records of the last epoch of everything measured, perhaps with those the paper has a number for."""
    last = dict[tuple[str, ...], float]()
    for record in records:
        last[_key(record)] = max(last.get(_key(record), 0.0), number(record.get("epoch")) or 0.0)
    return [
        record
        for record in records
        if (number(record.get("epoch")) or 0.0) == last[_key(record)] or (and_the_papers and record.get("paper"))
    ]


def _over_seeds(records: list[Row]) -> dict[tuple[str, ...], list[Row]]:
    groups = dict[tuple[str, ...], list[Row]]()
    for record in records:
        groups.setdefault((*_key(record), record.get("epoch") or ""), []).append(record)
    return groups


def _mean(records: list[Row], column: str = "value") -> float | None:
    known = [value for record in records if (value := number(record.get(column))) is not None]
    return statistics.fmean(known) if known else None


def _spread(records: list[Row]) -> float | None:
    """Deviation over seeds; of one seed, its standard error."""
    known = [value for record in records if (value := number(record.get("value"))) is not None]
    return statistics.stdev(known) if len(known) > 1 else _mean(records, "standard_error")


def _plus_minus(value: float | None, error: float | None) -> str:
    if value is None:
        return ""
    digits = 2 if abs(value) >= 10 else 3
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def record_rows(records: list[Row]) -> list[dict[str, Any]]:
    """Rows of a reproduction's table: mean and deviation over seeds, the paper's number beside them."""
    table, groups = [], _over_seeds(_final(records, and_the_papers=True))
    for (experiment, dataset, method, metric, protocol, epoch), group in groups.items():
        ours, paper = _mean(group), _mean(group, "paper")
        table.append(
            {
                "experiment": experiment,
                "dataset": dataset,
                "method": method,
                "metric": metric,
                "measure": _words(metric),
                "epoch": epoch,
                "protocol": protocol,
                "seeds": len({record.get("seed") for record in group}),
                "ours": _plus_minus(ours, _spread(group)),
                "value": ours,
                "paper": _plus_minus(paper, _mean(group, "paper_deviation")),
                "paper_value": paper,
                "difference": None if ours is None or paper is None else ours - paper,
                "seconds": _mean(group, "seconds"),
            }
        )
    return table


def record_answers(name: str, records: list[Row]) -> list[Answer]:
    """The method that explains each data set best, with the paper's number."""
    found = []
    table = [row for row in record_rows(_final(records)) if row["value"] is not None]
    for dataset in dict.fromkeys(row["dataset"] for row in table):
        by_metric = {
            metric: [row for row in table if (row["dataset"], row["metric"]) == (dataset, metric)]
            for metric in _LOWER_IS_BETTER
        }
        metric = next((metric for metric, rows in by_metric.items() if len(rows) > 1), None)
        if metric is not None:
            best = min(by_metric[metric], key=lambda row: float(row["value"]))
            paper = f" (the paper: {best['paper']})" if best["paper"] else ""
            headline = f"{name}, {dataset}: {best['method']} has the lowest {_words(metric)}, {best['ours']}{paper}."
            found.append(Answer(headline))
    return found or [Answer(f"{name}: {len(table)} values were measured.")]


def record_charts(records: list[Row]) -> list[Chart]:
    """Values against K and against model evaluations, for every data set and metric."""
    charts = list[Chart | None]()
    final = _final(records)
    several = len({record.get("protocol") for record in final}) > 1
    subjects = dict.fromkeys((record.get("dataset") or "", record["metric"]) for record in final)
    for dataset, metric in subjects:
        groups = _over_seeds([r for r in final if (r.get("dataset") or "", r["metric"]) == (dataset, metric)])
        subject = f"{dataset}: {_words(metric)}" if dataset else _words(metric)
        lines, points = dict[str, list[tuple[float, list[Row]]]](), list[Series]()
        for (_, _, method, _, protocol, _), group in groups.items():
            suffix = f" ({protocol})" if several else ""
            if match := re.fullmatch(r"(.+)-k(\d+)", method):
                lines.setdefault(match[1] + suffix, []).append((float(match[2]), group))
            if cost := _mean(group, "evaluations"):
                points.append(_line(method + suffix, len(points), [(cost, group)]))
        longer = [(name, members) for name, members in lines.items() if len(members) > 1]
        series = [_line(name, index, members) for index, (name, members) in enumerate(longer)]
        charts.append(chart(f"{subject} by K", "K", _words(metric), series))
        if len({point.x[0] for point in points if point.x}) > 1:
            title, label = f"{subject} by evaluations", "model evaluations"
            charts.append(chart(title, label, _words(metric), points, kind="points", log_x=True))
    return [found for found in charts if found is not None]


def _words(metric: str) -> str:
    """negative_elbo as negative ELBO."""
    return metric.replace("_", " ").replace("elbo", "ELBO").replace("nll", "NLL")


def _line(name: str, index: int, members: list[tuple[float, list[Row]]]) -> Series:
    known = [
        (x, mean, _spread(group) or 0.0)
        for x, group in sorted(members, key=lambda m: m[0])
        if (mean := _mean(group)) is not None
    ]
    return Series(name, index, [x for x, _, _ in known], [y for _, y, _ in known], [e for _, _, e in known])
