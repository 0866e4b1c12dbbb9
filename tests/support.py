"""Targets with known evidence and no symmetry, and the statistics that judge estimators on them."""

import torch
from torch import Tensor
from torch.distributions import Independent, Normal

import mcvae

LOG_Z = torch.tensor([0.7, -0.4], dtype=torch.float64)
"""Log evidence of the two data of `skewed_log_joint`."""


def skewed_log_joint(z: Tensor) -> Tensor:
    """Two skewed, dependent latents per datum, [S, 2, 2] -> [S, 2]; integrates to exp(LOG_Z)."""
    location = torch.tensor([0.0, 0.4], dtype=z.dtype)
    first, second = z[..., 0] - location, z[..., 1]
    log_skew_normal = torch.log(torch.tensor(2.0)) + log_normal(first, 0.0, 1.0) + torch.special.log_ndtr(2 * first)
    log_conditional = log_normal(second, 0.8 * torch.tanh(2 * first), 0.6)
    return log_skew_normal + log_conditional + LOG_Z.to(z)


def wide_initial() -> Independent:
    """An initial distribution that covers the skewed target, off its centre."""
    loc = torch.tensor([[0.2, -0.1], [0.6, 0.3]])
    return Independent(Normal(loc, torch.tensor([[1.3, 1.4], [1.5, 1.2]])), 1)


def log_normal(value: Tensor, mean, scale) -> Tensor:
    return Normal(torch.as_tensor(mean), torch.as_tensor(scale)).log_prob(value)


def standard_errors_off(samples: Tensor, truth: Tensor | float) -> float:
    """How many standard errors the mean over dim 0 is away from the truth, in the worst component."""
    error = samples.mean(0) - truth
    scale = samples.std(0) / samples.shape[0] ** 0.5
    return float((error / scale).abs().max())


def step(beta=1.0, step_size=0.1, index: int = 1, num_steps: int = 1, next_beta=1.0) -> mcvae.Step:
    """A step of a chain, for a kernel that is called alone."""
    beta, step_size, next_beta = (torch.as_tensor(value) for value in (beta, step_size, next_beta))
    return mcvae.Step(index, num_steps, beta, next_beta, step_size)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
