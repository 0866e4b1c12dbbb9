"""One-dimensional integrals by quadrature: exact answers to compare estimators with."""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["OneDimensional", "log_integral"]


def log_integral(log_density: Callable[[Tensor], Tensor], lower: float, upper: float, num_points: int = 4001) -> Tensor:
    """log ∫ exp(log_density(z)) dz by the trapezoidal rule, which converges exponentially for smooth decaying tails.

    Args:
        log_density: `[N] -> [N, ...]`, evaluated at all points at once.
        lower, upper: an interval outside which the density is negligible.
        num_points: N.

    >>> log_integral(lambda z: -0.5 * z.square(), -12.0, 12.0)  # log sqrt(2 pi)
    tensor(0.9189, dtype=torch.float64)
    """
    points = torch.linspace(lower, upper, num_points, dtype=torch.float64)
    values = log_density(points)
    weights = torch.full_like(points, (upper - lower) / (num_points - 1))
    weights[[0, -1]] /= 2
    return (values + weights.log().reshape(-1, *[1] * (values.dim() - 1))).logsumexp(0)


class OneDimensional:
    """An unnormalised density on the line with its evidence and expectations.

    Args:
        log_density: `[...] -> [...]`, elementwise.
        lower, upper: an interval outside which the density is negligible.

    >>> skewed = OneDimensional(lambda z: -0.5 * z.square() + torch.nn.functional.logsigmoid(3 * z), -10.0, 10.0)
    >>> skewed.log_evidence().exp()  # half of sqrt(2 pi)
    tensor(1.2533, dtype=torch.float64)
    >>> bool(skewed.expectation(lambda z: z) > 0.5)
    True
    """

    def __init__(self, log_density: Callable[[Tensor], Tensor], lower: float, upper: float):
        self.log_density, self.lower, self.upper = log_density, lower, upper

    def log_joint(self, z: Tensor) -> Tensor:
        """The density in the shape that estimators expect, `[S, B, 1] -> [S, B]`."""
        return self.log_density(z).squeeze(-1)

    def log_evidence(self) -> Tensor:
        """log of its integral."""
        return log_integral(self.log_density, self.lower, self.upper)

    def expectation(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Mean of `function` (elementwise) under the normalised density."""
        points = torch.linspace(self.lower, self.upper, 4001, dtype=torch.float64)
        return (self.log_density(points).softmax(0) * function(points)).sum(0)
