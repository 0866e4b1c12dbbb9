"""mcvae methods."""

from dataclasses import dataclass

from mcvae.data import DATASETS
from mcvae.runs.method import METHODS

__all__ = ["Options", "run"]


@dataclass
class Options:
    """This command has no options."""


def run(options: Options) -> None:
    """List methods and data sets, a line each."""
    trained = {name: method for name, method in METHODS.items() if method.builder is not None}
    for title, entries in (("methods", trained), ("data sets", DATASETS)):
        print(f"{title}:")
        for name, entry in entries.items():
            print(f"  {name:<14} {entry.description}")
