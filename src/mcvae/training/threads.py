"""How many threads torch should use: one for small batches, and at most one per idle core."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["free_cores", "recall_threads", "threads_for"]


@contextmanager
def threads_for(values: int | None = None) -> Iterator[None]:
    """Choose the number of threads for batches of `values` numbers, large if None, unless the user chose it.

    On small batches a second thread costs more than it saves. While another process keeps a core busy, threads wait for
    each other, and fewer are faster.
    """
    before = torch.get_num_threads()
    if not _chosen_by_user():
        few = values is not None and values < _FEW
        torch.set_num_threads(1 if few else min(before, free_cores()))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def recall_threads(number: int | None) -> None:
    """Use as many threads as a run had when it was interrupted: the last digits of sums depend on their number."""
    if number is not None and not _chosen_by_user():
        torch.set_num_threads(number)


def free_cores(seconds: float = 0.25) -> int:
    """How many cores other processes leave idle during this time, at least one; all cores where this is not known.

    Processes of low priority (`nice`) do not count: they yield the core.
    """
    total = os.cpu_count() or 1
    before = _ticks()
    if before is None:
        return total
    time.sleep(seconds)
    after = _ticks()
    assert after is not None
    spent = [end - begin for begin, end in zip(before, after, strict=True)]
    _, nice, _, idle, waiting, *_ = spent
    return max(1, round(total * (nice + idle + waiting) / max(sum(spent), 1)))


def _ticks() -> list[int] | None:
    """Time that all cores have spent so far on users, nice users, the system, nothing, waiting for disks, and more."""
    try:
        with open("/proc/stat") as file:
            return [int(number) for number in file.readline().split()[1:9]]
    except OSError:  # not Linux
        return None


def _chosen_by_user() -> bool:
    return "OMP_NUM_THREADS" in os.environ


_FEW = 2**15  # 50 digits have 3,200 values, 100 images of MNIST 78,400
