"""Real data with Gaussian noise."""

import math

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal

from mcvae.models.likelihoods.interface import Datum, Likelihood

__all__ = ["GaussianLikelihood", "fixed_gaussian", "gaussian_per_dimension", "learned_gaussian"]

_LEAST = math.log(0.01)
"""Least log σ, if every column learns its own: on a constant column the density would grow without limit."""


class GaussianLikelihood(Likelihood):
    """Real data, N(mean, σ²): the paper's choice for colour, with σ = 1.

    Args:
        sigma: σ, or where it starts.
        learned: whether σ is learned. A density that can be learned without limit needs dequantised data.
        squashed: whether means are between 0 and 1, sigmoid(output), as of pixels; else they are the output itself.
        shape: of one datum, for a σ of its own in every dimension; else one σ is shared.

    >>> p = GaussianLikelihood(sigma=0.5, squashed=False)(torch.zeros(3, 2))
    >>> p.mean.shape, p.base_dist.scale[0, 0].item()
    (torch.Size([3, 2]), 0.5)
    """

    def __init__(
        self, sigma: float = 1.0, *, learned: bool = False, squashed: bool = True, shape: tuple[int, ...] | None = None
    ):
        super().__init__()
        if sigma <= 0:
            raise ValueError(f"sigma must be positive, got {sigma}.")
        self.squashed, self.least = squashed, None if shape is None else _LEAST
        self.log_sigma = nn.Parameter(torch.full(shape or (), math.log(sigma)), requires_grad=learned)

    def forward(self, output: Tensor) -> Distribution:
        """See `Likelihood`."""
        mean = output.sigmoid() if self.squashed else output
        log_sigma = self.log_sigma if self.least is None else self.log_sigma.clamp(min=self.least)
        scale = log_sigma.exp().expand_as(mean)
        return Independent(Normal(mean, scale, validate_args=False), output.dim() - 1)


def fixed_gaussian(datum: Datum, sigma: float) -> GaussianLikelihood:
    """With one fixed σ."""
    return GaussianLikelihood(sigma, squashed=datum.kind == "pixels")


def learned_gaussian(datum: Datum, sigma: float) -> GaussianLikelihood:
    """With one learned σ."""
    return GaussianLikelihood(sigma, learned=True, squashed=datum.kind == "pixels")


def gaussian_per_dimension(datum: Datum, sigma: float) -> GaussianLikelihood:
    """With a σ for every dimension, all learned, none below 0.01."""
    return GaussianLikelihood(sigma, learned=True, squashed=datum.kind == "pixels", shape=datum.shape)
