"""The identity that every estimator of this package is: run a chain along a bridge and weigh it.

log w = log γ_end(z_K) − log γ_start(z_0) + Σ_k log_ratio_k,    E[w] = Z_end / Z_start
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from mcvae.core.bridge import Bridge, State
from mcvae.core.kernels import Kernel
from mcvae.core.randomness import rewinder

__all__ = ["Trajectory", "anneal", "anneal_hopefully"]


class Trajectory(NamedTuple):
    """Weighted chains and what a person, or a step-size rule, wants to know of them."""

    log_weight: Tensor
    """log w of every chain, `[S, B]`; −inf where a chain diverged."""
    log_accept: Tensor
    """log A: the log probability of all accept/reject decisions, `[S, B]`."""
    state: State
    """The last state z_K."""
    acceptance: Tensor
    """Acceptance per step and datum, averaged over the chains inside the support, `[K, B]`; hypothetical for
    unadjusted kernels."""
    score_std: Tensor | None
    """Standard deviation of ∇ log p over samples and batch, before each step, `[K, D]`; None without scores."""
    nonfinite: Tensor
    """Chains that met a density they could not evaluate, `[S, B]`, bool."""
    score_mean: Tensor | None = None
    """Mean of ∇ log p, as `score_std`: what it takes to pool the spread of several batches."""


def anneal(
    bridge: Bridge,
    state: State,
    kernels: Kernel | Sequence[Kernel],
    betas: Tensor | Sequence[float],
    step_sizes: Tensor | Sequence[float],
    *,
    start: float = 0.0,
    end: float = 1.0,
    generator: Generator | None = None,
) -> Trajectory:
    """Run chains from γ_start to γ_end through K kernels and return their weights (Algorithms 1 and 2).

    Args:
        bridge: the densities.
        state: exact samples of γ_start, usually `State(bridge.sample(num_samples))`.
        kernels: K kernels, or one for all steps.
        betas: the temperature of each kernel, `[K]`, monotone between `start` and `end`.
        step_sizes: the step size of each kernel: one for all, `[K]`, `[K, D]`, or `[K, B, 1]` for one per datum.
        start: temperature that `state` was drawn from; 1, with decreasing `betas` and `end=0`, is reverse AIS.
        end: temperature whose density closes the weight.
        generator: source of all randomness; the global stream if None.

    >>> from torch.distributions import Independent, Normal
    >>> from mcvae.core.kernels import mala
    >>> bridge = Bridge(Independent(Normal(torch.zeros(1, 2), torch.ones(1, 2)), 1), lambda z: -z.square().sum(-1))
    >>> generator = torch.Generator().manual_seed(0)
    >>> trajectory = anneal(bridge, State(bridge.sample(8, generator=generator)), mala(), [0.5], [0.1])
    >>> trajectory.log_weight.shape
    torch.Size([8, 1])
    """
    if not isinstance(state, State):
        raise TypeError(f"anneal starts from a State, got {type(state).__name__}. Wrap a Point: State(point).")
    z = state.point.z
    betas = torch.as_tensor(betas, dtype=z.dtype, device=z.device)
    step_sizes = torch.as_tensor(step_sizes, dtype=z.dtype, device=z.device)
    step_sizes = step_sizes.expand(betas.shape) if step_sizes.dim() == 0 else step_sizes
    kernels = [kernels] * betas.numel() if isinstance(kernels, Kernel) else list(kernels)
    _check_steps(z, kernels, betas, step_sizes, start, end)
    log_weight = -bridge.log_density(state.point, start)
    log_accept = torch.zeros_like(log_weight)
    nonfinite = log_weight.isnan()
    acceptance, score_std, score_mean = [], [], []
    for kernel, beta, step_size in zip(kernels, betas, step_sizes, strict=True):
        alive = state.point.log_p > -torch.inf  # others cannot move, and have no weight
        if state.point.score_p is not None:
            score_std.append(state.point.score_p.detach().std((0, 1), correction=0))
            score_mean.append(state.point.score_p.detach().mean((0, 1)))
        state, log_ratio, log_accept_k, alpha, failed = kernel(bridge, state, beta, step_size, generator=generator)
        broken = log_ratio.isnan()
        nonfinite = nonfinite | broken if failed is None else nonfinite | broken | failed
        log_weight = log_weight + torch.where(broken, -torch.inf, log_ratio)
        log_accept = log_accept + log_accept_k
        acceptance.append((alpha * alive).sum(0) / alive.sum(0).clamp(min=1))
    log_weight = log_weight + bridge.log_density(state.point, end)
    return Trajectory(
        log_weight=torch.where(log_weight.isnan(), -torch.inf, log_weight),
        log_accept=log_accept,
        state=state,
        acceptance=torch.stack(acceptance) if acceptance else log_weight.new_zeros(0, z.shape[1]),
        score_std=torch.stack(score_std) if len(score_std) == len(kernels) > 0 else None,
        nonfinite=nonfinite | log_weight.isnan(),
        score_mean=torch.stack(score_mean) if len(score_mean) == len(kernels) > 0 else None,
    )


def anneal_hopefully(
    bridge: Bridge,
    state: State,
    kernels: Kernel | Sequence[Kernel],
    betas: Tensor,
    step_sizes: Tensor,
    *,
    generator: Generator | None = None,
) -> Trajectory:
    """`anneal` with one look at the device per chain instead of one per state: for training on an accelerator.

    It assumes that every proposal can be evaluated. If one could not, the chains are run again from the same noise, and
    the failed rows evaluated elsewhere, so that no NaN reaches a gradient.
    """
    hopeful = replace(bridge, failures=[])
    rewind = rewinder(generator, state.point.z.device)
    trajectory = anneal(hopeful, state, kernels, betas, step_sizes, generator=generator)
    if hopeful.failures and bool(torch.stack(hopeful.failures).any()):
        rewind()
        return anneal(bridge, state, kernels, betas, step_sizes, generator=generator)
    return trajectory


def _check_steps(
    z: Tensor, kernels: Sequence[Kernel], betas: Tensor, step_sizes: Tensor, start: float, end: float
) -> None:
    if betas.dim() != 1 or not len(kernels) == len(betas) == len(step_sizes):
        raise ValueError(
            f"expected as many kernels as temperatures [K] and step sizes [K] or [K, D], got {len(kernels)} kernels, "
            f"temperatures {list(betas.shape)} and step sizes {list(step_sizes.shape)}."
        )
    if any(size not in (1, full) for size, full in zip(step_sizes.shape[:0:-1], z.shape[::-1], strict=False)):
        raise ValueError(
            f"step sizes {list(step_sizes.shape)} do not fit latents [S, B, D] = {list(z.shape)}. One per dimension "
            f"has shape [K, {z.shape[-1]}]; check latent_dim."
        )
    ladder = torch.cat([betas.new_tensor([start]), betas.detach(), betas.new_tensor([end])])
    if not bool((ladder.diff() * (1 if end >= start else -1) >= 0).all()):
        raise ValueError(
            f"temperatures must move monotonically from start={start} to end={end}, got temperatures {betas.tolist()}."
        )
    if not bool((step_sizes > 0).all()):
        raise ValueError(f"step sizes must be positive, got {step_sizes.tolist()}.")
