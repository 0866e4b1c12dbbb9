"""Densities of known evidence, with starts from good to hopeless: what a verdict is tested on."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import (
    Cauchy,
    Distribution,
    Gumbel,
    Independent,
    Laplace,
    MultivariateNormal,
    Normal,
    StudentT,
)


class Density(NamedTuple):
    log_joint: Callable[[Tensor], Tensor]
    initial: Distribution
    log_evidence: float
    easy: bool


def gaussian(dim, mean=0.0, scale=1.0, like=torch.float64) -> Independent:
    return Independent(Normal(torch.full((1, dim), mean, dtype=like), torch.full((1, dim), scale, dtype=like)), 1)


def mixture(*parts: tuple[float, Distribution]) -> Callable[[Tensor], Tensor]:
    def log_joint(z):
        return torch.stack([math.log(weight) + part.log_prob(z) for weight, part in parts]).logsumexp(0)

    return log_joint


def correlated(dim, correlation, scale=1.0) -> MultivariateNormal:
    covariance = correlation * torch.ones(dim, dim, dtype=torch.float64) + (1 - correlation) * torch.eye(dim)
    return MultivariateNormal(torch.zeros(1, dim, dtype=torch.float64), (scale**2 * covariance).unsqueeze(0))


def mean_field(target: MultivariateNormal) -> Independent:
    """What variational inference with independent coordinates ends at: far too narrow."""
    scale = torch.linalg.inv(target.covariance_matrix).diagonal(dim1=-2, dim2=-1).rsqrt()
    return Independent(Normal(target.mean, scale), 1)


def funnel(dim, scale) -> Callable[[Tensor], Tensor]:
    def log_joint(z):
        v, rest = z[..., 0], z[..., 1:]
        return Normal(0.0, scale).log_prob(v) + Normal(0.0, (v / 2).exp().unsqueeze(-1)).log_prob(rest).sum(-1)

    return log_joint


def banana(bend) -> Callable[[Tensor], Tensor]:
    def log_joint(z):
        first, second = z[..., 0], z[..., 1]
        return Normal(0.0, 1.0).log_prob(first) + Normal(bend * first.square(), 0.5).log_prob(second)

    return log_joint


def inside(z: Tensor, value: Tensor, test: Tensor) -> Tensor:
    return torch.where(test, value, torch.where(test, value, -torch.inf).detach())


def box(width) -> Callable[[Tensor], Tensor]:
    return lambda z: torch.where((z.abs() < width).all(-1), 0.0 * z.sum(-1), -torch.inf)


def half_normal(z):
    return torch.where((z > 0).all(-1), -0.5 * z.square().sum(-1), -torch.inf)


def soft_plateau(width, edge) -> Callable[[Tensor], Tensor]:
    """Flat on [-width, width], with edges like logistic curves; each coordinate integrates to about 2 width."""

    def log_joint(z):
        log = torch.nn.functional.logsigmoid
        return (log((width - z) / edge) + log((width + z) / edge)).sum(-1)

    return log_joint


def plateau_evidence(dim, width, edge) -> float:
    grid = torch.linspace(-width - 60 * edge, width + 60 * edge, 400_001, dtype=torch.float64)
    values = soft_plateau(width, edge)(grid.unsqueeze(-1)).exp()
    return dim * math.log(torch.trapezoid(values, grid).item())


def logistic_posterior(dim=8, number=60):
    """A posterior without a closed form; its evidence is that of the other test's exact model instead: conjugate."""
    generator = torch.Generator().manual_seed(5)
    design = torch.randn(number, dim, generator=generator, dtype=torch.float64)
    noise = 0.5 * torch.randn(number, generator=generator, dtype=torch.float64)
    y = design @ torch.linspace(-1, 1, dim, dtype=torch.float64) + noise
    prior = gaussian(dim)

    def log_joint(z):
        return prior.log_prob(z) + Normal(z @ design.T, 0.5).log_prob(y).sum(-1)

    covariance = design @ design.T + 0.25 * torch.eye(number)
    return log_joint, MultivariateNormal(torch.zeros(number, dtype=torch.float64), covariance).log_prob(y).item()


