"""Find and read run folders and reproductions. Only this module decides what a run is and in which state."""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mcvae.runs.config import TrainConfig
from mcvae.runs.method import MethodConfig, key_of, method_named
from mcvae.runs.plain import Row, RunError, checked, number, read_json, read_rows, read_yaml
from mcvae.runs.records import Record, read_records
from mcvae.runs.results import EvaluationSummary, RunResult, read_result
from mcvae.runs.storage import RunFolder, held

__all__ = ["FILES", "Found", "Reproduction", "Run", "State", "find", "state_of"]

State = Literal["training", "interrupted", "diverged", "trained"]

_DEPTH = 4
"""Folders below a given one that are searched."""
FILES = ("config.yaml", "metrics.csv", "result.json", "evaluation.csv", "records.csv", "provenance.json")
"""The files of a run or a reproduction that are read, or fetched from a URL."""
_NOT_SETTINGS = {
    *(f"run.{name}" for name in ("seed", "folder", "snapshots", "likelihood_every", "pictures_every", "log_every")),
    *("run.memory", "run.compile", "data.root"),
    *(f"trainer.{name}" for name in ("enable_progress_bar", "logger", "profiler", "devices", "strategy", "num_nodes")),
    *("trainer.accelerator", "trainer.enable_model_summary"),
}
"""Settings that do not change what is learned, beyond rounding and the seed."""


