"""Proposal maps T_u: deterministic moves of a state by innovation noise u ~ N(0, I), with their densities."""

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mcvae.core.bridge import Bridge, State, Step
from mcvae.core.drifts import Drift, score
from mcvae.core.refreshments import PartialRefreshment, Refreshment

__all__ = ["Hamiltonian", "Langevin", "Proposal", "Proposed", "RandomWalk"]


class Proposed(NamedTuple):
    """Where a proposal map leads, and how likely the move and its reversal were, `[S, B]` each."""

    state: State
    log_forward: Tensor
    log_backward: Tensor


class Proposal(nn.Module, ABC):
    """A proposal map."""

    uses_score: bool = True
    """Whether the map reads ∇ log γ_β."""
    is_reversible: bool = True
    """Whether `log_backward` is the density of the same map from the new state: what accept/reject needs."""
    has_transition_density: bool = True
    """Whether `log_forward` is the density of the new latent given the old one."""
    keeps_momentum: bool = False
    """Whether the momentum of a state goes on to the next move."""
    num_evaluations: int = 1
    """New latents per move, at each of which the bridge is evaluated."""

    @abstractmethod
    def step_unit(self, scale: Tensor) -> Tensor:
        """The step size that means "one standard deviation" where a density has standard deviations `scale`."""

    @abstractmethod
    def forward(self, bridge: Bridge, state: State, step: Step, noise: Tensor) -> Proposed:
        """Move `state` by `noise`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Proposed:
        """Call `forward`."""
        proposed: Proposed = super().__call__(*args, **kwargs)
        return proposed


class Langevin(Proposal):
    """z' = z + η f(z) + √(2η) u with density N(z'; z + η f(z), 2η), reversed by N(z; z' + η b(z'), 2η).

    With f = b = ∇ log γ_β it is the paper's Langevin map, eq. (langevin_map). A step size per dimension gives the
    paper's preconditioned form (Section 4.1).

    Args:
        drift: f; the score by default.
        backward_drift: b; the same as f by default, so that the reversal of the move is the move itself.
    """

    def __init__(self, drift: Drift = score, backward_drift: Drift | None = None):
        super().__init__()
        self.drift, self.backward_drift = drift, drift if backward_drift is None else backward_drift
        self.is_reversible = backward_drift is None

    def step_unit(self, scale: Tensor) -> Tensor:
        """η is a variance."""
        return scale.square()

    def forward(self, bridge: Bridge, state: State, step: Step, noise: Tensor) -> Proposed:
        """See `Proposal`."""
        old, step_size = state.point, step.step_size
        scale = (2 * step_size).sqrt()
        mean = old.z + step_size * self.drift(bridge, state, step)
        new = State(bridge.evaluate(mean + scale * noise, fallback=old.z))
        backward_mean = new.point.z + step_size * self.backward_drift(bridge, new, step)
        constant = _log_constant(scale, old.z)
        return Proposed(new, constant - _half_square(noise), constant - _half_square((old.z - backward_mean) / scale))


class RandomWalk(Proposal):
    """z' = z + η u: the symmetric random walk of Section 3.1, with Σ^(1/2) = diag(η)."""

    uses_score = False

    def step_unit(self, scale: Tensor) -> Tensor:
        """η is a standard deviation."""
        return scale

    def forward(self, bridge: Bridge, state: State, step: Step, noise: Tensor) -> Proposed:
        """See `Proposal`."""
        old = state.point
        new = bridge.evaluate(old.z + step.step_size * noise, with_score=old.score_p is not None, fallback=old.z)
        log_density = _log_constant(step.step_size, old.z) - _half_square(noise)
        return Proposed(State(new), log_density, log_density)


