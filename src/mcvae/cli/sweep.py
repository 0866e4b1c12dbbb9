"""mcvae sweep."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mcvae.cli.progress import live_table
from mcvae.experiments.cells import Cluster, chosen_threads, run_cells
from mcvae.experiments.grid import Grid
from mcvae.report.comparison import show as show_table
from mcvae.runs.discovery import find
from mcvae.runs.naming import check_range
from mcvae.runs.records import write_records

__all__ = ["Options", "run"]


@dataclass
class Options(Grid):
    """What to try, and where.

    Args:
        out: folder of the cells.
        workers: processes; as many as there are cores if not given.
        retries: how often a failed cell is tried again, from its last checkpoint.
        backend: local processes, or ray, for which out must be a folder that all machines share.
        address: of the Ray cluster; local starts one here.
        gpus: of each cell of a Ray cluster.
    """

    out: str = "sweep"
    workers: int | None = None
    retries: int = 1
    backend: Literal["local", "ray"] = "local"
    address: str = "auto"
    gpus: float = 0.0


def run(options: Options) -> None:
    """Train and evaluate data sets x methods x settings x seeds, on this machine or a Ray cluster.

    Finished cells are skipped, interrupted ones resume, failed ones are reported at the end. If only the evaluation's
    settings have changed, training is not repeated.
    """
    for name, least in {"workers": 1, "retries": 0, "gpus": 0}.items():
        check_range(name, getattr(options, name), least)
    if "://" in options.out:
        raise ValueError(f"--out must be a folder that all workers share, got {options.out}.")
    cells = options.cells()
    with live_table(options.out) as show:
        records = run_cells(
            Path(options.out),
            cells,
            workers=options.workers or os.cpu_count() or 1,
            threads=chosen_threads() or 1,
            retries=options.retries,
            cluster=Cluster(options.address, options.gpus) if options.backend == "ray" else None,
            show=show,
        )
    write_records(Path(options.out) / "records.csv", records)
    show_table(find([f"{options.out}/{cell.name}" for cell in cells]).runs)
    print(f"{options.out}/records.csv")
