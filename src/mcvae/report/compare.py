"""One table over many runs, best likelihood first. Imports no torch."""

import csv
import math
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mcvae.training.storage import RunFolder, read_json

__all__ = ["certificate", "collect", "comparison", "paired_difference", "show"]

Result = dict[str, Any]

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
        result["evaluation"][key] == baseline["evaluation"][key] for key in ("split", "num_images")
    )
    if not same or result["folder"] == baseline["folder"]:
        return None
    first, second = ([float(row[column]) for row in _images(r)] for r in (result, baseline))
    differences = [a - b for a, b in zip(first, second, strict=True)]
    return statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))


def _images(result: Result) -> list[dict[str, str]]:
    with open(Path(result["folder"]) / "evaluation.csv", newline="") as file:
        return list(csv.DictReader(file))


def comparison(results: list[Result]) -> Table:
    """The table: held-out bound, likelihood and cost of every run."""
    table = Table(title="Held-out images, in nats, ± standard error over images")
    baseline = next((r for r in results if r["method"] == "vae" and "evaluation" in r), None)
    versus = ["bound - VAE's"] if baseline else []
    for column in ("run", "data", "method", "bound", *versus, "NLL", "bound below NLL by", "ESS", "seconds"):
        table.add_column(column, justify="left" if column in ("run", "data", "method") else "right")
    for result in sorted(results, key=lambda r: (*_kind(r), r.get("evaluation", {}).get("nll", math.inf))):
        table.add_row(*_row(result, baseline))
    return table


def _row(result: Result, baseline: Result | None) -> list[str]:
    name = [result["name"], result["data"], describe(result)]
    measured = result.get("evaluation")
    if measured is None:
        return [*name, "not evaluated", *[""] * (3 + (baseline is not None)), f"{result['seconds']:.0f}"]
    difference = None if baseline is None else paired_difference(result, baseline)
    return [
        *name,
        f"{measured['bound']:.2f} ± {measured['bound_se']:.2f}",
        *([] if baseline is None else ["" if difference is None else f"{difference[0]:+.2f} ± {difference[1]:.2f}"]),
        f"{measured['nll']:.2f} ± {measured['nll_se']:.2f}",
        f"{measured['gap']:.2f} ± {measured['gap_se']:.2f}",
        f"{measured['ess']:.1f} of {measured['num_samples']}",
        f"{result['seconds']:.0f}",
    ]


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
    """Method with its K or number of samples."""
    steps = f" K={result['num_steps']}" if result["method"] in ("l-mcvae", "a-mcvae", "uha") else ""
    samples = f" S={result['num_samples']}" if result["num_samples"] > 1 else ""
    return f"{result['method']}{steps}{samples}"


def show(results: list[Result]) -> None:
    """Print the table and what it says."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(comparison(results))
    for kind in sorted({_kind(r) for r in results}):
        evaluated = [r for r in results if "evaluation" in r and _kind(r) == kind]
        if len(evaluated) > 1:
            best_nll = min(evaluated, key=lambda r: r["evaluation"]["nll"])
            best_bound = max(evaluated, key=lambda r: r["evaluation"]["bound"])
            console.print(
                f"{kind[0]}: best likelihood {describe(best_nll)} (NLL {best_nll['evaluation']['nll']:.2f}), "
                f"highest bound {describe(best_bound)} ({best_bound['evaluation']['bound']:.2f})."
            )


def _kind(result: Result) -> tuple[str, ...]:
    return tuple(str(result.get(key)) for key in _KIND)
