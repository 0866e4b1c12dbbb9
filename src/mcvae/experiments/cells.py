"""Run cells, each a task with a folder of its own, in parallel processes or on a Ray cluster. Imports no torch.

A cell is done when its folder has `records.csv`. Whoever works on a cell holds a lock that dies with the process, so
any number of sweeps may share a folder, and a killed one leaves nothing to tidy up.
"""

import json
import logging
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any, Literal, NamedTuple

from filelock import Timeout

from mcvae._moved import MOVED
from mcvae.runs.config import read_config
from mcvae.runs.plain import RunError, checked, number, read_json, read_rows, write_json
from mcvae.runs.records import Record, read_records, write_records
from mcvae.runs.storage import held, lock_of

__all__ = ["Cell", "Cluster", "Progress", "SweepError", "chosen_threads", "look", "run_cells"]


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


class Cluster(NamedTuple):
    """A Ray cluster.

    Args:
        address: auto finds the one this machine belongs to; local starts one here.
        gpus: of each cell; fractions share one.
    """

    address: str = "auto"
    gpus: float = 0.0


Task = Callable[[Path, dict[str, Any]], list[Record]]


class Progress(NamedTuple):
    """The status of a cell."""

    name: str
    status: Literal["queued", "running", "done", "failed"]
    detail: str
    """Epoch and time left of a running cell, the reason of a failed one."""


Show = Callable[[list[Progress]], None]


class _Sweep(NamedTuple):
    """What every worker needs to know."""

    root: Path
    cells: Sequence[Cell]
    retries: int
    threads: int


