"""The interface of likelihoods, and the description of the data that they are built for."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

__all__ = ["Datum", "Likelihood"]


class Datum(NamedTuple):
    """What networks and likelihoods need to know about the data."""

    shape: tuple[int, ...]
    """(C, H, W) of an image, (P,) of a row of a table."""
    kind: str = "pixels"
    """"pixels", "counts" or "real"."""
    levels: int = 256
    """One more than the largest whole number; 0 for real data."""
    conditions: int = 0
    """Numbers that the model is conditioned on."""


class Likelihood(nn.Module, ABC):
    """Turns the output of a network, `[N, channels_per_channel * C, ...]`, into a distribution over data `[C, ...]`."""

    channels_per_channel: int = 1
    """Network outputs per channel of an image, or per column of a table."""

    def start(self, data: Tensor) -> None:
        """Initialise from training data `[N, ...]`, such as with the mean of every count. Does nothing by default."""

    def _apply(self, *args: Any, **kwargs: Any) -> "Likelihood":
        """Move to another device or type; a density stays in single precision, in half its constants have no digits."""
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if any(values.dtype in (torch.float16, torch.bfloat16) for values in (*self.parameters(), *self.buffers())):
            self.float()
        return self

    @abstractmethod
    def forward(self, output: Tensor) -> Distribution:
        """Distribution with batch `[N]` and the event shape of one datum."""

    def __call__(self, *args: Any, **kwargs: Any) -> Distribution:
        """Call `forward`."""
        distribution: Distribution = super().__call__(*args, **kwargs)
        return distribution
