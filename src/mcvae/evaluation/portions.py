"""Data in any form, batch by batch, and how many rows of them fit in memory."""

import math
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor
from torch.autograd.graph import saved_tensors_hooks

from mcvae.core.bridge import Bridge
from mcvae.core.randomness import draw

__all__ = ["Data", "batches_of", "bytes_per_row", "evenly_spaced", "number_of_batches", "with_time_left"]

Data = Tensor | np.ndarray[Any, Any] | Iterable[Any]
"""A tensor or an array `[N, ...]`, or batches of those, alone or first in a tuple."""


def batches_of(data: Data, like: Tensor) -> Iterator[Tensor]:
    """Batches of tensors on the device of `like`; of batches that are tuples, such as (x, y), the first part."""
    whole = _tensor(data) if isinstance(data, Tensor | np.ndarray) else None
    for batch in torch.split(whole, _BATCH) if whole is not None else data:
        x = _tensor(batch[0] if isinstance(batch, list | tuple) else batch)
        if len(x):
            yield x.to(like.device, like.dtype if x.is_floating_point() else None)


_BATCH = 100
"""Data in a batch, where they come as a whole."""


def number_of_batches(data: Any) -> int | None:
    """How many batches `batches_of` will make; None if that cannot be known."""
    try:
        return math.ceil(len(data) / _BATCH) if hasattr(data, "shape") else len(data)
    except TypeError:  # a generator
        return None


def _tensor(x: Any) -> Tensor:
    if isinstance(x, Tensor):
        return x
    if isinstance(x, np.ndarray):
        return torch.from_numpy(x)
    raise TypeError(
        f"data must be a tensor, a NumPy array, or batches of those, got {type(x).__name__}. A DataLoader is fine."
    )


def evenly_spaced(number: int, limit: int) -> Tensor:
    """Indices of `limit` of `number` data, as evenly spaced as integers can be, `[limit]`; all if there are fewer.

    >>> evenly_spaced(10, 4)
    tensor([1, 3, 6, 8])
    """
    limit = min(number, limit)
    return ((2 * torch.arange(limit) + 1) * number) // (2 * limit)


def with_time_left(batches: Iterable[Any], number: int | None) -> Iterator[Any]:
    """Pass batches on, and write to stderr every ten seconds how many are done and how long the rest will take."""
    begin = last = time.monotonic()
    for done, batch in enumerate(batches):
        now = time.monotonic()
        if now - last > 10 and done:
            left = "" if number is None else f" of {number}, about {(now - begin) / done * (number - done):.0f} s left"
            print(f"mcvae.evaluate: {done}{left or ' batches done'}", file=sys.stderr)
            last = now
        yield batch


def bytes_per_row(bridge: Bridge, generator: Generator | None = None) -> float:
    """Bytes that the score of one latent takes: what the model keeps, and as much again for its backward pass."""
    held = 0

    def note(tensor: Tensor) -> Tensor:
        nonlocal held
        held += 0 if isinstance(tensor, torch.nn.Parameter) else tensor.numel() * tensor.element_size()
        return tensor

    z = draw(bridge.initial, (1,), generator).detach()
    with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
        bridge.log_joint(z.requires_grad_())
    return max(2 * held / z.shape[1], 1.0)
