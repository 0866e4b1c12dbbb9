"""One table over many runs, best likelihood first. Imports no torch."""

import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mcvae.report.read import number, read_rows
from mcvae.training.storage import RunFolder, read_json

__all__ = [
    "Answer",
    "Cell",
    "answers",
    "certificate",
    "collect",
    "comparison",
    "describe",
    "evaluations",
    "kind",
    "paired_difference",
    "rows",
    "show",
]

Result = dict[str, Any]

ANNEALED = ("l-mcvae", "a-mcvae", "uha")
"""Methods with K steps; for others `num_steps` means nothing."""
_KIND = ("data", "transform", "likelihood")
"""What must agree for likelihoods to be comparable: densities and probabilities, of the same data."""


_FILES = ("config.yaml", "result.json", "evaluation.csv")
"""What is read of a run."""


def collect(folders: list[str], *, skip_unfinished: bool = False) -> list[Result]:
    """Results of runs, each with its folder. A folder of run folders stands for those in it.

    Args:
        folders: run folders, or folders of them.
        skip_unfinished: leave out runs without a result, with a note, instead of raising an error.
    """
    results = []
    for folder, name in _runs(folders).items():
        path = folder / "result.json"
        if path.exists():
            results.append(read_json(path) | {"folder": str(folder), "name": name})
        elif skip_unfinished:
            print(f"{name} is not finished; continue it with: mcvae train --resume {name}")
        else:
            raise FileNotFoundError(f"{name} is not finished; continue it with: mcvae train --resume {name}")
    return results


def _runs(places: list[str]) -> dict[Path, str]:
    """The run folders among `places` and directly inside them, and what they are called."""
    runs: dict[Path, str] = {}
    for place in places:
        folder = RunFolder(place, lambda name: name.rpartition("/")[2] in _FILES).path
        inside = [] if _is_run(folder) else sorted(path for path in folder.glob("*") if _is_run(path))
        if not inside and not _is_run(folder):
            raise FileNotFoundError(f"{place} is not a run folder: it has neither result.json nor config.yaml.")
        runs |= {path: f"{place.rstrip('/')}/{path.name}" for path in inside} or {folder: place}
    return runs


def _is_run(folder: Path) -> bool:
    return (folder / "result.json").exists() or (folder / "config.yaml").exists()


def paired_difference(result: Result, baseline: Result, column: str = "bound") -> tuple[float, float] | None:
    """Mean difference between two runs over the same images, and its standard error; None if images differ.

    Images differ far more than methods do. Differences per image see the method, not the image.
    """
    same = all(result.get(key) == baseline.get(key) for key in (*_KIND, "seed", "batch_size")) and all(
        result["evaluation"].get(key) == baseline["evaluation"].get(key) for key in ("split", "num_images")
    )
    if not same or result["folder"] == baseline["folder"]:
        return None
    first, second = ([number(row.get(column)) for row in _images(r)] for r in (result, baseline))
    differences = [a - b for a, b in zip(first, second, strict=False) if a is not None and b is not None]
    if len(first) != len(second) or not len(differences) == len(first) > 1:
        return None
    return statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))


def _images(result: Result) -> list[dict[str, str]]:
    return read_rows(Path(result["folder"]) / "evaluation.csv")


class Cell(NamedTuple):
    """What a table shows, and the number it sorts by."""

    text: str
    value: float | None = None


def comparison(results: list[Result]) -> Table:
    """The table for a terminal: held-out bound, likelihood and cost of every run."""
    table = Table(title="Held-out images, in nats, ± standard error over images")
    columns, body = rows(results)
    for column in columns:
        table.add_column(column, justify="left" if column in ("run", "data", "method") else "right")
    for row in body:
        table.add_row(*(escape(cell.text) for cell in row))
    return table


def rows(results: list[Result]) -> tuple[list[str], list[list[Cell]]]:
    """Columns and rows of the comparison, the best likelihood of each kind of data first."""
    baselines = [r for r in results if r["method"] == "vae" and r.get("evaluation")]
    versus = ["bound - VAE's"] if baselines else []
    columns = ["run", "data", "method", "bound", *versus, "NLL", "bound below NLL by", "ESS", "evaluations", "seconds"]
    ordered = sorted(results, key=lambda r: (*kind(r), _finite(r, "nll", math.inf)))
    return columns, [_row(result, baselines) for result in ordered]


