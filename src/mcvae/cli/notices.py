"""What a command tells about runs that it leaves out."""

import shlex
import sys

from mcvae.runs.discovery import Found, Run
from mcvae.runs.plain import RunError

__all__ = ["tell"]


def tell(found: Found, *, unfinished: bool = True) -> list[Run]:
    """The runs that can be shown; what is left out is named. A RunError if nothing remains.

    Args:
        found: at the places that were asked for.
        unfinished: whether to leave out runs that are not trained to their end.
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