def independent(part: Distribution, dim: int) -> Callable[[Tensor], Tensor]:
    return lambda z: part.log_prob(z).sum(-1)


def at(dim, value, scale=1.0, axis_only=False) -> Independent:
    """A Gaussian centred at `value` in every coordinate, or in the first one only."""
    centre = torch.full((1, dim), value, dtype=torch.float64)
    if axis_only:
        centre[:, 1:] = 0.0
    return Independent(Normal(centre, torch.full((1, dim), scale, dtype=torch.float64)), 1)


def corpus() -> dict[str, Density]:
    regression, regression_evidence = logistic_posterior()
    tight = correlated(20, 0.99)
    return {
        # Good starts, simple densities: these should be called converged.
        "gaussian": Density(gaussian(3, 1.0).log_prob, gaussian(3, 0.0, 2.0), 0.0, True),
        "gaussian, 20 dimensions": Density(gaussian(20, 1.0).log_prob, gaussian(20, 0.0, 2.0), 0.0, True),
        "gaussian, 50 dimensions": Density(gaussian(50, 0.3).log_prob, gaussian(50, 0.0, 1.5), 0.0, True),
        "gaussian, one dimension": Density(gaussian(1, 0.5, 0.3).log_prob, gaussian(1), 0.0, True),
        "gaussian, offset": Density(lambda z: gaussian(4).log_prob(z) - 1234.5, gaussian(4, 0.5, 1.5), -1234.5, True),
        "gaussian, mildly correlated": Density(correlated(5, 0.5).log_prob, gaussian(5, 0.0, 1.5), 0.0, True),
        "logistic": Density(
            lambda z: (-z - 2 * torch.nn.functional.softplus(-z)).sum(-1), gaussian(4, 0.0, 2.0), 0, True
        ),
        "gumbel": Density(independent(Gumbel(0.0, 1.0), 3), gaussian(3, 0.5, 2.0), 0.0, True),
        "skewed": Density(
            lambda z: (math.log(2) + Normal(0.0, 1.0).log_prob(z) + torch.special.log_ndtr(2 * z)).sum(-1),
            gaussian(4, 0.5, 1.0),
            0.0,
            True,
        ),
        "quartic": Density(lambda z: -(z**4).sum(-1), gaussian(5), 5 * math.log(2 * math.gamma(1.25)), True),
        "cosh": Density(lambda z: -z.cosh().log().sum(-1), gaussian(3, 0.0, 2.0), 3 * math.log(math.pi), True),
        "linear regression": Density(regression, gaussian(8), regression_evidence, True),
        "overlapping modes": Density(
            mixture((0.5, gaussian(2, -1.0)), (0.5, gaussian(2, 1.0))), gaussian(2, 0.0, 2.0), 0.0, True
        ),
        "unequal scales": Density(
            Independent(Normal(torch.zeros(1, 4), torch.tensor([[0.1, 0.3, 1.0, 2.0]])), 1).log_prob,
            gaussian(4, 0.0, 2.0),
            0.0,
            True,
        ),
        "student, 10 degrees": Density(independent(StudentT(10.0), 3), gaussian(3, 0.0, 1.5), 0.0, True),
        "shifted a little": Density(gaussian(5, 1.5).log_prob, gaussian(5), 0.0, True),
        "mild banana": Density(banana(0.3), gaussian(2, 0.0, 1.5), 0.0, True),
        "narrow posterior": Density(gaussian(5, 0.2, 0.05).log_prob, gaussian(5), 0.0, True),
        # Modes missed, half covered, or far away.
        "a mode missed": Density(mixture((0.5, at(2, -5.0)), (0.5, at(2, 5.0))), at(2, -5.0, 1.5), 0.0, False),
        "a mode missed, one dimension": Density(
            mixture((0.4, at(1, -6.0)), (0.6, at(1, 6.0))), at(1, -6.0), 0.0, False
        ),
        "a mode missed, 10 dimensions": Density(
            mixture((0.5, at(10, -5.0, axis_only=True)), (0.5, at(10, 5.0, axis_only=True))),
            at(10, -5.0, axis_only=True),
            0.0,
            False,
        ),
        "a mode half covered": Density(
            mixture((0.5, at(3, -3.0, 0.5)), (0.5, at(3, 3.0, 0.5))), at(3, -2.0, 1.5), 0.0, False
        ),
        "three modes, one wide": Density(
            mixture((0.3, at(2, -4.0, 0.3)), (0.3, at(2, 4.0, 0.3)), (0.4, at(2, 0.0, 2.0))), gaussian(2), 0.0, False
        ),
        "modes of unequal width": Density(mixture((0.5, at(2, 0.0)), (0.5, at(2, 3.0, 0.1))), gaussian(2), 0.0, False),
        # Spikes.
        "spike in a slab": Density(mixture((0.7, gaussian(3, 0.0, 0.05)), (0.3, gaussian(3))), gaussian(3), 0.0, False),
        "spike in a slab, one dimension": Density(
            mixture((0.6, gaussian(1, 0.3, 0.01)), (0.4, gaussian(1))), gaussian(1), 0.0, False
        ),
        "spike in a slab, narrow start": Density(
            mixture((0.5, gaussian(4, 0.0, 0.1)), (0.5, gaussian(4, 0.0, 2.0))), gaussian(4, 0.0, 0.1), 0.0, False
        ),
        "spike in a slab, 6 dimensions": Density(
            mixture((0.6, gaussian(6, 0.5, 0.1)), (0.4, gaussian(6))), gaussian(6), 0.0, False
        ),
        # Funnels, ridges, bananas.
        "funnel": Density(funnel(10, 3.0), gaussian(10), 0.0, False),
        "funnel, 5 dimensions": Density(funnel(5, 2.0), gaussian(5), 0.0, False),
        "funnel, 20 dimensions": Density(funnel(20, 3.0), gaussian(20), 0.0, False),
        "funnel, wide start": Density(funnel(10, 3.0), gaussian(10, 0.0, 5.0), 0.0, False),
        "ridge, mean field": Density(tight.log_prob, mean_field(tight), 0.0, False),
        "ridge, wide start": Density(correlated(10, 0.95).log_prob, gaussian(10, 0.0, 2.0), 0.0, False),
        "strong banana": Density(banana(3.0), gaussian(2), 0.0, False),
        # Heavy tails.
        "cauchy": Density(independent(Cauchy(0.0, 1.0), 2), gaussian(2), 0.0, False),
        "cauchy, 8 dimensions": Density(independent(Cauchy(0.0, 1.0), 8), gaussian(8), 0.0, False),
        "student, 2 degrees": Density(independent(StudentT(2.0), 5), gaussian(5, 0.0, 0.5), 0.0, False),
        "double exponential": Density(independent(Laplace(0.0, 1.0), 5), gaussian(5, 0.0, 0.5), 0.0, False),
        "cauchy start": Density(
            gaussian(3, 1.0).log_prob,
            Independent(Cauchy(torch.zeros(1, 3, dtype=torch.float64), 1.0), 1),
            0.0,
            False,
        ),
        # Bounded support and plateaus.
        "box": Density(box(1.0), gaussian(3), 3 * math.log(2.0), False),
        "wide box": Density(box(10.0), gaussian(3), 3 * math.log(20.0), False),
        "half normal": Density(half_normal, gaussian(2), math.log(math.pi / 2), False),
        "soft plateau": Density(soft_plateau(10.0, 0.5), gaussian(4), plateau_evidence(4, 10.0, 0.5), False),
        # Bad starts for a Gaussian.
        "far too narrow": Density(gaussian(10).log_prob, gaussian(10, 0.0, 0.05), 0.0, False),
        "far too wide": Density(gaussian(10).log_prob, gaussian(10, 0.0, 30.0), 0.0, False),
        "far away": Density(gaussian(5).log_prob, gaussian(5, 12.0, 0.5), 0.0, False),
        "narrow and far, quartic": Density(
            lambda z: -(z**4).sum(-1), gaussian(4, 3.0, 0.2), 4 * math.log(2 * math.gamma(1.25)), False
        ),
        "rounding": Density(
            lambda z: gaussian(3, like=torch.float32).log_prob(z) - 1e8,
            gaussian(3, 0.5, 1.5, torch.float32),
            -1e8,
            False,
        ),
    }