def _row(result: Result, baselines: list[Result]) -> list[Cell]:
    name = [Cell(str(result.get("name", result["folder"]))), Cell(result["data"]), Cell(describe(result))]
    cost = [Cell(f"{evaluations(result)}", evaluations(result)), Cell(f"{result['seconds']:.0f}", result["seconds"])]
    measured = result.get("evaluation")
    if measured is None:
        return [*name, Cell("not evaluated"), *[Cell("")] * (3 + bool(baselines)), *cost]
    differences = (paired_difference(result, baseline) for baseline in baselines)
    found = next((difference for difference in differences if difference), None)
    versus = Cell("") if found is None else Cell(f"{found[0]:+.2f} ± {found[1]:.2f}", found[0])
    return [
        *name,
        _measured(measured, "bound"),
        *([versus] if baselines else []),
        _measured(measured, "nll"),
        _measured(measured, "gap"),
        _share(number(measured.get("ess")), number(measured.get("num_samples"))),
        *cost,
    ]


def _measured(measured: dict[str, Any], key: str) -> Cell:
    value, error = number(measured.get(key)), number(measured.get(f"{key}_se"))
    if value is None:
        return Cell("not finite")
    return Cell(f"{value:.2f}" + ("" if error is None else f" ± {error:.2f}"), value)


def _share(ess: float | None, chains: float | None) -> Cell:
    return Cell("unknown") if ess is None or not chains else Cell(f"{ess:.1f} of {chains:.0f}", ess / chains)


def _finite(result: Result, key: str, otherwise: float) -> float:
    """A number of the evaluation; of a run that was not evaluated, or diverged, something else."""
    value = number((result.get("evaluation") or {}).get(key))
    return otherwise if value is None else value


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def certificate(name: str, found: dict[str, Any]) -> str:
    """What an evaluation found, in words and with its doubts."""
    low, high = found["nll_interval"]
    lines = [
        f"{name}: NLL {found['nll']:.2f} on {found['num_images']} {found['split']} images, 95 % interval "
        f"[{low:.2f}, {high:.2f}] (of its standard error {found['nll_se']:.3f}, the chains cause "
        f"{found['nll_se_chains']:.3f}).",
        f"  {found['verdict'][0].upper()}{found['verdict'][1:]}.",
        f"  {found['num_samples']} chains of {found['num_steps']} temperatures from the {found['start']}: median ESS "
        f"{found['ess']:.1f}, median k {_number(found['pareto_k'])}, acceptance {found['acceptance']:.2f}, "
        f"{found['nonfinite']} chains not finite.",
        f"  Bound {found['bound']:.2f}, {found['gap']:.2f} ± {found['gap_se']:.2f} below the likelihood; rate "
        f"{found['rate']:.2f}, distortion {found['distortion']:.2f}; {found['active_units']} of {found['latent_dim']} "
        "units active.",
    ]
    if found["importance"] is not None:
        lines.append(
            f"  With as many passes through the model, importance sampling gives NLL {-found['importance']:.2f}; the "
            f"IWAE bound of 10 samples is {found['iwae_10']:.2f}."
        )
    both = found["sandwich"]
    if both is not None:
        lines.append(
            f"  On {both['num_images']} simulated images log p lies in [{both['lower']:.2f}, {both['upper']:.2f}], gap "
            f"{both['gap']:.3f} ± {both['gap_se']:.3f}."
        )
        if both["importance"] is not None:
            lines.append(
                f"  There importance sampling at equal cost says {both['importance']:.2f}, and the IWAE bound of 10 "
                f"samples {both['iwae_10']:.2f}."
            )
    return "\n".join(lines)


def describe(result: Result) -> str:
    """Method with its K, schedule and number of samples."""
    steps = f" K={result['num_steps']}" if result["method"] in ANNEALED else ""
    schedule = result.get("schedule", "linear")
    spaced = f" {schedule}" if steps and schedule != "linear" else ""
    samples = f" S={result['num_samples']}" if result["num_samples"] > 1 else ""
    return f"{result['method']}{steps}{spaced}{samples}"


