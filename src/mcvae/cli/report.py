"""mcvae report."""

import sys
from dataclasses import dataclass, field

from mcvae.runs.discovery import find

__all__ = ["Options", "run"]


@dataclass(kw_only=True)
class Options:
    """What to show, and where.

    Args:
        out: the HTML file.
    """

    folders: list[str] = field(metadata={"positional": "run folders, reproduction folders, or folders of them"})
    out: str = "report.html"


def run(options: Options) -> None:
    """Make one page of runs and reproductions that opens in any browser: mcvae report runs --out report.html."""
    from mcvae.report.page import write_page

    found = find(options.folders)
    for sentence in found.left_out:
        print(f"left out: {sentence}", file=sys.stderr)
    print(write_page(options.folders, options.out, found))
