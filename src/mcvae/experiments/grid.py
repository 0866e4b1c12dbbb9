"""Grids of runs: data sets × methods × settings × seeds. Each cell trains and evaluates one run."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from typing import Any

from mcvae.data import DATASETS
from mcvae.experiments.cell import Cell
from mcvae.experiments.image_tables import training_cell
from mcvae.runs.config import DataConfig, EvaluationSettings, RunConfig, TrainConfig, check, check_range, parse_config
from mcvae.runs.method import parse_key
from mcvae.runs.naming import check_name
from mcvae.runs.plain import RunError, checked
from mcvae.training.options import check_trainer

__all__ = ["Grid"]

_OF_THE_GRID = ("run.folder", "run.seed", "data.name", "method.name")


@dataclass
class Grid:
    """Data sets x methods x settings x seeds.

    Args:
        data: data sets.
        methods: such as vae, iwae-10, l-mcvae-sigmoid-k5, a-mcvae-k3-n5, uha-k10, realnvp.
        seeds: how many.
        settings: of every run, by dotted name, such as '{run.epochs: 20, data.batch_size: 50}'.
        vary: lists of values by dotted name, such as '{optimizer.learning_rate: [0.001, 0.0003]}'.
        evaluation: options of mcvae evaluate, such as '{limit: 100, num_steps: 32, num_samples: 16}'.
    """

    data: list[str] = field(default_factory=lambda: ["digits"])
    methods: list[str] = field(default_factory=lambda: ["vae", "iwae-10", "l-mcvae-k5", "a-mcvae-k3"])
    seeds: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    vary: dict[str, list[Any]] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)

    def cells(self) -> list[Cell]:
        """The cells, named after what they vary. Raise a ValueError if any of them makes no sense.

        >>> grid = Grid(["digits"], ["vae"], 2, {"run.epochs": 3}, {"optimizer.learning_rate": [0.001, 0.01]})
        >>> [cell.name for cell in grid.cells()][:2]
        ['digits-vae-learning_rate=0.001-s0', 'digits-vae-learning_rate=0.001-s1']
        """
        check_range("seeds", self.seeds, 1, 10**5)
        for what, given in (("data", self.data), ("methods", self.methods), *self.vary.items()):
            if not isinstance(given, list | tuple) or not given or len(set(map(str, given))) < len(given):
                raise ValueError(f"{what} must be a list of different values, got {given!r}.")
        for name in self.data:
            check_name("data set", name, DATASETS)
        _check_evaluation(self.evaluation)
        return [
            self._cell(dataset, method, dict(zip(self.vary, values, strict=True)), seed)
            for dataset, method, values in product(self.data, self.methods, product(*self.vary.values()))
            for seed in range(self.seeds)
        ]

    def _cell(self, dataset: str, method: str, varied: dict[str, Any], seed: int) -> Cell:
        words = [f"{key.rpartition('.')[2]}={_plain(value)}" for key, value in varied.items()]
        config = asdict(TrainConfig(DataConfig(dataset), method=parse_key(method), run=RunConfig(seed=seed)))
        for key, value in {**self.settings, **varied}.items():
            _set(config, key, value)
        parsed = parse_config(config)
        check(parsed)
        check_trainer(parsed.trainer)
        return training_cell(dataset, "-".join([method, *words]), config, dict(self.evaluation))


def _plain(value: Any) -> str:
    """A value as part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9_.+-]", "_", str(value))


def _set(content: dict[str, Any], key: str, value: Any) -> None:
    """Set a setting by its dotted name."""
    if key in _OF_THE_GRID:
        raise ValueError(f"{key} is decided by the grid; leave it out of the settings.")
    parts = {part: names for part, names in content.items() if isinstance(names, dict) and part != "trainer"}
    check_name("setting", key, [*(f"{part}.{name}" for part, names in parts.items() for name in names), "trainer"])
    part, _, name = key.rpartition(".")
    (parts[part] if part else content)[name] = value


def _check_evaluation(content: Mapping[str, Any]) -> None:
    """Raise a ValueError that names what does not fit."""
    for name in content:
        check_name("evaluation setting", name, [field.name for field in fields(EvaluationSettings)])
        if name in ("epoch", "split"):
            raise ValueError(f"{name} is decided by the grid; leave it out of the evaluation.")
    try:
        checked(EvaluationSettings, dict(content), "--evaluation").check()
    except RunError as error:
        raise ValueError(str(error)) from None
