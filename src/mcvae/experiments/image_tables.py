"""Tables 1 to 3, k-sweep and training curves: each cell trains one method on images and evaluates it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mcvae.experiments.cell import Cell
from mcvae.experiments.paper import ReproductionOptions
from mcvae.runs.config import (
    DataConfig,
    EvaluationSettings,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    parse_config,
)
from mcvae.runs.method import MethodConfig, method_named, parse_key
from mcvae.runs.plain import number, read_rows
from mcvae.runs.records import Record, paired, read_records
from mcvae.runs.results import read_snapshot

__all__ = ["PAPER_METHODS", "PRESETS", "cells", "differences", "run", "training_cell", "training_cells", "unfinished"]

PAPER_METHODS = (
    "vae",
    "iwae-10",
    "iwae-50",
    *(f"l-mcvae-{schedule}-k{k}" for k in (5, 10) for schedule in ("linear", "sigmoid", "learned")),
    *(f"a-mcvae-{schedule}-k{k}" for k in (3, 5) for schedule in ("linear", "sigmoid", "learned")),
    "realnvp",
)
"""The rows of the paper's full tables, in their order."""

PRESETS: dict[str, dict[str, Any]] = {
    "quick": {
        "methods": ("vae", "iwae-10", "l-mcvae-linear-k5", "a-mcvae-linear-k3", "realnvp"),
        "epochs": (10, 30),
        "seeds": 2,
        "limit": 300,
    },
    "paper": {"methods": PAPER_METHODS, "epochs": (10, 30, 100), "seeds": 5, "limit": None},
}
"""`epochs` after which models are evaluated, the last being the length of training; `limit`: test images."""

SIMULATED = {"mnist": 200, "cifar10": 50, "celeba": 20}
"""Images for bounds from both sides, which certify a likelihood; photographs cost more."""

QUICK_DATA = {
    "mnist": DataConfig("digits", batch_size=50),
    "cifar10": DataConfig("cifar10", limit=1000),
    "celeba": DataConfig("celeba", limit=1000),
}
"""What the quick preset trains on instead."""
_QUICK_COLOUR: dict[str, Any] = {"epochs": (5,), "limit": 50}
"""Shorter, since photographs cost more than digits."""


