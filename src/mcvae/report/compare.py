"""One table over many runs, best likelihood first. Imports no torch."""

import csv
import json
import math
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["collect", "comparison", "paired_difference", "show"]

Result = dict[str, Any]


def collect(folders: list[str]) -> list[Result]:
    """Results of runs, each with its folder; a folder without one is an error that says what to do."""
    results = []
    for folder in folders:
        path = Path(folder) / "result.json"
        if not path.exists():
            started = (Path(folder) / "config.yaml").exists()
            raise FileNotFoundError(
                f"{folder} is not finished; continue it with: mcvae train --resume {folder}"
                if started
                else f"{folder} is not a run folder: it has neither result.json nor config.yaml."
            )
        results.append({"folder": folder} | json.loads(path.read_text()))
    return results


def paired_difference(result: Result, baseline: Result, column: str = "bound") -> tuple[float, float] | None:
    """Mean difference between two runs over the same images, and its standard error; None if images differ.

    Images differ far more than methods do. Differences per image see the method, not the image.
    """
    same = all(result.get(key) == baseline.get(key) for key in ("data", "seed")) and all(
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
    for column in ("run", "method", "bound", *versus, "NLL", "bound below NLL by", "ESS", "seconds"):
        table.add_column(column, justify="left" if column in ("run", "method") else "right")
    for result in sorted(results, key=lambda r: r.get("evaluation", {}).get("nll", math.inf)):
        table.add_row(*_row(result, baseline))
    return table


def _row(result: Result, baseline: Result | None) -> list[str]:
    name = [result["folder"], describe(result)]
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
    evaluated = [r for r in results if "evaluation" in r]
    if len(evaluated) > 1:
        best_nll = min(evaluated, key=lambda r: r["evaluation"]["nll"])
        best_bound = max(evaluated, key=lambda r: r["evaluation"]["bound"])
        console.print(
            f"Best likelihood: {describe(best_nll)} (NLL {best_nll['evaluation']['nll']:.2f}). "
            f"Highest bound: {describe(best_bound)} ({best_bound['evaluation']['bound']:.2f})."
        )
