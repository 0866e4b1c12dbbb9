"""Run cells in this process, in parallel processes or on a Ray cluster. Imports no torch."""

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from mcvae.experiments.cell import Cell, Progress, SweepError, attempt, attempts_of, note, progress_of, settle
from mcvae.runs.records import Record, read_records

__all__ = ["Cell", "Cluster", "Progress", "SweepError", "chosen_threads", "look", "run_cells"]


class Cluster(NamedTuple):
    """A Ray cluster.

    Args:
        address: auto finds the one this machine belongs to; local starts one here.
        gpus: of each cell; fractions share one.
    """

    address: str = "auto"
    gpus: float = 0.0


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
        settle(root, cell)
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
    return [progress_of(root / cell.name) for cell in cells]


def _work(sweep: _Sweep) -> None:
    """Run every cell that is not done and that no other process holds."""
    for cell in sweep.cells:
        folder = sweep.root / cell.name
        while not (folder / "records.csv").exists() and _may_try(sweep, cell.name):
            if not attempt(folder, cell):
                break


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
    return attempts_of(sweep.root / name).number <= sweep.retries


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
                    note(sweep.root / cell.name, f"lost: {type(error).__name__}")
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
