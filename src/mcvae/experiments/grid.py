"""Grids of runs of one's own: data sets × methods × settings × seeds, each a cell that trains and evaluates."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

from mcvae.experiments.images import method_config, run as _task
from mcvae.sweep import Cell
from mcvae.training.config import DataConfig, RunConfig, TrainConfig, check
from mcvae.training.files import parse_config

__all__ = ["grid"]


def grid(
    data: Sequence[str],
    methods: Sequence[str],
    seeds: int,
    settings: Mapping[str, Any],
    variations: Mapping[str, Sequence[Any]],
    evaluation: Mapping[str, Any],
) -> list[Cell]:
    """The cells of a grid, with names that say what they are.

    Args:
        data: data sets.
        methods: names that `method_config` knows.
        seeds: how many.
        settings: of every run, by dotted name, such as `{"run.epochs": 20}`.
        variations: lists of values by dotted name; every combination becomes cells.
        evaluation: arguments of `evaluate_run`.

    >>> cells = grid(["digits"], ["vae"], 2, {"run.epochs": 3}, {"optimizer.learning_rate": [0.001, 0.01]}, {})
    >>> [cell.name for cell in cells][:2]
    ['digits-vae-learning_rate=0.001-s0', 'digits-vae-learning_rate=0.001-s1']
    """
    if seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {seeds}.")
    found = []
    for dataset, method, values in product(data, methods, product(*variations.values())):
        varied = dict(zip(variations, values, strict=True))
        words = [f"{key.rpartition('.')[2]}={_plain(value)}" for key, value in varied.items()]
        for seed in range(seeds):
            config = TrainConfig(DataConfig(dataset), method=method_config(method), run=RunConfig(seed=seed))
            content = asdict(config)
            for key, value in {**settings, **varied}.items():
                _set(content, key, value)
            check(parse_config(content))
            described = {
                "config": content,
                "evaluation": dict(evaluation),
                "method": "-".join([method, *words]),
                "protocol": "clean",
            }
            name = "-".join([dataset, method, *words, f"s{seed}"])
            found.append(Cell(name, f"{_task.__module__}:{_task.__name__}", described))
    return found


def _plain(value: Any) -> str:
    """A value as part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9_.+-]", "_", str(value))


def _set(content: dict[str, Any], key: str, value: Any) -> None:
    if key in ("run.folder", "run.seed", "data.name", "method.name"):
        raise ValueError(f"{key} is decided by the grid; leave it out of the settings.")
    *path, last = key.split(".")
    for part in path:
        content = content.get(part, {}) if isinstance(content, dict) else {}
    if not isinstance(content, dict) or last not in content:
        raise ValueError(f"unknown setting {key!r}; settings are named as in config.yaml, such as run.epochs.")
    content[last] = value
