"""Runs that are compared: grouped by configuration, and subtracted image by image. Imports no torch."""

import math
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from mcvae.report.tables import unique
from mcvae.runs.discovery import Run
from mcvae.runs.plain import number
from mcvae.runs.records import paired

__all__ = ["Group", "difference", "evaluated", "groups", "images_of", "kind", "paired_difference"]


class Group(NamedTuple):
    """Runs that differ only in their seeds."""

    runs: list[Run]
    """One for each seed."""
    label: str
    """The method's key, and settings in which groups differ."""

    @property
    def name(self) -> str:
        """The folders of its runs."""
        names = [run.name for run in self.runs]
        return ", ".join(names) if len(names) < 4 else f"{names[0]} … {names[-1]} ({len(names)} runs)"

    @property
    def seconds(self) -> float:
        """What training took, averaged over seeds."""
        return statistics.fmean(run.result.seconds for run in self.runs)

    def mean(self, key: str) -> float | None:
        """Mean of a field of the evaluations over seeds; None unless it is known and finite for all of them."""
        found = evaluated(self.runs, key)
        known = [value for value in found if value is not None]
        return statistics.fmean(known) if len(known) == len(found) else None

    def measured(self, key: str) -> tuple[float, float] | None:
        """Mean of a field of the evaluations over seeds, and its standard error."""
        found = zip(evaluated(self.runs, key), evaluated(self.runs, f"{key}_se"), strict=True)
        known = [(value, error) for value, error in found if value is not None and error is not None]
        return _over_seeds(known) if len(known) == len(self.runs) else None


def evaluated(runs: list[Run], key: str) -> list[float | None]:
    """A field of every run's evaluation; None where it is not known or not finite."""
    return [number(getattr(run.evaluation, key, None)) for run in runs]


def groups(runs: Iterable[Run]) -> list[Group]:
    """Group runs by configuration, best likelihood first within each kind of data.

    Runs in a group differ only in their seeds. Of several with one seed, such as copies of a folder, the first counts:
    the same seed gives the same run.
    """
    kinds = dict[tuple[str, ...], dict[str, dict[int, Run]]]()
    for run in runs:
        settings = {**run.settings, "images": images_of(run)}
        identity = repr(sorted((name, repr(value)) for name, value in settings.items()))
        kinds.setdefault(kind(run), {}).setdefault(identity, {}).setdefault(run.result.seed, run)
    found = list[Group]()
    for this, together in kinds.items():
        same = [list(by_seed.values()) for by_seed in together.values()]
        differing = _differing([members[0].settings for members in same])
        if len({other[-1] for other in kinds if other[0] == this[0]}) > 1:
            differing += ["data.condition", "data.fingerprint"]  # other data of the same name
        found += [Group(members, _label(members[0].settings, differing)) for members in same]
    return sorted(found, key=lambda g: (*images_of(g.runs[0]), math.inf if (m := g.mean("nll")) is None else m))


def _differing(settings: list[dict[str, Any]]) -> list[str]:
    """Names of the settings that differ between groups, except the method, which every label shows."""
    names = unique(name for each in settings for name in each)
    several = [name for name in names if len({repr(each.get(name)) for each in settings if name in each}) > 1]
    of_evaluations = [name for name in names if name.startswith("evaluation.")]
    evaluated = [each for each in settings if not each.keys().isdisjoint(of_evaluations)]
    missing = [name for name in of_evaluations if any(name not in each for each in evaluated)]
    return [name for name in unique([*several, *missing]) if name != "method"]


def _label(settings: dict[str, Any], differing: list[str]) -> str:
    """The method's key, and the settings in which this group differs from others.

    >>> _label({"method": "vae", "run.epochs": 30}, ["run.epochs"])
    'vae (epochs 30)'
    """
    shown = [_said(name.rpartition(".")[2], settings[name]) for name in differing if name in settings]
    more = f", and {len(shown) - 5} more" if len(shown) > 5 else ""
    return str(settings["method"]) + (f" ({', '.join(shown[:5])}{more})" if shown else "")


def _said(name: str, value: Any) -> str:
    """A setting in words.

    >>> _said("limit", None), _said("condition", ["age", "label"]), _said("epochs", 30)
    ('no limit', 'condition age + label', 'epochs 30')
    """
    if value in (None, "none", []):
        return f"no {name}"
    return f"{name} {' + '.join(map(str, value)) if isinstance(value, list) else value}"


def kind(run: Run) -> tuple[str, ...]:
    """Data, transform, likelihood and fingerprint of own data. Only runs that agree in all have comparable likelihoods.

    Files of one name may differ, and so do the rows that are tested with another split, and what is modelled and what
    given with another condition: the fingerprint is of all that.
    """
    result, own = run.result, run.settings.get("data.fingerprint")
    return result.data, str(result.transform), str(result.likelihood), str(own or "")


def images_of(run: Run) -> tuple[str, ...]:
    """The images that a run was evaluated on; empty if it was not."""
    found = run.evaluation
    return (*kind(run), "0", found.split, str(found.num_images)) if found else (*kind(run), "1", "", "")


def paired_difference(run: Run, baseline: Run, column: str = "bound") -> tuple[float, float] | None:
    """Mean difference between two runs over the same images, and its standard error; None if images differ."""
    if run.folder == baseline.folder or images_of(run) != images_of(baseline):
        return None
    if (run.result.seed, run.result.batch_size) != (baseline.result.seed, baseline.result.batch_size):
        return None
    return paired(run.images, baseline.images, column)


def difference(group: Group, baseline: Group, column: str) -> tuple[float, float] | None:
    """The paired difference between groups, over the seeds that both have."""
    pairs = [paired_difference(a, b, column) for a in group.runs for b in baseline.runs]
    found = [pair for pair in pairs if pair is not None]
    return _over_seeds(found) if found else None


def _over_seeds(measured: list[tuple[float, float]]) -> tuple[float, float]:
    """Mean over seeds. Its standard error adds that over images, which seeds share, to that over seeds."""
    values, errors = zip(*measured, strict=True)
    seeds = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), math.hypot(statistics.fmean(errors), seeds)