def cells(dataset: str, options: ReproductionOptions, methods: Sequence[str] | None = None) -> list[Cell]:
    """A cell per method and seed: the methods that the user chose, else the given ones, else the preset's."""
    preset, data = PRESETS[options.preset], DataConfig(dataset)
    if options.preset == "quick":
        data = QUICK_DATA[dataset]
        preset = preset if data.name == "digits" else preset | _QUICK_COLOUR
    first = (options.epochs or preset["epochs"])[0]
    every = max(1, first // 3) if dataset == "mnist" else 0  # for the training curves
    return training_cells(
        dataset,
        TrainConfig(data, run=RunConfig(likelihood_every=every)),
        options.methods or methods or preset["methods"],
        preset,
        options,
        simulated=SIMULATED[dataset] if options.certified else 0,
    )


def training_cells(
    prefix: str,
    config: TrainConfig,
    methods: Sequence[str],
    preset: Mapping[str, Any],
    options: ReproductionOptions,
    *,
    simulated: int,
    **more: Any,
) -> list[Cell]:
    """A cell per method and seed, for `config` with the user's options and, where they are None, the preset's.

    Protocol "clean" gives every method the same optimiser with a schedule and clipping, and evaluates by 16 chains of
    32 tuned temperatures, or by 8 of 64 to certify. Protocol "paper" is what the paper states: plain Adam, and 10
    chains of 5 equidistant temperatures. Bounds from both sides take `simulated` images.
    """
    epochs = list(options.epochs or preset["epochs"])
    evaluation = {"limit": options.limit or preset["limit"], "simulated": simulated, "compare_iwae": False}
    if options.protocol == "clean":
        optimizer = OptimizerConfig()
        evaluation |= {"num_steps": 64, "num_samples": 8} if options.certified else {"num_steps": 32, "num_samples": 16}
    else:
        optimizer = OptimizerConfig(milestones=[], clip=0.0)
        evaluation |= {"protocol": "paper"}
    data = replace(config.data, limit=options.images or config.data.limit)
    found = []
    for method in methods:
        for seed in range(options.seeds or preset["seeds"]):
            run_config = replace(config.run, epochs=epochs[-1], seed=seed, snapshots=epochs[:-1])
            own = asdict(replace(config, data=data, method=parse_key(method), optimizer=optimizer, run=run_config))
            found.append(training_cell(prefix, method, own, evaluation, protocol=options.protocol, **more))
    return found


def training_cell(
    prefix: str, label: str, config: dict[str, Any], evaluation: dict[str, Any], *, protocol: str = "clean", **more: Any
) -> Cell:
    """A cell that trains and evaluates one run; what its records call the method is `label`."""
    settings = {"config": config, "evaluation": evaluation, "method": label, "protocol": protocol, **more}
    return Cell(f"{prefix}-{label}-s{config['run']['seed']}", f"{__name__}:run", settings, ("evaluation",))


def run(folder: Path, settings: dict[str, Any]) -> list[Record]:
    """Train or resume, evaluate after the chosen epochs unless that is done, and return the records."""
    from mcvae.training.evaluate_run import evaluate_run
    from mcvae.training.loading import snapshot_folder
    from mcvae.training.run import train

    config, evaluation = parse_config(settings["config"]), EvaluationSettings(**settings["evaluation"])
    config.run.folder = str(folder)
    if (folder / "config.yaml").exists():
        train(resume=folder)
    else:
        train(config, trusted=False)  # the configuration may come from a file
    records = []
    for epoch in [*config.run.snapshots, config.run.epochs]:
        last = epoch == config.run.epochs
        found = read_snapshot(folder if last else snapshot_folder(folder, epoch)).evaluation
        if found is None or (found.settings or evaluation.identity()) != evaluation.identity():
            found = evaluate_run(folder, replace(evaluation, epoch=None if last else epoch))
        measured = {
            "negative_elbo": (-_known(found.bound), found.bound_se),
            "nll": (_known(found.nll), found.nll_se),
            "ess": (_known(found.ess), None),
        }
        if found.bits_per_dim is not None:
            measured["bits_per_dim"] = (found.bits_per_dim, None)
        if found.remaining is not None and found.verdict.startswith("converged"):
            measured["certificate"] = (found.remaining, None)
        for metric, (value, error) in measured.items():
            records.append(_record(folder, settings, epoch, metric, value, error))
    return records + unfinished(folder, settings)


def unfinished(folder: Path, settings: dict[str, Any]) -> list[Record]:
    """Validation bound and likelihood of every epoch so far, whether training is finished or not."""
    columns = {"validation_negative_elbo": ("val_bound", -1.0), "validation_nll": ("val_nll", 1.0)}
    return [
        _record(folder, settings, int(row["epoch"]), metric, sign * float(row[column]), None)
        for metric, (column, sign) in columns.items()
        for row in read_rows(folder / "metrics.csv")
        if row.get(column)
    ]


def differences(root: Path, cells: list[Cell]) -> list[Record]:
    """NLL minus that of the VAE with the same data, encoder and seed, paired image by image."""
    done = {cell.name: cell for cell in cells if (root / cell.name / "records.csv").exists()}
    found = []
    for name, cell in done.items():
        method, folder = cell.settings["method"], root / name
        baseline = root / name.replace(f"-{method}-", "-vae-")
        if method == "vae" or baseline.name not in done:
            continue
        measured = paired(
            read_rows(baseline / "evaluation.csv"), read_rows(folder / "evaluation.csv"), "log_likelihood"
        )
        nll = [record for record in read_records(folder / "records.csv") if record.metric == "nll"]
        if measured is not None and nll:
            found.append(replace(nll[-1], metric="nll_minus_vae", value=measured[0], standard_error=measured[1]))
    return found


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _record(
    folder: Path, settings: dict[str, Any], epoch: int, metric: str, value: float, error: float | None
) -> Record:
    config = settings["config"]
    row = next((row for row in read_rows(folder / "metrics.csv") if row["epoch"] == str(epoch)), {})
    method, images = MethodConfig(**config["method"]), number(row.get("images"))
    return Record(
        "images",
        settings.get("subject", config["data"]["name"]),
        settings["method"],
        metric,
        value,
        config["run"]["seed"],
        epoch,
        error,
        protocol=settings["protocol"],
        evaluations=None if images is None else images * method_named(method.name).cost(method),
        seconds=number(row.get("seconds")),
    )
