"""Results as flat records: one measured number each, with its error, its cost and the paper's number. No torch."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from mcvae.runs.plain import Row, RunError, number, read_rows, write_rows

__all__ = ["Record", "Summary", "paired", "read_records", "summarise", "write_records"]


@dataclass(frozen=True)
class Record:
    """One number of an experiment.

    Args:
        experiment: such as mnist or ppca.
        dataset: what it was measured on, such as mnist, or ring-20 for the toy model in 20 dimensions.
        method: a key such as vae, iwae-10, l-mcvae-sigmoid-k5.
        metric: what was measured, such as nll.
        value: the number.
        seed: of the run behind it.
        epoch: after how many epochs; None where there are none.
        standard_error: of the value, from what is random within the run (images, chains, replicates).
        paper: the paper's value, where it has one.
        paper_deviation: the paper's standard deviation over seeds.
        protocol: clean or paper.
        evaluations: model evaluations (passes of one latent through the decoder) that training or the estimate took.
        seconds: time that it took.
    """

    experiment: str
    dataset: str
    method: str
    metric: str
    value: float
    seed: int = 0
    epoch: int | None = None
    standard_error: float | None = None
    paper: float | None = None
    paper_deviation: float | None = None
    protocol: str = "clean"
    evaluations: float | None = None
    seconds: float | None = None


_COLUMNS = [field.name for field in fields(Record)]
_TEXTS = ("experiment", "dataset", "method", "metric", "protocol")


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write a CSV file, whole or not at all."""
    write_rows(path, _COLUMNS, map(asdict, records))


def read_records(path: Path) -> list[Record]:
    """Read a CSV file of `write_records`."""
    rows = read_rows(path)
    try:
        return [Record(**{name: _parse(name, row[name]) for name in _COLUMNS}) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is not a table of records: {error}. Remove it to measure again.") from None


def _parse(name: str, text: str) -> Any:
    if name in _TEXTS:
        return text
    if text == "":
        return None
    return int(text) if name in ("seed", "epoch") else float(text)


def paired(first: list[Row], second: list[Row], column: str) -> tuple[float, float] | None:
    """Mean and standard error of first − second over the rows of two tables; None if they do not match.

    Images differ far more than methods do. Taking differences image by image removes that variation.

    >>> paired([{"bound": "1"}, {"bound": "3"}], [{"bound": "0"}, {"bound": "0"}], "bound")
    (2.0, 1.0)
    """
    values = [(number(a.get(column)), number(b.get(column))) for a, b in zip(first, second, strict=False)]
    differences = [a - b for a, b in values if a is not None and b is not None]
    if not len(first) == len(second) == len(differences) > 1:
        return None
    return statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))


class Summary(NamedTuple):
    """Mean and spread of a number over its seeds."""

    dataset: str
    method: str
    epoch: int | None
    metric: str
    protocol: str
    mean: float
    deviation: float | None
    """Standard deviation over seeds; None for one seed."""
    standard_error: float | None
    """Of the mean: over seeds, or from within the run if there is one seed."""
    num_seeds: int
    paper: float | None
    paper_deviation: float | None
    evaluations: float | None
    seconds: float | None
    largest: float
    """The largest value over seeds."""

    @property
    def spread(self) -> float | None:
        """Deviation over seeds; of one seed, its standard error."""
        return self.standard_error if self.deviation is None else self.deviation


def summarise(records: Iterable[Record]) -> list[Summary]:
    """Means over seeds, in the order in which records come.

    >>> one, two = (Record("toy", "ring", "vae", "error", value, seed) for seed, value in enumerate((1.0, 3.0)))
    >>> found, = summarise([one, two])
    >>> found.mean, round(found.deviation, 3), found.num_seeds
    (2.0, 1.414, 2)
    """
    groups = dict[tuple[Any, ...], list[Record]]()
    for record in records:
        key = (record.dataset, record.method, record.epoch, record.metric, record.protocol)
        groups.setdefault(key, []).append(record)
    return [_summary(group) for group in groups.values()]


def _summary(group: list[Record]) -> Summary:
    """Of records that differ in their seeds only."""
    first, values = group[0], [record.value for record in group]
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Summary(
        dataset=first.dataset,
        method=first.method,
        epoch=first.epoch,
        metric=first.metric,
        protocol=first.protocol,
        mean=statistics.fmean(values),
        deviation=deviation,
        standard_error=first.standard_error if deviation is None else deviation / math.sqrt(len(values)),
        num_seeds=len({record.seed for record in group}),
        paper=first.paper,
        paper_deviation=first.paper_deviation,
        evaluations=_mean(record.evaluations for record in group),
        seconds=_mean(record.seconds for record in group),
        largest=max(values),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
