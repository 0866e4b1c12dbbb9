"""Charts of runs: training, transitions, K, cost and weights."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from mcvae.report.charts import Chart, Series, chart
from mcvae.report.groups import evaluated
from mcvae.runs.discovery import Run
from mcvae.runs.plain import Row, number, numbers

__all__ = ["panels"]


def panels(label: tuple[str, ...], runs: list[Run], style: dict[str, int]) -> dict[str, Any]:
    """Charts of the runs on one kind of data, which can share axes."""
    return {
        "name": f"{label[0]} ({', '.join(part for part in label[1:3] if part != 'None')})".replace(" ()", ""),
        "legend": [(style[run.name], run.name, run.key) for run in runs],
        "curves": _curves(runs, style),
        "transitions": [(run.name, found) for run in runs if (found := _transitions(run))],
        "steps": _against_steps(runs),
        "cost": _against_cost(runs, style),
        "weights": _weights(runs, style),
    }


def _present(charts: list[Chart | None]) -> list[Chart]:
    return [found for found in charts if found is not None]


def _column(run: Run, column: str, x: Callable[[Row], float | None]) -> tuple[list[float], list[float]]:
    """A column of `metrics.csv` against x, at the epochs where both are known."""
    pairs = [(x(row), number(row.get(column))) for row in run.metrics]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return [a for a, _ in known], [b for _, b in known]


def _epoch(row: Row) -> float | None:
    return number(row.get("epoch"))


def _curves(runs: list[Run], style: dict[str, int]) -> list[Chart]:
    """Training curves, and where acceptance and step size of the transitions ended."""
    titles = {
        "train_bound": ("Bound in training", "bound, nats", True),
        "val_bound": ("Bound on validation data", "bound, nats", True),
        "val_nll": ("NLL on validation data", "NLL, nats", False),
        "acceptance": ("Acceptance", "acceptance", False),
        "step_size": ("Step size", "step size", False),
    }
    charts = [
        chart(
            title,
            "epoch",
            y_label,
            [Series(run.name, style[run.name], *_column(run, column, _epoch)) for run in runs],
            cut_start=cut,
        )
        for column, (title, y_label, cut) in titles.items()
    ]
    for column, title in (("acceptances", "Acceptance"), ("step_sizes", "Step size")):
        last = [(run, numbers(run.metrics[-1].get(column)) if run.metrics else []) for run in runs]
        series = [Series(run.name, style[run.name], [*map(float, range(1, len(y) + 1))], y) for run, y in last]
        charts.append(chart(f"{title} by transition, at the end", "transition", titles[column[:-1]][1], series))
    return _present(charts)


def _transitions(run: Run) -> list[Chart]:
    """Acceptance and step size of every transition of a run during training."""
    charts = []
    for column, label in (("acceptances", "acceptance"), ("step_sizes", "step size")):
        known = [(_epoch(row) or 0.0, numbers(row.get(column))) for row in run.metrics]
        known = [(epoch, values) for epoch, values in known if values]
        series = [
            Series(f"transition {k + 1}", k, [epoch for epoch, _ in known], [values[k] for _, values in known])
            for k in range(min((len(values) for _, values in known), default=0))
        ]
        charts.append(chart(f"{label.capitalize()} of every transition", "epoch", label, series))
    return _present(charts)


def _against_steps(runs: list[Run]) -> list[Chart]:
    """Held-out bound and NLL against K, a line per method; methods without steps are points at 0."""
    lines = dict[str, list[Run]]()
    for run in runs:
        if run.evaluation:
            lines.setdefault(run.key.replace(f"-k{run.num_steps}", ""), []).append(run)
    if not any(len({run.num_steps for run in line}) > 1 for line in lines.values()):
        return []
    charts = []
    for key, title in (("bound", "Held-out bound by K"), ("nll", "Held-out NLL by K")):
        series = []
        for index, (name, line) in enumerate(lines.items()):
            ordered = sorted(line, key=lambda run: run.num_steps)
            x = [float(run.num_steps) for run in ordered]
            series.append(Series(name, index, x, *_values(ordered, key)))
        charts.append(chart(title, "K", f"{key.replace('nll', 'NLL')}, nats", series))
    return _present(charts)


def _values(runs: list[Run], key: str) -> tuple[list[float], list[float]]:
    """A field of the evaluations, and its standard errors; NaN where unknown."""
    values, errors = (
        [math.nan if value is None else value for value in evaluated(runs, name)] for name in (key, f"{key}_se")
    )
    return values, errors


def _against_cost(runs: list[Run], style: dict[str, int]) -> list[Chart]:
    """Bound during training, and the final NLL, against model evaluations and seconds."""
    if len(runs) < 2:
        return []
    costs: dict[str, Callable[[Run, Row], float | None]] = {
        "evaluations per datum": lambda run, row: (_epoch(row) or 0.0) * run.cost or None,
        "seconds": lambda run, row: number(row.get("seconds")) or None,
    }
    charts = list[Chart | None]()
    for label, cost in costs.items():
        lines = [
            Series(run.name, style[run.name], *_column(run, "val_bound", lambda row, r=run, c=cost: c(r, row)))  # type: ignore[misc]
            for run in runs
        ]
        title = f"Validation bound by {label}"
        charts.append(chart(title, label, "bound, nats", lines, log_x=True, cut_start=True))
    for label, cost in costs.items():
        points = [
            Series(run.name, style[run.name], [x], *_values([run], "nll"))
            for run in runs
            if run.evaluation and run.metrics and (x := cost(run, run.metrics[-1]))
        ]
        charts.append(chart(f"Held-out NLL by {label}", label, "NLL, nats", points, kind="points", log_x=True))
    return _present(charts)


def _weights(runs: list[Run], style: dict[str, int]) -> list[Chart]:
    """Histograms: log weights of all chains, effective sample size and k̂ of all images."""
    weights, sizes, shapes = list[Series](), list[Series](), list[Series]()
    for run in runs:
        if run.evaluation is not None and (found := run.evaluation.weights):
            middle = [(a + b) / 2 for a, b in zip(found.edges, found.edges[1:], strict=False)]
            total = sum(found.counts) or 1
            weights.append(Series(run.name, style[run.name], middle, [100 * n / total for n in found.counts]))
        for column, unit, low, high, to in (
            ("ess", number(getattr(run.evaluation, "num_samples", None)) or 1.0, 0.0, 1.0, sizes),
            ("pareto_k", 1, -0.5, 1.5, shapes),
        ):
            known = [value / unit for row in run.images if (value := number(row.get(column))) is not None]
            if known:
                to.append(Series(run.name, style[run.name], *_histogram(known, low, high)))
    share = "% of data"
    return _present(
        [
            chart("Weights of the chains", "log w − log mean w, nats", "% of chains", weights, kind="steps"),
            chart("Effective sample size", "ESS / chains", share, sizes, kind="steps"),
            chart("Tail of the weights", "Pareto k̂", share, shapes, kind="steps"),
        ]
    )


def _histogram(values: list[float], low: float, high: float, bins: int = 20) -> tuple[list[float], list[float]]:
    """Centres of bins and the percentage in each; the outer bins include what lies beyond."""
    width = (high - low) / bins
    counts = Counter(min(bins - 1, max(0, int((value - low) / width))) for value in values)
    middles = [low + (index + 0.5) * width for index in range(bins)]
    return middles, [100 * counts[index] / len(values) for index in range(bins)]