def run_cells(
    root: Path,
    cells: Sequence[Cell],
    *,
    workers: int = 0,
    threads: int | None = None,
    retries: int = 1,
    cluster: Cluster | None = None,
    show: Show = lambda progress: None,
) -> list[Record]:
    """Run the cells that are not done yet, and return the records of all cells in order.

    Args:
        root: folder of the cells' folders.
        cells: the work. A cell whose folder was made with other settings is an error, not a result.
        workers: processes; 0 works in this process.
        threads: of each process; by default `--threads` if given, else processes share the processor's cores. Sums
            depend on it in the last digit.
        cluster: let Ray run the cells instead; `root` must be a folder that all machines share.
        retries: how often to retry a failed cell, from its last checkpoint if it has one.
        show: called with the status of all cells about once a second.
    """
    if len({cell.name for cell in cells}) < len(cells):
        raise ValueError("every cell needs a name of its own.")
    root.mkdir(parents=True, exist_ok=True)
    for cell in cells:
        _settle(root, cell)
    if cluster is not None:
        _supervise_cluster(_Sweep(root.resolve(), cells, retries, threads or 1), cluster, show)
    elif workers < 1:
        _work(_Sweep(root, cells, retries, threads or 1))
    else:
        threads = threads or chosen_threads() or max(1, (os.cpu_count() or 1) // workers)
        _supervise(_Sweep(root, cells, retries, threads), workers, show)
    progress = look(root, cells)
    show(progress)
    failed = [cell for cell in progress if cell.status != "done"]
    if failed:
        reasons = "\n".join(f"  {cell.name}: {cell.detail or cell.status}" for cell in failed)
        raise SweepError(
            f"{len(failed)} of {len(cells)} cells are not done:\n{reasons}\nTheir logs are {root}/*/cell.log. Run the "
            "same command to retry them, and only them."
        )
    return [record for cell in cells for record in read_records(root / cell.name / "records.csv")]


def chosen_threads() -> int | None:
    """What `--threads` or the environment variable OMP_NUM_THREADS says."""
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    return int(chosen) if chosen.isdigit() else None


def look(root: Path, cells: Sequence[Cell]) -> list[Progress]:
    """The status of the cells, read from their folders."""
    return [_look(root / cell.name) for cell in cells]


def _look(folder: Path) -> Progress:
    attempts = _attempts(folder)  # read before the records, because a worker writes the records first
    if (folder / "records.csv").exists():
        return Progress(folder.name, "done", "")
    if attempts.running and held(folder, _WORK):
        return Progress(folder.name, "running", _epochs(folder))
    if (folder / "records.csv").exists():  # it has ended while we looked
        return Progress(folder.name, "done", "")
    return Progress(folder.name, "failed" if attempts.error else "queued", attempts.error)


def _epochs(folder: Path) -> str:
    """Epoch and time left, if the cell is a training run that has finished an epoch."""
    try:
        total, last = read_config(folder).run.epochs, read_rows(folder / "metrics.csv")[-1]
        epoch, seconds = number(last["epoch"]) or 0.0, number(last["seconds"]) or 0.0
        return f"epoch {epoch:.0f} of {total}, {seconds / epoch * (total - epoch):.0f} s left"
    except (RunError, KeyError, IndexError, ZeroDivisionError):
        return ""


def _settle(root: Path, cell: Cell) -> None:
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


def _work(sweep: _Sweep) -> None:
    """Run every cell that is not done and that no other process holds."""
    for cell in sweep.cells:
        folder = sweep.root / cell.name
        while not (folder / "records.csv").exists() and _may_try(sweep, cell.name):
            if not _attempt(folder, cell):
                break


def _attempt(folder: Path, cell: Cell) -> bool:
    """Run a cell once; return False if another process holds it."""
    with _claim(folder) as free:
        if not free:
            return False
        if (folder / "records.csv").exists():
            return True
        count = _attempts(folder).number + 1
        _write_attempts(folder, Attempts(count, "exited without an error; was it killed, or out of memory?", True))
        _note(folder, f"attempt {count}")
        module, _, function = cell.task.partition(":")
        try:
            task: Task = getattr(import_module(module), function)
            with open(folder / "cell.log", "a") as log, redirect_stdout(log), redirect_stderr(log):
                try:
                    records = task(folder, cell.settings)
                except Exception:
                    traceback.print_exc(file=log)
                    raise
            write_records(folder / "records.csv", records)
            _write_attempts(folder, Attempts(count))
            _note(folder, "done")
        except (KeyboardInterrupt, SystemExit):
            _write_attempts(folder, Attempts(count - 1))
            raise
        except Exception as error:
            _write_attempts(folder, Attempts(count, f"{type(error).__name__}: {error}"))
            _note(folder, f"failed: {type(error).__name__}: {error}")
        return True


def _supervise(sweep: _Sweep, workers: int, show: Show) -> None:
    """Keep `workers` processes running, and replace one that dies while cells remain that may be tried."""
    context = get_context("spawn")
    team: list[Any] = []
    try:
        while True:
            team = [process for process in team if process.is_alive()]
            progress = look(sweep.root, sweep.cells)
            show(progress)
            left = sum(cell.status != "done" and _may_try(sweep, cell.name) for cell in progress)
            running = sum(cell.status == "running" for cell in progress)
            if not left and not team and not running:
                return
            while len(team) < min(workers, left):
                team.append(context.Process(target=_worker, args=(sweep,)))
                team[-1].start()
            time.sleep(1)
    finally:
        for process in team:
            process.terminate()
        for process in team:
            process.join()


def _may_try(sweep: _Sweep, name: str) -> bool:
    return _attempts(sweep.root / name).number <= sweep.retries


def _worker(sweep: _Sweep) -> None:
    Thread(target=_die_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = str(sweep.threads)  # as if the user had chosen it: training leaves it alone
    _work_with_threads(sweep)


def _work_with_threads(sweep: _Sweep) -> None:
    import torch

    torch.set_num_threads(sweep.threads)
    _work(sweep)


def _supervise_cluster(sweep: _Sweep, cluster: Cluster, show: Show) -> None:
    """Submit every cell to Ray, and again if its machine dies, as often as it may be tried."""
    try:
        import ray
    except ImportError:
        raise SweepError("the backend ray needs the package ray: pip install 'mcvae[cluster]'.") from None
    _reach(cluster.address)
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise SweepError(f"there is no Ray cluster at {cluster.address!r}: {error}") from None
    try:
        remote = ray.remote(num_cpus=sweep.threads, num_gpus=cluster.gpus, max_retries=0)(_work_with_threads)

        def submit(cell: Cell) -> Any:
            return remote.remote(sweep._replace(cells=[cell]))

        pending = {submit(cell): cell for cell in sweep.cells}
        while pending:
            ready, _ = ray.wait(list(pending), timeout=1)
            show(look(sweep.root, sweep.cells))
            for reference in ready:
                cell = pending.pop(reference)
                try:
                    ray.get(reference)
                except ray.exceptions.RayError as error:  # the process or its machine died
                    _note(sweep.root / cell.name, f"lost: {type(error).__name__}")
                    if _may_try(sweep, cell.name):
                        pending[submit(cell)] = cell
    finally:
        ray.shutdown()


def _reach(address: str) -> None:
    """Raise an error within ten seconds if nothing answers at the address; Ray itself waits for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise SweepError(f"there is no Ray cluster at {address!r}: {error}.") from None


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


_WORK = "cell"


@contextmanager
def _claim(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock, if it is free. The system releases it when the process ends, however it ends."""
    lock = lock_of(folder, _WORK)
    try:
        lock.acquire(timeout=0.1, poll_interval=0.02)  # `held` takes it for an instant to see whether it is free
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


@dataclass(frozen=True)
class Attempts:
    """`attempts.json`: how often a cell has been tried, and how the last time ended."""

    number: int = 0
    error: str = ""
    running: bool = False
    """Whether an attempt has begun. If no process holds the lock any more, it ended with `error`."""


def _attempts(folder: Path) -> Attempts:
    path = folder / "attempts.json"
    return checked(Attempts, read_json(path), str(path)) if path.exists() else Attempts()


def _write_attempts(folder: Path, attempts: Attempts) -> None:
    write_json(folder / "attempts.json", asdict(attempts))


def _note(folder: Path, event: str) -> None:
    """Append an event to `journal.jsonl`."""
    line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "cell": folder.name, "event": event})
    with open(folder.parent / "journal.jsonl", "a") as file:
        file.write(line + "\n")
