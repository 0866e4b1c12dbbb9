"""Find and read what runs and reproductions left on disk. Imports no torch and executes nothing."""

import csv
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

__all__ = ["Reproduction", "Run", "find", "number", "numbers", "read_json", "read_rows"]

Row = dict[str, str]

_DEPTH = 4
"""Folders below a given one that are searched."""


@dataclass(frozen=True)
class Run:
    """A run folder, finished or not."""

    folder: Path
    name: str
    """The folder, without what it has in common with the others."""
    result: dict[str, Any]
    """`result.json`; of an unfinished run, what its configuration says."""
    config: dict[str, Any]
    metrics: list[Row]
    images: list[Row]
    """`evaluation.csv`, a row per image."""

    @property
    def finished(self) -> bool:
        """Whether training reached its end."""
        return self.result.get("status") == "finished"

    @property
    def evaluation(self) -> dict[str, Any] | None:
        """The summary of `mcvae evaluate`, if there is one."""
        return self.result.get("evaluation")


@dataclass(frozen=True)
class Reproduction:
    """A folder with `records.csv`: an experiment of the paper, repeated."""

    folder: Path
    name: str
    records: list[Row]
    provenance: dict[str, Any]
    figure: Path | None


def find(paths: list[str]) -> tuple[list[Run], list[Reproduction]]:
    """Every run and reproduction at or below the given folders.

    Args:
        paths: run folders, reproduction folders, or folders of them.
    """
    runs, reproductions = list[Path](), list[Path]()
    for path in map(Path, paths):
        if not path.is_dir():
            raise FileNotFoundError(f"{path} is not a folder. Give folders of runs or reproductions.")
        found = list(_folders(path, _DEPTH))
        here = [f for f in found if _is_run(f)], [f for f in found if (f / "records.csv").exists() and not _is_run(f)]
        if not any(here):
            raise FileNotFoundError(
                f"nothing to report in {path}: no config.yaml or result.json of a run and no records.csv of a "
                f"reproduction, in it or up to {_DEPTH} folders below."
            )
        runs, reproductions = runs + here[0], reproductions + here[1]
    runs, reproductions = list(dict.fromkeys(runs)), list(dict.fromkeys(reproductions))
    names = _names([*runs, *reproductions])
    return [_read_run(folder, names[folder]) for folder in runs], [
        _read_reproduction(folder, names[folder]) for folder in reproductions
    ]


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
    """Short names: paths without what all of them share."""
    absolute = [folder.resolve() for folder in folders]
    shared = Path(os.path.commonpath([path.parent for path in absolute]))
    return {folder: str(path.relative_to(shared)) for folder, path in zip(folders, absolute, strict=True)}


def _read_run(folder: Path, name: str) -> Run:
    config = _read_yaml(folder / "config.yaml") if (folder / "config.yaml").exists() else {}
    metrics = read_rows(folder / "metrics.csv")
    result = read_json(folder / "result.json") if (folder / "result.json").exists() else _so_far(folder, config)
    missing = {"data", "method", "num_steps", "num_samples"} - result.keys()
    if missing:
        raise ValueError(f"{folder / 'result.json'} is not the result of a run: {', '.join(sorted(missing))} missing.")
    seconds = number(metrics[-1].get("seconds")) if metrics else None
    return Run(
        folder, name, {"seconds": seconds or 0.0} | result, config, metrics, read_rows(folder / "evaluation.csv")
    )


def _so_far(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """What the configuration of an unfinished run says about its result."""
    try:
        data, method = config["data"], config["method"]
        samples = {"iwae": 10, "a-mcvae": 5}.get(method["name"], 1)  # what `mcvae train` does if nothing is said
        return {
            "data": data["name"],
            "transform": data["transform"],
            "likelihood": config["model"]["likelihood"],
            "batch_size": data["batch_size"],
            "method": method["name"],
            "num_steps": method["num_steps"],
            "schedule": method["schedule"],
            "num_samples": method["num_samples"] or samples,
            "seed": config["run"]["seed"],
            "epochs": config["run"]["epochs"],
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'config.yaml'} is not the configuration of a run: {error} missing.") from None


def _read_reproduction(folder: Path, name: str) -> Reproduction:
    path = folder / "provenance.json"
    figure = next((p for p in (folder / "figure.svg", folder / "figure.png") if p.exists()), None)
    records = read_rows(folder / "records.csv")
    missing = {"experiment", "method", "metric", "value"} - (records[0].keys() if records else set())
    if missing:
        raise ValueError(f"{folder / 'records.csv'} has no column {', '.join(sorted(missing))}.")
    return Reproduction(folder, name, records, read_json(path) if path.exists() else {}, figure)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; an error names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}). Remove it, or restore it from a copy.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}.")
    return content


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}.") from None
    return content if isinstance(content, dict) else {}


def read_rows(path: Path) -> list[Row]:
    """Rows of a CSV file; none if it does not exist. An error names the file."""
    if not path.exists():
        return []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid CSV ({error}). Remove it, or restore it from a copy.") from None
    for line, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise ValueError(f"{path}, line {line}, does not have as many fields as the header.")
    return rows


def number(value: Any) -> float | None:
    """A finite number, or None for whatever is not one.

    >>> number("1.5"), number(""), number("nan"), number(None)
    (1.5, None, None, None)
    """
    try:
        parsed = float(value)
    except (TypeError, ValueError):
        return None
    return parsed if math.isfinite(parsed) else None


def numbers(text: str | None) -> list[float]:
    """Numbers separated by spaces.

    >>> numbers("0.1 0.2")
    [0.1, 0.2]
    """
    return [value for part in re.split(r"\s+", text or "") if (value := number(part)) is not None]
