"""Tables 1 to 3 and the figures behind them: every method on images, trained and evaluated in one cell each."""

import csv
import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from mcvae.data import load_images
from mcvae.records import Record
from mcvae.sweep import Cell
from mcvae.training.config import (
    DataConfig,
    MethodConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)

__all__ = ["METHODS", "PRESETS", "cells", "method_config", "run", "unfinished"]


def method_config(name: str) -> MethodConfig:
    """The method that a name stands for: vae, iwae-10, l-mcvae-sigmoid-k5, a-mcvae-k3-n5, uha-k10, realnvp.

    >>> method_config("a-mcvae-sigmoid-k3").num_steps, method_config("iwae-50").num_samples
    (3, 50)
    """
    annealed = (
        r"(?P<annealed>l-mcvae|a-mcvae|uha)(-(?P<schedule>linear|sigmoid|learned))?-k(?P<steps>\d+)(-n(?P<n>\d+))?"
    )
    found = re.fullmatch(rf"(?P<plain>vae|realnvp)|iwae-(?P<samples>[1-9]\d*)|{annealed}", name)
    if found is None:
        raise ValueError(
            f"unknown method {name!r}; such names are known: vae, iwae-10, l-mcvae-sigmoid-k5, a-mcvae-k3-n5, uha-k10, "
            "realnvp."
        )
    if found["plain"]:
        return MethodConfig(found["plain"])
    if found["samples"]:
        return MethodConfig("iwae", num_samples=int(found["samples"]))
    schedule: Any = found["schedule"] or "linear"
    return MethodConfig(
        found["annealed"], int(found["steps"]), int(found["n"]) if found["n"] else None, schedule=schedule
    )


METHODS = (
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
    "paper": {"methods": METHODS, "epochs": (10, 30, 100), "seeds": 5, "limit": None},
}
"""`epochs` after which models are evaluated, the last being the length of training; `limit`: test images."""

_DATA = {
    ("mnist", "quick"): DataConfig("digits", batch_size=50),
    ("cifar10", "quick"): DataConfig("cifar10", limit=1000),
    ("celeba", "quick"): DataConfig("celeba", limit=1000),
}
_QUICK_COLOUR: dict[str, Any] = {"epochs": (5,), "limit": 50}
"""Photographs cost more than digits."""


def cells(
    dataset: str,
    methods: Sequence[str],
    *,
    preset: str,
    protocol: str,
    seeds: int,
    epochs: tuple[int, ...],
    limit: int | None,
) -> list[Cell]:
    """A cell per method and seed.

    Protocol "clean" gives every method the same optimiser with a schedule and clipping, and evaluates by 16 chains of
    32 tuned temperatures; "paper" is what the paper states: plain Adam, and 10 chains of 5 equidistant temperatures.
    """
    data = _DATA.get((dataset, preset), DataConfig(dataset))
    if data.name != "digits" and preset == "quick":
        epochs = _QUICK_COLOUR["epochs"] if epochs == PRESETS["quick"]["epochs"] else epochs
        limit = _QUICK_COLOUR["limit"] if limit == PRESETS["quick"]["limit"] else limit
    optimizer = OptimizerConfig() if protocol == "clean" else OptimizerConfig(milestones=[], clip=0.0)
    evaluation: dict[str, Any] = {"protocol": "paper"}
    if protocol == "clean":
        evaluation = {"num_steps": 32, "num_samples": 16}
    evaluation |= {"limit": limit, "simulated": 0, "compare_iwae": False}
    every = max(1, epochs[0] // 3) if dataset == "mnist" else 0  # for the training curves
    found = []
    for name in methods:
        for seed in range(seeds):
            run_config = RunConfig(epochs=epochs[-1], seed=seed, snapshots=list(epochs[:-1]), likelihood_every=every)
            config = TrainConfig(data, ModelConfig(), method_config(name), optimizer, run_config)
            settings = {"config": asdict(config), "evaluation": evaluation, "method": name, "protocol": protocol}
            found.append(Cell(f"{dataset}-{name}-s{seed}", f"{__name__}:run", settings))
    return found


def run(folder: Path, settings: dict[str, Any]) -> list[Record]:
    """Train, or go on training; evaluate after the chosen epochs; record."""
    from mcvae.training.evaluation import evaluate_run
    from mcvae.training.files import parse_config, read_json, snapshot_folder
    from mcvae.training.run import train

    config = parse_config(settings["config"])
    config.run.folder = str(folder)
    if (folder / "config.yaml").exists():
        train(resume=folder)
    else:
        train(config)
    records = []
    for epoch in [*config.run.snapshots, config.run.epochs]:
        last = epoch == config.run.epochs
        home = folder if last else snapshot_folder(folder, epoch)
        result = read_json(home / "result.json") if (home / "result.json").exists() else {}
        found = result.get("evaluation")
        if found is None:
            found = evaluate_run(folder, epoch=None if last else epoch, **settings["evaluation"])
        measured = {
            "negative_elbo": (-found["bound"], found["bound_se"]),
            "nll": (found["nll"], found["nll_se"]),
            "ess": (found["ess"], None),
        }
        for metric, (value, error) in measured.items():
            records.append(_record(folder, settings, epoch, metric, value, error))
    return records + unfinished(folder, settings)


def unfinished(folder: Path, settings: dict[str, Any]) -> list[Record]:
    """Validation bound and likelihood of every epoch so far, whether training is finished or not."""
    path = folder / "metrics.csv"
    if not path.exists():
        return []
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    columns = {"validation_negative_elbo": ("val_bound", -1.0), "validation_nll": ("val_nll", 1.0)}
    return [
        _record(folder, settings, int(row["epoch"]), metric, sign * float(row[column]), None)
        for metric, (column, sign) in columns.items()
        for row in rows
        if row[column] != ""
    ]


def _record(
    folder: Path, settings: dict[str, Any], epoch: int, metric: str, value: float, error: float | None
) -> Record:
    config = settings["config"]
    with open(folder / "metrics.csv", newline="") as file:
        seconds = {int(row["epoch"]): float(row["seconds"]) for row in csv.DictReader(file)}
    return Record(
        "images",
        config["data"]["name"],
        settings["method"],
        metric,
        value,
        config["run"]["seed"],
        epoch,
        error,
        protocol=settings["protocol"],
        evaluations=float(epoch)
        * _num_images(config["data"]["name"], config["data"]["limit"])
        * _evaluations_per_image(MethodConfig(**config["method"])),
        seconds=seconds.get(epoch),
    )


@cache
def _num_images(name: str, limit: int | None) -> int:
    return len(load_images(name).train[:limit])


def _evaluations_per_image(method: MethodConfig) -> int:
    """S (K + 1), of one epoch."""
    samples = method.num_samples or {"iwae": 10, "a-mcvae": 5}.get(method.name, 1)
    steps = method.num_steps if method.name in ("l-mcvae", "a-mcvae", "uha") else 0
    return samples * (steps + 1)
