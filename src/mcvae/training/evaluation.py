"""Evaluate a run on images it was not trained on: its bound, and its likelihood by AIS with HMC."""

import csv
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcvae.evidence import estimate_log_evidence
from mcvae.randomness import seeded_generator
from mcvae.schedules import SigmoidSchedule
from mcvae.training.files import load_run, read_config, read_json, write_atomically, write_json
from mcvae.training.likelihood import shared_step_sizes
from mcvae.training.run import batches, prepare

__all__ = ["evaluate_run"]


def evaluate_run(
    folder: str | Path,
    *,
    split: str = "test",
    num_steps: int = 50,
    num_samples: int = 16,
    limit: int | None = None,
    progress: Any = None,
) -> dict[str, Any]:
    """Measure bound and likelihood per image; write `evaluation.csv` and the summary into `result.json`.

    Step sizes of the bound are those of training, frozen; those of AIS-HMC are tuned on pilot chains and frozen.

    Args:
        folder: a finished run.
        split: "test" or "validation".
        num_steps: temperatures of AIS-HMC.
        num_samples: chains of AIS-HMC per image.
        limit: evaluate only so many images.
        progress: wraps the list of batches, such as `rich.progress.track`.
    """
    folder = Path(folder)
    if limit is not None and limit < 2:
        raise ValueError(f"--limit must be at least 2, got {limit}: a standard error needs two images.")
    result = read_json(folder / "result.json")
    model, objective = load_run(folder)
    config, images = prepare(read_config(folder))
    config.data.limit = limit if limit is not None else config.data.limit
    start, rows = time.perf_counter(), list[Tensor]()
    work = list(enumerate(batches(images, config, split)))
    if not work:
        raise ValueError(f"there are no {split} images to evaluate on (limit {limit}).")
    schedule = SigmoidSchedule(num_steps, interior=True)
    step_sizes = shared_step_sizes(model, work[0][1], schedule, config.run.seed)
    for index, x in progress(work) if progress is not None else work:
        generator = seeded_generator("evaluate", config.run.seed, index)
        with torch.no_grad():
            bridge = model.bridge(x)
            repeats = [objective(bridge, generator=generator).bound for _ in range(_BOUND_REPEATS)]
            bound = torch.stack(repeats).mean(0)
        evidence = estimate_log_evidence(
            bridge.log_joint,
            bridge.initial,
            schedule=schedule,
            num_samples=num_samples,
            step_size=step_sizes,
            generator=generator,
        )
        columns = (bound, evidence.log_evidence, evidence.standard_error, evidence.ess, evidence.acceptance)
        rows.append(torch.stack([column.double() for column in columns], 1))
    table = torch.cat(rows)
    write_atomically(folder / "evaluation.csv", lambda path: _write_table(path, table))
    summary = _summary(table) | {
        "split": split,
        "num_images": len(table),
        "num_steps": num_steps,
        "num_samples": num_samples,
        "seconds": round(time.perf_counter() - start, 2),
    }
    write_json(folder / "result.json", result | {"evaluation": summary})
    return summary


_BOUND_REPEATS = 10  # so that the noise of the chains does not drown the differences between methods


def _summary(table: Tensor) -> dict[str, float]:
    """Means over images, with standard errors over images."""
    bound, log_likelihood, _, ess, acceptance = table.unbind(1)
    root = len(table) ** 0.5
    return {
        "bound": bound.mean().item(),
        "bound_se": (bound.std() / root).item(),
        "nll": -log_likelihood.mean().item(),
        "nll_se": (log_likelihood.std() / root).item(),
        "gap": (log_likelihood - bound).mean().item(),
        "gap_se": ((log_likelihood - bound).std() / root).item(),
        "ess": ess.median().item(),
        "acceptance": acceptance.mean().item(),
    }


def _write_table(path: Path, table: Tensor) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "bound", "log_likelihood", "standard_error", "ess", "acceptance"])
        writer.writerows([index, *row] for index, row in enumerate(table.tolist()))
