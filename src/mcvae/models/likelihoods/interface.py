"""The interface of likelihoods, and the description of the data that they are built for."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributions import Distribution

from mcvae.models.precision import InSinglePrecision

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


class Likelihood(InSinglePrecision, ABC):
    """Turns the output of a network, `[N, channels_per_channel * C, ...]`, into a distribution over data `[C, ...]`."""

    channels_per_channel: int = 1
    """Network outputs per channel of an image, or per column of a table."""

    def start(self, data: Tensor) -> None:
        """Initialise from training data `[N, ...]`, such as with the mean of every count. Does nothing by default."""

    @abstractmethod
    def forward(self, output: Tensor) -> Distribution:
        """Distribution with batch `[N]` and the event shape of one datum."""

    def __call__(self, *args: Any, **kwargs: Any) -> Distribution:
        """Call `forward`."""
        distribution: Distribution = super().__call__(*args, **kwargs)
        return distribution
