"""Whether memory that torch frees on a CPU is kept for the next step, or returned to the system.

Every step frees hundreds of megabytes and asks for as much again. By default glibc's `malloc` returns much of it each
time, and the system must then map and clear every page anew: up to a fifth of a training step, or a third of an
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
    """Keep freed memory for the next step instead of returning it. It holds for the whole process, and needs glibc.

    The command line calls this. In a training loop of your own, and before long evaluations, call it once at the start.
    The process then stays at its peak of memory, and does not exceed it.
    """
    _choose("keep", (_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, (1 << 31) - 1))


def return_memory() -> None:
    """Return freed blocks above 256 kB to the system at once, which is slower but takes less memory in long chains.

    `memory="low"` keeps a few numbers of every state. If freed blocks were kept, those numbers would be put into them
    and fragment them, and the process would grow as if it kept every state in full.
    """
    _choose("return", (_MMAP_THRESHOLD, 1 << 18))


def _choose(policy: str, *options: tuple[int, int]) -> None:
    global _in_force
    malloc = _mallopt()
    if malloc is None or _in_force == policy:
        return
    for option, value in options:
        if not malloc(option, value):  # older versions of glibc allow thresholds up to 32 MB
            malloc(option, 1 << 25)
    _in_force = policy


@cache
def _mallopt() -> Any:
    return getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
