"""Proposal maps T_u: deterministic moves of a state by innovation noise u ~ N(0, I), with their densities."""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from mcvae.core.bridge import Bridge, State

__all__ = ["Hamiltonian", "Langevin", "Proposal", "Proposed", "RandomWalk"]


class Proposed(NamedTuple):
    """Where a proposal map leads, and how likely the move and its reversal were, `[S, B]` each."""

    state: State
    log_forward: Tensor
    log_backward: Tensor


class Proposal(Protocol):
    """A proposal map. `step_size` is a scalar or broadcasts against latents `[S, B, D]`."""

    uses_score: ClassVar[bool]
    """Whether the map reads ∇ log γ_β."""
    has_transition_density: ClassVar[bool]
    """Whether `log_forward` is the density of the new latent given the old one."""

    def step_unit(self, scale: Tensor) -> Tensor:
        """The step size that means "one standard deviation" where a density has standard deviations `scale`."""
        ...

    def __call__(self, bridge: Bridge, state: State, beta: Tensor, step_size: Tensor, noise: Tensor) -> Proposed:
        """Move `state` by `noise` at temperature `beta`, evaluating the bridge once per new latent."""
        ...


@dataclass(frozen=True)
class Langevin:
    """z' = z + η ∇log γ_β(z) + √(2η) u, eq. (langevin_map); its density is N(z'; z + η ∇log γ_β(z), 2η).

    A step size per dimension gives the paper's preconditioned form (Section 4.1).
    """

    uses_score: ClassVar[bool] = True
    has_transition_density: ClassVar[bool] = True

    def step_unit(self, scale: Tensor) -> Tensor:
        """η is a variance."""
        return scale.square()

    def __call__(self, bridge: Bridge, state: State, beta: Tensor, step_size: Tensor, noise: Tensor) -> Proposed:
        """See `Proposal`."""
        old, scale = state.point, (2 * step_size).sqrt()
        new = bridge.evaluate(old.z + step_size * bridge.score(old, beta) + scale * noise, fallback=old.z)
        reverse_noise = (old.z - new.z - step_size * bridge.score(new, beta)) / scale
        return Proposed(State(new), _log_normal(noise, scale), _log_normal(reverse_noise, scale))


@dataclass(frozen=True)
class RandomWalk:
    """z' = z + η u: the symmetric random walk of Section 3.1, with Σ^(1/2) = diag(η)."""

    uses_score: ClassVar[bool] = False
    has_transition_density: ClassVar[bool] = True

    def step_unit(self, scale: Tensor) -> Tensor:
        """η is a standard deviation."""
        return scale

    def __call__(self, bridge: Bridge, state: State, beta: Tensor, step_size: Tensor, noise: Tensor) -> Proposed:
        """See `Proposal`."""
        old = state.point
        new = bridge.evaluate(old.z + step_size * noise, with_score=old.score_p is not None, fallback=old.z)
        log_density = _log_normal(noise, step_size)
        return Proposed(State(new), log_density, log_density)


@dataclass(frozen=True)
class Hamiltonian:
    """Leapfrog steps of size ε from a refreshed momentum ρ ~ N(0, I).

    The momentum is kept by `damping` h in [0, 1): ρ = h ρ_old + √(1 − h²) u; h = 0 draws it anew. Leapfrog steps
    preserve volume, so the two densities are those of the momentum before and after them. One step of size
    ε = √(2η) without damping is the Langevin map of size η.

    Args:
        num_leapfrog: leapfrog steps, one evaluation each.
        damping: share of the momentum that survives a refreshment; only for unadjusted kernels.
    """

    num_leapfrog: int = 3
    damping: float = 0.0
    uses_score: ClassVar[bool] = True
    has_transition_density: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.num_leapfrog < 1:
            raise ValueError(f"num_leapfrog must be at least 1, got {self.num_leapfrog}.")
        if not 0 <= self.damping < 1:
            raise ValueError(f"damping must lie in [0, 1), got {self.damping}: 0 refreshes the momentum completely.")

    def step_unit(self, scale: Tensor) -> Tensor:
        """ε times a momentum of variance 1; a step per dimension is a diagonal mass matrix."""
        return scale

    def __call__(self, bridge: Bridge, state: State, beta: Tensor, step_size: Tensor, noise: Tensor) -> Proposed:
        """See `Proposal`."""
        before = noise
        if state.momentum is not None:
            before = self.damping * state.momentum + math.sqrt(1 - self.damping**2) * noise
        point, momentum = state.point, before
        failed = torch.zeros_like(point.log_p, dtype=torch.bool)
        for _ in range(self.num_leapfrog):
            momentum = momentum + 0.5 * step_size * bridge.score(point, beta)
            point = bridge.evaluate(point.z + step_size * momentum, fallback=state.point.z)
            momentum = momentum + 0.5 * step_size * bridge.score(point, beta)
            failed = failed | point.log_p.isnan()
        # A path that failed on its way may end somewhere harmless, but is no longer reversible.
        point = point._replace(log_p=torch.where(failed, torch.nan, point.log_p))
        unit = torch.ones_like(step_size)
        return Proposed(State(point, momentum), _log_normal(before, unit), _log_normal(momentum, unit))


def _log_normal(noise: Tensor, scale: Tensor) -> Tensor:
    """log density at z' = mean + scale * noise of N(mean, scale²), summed over the latent dimension."""
    return (-0.5 * noise.square() - 0.5 * math.log(2 * math.pi) - scale.log()).sum(-1)
