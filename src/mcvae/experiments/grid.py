"""Grids of runs of one's own: data sets × methods × settings × seeds, each a cell that trains and evaluates."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import product
from typing import Any

from mcvae.data import DATASETS
from mcvae.experiments.cells import Cell
from mcvae.runs.config import (
    DataConfig,
    EvaluationSettings,
    RunConfig,
    TrainConfig,
    check,
    parse_config,
)
from mcvae.runs.method import parse_key
from mcvae.runs.naming import check_name
from mcvae.runs.plain import RunError, checked
from mcvae.training.options import check_trainer

__all__ = ["evaluation_settings", "grid"]

_TASK = "mcvae.experiments.image_tables:run"  # by name, since it imports torch
_OF_THE_GRID = ("run.folder", "run.seed", "data.name", "method.name")


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
        methods: keys, such as l-mcvae-sigmoid-k5.
        seeds: how many.
        settings: of every run, by dotted name, such as `{"run.epochs": 20}`.
        variations: lists of values by dotted name; every combination becomes cells.
        evaluation: fields of `EvaluationSettings`.

    >>> cells = grid(["digits"], ["vae"], 2, {"run.epochs": 3}, {"optimizer.learning_rate": [0.001, 0.01]}, {})
    >>> [cell.name for cell in cells][:2]
    ['digits-vae-learning_rate=0.001-s0', 'digits-vae-learning_rate=0.001-s1']
    """
    if seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {seeds}.")
    for what, given in (("data", data), ("methods", methods), *variations.items()):
        if not isinstance(given, list | tuple) or not given or len(set(map(str, given))) < len(given):
            raise ValueError(f"{what} must be a list of different values, got {given!r}.")
    for name in data:
        check_name("data set", name, DATASETS)
    evaluation_settings(evaluation)
    found = []
    for dataset, method, values in product(data, methods, product(*variations.values())):
        varied = dict(zip(variations, values, strict=True))
        words = [f"{key.rpartition('.')[2]}={_plain(value)}" for key, value in varied.items()]
        for seed in range(seeds):
            config = TrainConfig(DataConfig(dataset), method=parse_key(method), run=RunConfig(seed=seed))
            content = asdict(config)
            for key, value in {**settings, **varied}.items():
                _set(content, key, value)
            parsed = parse_config(content)
            check(parsed)
            check_trainer(parsed.trainer)
            described = {
                "config": content,
                "evaluation": dict(evaluation),
                "method": "-".join([method, *words]),
                "protocol": "clean",
            }
            name = "-".join([dataset, method, *words, f"s{seed}"])
            found.append(Cell(name, _TASK, described, ("evaluation",)))
    return found


def _plain(value: Any) -> str:
    """A value as part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9_.+-]", "_", str(value))


def _set(content: dict[str, Any], key: str, value: Any) -> None:
    if key in _OF_THE_GRID:
        raise ValueError(f"{key} is decided by the grid; leave it out of the settings.")
    *path, last = str(key).split(".")
    if not path and last != "trainer":
        check_name("setting", key, _dotted(content))
    for part in path:
        content = content.get(part, {}) if isinstance(content, dict) else {}
    if not isinstance(content, dict) or last not in content:
        check_name("setting", key, _dotted(asdict(TrainConfig())))
        raise ValueError(f"the setting {key} has parts; give one of them, such as {key}.name.")
    content[last] = value


def _dotted(content: dict[str, Any]) -> list[str]:
    """The names of settings, without those of the grid."""
    parts = {part: names for part, names in content.items() if isinstance(names, dict) and part != "trainer"}
    return [*(f"{part}.{name}" for part, names in parts.items() for name in names), "trainer"]


def evaluation_settings(content: Mapping[str, Any]) -> EvaluationSettings:
    """Settings of evaluations from plain data; a ValueError names what does not fit."""
    for name in content:
        check_name("evaluation setting", name, [field.name for field in fields(EvaluationSettings)])
    for name in ("epoch", "split"):
        if name in content:
            raise ValueError(f"{name} is decided by the grid; leave it out of the evaluation.")
    try:
        found = checked(EvaluationSettings, dict(content), "--evaluation")
    except RunError as error:
        raise ValueError(str(error)) from None
    found.check()
    return found
