"""What becomes of memory that torch frees on a CPU, where glibc's `malloc` decides.

Every step frees hundreds of megabytes and asks for the same again. By default glibc hands much of that back to the
system each time, which must then map and clear every page anew: up to a fifth of a training step, a third of an
evaluation.
"""

import ctypes
import sys
from functools import cache
from typing import Any

__all__ = ["keep_memory", "return_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's numbers of these options
_in_force: str | None = None


def keep_memory() -> None:
    """Keep freed memory for the next step instead of returning it: for the whole process, and only with glibc.

    The command line calls this. In a training loop of your own, and before long evaluations, call it once at the start.
    The process does not take more than at its peak, but stays there.
    """
    _choose("keep", (_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, (1 << 31) - 1))


def return_memory() -> None:
    """Return freed blocks above 256 kB at once: slower, but what a long chain keeps can then not split them.

    Otherwise the few numbers that `memory="low"` keeps of every state would be put into the gaps, and the process would
    grow as if nothing had been forgotten.
    """
    _choose("return", (_MMAP_THRESHOLD, 1 << 18))


def _choose(policy: str, *options: tuple[int, int]) -> None:
    global _in_force
    malloc = _mallopt()
    if malloc is None or _in_force == policy:
        return
    for option, value in options:
        if not malloc(option, value):  # older versions allow thresholds up to 32 MB
            malloc(option, 1 << 25)
    _in_force = policy


@cache
def _mallopt() -> Any:
    return getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
