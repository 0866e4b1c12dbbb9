"""mcvae demo."""

import shlex
from dataclasses import dataclass

from mcvae.report.comparison import show
from mcvae.runs.config import check_range
from mcvae.runs.discovery import find

__all__ = ["Options", "run"]


@dataclass
class Options:
    """How long, and where to.

    Args:
        folder: where the runs go; finished ones are not trained again.
        epochs: for each method.
        seed: for each method.
    """

    folder: str = "runs/demo"
    epochs: int = 60
    seed: int = 0


def run(options: Options) -> None:
    """Train four methods on bundled digits with one budget, evaluate them on test images, and compare."""
    if "://" in options.folder:
        raise ValueError(f"--folder must be a folder of this machine, got {options.folder}.")
    check_range("epochs", options.epochs, 1, 10**7)
    check_range("seed", options.seed, 0, 2**32 - 1)
    from mcvae.experiments.demonstration import run_demo

    show(find(run_demo(options.folder, options.epochs, options.seed)).runs)
    print(f"All of it, with pictures, as a page: mcvae report {shlex.quote(options.folder)}")
