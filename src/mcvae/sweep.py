"""Many pieces of work, each in a folder of its own, done by as many processes as wanted. Imports no torch.

A cell is done when its folder has `records.csv`. Whoever works on a cell holds a lock that dies with the process, so
any number of sweeps may share a folder, and a killed one leaves nothing to tidy up.
"""

import fcntl
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any, Literal, NamedTuple

from mcvae.records import Record, read_records, write_records

__all__ = ["Cell", "Progress", "SweepError", "look", "run_cells"]


class SweepError(Exception):
    """Some cells could not be finished."""


class Cell(NamedTuple):
    """A piece of work.

    Args:
        name: of its folder; stable, so that a later sweep finds it.
        task: "package.module:function"; the function takes the folder and the settings, and returns records.
        settings: plain data that decides everything about the result.
    """

    name: str
    task: str
    settings: dict[str, Any]


Task = Callable[[Path, dict[str, Any]], list[Record]]


class Progress(NamedTuple):
    """How far a cell is."""

    name: str
    status: Literal["queued", "running", "done", "failed"]
    detail: str
    """Epoch and time left of a running cell, the reason of a failed one."""


def run_cells(
    root: Path,
    cells: Sequence[Cell],
    *,
    workers: int = 0,
    retries: int = 1,
    show: Callable[[list[Progress]], None] = lambda progress: None,
) -> list[Record]:
    """Do what is not done yet, and return the records of all cells in their order.

    Args:
        root: folder of the cells' folders.
        cells: the work. A cell whose folder was made with other settings is an error, not a result.
        workers: processes, which share the processor's cores; 0 works in this process.
        retries: how often a failed cell is tried again, from its last checkpoint if it has one.
        show: is told how far all cells are, about once a second.
    """
    if len({cell.name for cell in cells}) < len(cells):
        raise ValueError("every cell needs a name of its own.")
    root.mkdir(parents=True, exist_ok=True)
    for cell in cells:
        _settle(root, cell)
    if workers < 1:
        _work(root, cells, retries)
    else:
        _supervise(root, cells, workers, retries, show)
    progress = look(root, cells)
    show(progress)
    failed = [cell for cell in progress if cell.status != "done"]
    if failed:
        reasons = "\n".join(f"  {cell.name}: {cell.detail or cell.status}" for cell in failed)
        raise SweepError(
            f"{len(failed)} of {len(cells)} cells are not done:\n{reasons}\nTheir logs are {root}/*/cell.log. The same "
            "command does them again, and only them."
        )
    return [record for cell in cells for record in read_records(root / cell.name / "records.csv")]


def look(root: Path, cells: Sequence[Cell]) -> list[Progress]:
    """How far the cells are, from their folders alone."""
    return [_look(root / cell.name) for cell in cells]


def _look(folder: Path) -> Progress:
    if (folder / "records.csv").exists():
        return Progress(folder.name, "done", "")
    with _claim(folder) as free:
        if not free:
            return Progress(folder.name, "running", _epochs(folder))
    error = _attempts(folder).get("error")
    return Progress(folder.name, "failed" if error else "queued", error or "")


def _epochs(folder: Path) -> str:
    """Epoch and time left, if the cell is a training run that has finished an epoch."""
    try:
        total = int((folder / "config.yaml").read_text().split("epochs:")[1].split()[0])
        rows = (folder / "metrics.csv").read_text().splitlines()
        header, last = rows[0].split(","), rows[-1].split(",")
        epoch, seconds = int(last[header.index("epoch")]), float(last[header.index("seconds")])
    except (OSError, ValueError, IndexError):
        return ""
    return f"epoch {epoch} of {total}, {seconds / epoch * (total - epoch):.0f} s left"


