"""mcvae reproduce."""

import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

from mcvae.cli.progress import live_table
from mcvae.experiments.cells import SweepError
from mcvae.experiments.paper import NAMES, ReproductionOptions
from mcvae.runs.naming import check_name, check_range

__all__ = ["Options", "run"]


@dataclass(kw_only=True)
class Options(ReproductionOptions):
    """What to reproduce.

    Args:
        out: folder of all reproductions.
        workers: processes; cores are shared among them.
        retries: how often a failed cell is tried again.
        collect: run nothing; make table and figure from the results so far, unfinished training included.
    """

    name: str = field(metadata={"positional": ", ".join([*NAMES, "all"])})
    out: str = "reproduction"
    workers: int = 1
    retries: int = 1
    collect: bool = False


def run(options: Options) -> None:
    """Reproduce a table or figure of the paper: mcvae reproduce toy-posterior.

    Finished cells are not run again and interrupted ones resume where they left off.
    """
    check_name("experiment", options.name, [*NAMES, "all"])
    options.check(options.name)
    check_range("workers", options.workers, 0)
    check_range("retries", options.retries, 0)
    from mcvae.experiments.reproduction import reproduce
    from mcvae.report.present import present

    failed = []
    for each in NAMES if options.name == "all" else [options.name]:
        try:
            with live_table(each) as show:
                folder = reproduce(
                    each,
                    options,
                    Path(options.out),
                    workers=options.workers,
                    retries=options.retries,
                    collect=options.collect,
                    command=shlex.join(["mcvae", *sys.argv[1:]]),
                    show=show,
                )
        except SweepError as error:
            if options.name != "all":
                raise
            failed.append(each)
            print(f"{each}: {error}", file=sys.stderr)
            continue
        for path in present(folder):
            print(path)
    if failed:
        raise SweepError(f"not reproduced: {', '.join(failed)}.")
