"""A cell: a task with a folder of its own, in which its status is. Imports no torch.

A cell is done when its folder has `records.csv`. Whoever works on it holds a lock that dies with the process, so any
number of sweeps may share a folder, and a killed one leaves nothing to tidy up.
"""

import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

from filelock import Timeout

from mcvae._moved import MOVED
from mcvae.runs.plain import RunError, checked, number, read_json, read_rows, read_yaml, write_json
from mcvae.runs.records import Record, write_records
from mcvae.runs.storage import held, lock_of

__all__ = ["Cell", "Progress", "SweepError", "attempt", "attempts_of", "note", "progress_of", "settle"]

_LOCK = "cell"
"""Name of the lock."""


class SweepError(Exception):
    """Some cells could not be finished."""


class Cell(NamedTuple):
    """A task, its settings and the name of its folder.

    Args:
        name: of its folder; stable, so that a later sweep finds it.
        task: "package.module:function"; the function takes the folder and the settings, and returns records.
        settings: plain data that decides everything about the result.
        renewed: settings that may change. The cell then runs again in the same folder, and the task reuses what is
            still valid there.
    """

    name: str
    task: str
    settings: dict[str, Any]
    renewed: tuple[str, ...] = ()


Task = Callable[[Path, dict[str, Any]], list[Record]]


class Progress(NamedTuple):
    """The status of a cell."""

    name: str
    status: Literal["queued", "running", "done", "failed"]
    detail: str
    """Epoch and time left of a running cell, the reason of a failed one."""


@dataclass(frozen=True)
class Attempts:
    """`attempts.json`: how often a cell has been tried, and how the last time ended."""

    number: int = 0
    error: str = ""
    running: bool = False
    """Whether an attempt has begun. If no process holds the lock any more, it ended with `error`."""


def attempts_of(folder: Path) -> Attempts:
    """Read `attempts.json`."""
    path = folder / "attempts.json"
    return checked(Attempts, read_json(path), str(path)) if path.exists() else Attempts()


def write_attempts(folder: Path, attempts: Attempts) -> None:
    """Write `attempts.json`."""
    write_json(folder / "attempts.json", asdict(attempts))


def note(folder: Path, event: str) -> None:
    """Append an event to `journal.jsonl`."""
    line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "cell": folder.name, "event": event})
    with open(folder.parent / "journal.jsonl", "a") as file:
        file.write(line + "\n")


def progress_of(folder: Path) -> Progress:
    """The status of the cell, read from its folder."""
    attempts = attempts_of(folder)  # read before the records, because a worker writes the records first
    if (folder / "records.csv").exists():
        return Progress(folder.name, "done", "")
    if attempts.running and held(folder, _LOCK):
        return Progress(folder.name, "running", _epochs(folder))
    if (folder / "records.csv").exists():  # it has ended while we looked
        return Progress(folder.name, "done", "")
    return Progress(folder.name, "failed" if attempts.error else "queued", attempts.error)


def _epochs(folder: Path) -> str:
    """Epoch and time left, if the cell is a training run that has finished an epoch."""
    try:
        last = read_rows(folder / "metrics.csv")[-1]
        total = read_yaml(folder / "config.yaml")["run"]["epochs"]  # unchecked, since this is asked every second
        epoch, seconds = number(last["epoch"]) or 0.0, number(last["seconds"]) or 0.0
        return f"epoch {epoch:.0f} of {total}, {seconds / epoch * (total - epoch):.0f} s left"
    except (RunError, KeyError, TypeError, IndexError, ZeroDivisionError):
        return ""


def settle(root: Path, cell: Cell) -> None:
    """Create the cell's folder, or check that it belongs to this cell. Clear the failures of earlier sweeps."""
    folder, path = root / cell.name, root / cell.name / "cell.json"
    if folder.parent != root or cell.name.startswith("."):
        raise ValueError(f"a cell is named like a folder, got {cell.name!r}.")
    folder.mkdir(exist_ok=True)
    described = json.loads(json.dumps({"task": cell.task, "settings": cell.settings}))
    made = read_json(path) if path.exists() else described
    module, _, function = str(made.get("task")).partition(":")
    made["task"] = f"{MOVED.get(module, module)}:{function}"  # of an earlier release
    with _claim(folder) as free:
        if made != described:
            fixed = {k: v for k, v in described["settings"].items() if k not in cell.renewed}
            same = isinstance(made.get("settings"), dict) and made["task"] == described["task"]
            if not (same and free and fixed == {k: v for k, v in made["settings"].items() if k not in cell.renewed}):
                raise SweepError(
                    f"{folder} was made with other settings ({path}). Choose another folder, or remove this one to do "
                    "it again."
                )
            (folder / "records.csv").unlink(missing_ok=True)
        if made != described or not path.exists():
            write_json(path, described)
        if free:
            (folder / "attempts.json").unlink(missing_ok=True)


def attempt(folder: Path, cell: Cell) -> bool:
    """Run a cell once; return False if another process holds it."""
    with _claim(folder) as free:
        if not free:
            return False
        if (folder / "records.csv").exists():
            return True
        count = attempts_of(folder).number + 1
        write_attempts(folder, Attempts(count, "exited without an error; was it killed, or out of memory?", True))
        note(folder, f"attempt {count}")
        module, _, function = cell.task.partition(":")
        try:
            task: Task = getattr(import_module(module), function)
            with open(folder / "cell.log", "a") as log, redirect_stdout(log), redirect_stderr(log):
                try:
                    records = task(folder, cell.settings)
                except Exception:
                    traceback.print_exc()
                    raise
            write_records(folder / "records.csv", records)
            write_attempts(folder, Attempts(count))
            note(folder, "done")
        except (KeyboardInterrupt, SystemExit):
            write_attempts(folder, Attempts(count - 1))
            raise
        except Exception as error:
            write_attempts(folder, Attempts(count, f"{type(error).__name__}: {error}"))
            note(folder, f"failed: {type(error).__name__}: {error}")
        return True


@contextmanager
def _claim(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock, if it is free. The system releases it when the process ends, however it ends."""
    lock = lock_of(folder, _LOCK)
    try:
        lock.acquire(timeout=0.1, poll_interval=0.02)  # `held` takes it for an instant to see whether it is free
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
