"""Plain files: written atomically, read with checked types, and named in every error."""

import csv
import json
import math
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

__all__ = [
    "Row",
    "RunError",
    "checked",
    "number",
    "numbers",
    "read_json",
    "read_rows",
    "read_yaml",
    "write_atomically",
    "write_json",
    "write_rows",
]

Row = dict[str, str]
T = TypeVar("T")


class RunError(Exception):
    """A run folder cannot be used; the message says why."""


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise RunError(
            f"could not write {path}: {error}. Nothing that was there before is lost. Make space, or make the folder "
            "writable, and try again."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    write_atomically(path, lambda p: p.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8"))


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a CSV file atomically; None becomes an empty field."""

    def write(temporary: Path) -> None:
        with open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)

    write_atomically(path, write)


@contextmanager
def _reading(path: Path, form: str) -> Iterator[None]:
    """Turn the errors of the system and of the parser of a form into a RunError that names the file."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from None
    except (csv.Error, yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split()).removesuffix(".")
        raise RunError(f"{path} is not valid {form}: {reason}. Restore it from a copy, or remove it.") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    if not path.exists():
        raise RunError(f"{path} does not exist. Is {path.parent} a run folder, and has the run finished?")
    with _reading(path, "JSON"):
        content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise RunError(f"{path} must hold a JSON object, got {type(content).__name__}.")
    return content


def read_yaml(path: Path) -> Any:
    """Read a YAML file as plain data; anchors that refer to themselves are refused."""
    with _reading(path, "YAML"):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        json.dumps(content, default=str)  # raises an error if the content refers to itself
    return content


def read_rows(path: Path) -> list[Row]:
    """Read a CSV file with a header; no rows if it does not exist."""
    if not path.exists():
        return []
    with _reading(path, "CSV"), open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for line, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise RunError(f"{path}, line {line}, does not have as many fields as the header.")
    return rows


def checked(kind: type[T], value: Any, place: str) -> T:
    """Check that a value read from a file has the type `kind`, such as a dataclass, whose unknown keys are ignored.

    >>> from mcvae.runs.config import RunConfig
    >>> checked(RunConfig, {"epochs": 3}, "run").epochs
    3
    >>> checked(RunConfig, {"epochs": "three"}, "run")
    Traceback (most recent call last):
    mcvae.runs.plain.RunError: run: epochs must be int, got 'three'.
    """
    found: T = _checked(kind, value, place, "")
    return found


def _checked(kind: Any, value: Any, place: str, name: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(value, dict):
        hints, given = get_type_hints(kind), {str(key): item for key, item in value.items()}
        needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
        if missing := sorted(set(needed) - given.keys()):
            raise RunError(f"{place} lacks {', '.join(missing)}.")
        prefix = f"{name}." if name else ""
        known = {key: _checked(hints[key], given[key], place, prefix + key) for key in hints if key in given}
        return kind(**known)  # type: ignore[operator]
    if origin in (Union, types.UnionType):
        for option in arguments:
            try:
                return _checked(option, value, place, name)
            except RunError:
                continue
    elif origin is Literal:
        if value in arguments:
            return value
    elif origin in (list, tuple) and isinstance(value, list | tuple):
        return origin(_checked(arguments[0], item, place, name) for item in value)
    elif origin is dict and isinstance(value, dict):
        return {str(key): _checked(arguments[1], item, place, name) for key, item in value.items()}
    elif kind is Any:
        return value
    elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif isinstance(kind, type) and type(value) is kind:
        return value
    words = kind.__name__ if isinstance(kind, type) and not arguments else str(kind).replace("typing.", "")
    raise RunError(f"{place}: {name or 'the content'} must be {words}, got {str(value)[:60]!r}.")


def number(value: Any) -> float | None:
    """The value as a finite number; None if it is not one.

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
    return [value for part in (text or "").split() if (value := number(part)) is not None]
