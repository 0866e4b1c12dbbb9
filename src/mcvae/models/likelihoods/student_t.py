"""Real data with outliers."""

import math

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, StudentT

from mcvae.models.likelihoods.interface import Datum, Likelihood

__all__ = ["StudentTLikelihood", "student_t"]


class StudentTLikelihood(Likelihood):
    """Real data with Student's t: location from the network, scale and degrees of freedom learned per dimension.

    Args:
        shape: of one datum.
        scale: where scales start; none falls below 0.01.
        degrees: where degrees of freedom start; none falls below 2, so that the variance is defined beyond.

    >>> StudentTLikelihood((2,))(torch.zeros(1, 2)).log_prob(torch.zeros(1, 2)).shape
    torch.Size([1])
    """

    def __init__(self, shape: tuple[int, ...], scale: float = 1.0, degrees: float = 5.0):
        super().__init__()
        if scale <= 0 or degrees <= 2:
            raise ValueError(f"scale must be positive and degrees above 2, got {scale} and {degrees}.")
        self.log_scale = nn.Parameter(torch.full(shape, math.log(scale)))
        self.log_degrees = nn.Parameter(torch.full(shape, math.log(degrees - 2)))  # above 2

    def forward(self, output: Tensor) -> Distribution:
        """See `Likelihood`."""
        scale = self.log_scale.clamp(min=math.log(0.01)).exp().expand_as(output)
        degrees = 2 + self.log_degrees.exp().expand_as(output)
        return Independent(StudentT(degrees, output, scale, validate_args=False), output.dim() - 1)


def student_t(datum: Datum, sigma: float) -> StudentTLikelihood:
    """For real data; scales start at σ."""
    return StudentTLikelihood(datum.shape, sigma)
