"""Tell the user which runs a command leaves out, and why."""

import shlex
import sys

from mcvae.runs.discovery import Found, Run
from mcvae.runs.plain import RunError

__all__ = ["tell"]


def tell(found: Found, *, unfinished: bool = True) -> list[Run]:
    """Return the runs that can be shown, and print why others are left out. Raise a RunError if none remains.

    Args:
        found: what `find` returned.
        unfinished: whether to leave out runs whose training has not finished.
    """
    sentences, shown = list(found.left_out), list[Run]()
    for run in found.runs:
        place = shlex.quote(run.place)
        if run.state == "trained" or not unfinished:
            shown.append(run)
        elif run.state == "diverged":
            sentences.append(f"{run.place} diverged: {run.result.reason}")
        elif run.state == "training":
            sentences.append(f"{run.place} is still training.")
        else:
            sentences.append(f"{run.place} is not finished; continue it (mcvae train --resume {place}).")
    if not shown:
        raise RunError(" ".join(sentences) or "there are only reproductions here; show them with mcvae report.")
    for sentence in sentences:
        print(f"left out: {sentence}", file=sys.stderr)
    return shown
