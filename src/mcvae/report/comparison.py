"""Compare runs in one table: a row per configuration, best likelihood first. Imports no torch."""

import math

from rich.markup import escape

from mcvae.report.groups import Group, difference, groups, images_of
from mcvae.report.tables import Answer, Table, console, terminal
from mcvae.runs.discovery import Run
from mcvae.runs.plain import number
from mcvae.runs.results import EvaluationSummary

__all__ = ["answers", "certificate", "comparison", "show"]


def comparison(found: list[Group]) -> Table:
    """Held-out bound, likelihood and cost of every group."""
    baselines = [group for group in found if group.runs[0].key == "vae" and group.runs[0].evaluation]
    versus = ["bound - VAE's"] if baselines else []
    header = ["run", "data", "method", "bound", *versus, "NLL", "bound below NLL by", "ESS", "evaluations", "seconds"]
    title = "Held-out data, in nats, ± standard error over data and seeds"
    return Table(title, header, [_row(group, baselines) for group in found], [], names=3)


def _row(group: Group, baselines: list[Group]) -> list[str]:
    first = group.runs[0]
    name = [group.name, first.result.data, group.label]
    cost = [f"{first.cost}", f"{group.seconds:.0f}"]
    if first.evaluation is None:
        words = "diverged" if first.state == "diverged" else "not evaluated"
        return [*name, words, *[""] * (3 + bool(baselines)), *cost]
    differences = (difference(group, baseline, "bound") for baseline in baselines if baseline is not group)
    found = next((each for each in differences if each), None)
    versus = "" if found is None else "{:+.2f} ± {:.2f}".format(*found)
    measured = [_measured(group, key) for key in ("bound", "nll", "gap")]
    share = _share(group.mean("ess"), number(first.evaluation.num_samples))
    return [*name, measured[0], *([versus] if baselines else []), *measured[1:], share, *cost]


def _measured(group: Group, key: str) -> str:
    found, mean = group.measured(key), group.mean(key)
    if mean is None:
        return "not finite"
    return f"{mean:.2f}" + ("" if found is None else f" ± {found[1]:.2f}")


def _share(ess: float | None, chains: float | None) -> str:
    return "unknown" if ess is None or not chains else f"{ess:.1f} of {chains:.0f}"


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
    out.print(terminal(comparison(found)))
    if (copies := len(runs) - sum(len(group.runs) for group in found)) > 0:
        out.print(f"{copies} of the {len(runs)} runs repeat another's settings and seed, and are not counted.")
    for answer in answers(found):
        out.print(escape(f"{answer.headline} {answer.details}"))


def answers(found: list[Group]) -> list[Answer]:
    """Say which method explains held-out data best, by how much and at what cost: a paragraph per set of images.

    Args:
        found: groups in the order of the table, so that the answer is the first row of the set.
    """
    sets = dict[tuple[str, ...], list[Group]]()
    for group in found:
        if group.measured("nll") is not None and group.mean("bound") is not None and group.mean("num_images"):
            sets.setdefault(images_of(group.runs[0]), []).append(group)
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
        details.append(
            f"Training took {_cost(best)} model evaluations per datum and step; {reference.label} took "
            f"{_cost(reference)}."
        )
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
    if found := difference(best, other, "log_likelihood"):
        return found
    (first, first_error), (second, second_error) = _nll(best), _nll(other)
    return second - first, math.hypot(first_error, second_error)


def _cost(group: Group) -> str:
    return f"{group.seconds:.0f} s and {group.runs[0].cost}"
