"""The identity that every estimator of this package is: run a chain along a bridge and weigh it.

log w = log γ_end(z_K) − log γ_start(z_0) + Σ_k log_ratio_k,    E[w] = Z_end / Z_start
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from mcvae.core.bridge import Bridge, Point, State, Step
from mcvae.core.kernels import Kernel
from mcvae.core.resampling import Resampling

__all__ = ["StepRecord", "Trajectory", "anneal", "moved_on"]


class StepRecord(NamedTuple):
    """What happened at every move; all `[K, S, B]`."""

    log_ratio: Tensor
    """What the move added to the log-weight."""
    log_accept: Tensor
    """Log probability of the accept/reject decision that was taken; 0 where none was."""
    stopped: Tensor
    """V_{k−1}: the log-weight of a chain that stops before the move and jumps to the end, without gradient."""


class Trajectory(NamedTuple):
    """Weighted chains and what a person, or a step-size rule, wants to know of them."""

    log_weight: Tensor
    """log w of every chain, `[S, B]`; −inf where a chain diverged."""
    state: State
    """The last state z_K."""
    acceptance: Tensor
    """Acceptance per step and datum, averaged over the chains inside the support, `[K, B]`; hypothetical for
    unadjusted kernels."""
    nonfinite: Tensor
    """Chains that met a density they could not evaluate, `[S, B]`, bool."""
    sound: Tensor | None = None
    """Chains on whose way everything was finite, derivatives included, `[S, B]`; None if all were."""
    steps: StepRecord | None = None
    """Every move, recorded while gradients are enabled."""
    score_std: Tensor | None = None
    """Standard deviation of ∇ log p over samples and batch, before each step, `[K, D]`; None without scores."""
    score_mean: Tensor | None = None
    """Mean of ∇ log p, as `score_std`: what it takes to pool the spread of several batches."""

    @property
    def log_accept(self) -> Tensor:
        """log A: the log probability of all accept/reject decisions, `[S, B]`."""
        return torch.zeros_like(self.log_weight) if self.steps is None else self.steps.log_accept.sum(0)


def anneal(
    bridge: Bridge,
    state: State,
    kernels: Kernel | Sequence[Kernel],
    betas: Tensor | Sequence[float],
    step_sizes: Tensor | Sequence[float] | float,
    *,
    start: float = 0.0,
    end: float = 1.0,
    resample: Resampling | None = None,
    generator: Generator | None = None,
) -> Trajectory:
    """Run chains from γ_start to γ_end through K kernels and return their weights (Algorithms 1 and 2).

    Args:
        bridge: the densities.
        state: exact samples of γ_start, usually `State(bridge.sample(num_samples))`.
        kernels: K kernels, or one for all steps.
        betas: the temperature of each kernel, `[K]`, monotone between `start` and `end`.
        step_sizes: the step size of each kernel: one for all, `[K]`, `[K, D]`, or `[K, B, D]` for one per datum (the
            last may be `[K, B, 1]`).
        start: temperature that `state` was drawn from; 1, with decreasing `betas` and `end=0`, is reverse AIS.
        end: temperature whose density closes the weight.
        resample: between moves, replace chains of little weight by copies of others; only without gradients.
        generator: source of all randomness; the global stream if None.

    >>> from torch.distributions import Independent, Normal
    >>> from mcvae import mala
    >>> bridge = Bridge(Independent(Normal(torch.zeros(1, 2), torch.ones(1, 2)), 1), lambda z: -z.square().sum(-1))
    >>> generator = torch.Generator().manual_seed(0)
    >>> trajectory = anneal(bridge, State(bridge.sample(8, generator=generator)), mala(), [0.5], [0.1])
    >>> trajectory.log_weight.shape
    torch.Size([8, 1])
    """
    if not isinstance(state, State):
        raise TypeError(f"anneal starts from a State, got {type(state).__name__}. Wrap a Point: State(point).")
    z, log_p = state.point.z, state.point.log_p
    betas = torch.as_tensor(betas, dtype=log_p.dtype, device=z.device)
    step_sizes = torch.as_tensor(step_sizes, dtype=z.dtype, device=z.device)
    step_sizes = step_sizes.expand(betas.shape) if step_sizes.dim() == 0 else step_sizes
    kernels = [kernels] * betas.numel() if isinstance(kernels, Kernel) else list(kernels)
    check_steps(z, kernels, betas, step_sizes, start, end)
    recording = torch.is_grad_enabled()
    if resample is not None:
        resample.check(len(z))
        if recording:
            raise ValueError(
                "resampling has no gradient: which chains survive depends on the parameters. Run it under "
                "torch.no_grad(), or train without resample."
            )
    log_weight = -bridge.log_density(state.point, start)
    nonfinite = torch.zeros_like(log_weight, dtype=torch.bool)
    sound = state.point.sound
    acceptance, record, spread = list[Tensor](), list[StepRecord](), list[tuple[Tensor, ...]]()
    temperatures = [*betas.unbind(), betas.new_tensor(end)]
    for k, (kernel, step_size) in enumerate(zip(kernels, step_sizes.unbind(), strict=True)):
        step = Step(k + 1, len(kernels), temperatures[k], temperatures[k + 1], step_size)
        if resample is not None:
            state, log_weight = resample(bridge, state, log_weight, step.beta, generator)
        point = state.point
        if point.score_p is not None:
            spread.append(torch.std_mean(point.score_p.detach(), (0, 1), correction=0))
        with torch.no_grad():
            stopped = log_weight + bridge.log_density(point, end) if recording else log_weight
        state, log_ratio, log_accept, alpha, failed, clean = kernel(bridge, state, step, generator=generator)
        acceptance.append(mean_inside(alpha, point.log_p if point.sound is not None else None))
        if state.point.sound is not None or failed is not None or clean is not None:
            broken = log_ratio.isnan()
            nonfinite = nonfinite | broken if failed is None else nonfinite | broken | failed
            log_ratio = torch.where(broken, -torch.inf, log_ratio)
            known = [rows for rows in (sound, state.point.sound, clean) if rows is not None]
            sound = torch.stack(known).all(0) if known else None
        log_weight = log_weight + log_ratio
        if recording:
            taken = torch.zeros_like(log_weight) if log_accept is None else log_accept
            record.append(StepRecord(log_ratio, taken, stopped))
    log_weight = log_weight + bridge.log_density(state.point, end)
    broken = log_weight.isnan()
    whole = len(spread) == len(kernels) > 0
    return Trajectory(
        log_weight=torch.where(broken, -torch.inf, log_weight),
        state=state,
        acceptance=torch.stack(acceptance) if acceptance else log_weight.new_zeros(0, z.shape[1]),
        nonfinite=nonfinite | broken,
        sound=sound,
        steps=StepRecord(*map(torch.stack, zip(*record, strict=True))) if record else None,
        score_std=torch.stack([std for std, _ in spread]) if whole else None,
        score_mean=torch.stack([mean for _, mean in spread]) if whole else None,
    )


@torch.no_grad()
def moved_on(
    bridge: Bridge, kernel: Kernel, z: Tensor, step_size: Tensor, number: int, generator: Generator | None
) -> Point:
    """Move chains `z [S, B, D]` a number of times at β = 1, and return where they are.

    A kernel that leaves p invariant leaves samples of the posterior what they were, and pulls copies apart.
    """
    one = torch.ones((), dtype=torch.float64, device=z.device)
    state = State(bridge.evaluate(z, with_score=kernel.uses_score))
    for _ in range(number):
        state = kernel(bridge, state, Step(1, 1, one, one, step_size.to(z)), generator=generator).state
    return state.point


def mean_inside(alpha: Tensor, log_p: Tensor | None) -> Tensor:
    """Mean over the chains inside the support, `[B]`: others cannot move, and have no weight."""
    if log_p is None:
        return alpha.mean(0)
    alive = log_p > -torch.inf
    return (alpha * alive).sum(0) / alive.sum(0).clamp(min=1)


def check_steps(
    z: Tensor, kernels: Sequence[Kernel], betas: Tensor, step_sizes: Tensor, start: float, end: float
) -> None:
    """Refuse temperatures and step sizes that do not fit, or do not lead from `start` to `end`."""
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
    temperatures = betas.tolist()
    ladder = pairwise([start, *temperatures, end])
    if not all(a <= b if end >= start else a >= b for a, b in ladder):
        raise ValueError(
            f"temperatures must move monotonically from start={start} to end={end}, got temperatures {temperatures}."
        )
    if step_sizes.numel() and not float(step_sizes.detach().min()) > 0:
        raise ValueError(f"step sizes must be positive, got {step_sizes.tolist()}.")