def evaluations(result: Result) -> int:
    """Model evaluations per image and optimiser step: S (K + 1)."""
    steps = result["num_steps"] if result["method"] in ANNEALED else 0
    return int(result.get("evaluations", result["num_samples"] * (steps + 1)))


def show(results: list[Result]) -> None:
    """Print the table and what it says."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(comparison(results))
    for answer in answers(results):
        console.print(escape(f"{answer.headline} {answer.details}"))


class Answer(NamedTuple):
    """What a table says, in words."""

    headline: str
    details: str = ""


def answers(results: list[Result]) -> list[Answer]:
    """Which method explains held-out data best, by how much and at what cost: a paragraph per set of images."""
    sets = dict[tuple[str, ...], dict[str, list[Result]]]()
    for result in results:
        if all(math.isfinite(_finite(result, key, math.nan)) for key in ("nll", "nll_se", "bound", "num_images")):
            images = (*kind(result), str(result["evaluation"].get("split")), str(result["evaluation"]["num_images"]))
            sets.setdefault(images, {}).setdefault(describe(result), []).append(result)
    return [_answer(images, methods) for images, methods in sorted(sets.items())]


def _answer(images: tuple[str, ...], methods: dict[str, list[Result]]) -> Answer:
    data, _, _, split, count = images
    best, *others = sorted(methods, key=lambda method: _mean_nll(methods[method])[0])
    nll = "NLL {:.2f} ± {:.2f} nats".format(*_mean_nll(methods[best]))
    seeds = f" over {len(methods[best])} runs" if len(methods[best]) > 1 else ""
    details = list[str]()
    if others:
        headline = f"{data}: {best} explains the {count} {split} images best, with {nll}{seeds}."
        for other in dict.fromkeys([others[0], *(method for method in others if method == "vae")]):
            difference, error = _advantage(methods[best], methods[other])
            doubt = "" if difference > 2 * error else ", which is within the noise"
            details.append(f"It is {difference:.2f} ± {error:.2f} nats better than {other}{doubt}.")
        reference = "vae" if "vae" in others else others[0]
        details.append(f"{_cost(methods[best])}; {reference} took {_cost(methods[reference], short=True)}.")
    else:
        headline = f"{data}: {best} has {nll}{seeds} on {count} {split} images."
        details.append("No other method was evaluated on them.")
    tightest = max(methods, key=lambda method: statistics.fmean(r["evaluation"]["bound"] for r in methods[method]))
    if tightest != best:
        details.append(f"The highest bound is that of {tightest}.")
    if any(r["evaluation"].get("verdict", "converged").startswith("not") for group in methods.values() for r in group):
        details.append("Not every likelihood here has converged: read the verdicts.")
    return Answer(headline, " ".join(details))


def _mean_nll(group: list[Result]) -> tuple[float, float]:
    return _over_seeds([(r["evaluation"]["nll"], r["evaluation"]["nll_se"]) for r in group])


def _advantage(best: list[Result], other: list[Result]) -> tuple[float, float]:
    """How much better `best` is, image by image where the images are the same."""
    pairs = [paired_difference(a, b, "log_likelihood") for a in best for b in other]
    found = [pair for pair in pairs if pair is not None]
    if found:
        return _over_seeds(found)
    (first, first_error), (second, second_error) = _mean_nll(best), _mean_nll(other)
    return second - first, math.hypot(first_error, second_error)


def _over_seeds(measured: list[tuple[float, float]]) -> tuple[float, float]:
    """Mean and standard error: that over images, which seeds share, and that over seeds."""
    values, errors = zip(*measured, strict=True)
    seeds = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), math.hypot(statistics.fmean(errors), seeds)


def _cost(group: list[Result], *, short: bool = False) -> str:
    seconds, times = statistics.fmean(r["seconds"] for r in group), evaluations(group[0])
    if short:
        return f"{seconds:.0f} s and {times}"
    return f"Training took {seconds:.0f} s and {times} model evaluations per image and step"


def kind(result: Result) -> tuple[str, ...]:
    """What must agree for likelihoods to be comparable."""
    return tuple(str(result.get(key)) for key in _KIND)
