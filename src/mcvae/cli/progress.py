"""Show the progress of a sweep on a terminal or in a log."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

from mcvae.experiments.cells import Progress

__all__ = ["live_table"]


@contextmanager
def live_table(title: str) -> Iterator[Callable[[list[Progress]], None]]:
    """Yield a function that shows progress: a live table on a terminal, else a line for every change of status."""
    if not sys.stderr.isatty():
        seen = dict[str, str]()

        def lines(progress: list[Progress]) -> None:
            for cell in progress:
                if seen.get(cell.name, "queued") != cell.status:
                    print(f"{cell.name}: {cell.status} {cell.detail}".rstrip(), file=sys.stderr, flush=True)
                seen[cell.name] = cell.status

        yield lines
        return
    with Live(console=Console(stderr=True), refresh_per_second=2, transient=True) as live:

        def rows(progress: list[Progress]) -> None:
            done = sum(cell.status == "done" for cell in progress)
            table = Table("cell", "status", "", title=f"{title}: {done} of {len(progress)} done")
            for cell in [c for c in progress if c.status in ("running", "failed")][:30]:
                table.add_row(cell.name, cell.status, cell.detail)
            live.update(table)

        yield rows
