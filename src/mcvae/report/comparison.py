"""Compare runs in one table: a row per configuration, best likelihood first. Imports no torch."""

import math
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from rich.markup import escape

from mcvae.report.tables import Table, console, terminal, unique
from mcvae.runs.discovery import Run
from mcvae.runs.plain import number
from mcvae.runs.records import paired
from mcvae.runs.results import EvaluationSummary

__all__ = [
    "Answer",
    "Group",
    "TableCell",
    "answers",
    "certificate",
    "comparison",
    "groups",
    "kind",
    "paired_difference",
    "rows",
    "show",
]


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

    def mean(self, key: str) -> float | None:
        """Mean of a field of the evaluations over seeds; None unless it is known and finite for all of them."""
        found = [number(getattr(run.evaluation, key, None)) for run in self.runs]
        known = [value for value in found if value is not None]
        return statistics.fmean(known) if len(known) == len(found) else None

    def measured(self, key: str) -> tuple[float, float] | None:
        """Mean of a field of the evaluations over seeds, and its standard error."""
        values, errors = ([number(getattr(run.evaluation, k, None)) for run in self.runs] for k in (key, f"{key}_se"))
        known = [(v, e) for v, e in zip(values, errors, strict=True) if v is not None and e is not None]
        return _over_seeds(known) if len(known) == len(values) else None


def groups(runs: Iterable[Run]) -> list[Group]:
    """Group runs by configuration, best likelihood first within each kind of data.

    Runs in a group differ only in their seeds. Of several with one seed, such as copies of a folder, the first counts:
    the same seed gives the same run.
    """
    kinds = dict[tuple[str, ...], dict[str, dict[int, Run]]]()
    for run in runs:
        told = {**run.settings, "images": _images_of(run)}
        identity = repr(sorted((name, repr(value)) for name, value in told.items()))
        kinds.setdefault(kind(run), {}).setdefault(identity, {}).setdefault(run.result.seed, run)
    found = list[Group]()
    for together in kinds.values():
        same = [list(by_seed.values()) for by_seed in together.values()]
        differing = _differing([members[0].settings for members in same])
        found += [Group(members, _label(members[0].settings, differing)) for members in same]
    return sorted(found, key=lambda g: (*_images_of(g.runs[0]), math.inf if (m := g.mean("nll")) is None else m))


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
    shown = [f"{name.rpartition('.')[2]} {settings[name]}" for name in differing if name in settings]
    more = f", and {len(shown) - 5} more" if len(shown) > 5 else ""
    return str(settings["method"]) + (f" ({', '.join(shown[:5])}{more})" if shown else "")


def kind(run: Run) -> tuple[str, ...]:
    """Data, transform and likelihood of a run. Only runs that agree in all three have comparable likelihoods."""
    return run.result.data, str(run.result.transform), str(run.result.likelihood)


def _images_of(run: Run) -> tuple[str, ...]:
    """The images that a run was evaluated on; empty if it was not."""
    found = run.evaluation
    return (*kind(run), "0", found.split, str(found.num_images)) if found else (*kind(run), "1", "", "")


def paired_difference(run: Run, baseline: Run, column: str = "bound") -> tuple[float, float] | None:
    """Mean difference between two runs over the same images, and its standard error; None if images differ."""
    if run.folder == baseline.folder or _images_of(run) != _images_of(baseline):
        return None
    if (run.result.seed, run.result.batch_size) != (baseline.result.seed, baseline.result.batch_size):
        return None
    return paired(run.images, baseline.images, column)


def _difference(group: Group, baseline: Group, column: str) -> tuple[float, float] | None:
    """The paired difference between groups, over the seeds that both have."""
    pairs = [paired_difference(a, b, column) for a in group.runs for b in baseline.runs]
    found = [pair for pair in pairs if pair is not None]
    return _over_seeds(found) if found else None


class TableCell(NamedTuple):
    """The text of a cell, and the number that the column is sorted by."""

    text: str
    value: float | None = None


def comparison(found: list[Group]) -> Table:
    """The table as text: held-out bound, likelihood and cost of every group."""
    columns, body = rows(found)
    title = "Held-out data, in nats, ± standard error over data and seeds"
    return Table(title, columns, [[cell.text for cell in row] for row in body], [])


