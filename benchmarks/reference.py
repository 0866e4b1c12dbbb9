"""The yardstick: the paper's algorithms as their text has them.

A fresh autograd gradient wherever the text has ∇log γ, a fresh evaluation wherever it has a density. Temperatures are
k / (K + 1), and densities are summed in float64. Noise is drawn in the same order as by the package, so that both
compute the same numbers.
"""

import math

import torch
from torch import Generator, Tensor
from torch.distributions import Normal

from mcvae import Bridge
from mcvae.core.randomness import draw


def log_gamma(bridge: Bridge, z: Tensor, beta: float) -> Tensor:
    return (1 - beta) * bridge.initial.log_prob(z).double() + beta * bridge.log_joint(z).double()


def gradient(bridge: Bridge, z: Tensor, beta: float, create_graph: bool) -> Tensor:
    with torch.enable_grad():
        z = z if z.requires_grad else z.detach().requires_grad_()
        return torch.autograd.grad(log_gamma(bridge, z, beta).sum(), z, create_graph=create_graph)[0]


def langevin(bridge: Bridge, num_samples: int, num_steps: int, step: float, adjusted: bool, source: Generator):
    """log W and log A of Algorithm 1 (adjusted=False) or Algorithm 2."""
    z = draw(bridge.initial, (num_samples,), source)

    def log_m(origin: Tensor, destination: Tensor, beta: float) -> Tensor:
        mean = origin + step * gradient(bridge, origin, beta, True)
        return Normal(mean, math.sqrt(2 * step)).log_prob(destination).sum(-1).double()

    log_weight = torch.zeros(z.shape[:2]) if adjusted else -bridge.initial.log_prob(z).double()
    log_accept, previous = torch.zeros(z.shape[:2]), 0.0
    for k in range(1, num_steps + 1):
        beta = k / (num_steps + 1)
        noise = torch.randn(z.shape, generator=source, dtype=z.dtype)
        if adjusted:
            log_weight = log_weight + log_gamma(bridge, z, beta) - log_gamma(bridge, z, previous)
            threshold = torch.rand(z.shape[:2], generator=source, dtype=torch.float64).log()
        proposal = z + step * gradient(bridge, z, beta, True) + math.sqrt(2 * step) * noise
        log_ratio = log_m(proposal, z, beta) - log_m(z, proposal, beta)
        if adjusted:
            log_alpha = (log_gamma(bridge, proposal, beta) - log_gamma(bridge, z, beta) + log_ratio).clamp(max=0)
            accepted = threshold < log_alpha
            log_reject = torch.log1p(-log_alpha.clamp(max=-1e-12).exp())
            log_accept = log_accept + torch.where(accepted, log_alpha, log_reject)
            z = torch.where(accepted.unsqueeze(-1), proposal, z)
        else:
            log_weight, z = log_weight + log_ratio, proposal
        previous = beta
    if adjusted:
        return log_weight + log_gamma(bridge, z, 1.0) - log_gamma(bridge, z, previous), log_accept
    return log_weight + bridge.log_joint(z).double(), log_accept


def langevin_loss(bridge: Bridge, num_samples: int, num_steps: int, step: float, adjusted: bool, source: Generator):
    """What has the gradient of minus the bound: with the REINFORCE term and leave-one-out control variate."""
    log_weight, log_accept = langevin(bridge, num_samples, num_steps, step, adjusted, source)
    signal = (log_weight - log_weight.mean(0)).detach() / max(num_samples - 1, 1)
    return -(log_weight.mean(0) + (signal * log_accept).sum(0)).mean()


@torch.no_grad()
def ais_hmc(bridge: Bridge, num_samples: int, num_steps: int, step: float, num_leapfrog: int, source: Generator):
    """log W of annealed importance sampling with Hamiltonian Monte Carlo (Section 4.3)."""
    z = draw(bridge.initial, (num_samples,), source)
    log_weight, previous = torch.zeros(z.shape[:2]), 0.0
    for k in range(1, num_steps + 1):
        beta = k / (num_steps + 1)
        log_weight = log_weight + log_gamma(bridge, z, beta) - log_gamma(bridge, z, previous)
        momentum = torch.randn(z.shape, generator=source, dtype=z.dtype)
        threshold = torch.rand(z.shape[:2], generator=source, dtype=torch.float64).log()
        proposal, energy = z, log_gamma(bridge, z, beta) - 0.5 * momentum.square().sum(-1)
        for _ in range(num_leapfrog):
            momentum = momentum + 0.5 * step * gradient(bridge, proposal, beta, False)
            proposal = proposal + step * momentum
            momentum = momentum + 0.5 * step * gradient(bridge, proposal, beta, False)
        log_alpha = log_gamma(bridge, proposal, beta) - 0.5 * momentum.square().sum(-1) - energy
        z = torch.where((threshold < log_alpha).unsqueeze(-1), proposal, z)
        previous = beta
    return log_weight + log_gamma(bridge, z, 1.0) - log_gamma(bridge, z, previous)