@dataclass(frozen=True)
class Run:
    """A run folder, finished or not."""

    folder: Path
    place: str
    """The folder or URL, as one would type it in a command."""
    name: str
    """The folder, without the parent that all folders share."""
    state: State
    result: RunResult
    """`result.json`; of an unfinished run, what its configuration says."""
    config: dict[str, Any]
    metrics: list[Row] = field(default_factory=list)
    images: list[Row] = field(default_factory=list)
    """`evaluation.csv`, a row per image."""

    @property
    def evaluation(self) -> EvaluationSummary | None:
        """The summary of `mcvae evaluate` on test images, if there is one."""
        return self.result.evaluation

    @cached_property
    def method(self) -> MethodConfig:
        """The method's settings."""
        result = self.result
        known = {k: v for k, v in _flat(self.config.get("method", {})).items() if k in MethodConfig.__annotations__}
        said = {"num_steps": result.num_steps, "num_samples": result.num_samples, "schedule": result.schedule}
        return MethodConfig(**{**known, **said, "name": result.method})

    @property
    def key(self) -> str:
        """The method's key; of a method that this version does not know, its name."""
        try:
            return key_of(self.method)
        except ValueError:
            return self.result.method

    @property
    def num_steps(self) -> int:
        """K; 0 for methods that do not anneal."""
        return self.result.num_steps if _anneals(self.result.method) else 0

    @property
    def cost(self) -> int:
        """Model evaluations per image and optimiser step."""
        return self.result.evaluations or self.result.num_samples * (self.num_steps + 1)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings that affect the outcome, except the seed, by dotted name. Runs that agree in them form a group."""
        result = self.result
        given = _flat(asdict(TrainConfig())) | _flat({k: v for k, v in self.config.items() if isinstance(v, dict)})
        # the key of the method says the rest
        of_method = ("method.step_size", "method.step_sizes") if _anneals(result.method) else ()
        found = {
            name: value
            for name, value in given.items()
            if name not in _NOT_SETTINGS and (name in of_method or not name.startswith("method."))
        }
        found |= {
            "method": self.key,
            "data.name": result.data,
            "data.transform": result.transform,
            "data.batch_size": result.batch_size,
            "model.likelihood": result.likelihood,
            "run.epochs": result.epochs,
        }
        if self.evaluation is not None:
            measured = {name: getattr(self.evaluation, name) for name in ("num_samples", "start", "spacing")}
            measured |= {k: v for k, v in self.evaluation.settings.items() if k in ("num_steps", "seed", "tuning")}
            found |= {f"evaluation.{name}": value for name, value in measured.items() if value is not None}
        return found


@dataclass(frozen=True)
class Reproduction:
    """A folder with `records.csv`: an experiment of the paper, repeated."""

    folder: Path
    name: str
    records: list[Record]
    provenance: dict[str, Any]
    figure: Path | None


class Found(NamedTuple):
    """Runs and reproductions that were found."""

    runs: list[Run]
    reproductions: list[Reproduction]
    left_out: list[str]
    """Sentences about files that cannot be read."""


def state_of(folder: Path, result: RunResult | None) -> State:
    """The state of a run."""
    if result is not None:
        return "trained" if result.status == "finished" else "diverged"
    return "training" if held(folder, "training") else "interrupted"


def find(places: list[str]) -> Found:
    """Every run and reproduction at or below the given folders or URLs. One that cannot be read is named and left out.

    Args:
        places: run folders, reproduction folders, or folders of them.
    """
    runs, reproductions = dict[Path, str](), list[Path]()
    for place in places:
        folder = RunFolder(place, lambda name: name.rpartition("/")[2] in FILES).path
        if not folder.is_dir():
            raise FileNotFoundError(f"{place} is not a run folder, nor a folder of them: it does not exist.")
        below = list(_folders(folder, _DEPTH))
        here = [f for f in below if _is_run(f)]
        others = [f for f in below if (f / "records.csv").exists() and not _is_run(f)]
        if not here and not others:
            raise FileNotFoundError(
                f"{place} is not a run folder: there is no config.yaml or result.json of a run and no records.csv of "
                f"a reproduction, in it or up to {_DEPTH} folders below."
            )
        for path in here:
            below_place = path.relative_to(folder).as_posix()
            runs.setdefault(path, place if below_place == "." else f"{place.rstrip('/')}/{below_place}")
        reproductions += others
    names, found = _names([*runs, *reproductions]), Found([], [], [])
    for folder, place in runs.items():
        try:
            found.runs.append(_read_run(folder, place, names[folder], found.left_out))
        except RunError as error:
            found.left_out.append(str(error))
    for folder in dict.fromkeys(reproductions):
        try:
            found.reproductions.append(_read_reproduction(folder, names[folder]))
        except RunError as error:
            found.left_out.append(str(error))
    return found


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    """The folder and those below it, except hidden ones, what is inside of runs, and the cells of reproductions."""
    yield folder
    if depth and not _is_run(folder):
        for inside in sorted(folder.iterdir()):
            if inside.is_dir() and not inside.name.startswith(".") and inside.name != "cells":
                yield from _folders(inside, depth - 1)


def _is_run(folder: Path) -> bool:
    return (folder / "result.json").exists() or (folder / "config.yaml").exists()


def _names(folders: list[Path]) -> dict[Path, str]:
    """Short names: paths without their common parent."""
    absolute = [folder.resolve() for folder in folders]
    shared = Path(os.path.commonpath([path.parent for path in absolute]))
    return {folder: str(path.relative_to(shared)) for folder, path in zip(folders, absolute, strict=True)}


def _read_run(folder: Path, place: str, name: str, left_out: list[str]) -> Run:
    config = read_yaml(folder / "config.yaml") if (folder / "config.yaml").exists() else {}
    if not isinstance(config, dict):
        raise RunError(f"{folder / 'config.yaml'} is not the configuration of a run.")
    if (config.get("trainer") or {}).get("fast_dev_run"):
        raise RunError(f"{folder} is a trial (--trainer.fast_dev_run), not a run. Remove it.")
    finished = (folder / "result.json").exists()
    result = read_result(folder) if finished else _so_far(folder, config)
    rows = dict[str, list[Row]]()
    for table in ("metrics.csv", "evaluation.csv"):
        try:
            rows[table] = read_rows(folder / table)
        except RunError as error:
            left_out.append(str(error))
            rows[table] = []
    if rows["metrics.csv"] and not result.seconds:
        result = replace(result, seconds=number(rows["metrics.csv"][-1].get("seconds")) or 0.0)
    state = state_of(folder, result if finished else None)
    return Run(folder, place, name, state, result, config, rows["metrics.csv"], rows["evaluation.csv"])


def _so_far(folder: Path, config: dict[str, Any]) -> RunResult:
    """The result of an unfinished run, from its configuration."""
    try:
        data, model, method, run = (config[part] for part in ("data", "model", "method", "run"))
        known = {name: value for name, value in method.items() if name in MethodConfig.__annotations__}
        own = method_named(method["name"]).whole(MethodConfig(**known))
        content = {
            "data": data["name"],
            "transform": data["transform"],
            "likelihood": model["likelihood"],
            "batch_size": data["batch_size"],
            "method": method["name"],
            "num_steps": method["num_steps"],
            "schedule": own.schedule or "linear",
            "num_samples": own.num_samples,
            "seed": run["seed"],
            "epochs": run["epochs"],
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{folder / 'config.yaml'} is not the configuration of a run: {error}.") from None
    return checked(RunResult, content, str(folder / "config.yaml"))


def _read_reproduction(folder: Path, name: str) -> Reproduction:
    path = folder / "provenance.json"
    figure = next((p for p in (folder / "figure.svg", folder / "figure.png") if p.exists()), None)
    records = read_records(folder / "records.csv")
    return Reproduction(folder, name, records, read_json(path) if path.exists() else {}, figure)


def _anneals(name: str) -> bool:
    try:
        return method_named(name).annealed
    except ValueError:
        return False


def _flat(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested configuration as one dictionary with dotted names."""
    found = dict[str, Any]()
    for name, value in content.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