def rows(found: list[Group]) -> tuple[list[str], list[list[TableCell]]]:
    """Columns and rows of the comparison."""
    baselines = [group for group in found if group.runs[0].key == "vae" and group.runs[0].evaluation]
    versus = ["bound - VAE's"] if baselines else []
    columns = ["run", "data", "method", "bound", *versus, "NLL", "bound below NLL by", "ESS", "evaluations", "seconds"]
    return columns, [_row(group, baselines) for group in found]


def _row(group: Group, baselines: list[Group]) -> list[TableCell]:
    first = group.runs[0]
    seconds = statistics.fmean(run.result.seconds for run in group.runs)
    name = [TableCell(group.name), TableCell(first.result.data), TableCell(group.label)]
    cost = [TableCell(f"{first.cost}", first.cost), TableCell(f"{seconds:.0f}", seconds)]
    if first.evaluation is None:
        words = "diverged" if first.state == "diverged" else "not evaluated"
        return [*name, TableCell(words), *[TableCell("")] * (3 + bool(baselines)), *cost]
    differences = (_difference(group, baseline, "bound") for baseline in baselines if baseline is not group)
    difference = next((each for each in differences if each), None)
    versus = TableCell("") if difference is None else TableCell("{:+.2f} ± {:.2f}".format(*difference), difference[0])
    return [
        *name,
        _measured(group, "bound"),
        *([versus] if baselines else []),
        _measured(group, "nll"),
        _measured(group, "gap"),
        _share(group.mean("ess"), number(first.evaluation.num_samples)),
        *cost,
    ]


def _measured(group: Group, key: str) -> TableCell:
    found, mean = group.measured(key), group.mean(key)
    if mean is None:
        return TableCell("not finite")
    return TableCell(f"{mean:.2f}" + ("" if found is None else f" ± {found[1]:.2f}"), mean)


def _share(ess: float | None, chains: float | None) -> TableCell:
    text = "unknown" if ess is None or not chains else f"{ess:.1f} of {chains:.0f}"
    return TableCell(text, ess / chains if ess is not None and chains else None)


def certificate(name: str, found: EvaluationSummary) -> str:
    """What an evaluation found, in words: the likelihood, whether it has converged, and why not.

    >>> certificate("runs/a", EvaluationSummary(num_images=9, nll=1.25, verdict="not converged")).splitlines()[0][:30]
    'runs/a: NLL 1.25 on 9 test ima'
    """
    low, high = found.nll_interval or (None, None)
    start = "fitted Gaussians" if found.start == "fitted" else f"the {found.start}"
    lines = [
        f"{name}: NLL {_told(found.nll)} on {found.num_images} {found.split} {found.unit}, 95 % interval "
        f"[{_told(low)}, {_told(high)}] (of its standard error {_told(found.nll_se, 3)}, the chains cause "
        f"{_told(found.nll_se_chains, 3)}).",
        f"  {found.verdict[:1].upper()}{found.verdict[1:]}.",
        f"  {found.num_samples} chains of {found.num_steps} temperatures from {start}: median ESS "
        f"{_told(found.ess, 1)}, median k {_told(found.pareto_k)}, acceptance {_told(found.acceptance)}, "
        f"{found.nonfinite} chains not finite.",
        f"  Bound {_told(found.bound)}, {_told(found.gap)} ± {_told(found.gap_se)} below the likelihood; rate "
        f"{_told(found.rate)}, distortion {_told(found.distortion)}; {found.active_units} of {found.latent_dim} "
        "units active.",
    ]
    if found.importance is not None:
        lines.append(
            f"  With as many passes through the model, importance sampling gives NLL {_told(-found.importance)}; the "
            f"IWAE bound of 10 samples is {_told(found.iwae_10)}."
        )
    both = found.sandwich
    if both is not None:
        lines.append(
            f"  On {both.num_images} simulated {found.unit} log p lies in [{both.lower:.2f}, {both.upper:.2f}], gap "
            f"{both.gap:.3f} ± {both.gap_se:.3f}."
        )
        if both.importance is not None:
            lines.append(
                f"  There importance sampling at equal cost says {both.importance:.2f}, and the IWAE bound of 10 "
                f"samples {_told(both.iwae_10)}."
            )
    return "\n".join(lines)


