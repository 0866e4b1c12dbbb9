"""Densities of constrained parameters, as densities on all of R^D that chains can walk on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Transform, biject_to
from torch.distributions.constraints import Constraint

__all__ = ["Constrained", "constrained"]


class Constrained:
    """A log density of unconstrained latents; see `constrained`."""

    def __init__(self, log_density: Callable[[Tensor], Tensor], transform: Transform):
        self.log_density, self.transform = log_density, transform

    def __call__(self, z: Tensor) -> Tensor:
        """Log density with the Jacobian of the change of variables, `[S, B, D] -> [S, B]`."""
        value = self.transform(z)
        log_jacobian: Tensor = self.transform.log_abs_det_jacobian(z, value)  # type: ignore[no-untyped-call]
        return self.log_density(value) + log_jacobian.reshape(*z.shape[:-1], -1).sum(-1)  # [S, B, D] if elementwise

    def rounding(self, z: Tensor) -> Tensor:
        """By how many nats the log density is off because parameters are rounded, `[S, B]`.

        Near the upper end of an interval, or a face of a simplex, many latents share one floating-point number.
        """
        with torch.no_grad():
            return (self(z) - self(self.latents(self.parameters(z)))).abs().nan_to_num(nan=torch.inf)

    def parameters(self, z: Tensor) -> Tensor:
        """The constrained parameters of latents, such as `density.parameters(e.posterior(1000))`."""
        value: Tensor = self.transform(z)
        return value

    def latents(self, value: Tensor) -> Tensor:
        """The latents of constrained parameters: where to centre an initial distribution."""
        z: Tensor = self.transform.inv(value)
        return z


def constrained(log_density: Callable[[Tensor], Tensor], constraint: Constraint) -> Constrained:
    """A density on a simplex, half-line, interval or other set, as one on all of R^D with the same evidence.

    If more than a little of its mass is nearer to the end of an interval than floating-point numbers are to each other,
    as with Beta(0.1, 0.1), that mass cannot be seen, and the verdict says so.

    Args:
        log_density: unnormalised, of parameters inside the constraint, `[S, B, P] -> [S, B]`.
        constraint: such as `constraints.simplex`, `constraints.positive` or `constraints.interval(0, 1)`. Latents have
            D = P dimensions, D = P − 1 for a simplex.

    >>> import torch
    >>> from torch.distributions import Gamma, Independent, Normal, constraints
    >>> log_joint = constrained(lambda rate: Gamma(3.0, 2.0).log_prob(rate).sum(-1), constraints.positive)
    >>> initial = Independent(Normal(torch.zeros(1, 1), torch.ones(1, 1)), 1)
    >>> import mcvae
    >>> e = mcvae.estimate_log_evidence(log_joint, initial, seed=0)
    >>> bool(e.log_evidence.abs() < 4 * e.standard_error + 0.01)
    True
    >>> mean, error = e.expectation(log_joint.parameters)  # 3 / 2
    >>> bool((mean - 1.5).abs() < 4 * error)
    True
    """
    if not isinstance(constraint, Constraint):
        raise TypeError(
            f"constraint must be one of torch.distributions.constraints, such as constraints.positive, got "
            f"{constraint!r}."
        )
    try:
        transform: Any = biject_to(constraint)
    except NotImplementedError:
        raise ValueError(
            f"torch has no bijection from R^D to {constraint}. Write the density on unconstrained parameters yourself, "
            "with its log Jacobian."
        ) from None
    return Constrained(log_density, transform)