def _settle(root: Path, cell: Cell) -> None:
    """Make the cell's folder, or check that it is of this cell; forget failures of earlier sweeps."""
    folder = root / cell.name
    if folder.parent != root or cell.name.startswith("."):
        raise ValueError(f"a cell is named like a folder, got {cell.name!r}.")
    folder.mkdir(exist_ok=True)
    described = json.dumps({"task": cell.task, "settings": cell.settings}, indent=2, sort_keys=True) + "\n"
    path = folder / "cell.json"
    if not path.exists():
        _write(path, described)
    elif path.read_text() != described:
        raise SweepError(
            f"{folder} was made with other settings ({path}). Choose another folder, or remove this one to do it again."
        )
    with _claim(folder) as free:
        if free:
            (folder / "attempts.json").unlink(missing_ok=True)


def _work(root: Path, cells: Sequence[Cell], retries: int) -> None:
    """Do every cell that nobody else is doing, until none is left to do."""
    for cell in cells:
        folder = root / cell.name
        while not (folder / "records.csv").exists() and _attempts(folder)["number"] <= retries:
            if not _attempt(folder, cell):
                break


def _attempt(folder: Path, cell: Cell) -> bool:
    """Try a cell; False if somebody else has it."""
    with _claim(folder) as free:
        if not free:
            return False
        if (folder / "records.csv").exists():
            return True
        number = _attempts(folder)["number"] + 1
        _write_attempts(folder, number, "stopped without a word; was it killed, or out of memory?")
        _note(folder, f"attempt {number}")
        module, _, function = cell.task.partition(":")
        task: Task = getattr(import_module(module), function)
        try:
            with open(folder / "cell.log", "a") as log, redirect_stdout(log), redirect_stderr(log):
                try:
                    records = task(folder, cell.settings)
                except Exception:
                    traceback.print_exc(file=log)
                    raise
            write_records(folder / "records.csv", records)
            _note(folder, "done")
        except (KeyboardInterrupt, SystemExit):
            _write_attempts(folder, number - 1, "")
            raise
        except Exception as error:
            _write_attempts(folder, number, f"{type(error).__name__}: {error}")
            _note(folder, f"failed: {type(error).__name__}: {error}")
        return True


def _supervise(
    root: Path, cells: Sequence[Cell], workers: int, retries: int, show: Callable[[list[Progress]], None]
) -> None:
    """Keep `workers` processes at work; replace one that dies, as long as there is something left to try."""
    context = get_context("spawn")
    threads = max(1, (os.cpu_count() or 1) // workers)
    team: list[Any] = []
    try:
        while True:
            team = [process for process in team if process.is_alive()]
            progress = look(root, cells)
            show(progress)
            left = sum(cell.status != "done" and _attempts(root / cell.name)["number"] <= retries for cell in progress)
            running = sum(cell.status == "running" for cell in progress)
            if not left and not team and not running:
                return
            while len(team) < min(workers, left):
                team.append(context.Process(target=_worker, args=(root, cells, retries, threads)))
                with _threads_in_environment(threads):
                    team[-1].start()
            time.sleep(1)
    finally:
        for process in team:
            process.terminate()
        for process in team:
            process.join()


def _worker(root: Path, cells: Sequence[Cell], retries: int, threads: int) -> None:
    Thread(target=_die_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(threads)
    _work(root, cells, retries)


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _threads_in_environment(threads: int) -> Iterator[None]:
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


@contextmanager
def _claim(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock, if it is free. The system releases it when the process ends, however it ends."""
    with open(folder / "cell.lock", "a") as file:
        yield any(_lock(file) for _ in range(3))  # somebody who only looks holds it for an instant


def _lock(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(0.02)
        return False
    return True


def _attempts(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "attempts.json").read_text())
    except FileNotFoundError:
        return {"number": 0, "error": ""}
    return found


def _note(folder: Path, event: str) -> None:
    """Append to the journal of the sweep."""
    line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "cell": folder.name, "event": event})
    with open(folder.parent / "journal.jsonl", "a") as file:
        file.write(line + "\n")


def _write_attempts(folder: Path, number: int, error: str) -> None:
    _write(folder / "attempts.json", json.dumps({"number": number, "error": error}) + "\n")


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)
