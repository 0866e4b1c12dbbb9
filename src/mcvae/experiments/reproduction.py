"""One command per table and figure: cells, then records, arrays and provenance in one folder."""

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

import mcvae
from mcvae.experiments import frontier, image_tables, posteriors, ppca_gradients, toy_parameters, toy_posterior
from mcvae.experiments.cell import Cell, Progress
from mcvae.experiments.cells import look, run_cells
from mcvae.experiments.paper import ReproductionOptions, paper_value
from mcvae.runs.plain import write_json
from mcvae.runs.records import Record, read_records, write_records

__all__ = ["EXPERIMENTS", "ReproductionOptions", "reproduce"]


@dataclass(frozen=True)
class Experiment:
    """A table or figure: its cells, and the records that belong to it."""

    title: str
    """Of the paper's table or figure."""
    cells: Callable[[ReproductionOptions], list[Cell]]
    metrics: tuple[str, ...]
    """The records that belong to it, in the order of its table."""
    arrays: Callable[[Path, list[Cell]], dict[str, Any]] = lambda root, cells: {}
    """What its figure needs beyond records."""
    derived: Callable[[Path, list[Cell]], list[Record]] = lambda root, cells: []
    """Records of several cells together, such as differences between methods."""


def _k_sweep(options: ReproductionOptions) -> list[Cell]:
    steps = (1, 2, 5, 10) if options.preset == "quick" else (1, 2, 5, 10, 20)
    return image_tables.cells("mnist", options, ("vae", "iwae-10", *(f"l-mcvae-linear-k{k}" for k in steps)))


def _training_curves(options: ReproductionOptions) -> list[Cell]:
    return image_tables.cells("mnist", options, ("vae", "iwae-10", "l-mcvae-linear-k5", "a-mcvae-linear-k3"))


def _table(title: str, cells: Callable[[ReproductionOptions], list[Cell]], *more: str) -> Experiment:
    metrics = ("negative_elbo", "nll", "nll_minus_vae", "certificate", *more)
    return Experiment(title, cells, metrics, derived=image_tables.differences)


EXPERIMENTS = {
    "toy-posterior": Experiment(
        "Figure 1: how near each method comes to a posterior that is a ring",
        toy_posterior.cells,
        ("energy_distance", "energy_distance_resampled", "bound_gap"),
        toy_posterior.arrays,
    ),
    "toy-parameters": Experiment(
        "Supplement: squared error of (ξ, ζ) against the dimension of the latents",
        toy_parameters.cells,
        ("squared_error",),
    ),
    "ppca": Experiment(
        "Figure 2: bounds and gradients on probabilistic PCA, where both are known",
        ppca_gradients.cells,
        (
            "log_evidence_error",
            "log_evidence_variance",
            "gradient_variance",
            "gradient_snr",
            "gradient_bias",
            "derivative_z",
        ),
        ppca_gradients.arrays,
    ),
    "mnist": _table("Table 1: MNIST", partial(image_tables.cells, "mnist")),
    "celeba": _table("Table 2: CelebA", partial(image_tables.cells, "celeba"), "bits_per_dim"),
    "cifar10": _table("Table 3: CIFAR-10", partial(image_tables.cells, "cifar10"), "bits_per_dim"),
    "k-sweep": _table("Figure 3: likelihood against the number K of Langevin steps", _k_sweep),
    "training-curves": Experiment(
        "Figure 4: held-out likelihood during training",
        _training_curves,
        ("validation_negative_elbo", "validation_nll"),
    ),
    "posteriors": Experiment(
        "The public benchmark of posteriors: bound and evidence of single densities",
        posteriors.cells,
        ("elbo", "log_evidence"),
    ),
    "frontier": Experiment(
        "Where do chains pay? A budget of decoder passes per image, spent as samples, steps or both",
        frontier.cells,
        ("nll_minus_vae", "nll", "certificate", "negative_elbo"),
        derived=image_tables.differences,
    ),
}
"""Every table and figure of the paper, in its order, the field's benchmark of posteriors, and our own question."""


def reproduce(
    name: str,
    options: ReproductionOptions,
    out: Path,
    *,
    workers: int = 0,
    retries: int = 1,
    collect: bool = False,
    command: str = "",
    show: Callable[[list[Progress]], None] = lambda progress: None,
) -> Path:
    """Run what is missing of an experiment, and write `records.csv`, `arrays.npz` and `provenance.json`.

    Experiments share the cells of `options.folder`: the curves use the table's runs.

    Args:
        name: one of `EXPERIMENTS`.
        options: see `ReproductionOptions`.
        out: folder of all reproductions.
        workers, retries, show: see `run_cells`.
        collect: run nothing; take what is there, the epochs of unfinished training included.
        command: what the user typed, for `provenance.json`.
    """
    options.check(name)
    experiment = EXPERIMENTS[name]
    home = out / options.folder
    root, folder = home / "cells", home / name
    cells = experiment.cells(options)
    begin = time.perf_counter()
    if collect:
        records = _collected(root, cells)
    else:
        records = run_cells(root, cells, workers=workers, retries=retries, show=show)
    records += experiment.derived(root, cells)
    kept = [_completed(name, record) for record in records if record.metric in experiment.metrics]
    if not kept:
        raise ValueError(f"there is nothing of {name} in {root} yet.")
    folder.mkdir(parents=True, exist_ok=True)
    write_records(folder / "records.csv", kept)
    arrays = experiment.arrays(root, cells)
    if arrays:
        numpy.savez_compressed(folder / "arrays.npz", **arrays)
    progress = look(root, cells) if root.exists() else []
    provenance = {
        "experiment": name,
        "title": _title(experiment.title, kept),
        "metrics": experiment.metrics,
        "command": command,
        "preset": options.preset,
        "protocol": options.protocol,
        "cells": len(cells),
        "unfinished": [cell.name for cell in progress if cell.status != "done"],
        "seconds_of_this_call": round(time.perf_counter() - begin, 1),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"mcvae": mcvae.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "gpus": torch.cuda.device_count()},
    }
    write_json(folder / "provenance.json", provenance)
    return folder


def _title(title: str, records: Sequence[Record]) -> str:
    """The title, which says so if digits stand in for MNIST."""
    return f"{title}, on digits instead" if {record.dataset for record in records} == {"digits"} else title


def _collected(root: Path, cells: Sequence[Cell]) -> list[Record]:
    found = list[Record]()
    for cell in cells:
        path = root / cell.name / "records.csv"
        if path.exists():
            found += read_records(path)
        elif cell.task == f"{image_tables.__name__}:run":
            found += image_tables.unfinished(root / cell.name, cell.settings)
    return found


def _completed(experiment: str, record: Record) -> Record:
    """The record with the experiment's name, and the paper's number unless it has a published one."""
    if record.paper is not None:
        return replace(record, experiment=experiment)
    value, deviation = paper_value(record.dataset, record.method, record.epoch, record.metric)
    return replace(record, experiment=experiment, paper=value, paper_deviation=deviation)
