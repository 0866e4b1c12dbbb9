"""From bytes to the values that a likelihood is a density of.

A transform is a function of uint8 pixels and a generator. It draws either no random numbers or one array of the batch's
shape, so that a batch shared among processes gets the same numbers as in one process.
"""

from collections.abc import Callable

import torch
from torch import Generator, Tensor

__all__ = ["TRANSFORMS", "Transform", "binarize", "dequantize", "scale"]

Transform = Callable[[Tensor, Generator], Tensor]
"""`(pixels uint8 [B, C, H, W], generator) -> float32 [B, C, H, W]`."""


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


def _checked(pixels: Tensor) -> Tensor:
    if pixels.dtype != torch.uint8:
        raise TypeError(
            f"a transform takes the pixels of a data set, uint8 from 0 to 255, got {pixels.dtype}. Pass images as they "
            "were loaded; scaled images need no transform."
        )
    return pixels


TRANSFORMS: dict[str, Transform] = {"binarize": binarize, "scale": scale, "dequantize": dequantize}
"""Transforms by name."""