class Hamiltonian(Proposal):
    """Leapfrog steps of size ε from a refreshed momentum ρ ~ N(0, I).

    Leapfrog steps preserve volume, so all densities are those of momenta. If the momentum is drawn anew, they are those
    before and after the steps, and one step of size ε = √(2η) is the Langevin map of size η. If it is kept, it belongs
    to the state: the chain moves in the space of (z, ρ) with target γ_β(z) N(ρ; 0, I), and the refreshment has a
    forward and a backward density.

    Args:
        num_leapfrog: leapfrog steps, one evaluation each; the half steps between them are taken together.
        damping: share h of the momentum that survives a refreshment, ρ' = h ρ + √(1 − h²) u; 0 draws it anew.
        refreshment: how the momentum is refreshed, instead of `damping`.
        backward_refreshment: the backward density of the refreshment; the same by default.
    """

    has_transition_density = False

    def __init__(
        self,
        num_leapfrog: int = 3,
        damping: float = 0.0,
        *,
        refreshment: Refreshment | None = None,
        backward_refreshment: Refreshment | None = None,
    ):
        super().__init__()
        if num_leapfrog < 1:
            raise ValueError(f"num_leapfrog must be at least 1, got {num_leapfrog}.")
        if not 0 <= damping < 1:
            raise ValueError(f"damping must lie in [0, 1), got {damping}: 0 refreshes the momentum completely.")
        if refreshment is None and damping > 0:
            refreshment = PartialRefreshment(damping)
        self.refreshment = refreshment
        self.backward_refreshment = refreshment if backward_refreshment is None else backward_refreshment
        self.num_evaluations = num_leapfrog
        self.keeps_momentum = refreshment is not None
        self.is_reversible = refreshment is None  # a kept momentum would have to be flipped at every rejection

    def step_unit(self, scale: Tensor) -> Tensor:
        """ε times a momentum of variance 1; a step per dimension is a diagonal mass matrix."""
        return scale

    def forward(self, bridge: Bridge, state: State, step: Step, noise: Tensor) -> Proposed:
        """See `Proposal`."""
        momentum, log_forward, log_backward = self._refresh(bridge, state, step, noise)
        new = self._leapfrog(bridge, State(state.point, momentum), step)
        assert new.momentum is not None
        return Proposed(new, log_forward, log_backward + _log_standard_normal(new.momentum))

    def _refresh(
        self, bridge: Bridge, state: State, step: Step, noise: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | float]:
        """The refreshed momentum, and the log densities of the refreshment: of what was drawn, and of its reversal."""
        if self.refreshment is None or self.backward_refreshment is None:
            return noise, _log_standard_normal(noise), 0.0
        old = state.momentum
        if old is None:
            raise ValueError("this move keeps the momentum, and the state has none. Start with State(point, momentum).")
        mean, scale = self.refreshment(bridge, state, step)
        momentum = mean + scale * noise
        backward_mean, backward_scale = self.backward_refreshment(bridge, State(state.point, momentum), step)
        backward_noise = (old - backward_mean) / backward_scale
        return (
            momentum,
            _log_standard_normal(old) + _log_constant(scale, noise) - _half_square(noise),
            _log_constant(backward_scale, noise) - _half_square(backward_noise),
        )

    def _leapfrog(self, bridge: Bridge, state: State, step: Step) -> State:
        point, step_size, sound = state.point, step.step_size, state.point.sound
        assert state.momentum is not None
        momentum = state.momentum + 0.5 * step_size * bridge.score(point, step.beta)
        failed = None
        for number in range(1, self.num_evaluations + 1):
            point = bridge.evaluate(point.z + step_size * momentum, fallback=state.point.z)
            momentum = momentum + (0.5 if number == self.num_evaluations else 1.0) * step_size * bridge.score(
                point, step.beta
            )
            if point.sound is not None:
                sound = point.sound if sound is None else sound & point.sound
                failed = point.log_p.isnan() if failed is None else failed | point.log_p.isnan()
        if failed is not None:  # a path that failed on its way may end somewhere harmless, but is not reversible
            point = point._replace(log_p=torch.where(failed, torch.nan, point.log_p), sound=sound)
        return State(point, momentum)

    def extra_repr(self) -> str:
        """Show the settings in `repr`."""
        return f"num_leapfrog={self.num_evaluations}"


def _half_square(noise: Tensor) -> Tensor:
    return 0.5 * noise.square().sum(-1)


def _log_constant(scale: Tensor, like: Tensor) -> Tensor:
    """log of the normalising constant of N(·, scale²) in all latent dimensions; `[]`, `[B]` or `[S, B]`."""
    latent = like.shape[-1]
    log_scale = scale.log()
    total = log_scale.sum(-1) if scale.dim() and scale.shape[-1] == latent else latent * log_scale
    total = total.squeeze(-1) if scale.dim() and scale.shape[-1] != latent else total
    return -total - 0.5 * latent * math.log(2 * math.pi)


def _log_standard_normal(noise: Tensor) -> Tensor:
    return -_half_square(noise) - 0.5 * noise.shape[-1] * math.log(2 * math.pi)
