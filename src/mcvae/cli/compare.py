"""mcvae compare."""

from dataclasses import dataclass, field

from mcvae.cli.notices import tell
from mcvae.report.comparison import show
from mcvae.runs.discovery import find

__all__ = ["Options", "run"]


@dataclass
class Options:
    """What to compare."""

    folders: list[str] = field(metadata={"positional": "run folders, or folders of them"})


def run(options: Options) -> None:
    """Show runs in one table, best likelihood first."""
    show(tell(find(options.folders)))