def _told(value: float | None, digits: int = 2) -> str:
    return "unknown" if number(value) is None else f"{value:.{digits}f}"


def show(runs: list[Run]) -> None:
    """Print the table, and its result in words."""
    out, found = console(), groups(runs)
    out.print(terminal(comparison(found), names=3))
    if (copies := len(runs) - sum(len(group.runs) for group in found)) > 0:
        out.print(f"{copies} of the {len(runs)} runs repeat another's settings and seed, and are not counted.")
    for answer in answers(found):
        out.print(escape(f"{answer.headline} {answer.details}"))


class Answer(NamedTuple):
    """The result of a table in words."""

    headline: str
    details: str = ""


def answers(found: list[Group]) -> list[Answer]:
    """Say which method explains held-out data best, by how much and at what cost: a paragraph per set of images.

    Args:
        found: groups in the order of the table, so that the answer is the first row of the set.
    """
    sets = dict[tuple[str, ...], list[Group]]()
    for group in found:
        if group.measured("nll") is not None and group.mean("bound") is not None and group.mean("num_images"):
            sets.setdefault(_images_of(group.runs[0]), []).append(group)
    return [_answer(images, members) for images, members in sets.items()]


def _answer(images: tuple[str, ...], members: list[Group]) -> Answer:
    data, *_, split, count = images
    best, *others = members
    assert best.runs[0].evaluation is not None
    unit = best.runs[0].evaluation.unit
    nll = "NLL {:.2f} ± {:.2f} nats".format(*_nll(best))
    seeds = f" over {len(best.runs)} seeds" if len(best.runs) > 1 else ""
    details, plain = list[str](), [group for group in others if group.runs[0].key == "vae"]
    if others:
        headline = f"{data}: {best.label} explains the {count} {split} {unit} best, with {nll}{seeds}."
        for other in [others[0], *plain[: plain[:1] != others[:1]]]:
            difference, error = _advantage(best, other)
            doubt = "" if difference > 2 * error else ", which is within the noise"
            details.append(f"It is {difference:.2f} ± {error:.2f} nats better than {other.label}{doubt}.")
        reference = plain[0] if plain else others[0]
        details.append(f"{_cost(best)}; {reference.label} took {_cost(reference, short=True)}.")
    else:
        headline = f"{data}: {best.label} has {nll}{seeds} on {count} {split} {unit}."
        details.append("No other method was evaluated on them.")
    tightest = max(members, key=lambda group: group.mean("bound") or -math.inf)
    if tightest is not best:
        details.append(f"The highest bound is that of {tightest.label}.")
    if any(run.evaluation and run.evaluation.verdict.startswith("not") for group in members for run in group.runs):
        details.append("Not every likelihood here has converged: read the verdicts.")
    return Answer(headline, " ".join(details))


def _nll(group: Group) -> tuple[float, float]:
    found = group.measured("nll")
    assert found is not None
    return found


def _advantage(best: Group, other: Group) -> tuple[float, float]:
    """How much better `best` is, image by image where the images are the same."""
    if found := _difference(best, other, "log_likelihood"):
        return found
    (first, first_error), (second, second_error) = _nll(best), _nll(other)
    return second - first, math.hypot(first_error, second_error)


def _over_seeds(measured: list[tuple[float, float]]) -> tuple[float, float]:
    """Mean over seeds. Its standard error adds that over images, which seeds share, to that over seeds."""
    values, errors = zip(*measured, strict=True)
    seeds = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), math.hypot(statistics.fmean(errors), seeds)


def _cost(group: Group, *, short: bool = False) -> str:
    seconds, times = statistics.fmean(run.result.seconds for run in group.runs), group.runs[0].cost
    if short:
        return f"{seconds:.0f} s and {times}"
    return f"Training took {seconds:.0f} s and {times} model evaluations per datum and step"
