"""From data as they are stored to the values that a likelihood is a density of.

A transform is a function of data and a generator. It draws either no random numbers or one array of the batch's
shape, so that a batch shared among processes gets the same numbers as in one process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

__all__ = ["TRANSFORMS", "Standardization", "Transform", "binarize", "dequantize", "keep", "scale"]

Transform = Callable[[Tensor, Generator], Tensor]
"""`(data [B, ...], generator) -> float32 [B, ...]`."""


def binarize(pixels: Tensor, generator: Generator) -> Tensor:
    """Draw 0 or 1 with the grey level as probability of 1: dynamic binarisation, for a Bernoulli likelihood.

    >>> binarize(torch.tensor([0, 255], dtype=torch.uint8), torch.Generator()).tolist()
    [0.0, 1.0]
    """
    uniform = torch.rand(pixels.shape, generator=generator, dtype=torch.float32, device=pixels.device)
    return (uniform < scale(pixels, generator)).to(torch.float32)


def scale(pixels: Tensor, generator: Generator) -> Tensor:
    """Grey levels from 0 to 1, pixel / 255; nothing is drawn.

    >>> scale(torch.tensor([0, 51, 255], dtype=torch.uint8), torch.Generator()).tolist()
    [0.0, 0.20000000298023224, 1.0]
    """
    return _checked(pixels).to(torch.float32) / 255


def dequantize(pixels: Tensor, generator: Generator) -> Tensor:
    """(pixel + u) / 256 with u uniform on (0, 1): a density of it bounds the probability of the pixel from below.

    u lies midway between multiples of 2⁻¹⁵. Eight bits of pixel and sixteen of u are what float32 holds exactly, so
    no value is rounded into the next pixel, and none is 0 or 1, where a logit is infinite.

    >>> torch.floor(256 * dequantize(torch.tensor([0, 7, 255], dtype=torch.uint8), torch.Generator())).int().tolist()
    [0, 7, 255]
    """
    whole = _checked(pixels).to(torch.float32)
    level = torch.randint(2**15, pixels.shape, generator=generator, dtype=torch.float32, device=pixels.device)
    return (whole + (level + 0.5) / 2**15) / 256


def keep(data: Tensor, generator: Generator) -> Tensor:
    """The numbers as they are, as float32: counts, or real data in units of your choice.

    >>> keep(torch.tensor([0, 3, 12]), torch.Generator()).tolist()
    [0.0, 3.0, 12.0]
    """
    return data.to(torch.float32)


@dataclass(frozen=True, eq=False)
class Standardization:
    """(x − mean) / scale, with the mean and standard deviation of training data: kept with a run, for new data.

    Args:
        mean: of one datum's shape.
        scale: of the same shape; 1 where the training data are constant.
        columns: names of the columns of a table, if they have any.

    >>> standardize = Standardization.of(torch.tensor([[0.0, 5.0], [2.0, 5.0]]))
    >>> standardize(torch.tensor([[4.0, 6.0]]), torch.Generator()).tolist()
    [[3.0, 1.0]]
    >>> standardize.undone(torch.tensor([[3.0, 1.0]])).tolist()
    [[4.0, 6.0]]
    """

    mean: Tensor
    scale: Tensor
    columns: Sequence[str] = ()

    @classmethod
    def of(cls, train: Tensor, columns: Sequence[str] = ()) -> "Standardization":
        """From the mean and deviation of training data `[N, ...]`."""
        values = train.double()
        deviation = values.std(0, correction=0)
        return cls(values.mean(0).float(), torch.where(deviation > 0, deviation, 1.0).float(), columns)

    def __call__(self, data: Tensor, generator: Generator) -> Tensor:
        """See `Transform`."""
        return (data.to(torch.float32) - self.mean) / self.scale

    def undone(self, values: Tensor) -> Tensor:
        """Return values to the units of the data."""
        return values * self.scale.to(values) + self.mean.to(values)


def _checked(pixels: Tensor) -> Tensor:
    if pixels.dtype != torch.uint8:
        raise TypeError(
            f"a transform takes the pixels of a data set, uint8 from 0 to 255, got {pixels.dtype}. Pass images as they "
            "were loaded; scaled images need no transform."
        )
    return pixels


TRANSFORMS: dict[str, Transform] = {"binarize": binarize, "scale": scale, "dequantize": dequantize, "keep": keep}
"""Transforms by name. "standardize" is one more: it needs training data, see `Standardization`."""
