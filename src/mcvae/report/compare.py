"""One table over many runs, best likelihood first. Imports no torch."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["collect", "comparison", "show"]


def collect(folders: list[str]) -> list[dict[str, Any]]:
    """Results of runs, each with its folder; folders without one are an error that says why."""
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


def comparison(results: list[dict[str, Any]]) -> Table:
    """The table: held-out bound, likelihood and cost of every run."""
    table = Table(title="Held-out images: bound and log-likelihood in nats, ± standard error over images")
    for column in ("run", "method", "epochs", "bound", "NLL (AIS-HMC)", "NLL - (-bound)", "ESS", "training s"):
        table.add_column(column, justify="left" if column in ("run", "method") else "right")
    for result in sorted(results, key=lambda r: r.get("evaluation", {}).get("nll", float("inf"))):
        e = result.get("evaluation")
        measured = (
            [
                f"{e['bound']:.2f} ± {e['bound_se']:.2f}",
                f"{e['nll']:.2f} ± {e['nll_se']:.2f}",
                f"{-e['gap']:.2f} ± {e['gap_se']:.2f}",
                f"{e['ess']:.1f}/{e['num_samples']}",
            ]
            if e
            else ["not evaluated", "", "", ""]
        )
        steps = f" K={result['num_steps']}" if result["method"] in ("l-mcvae", "a-mcvae", "uha") else ""
        table.add_row(
            result["folder"], f"{result['method']}{steps}", str(result["epochs"]), *measured, f"{result['seconds']:.0f}"
        )
    return table


def show(results: list[dict[str, Any]]) -> None:
    """Print the table and what it says."""
    console = Console(width=None if Console().is_terminal else 140)
    console.print(comparison(results))
    evaluated = [r for r in results if "evaluation" in r]
    if len(evaluated) > 1:
        best_nll = min(evaluated, key=lambda r: r["evaluation"]["nll"])
        best_bound = max(evaluated, key=lambda r: r["evaluation"]["bound"])
        tightest = min(evaluated, key=lambda r: r["evaluation"]["gap"])
        console.print(
            f"Best likelihood: {best_nll['method']} (NLL {best_nll['evaluation']['nll']:.2f}). "
            f"Highest bound: {best_bound['method']} ({best_bound['evaluation']['bound']:.2f}). "
            f"Tightest bound: {tightest['method']} ({tightest['evaluation']['gap']:.2f} nats below the likelihood)."
        )
