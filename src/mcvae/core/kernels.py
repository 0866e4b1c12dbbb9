"""Transition kernels. A kernel owes the estimator one thing: log ℓ(z' → z) − log m(z → z'), its `log_ratio`."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.distributions import Transform

from mcvae.core.bridge import Bridge, State, select
from mcvae.core.proposals import Hamiltonian, Langevin, Proposal, Proposed, RandomWalk
from mcvae.core.randomness import standard_normal, uniform

__all__ = [
    "FlowStep",
    "Kernel",
    "MetropolisHastings",
    "Transition",
    "Unadjusted",
    "barker",
    "hmc",
    "mala",
    "metropolis",
    "rwm",
    "ula",
    "underdamped",
]


class Transition(NamedTuple):
    """One step of every chain; all but the state are `[S, B]`."""

    state: State
    log_ratio: Tensor
    """log ℓ_{k−1}(z_k → z_{k−1}) − log m_k(z_{k−1} → z_k)."""
    log_accept: Tensor
    """Log probability of the accept/reject decision that was taken; 0 where none was."""
    acceptance: Tensor
    """Acceptance probability, without gradient; hypothetical for unadjusted kernels."""
    nonfinite: Tensor | None = None
    """Whether the density could not be evaluated where the chain wanted to go."""


class Kernel(nn.Module, ABC):
    """A Markov kernel with a backward kernel. A new one needs this one method."""

    uses_score: bool = True
    """Whether `forward` reads scores. If False, chains without other kernels save their computation."""

    @abstractmethod
    def forward(
        self, bridge: Bridge, state: State, beta: Tensor, step_size: Tensor, *, generator: Generator | None = None
    ) -> Transition:
        """Move every chain one step at temperature `beta`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Transition:
        """Call `forward`."""
        transition: Transition = super().__call__(*args, **kwargs)
        return transition


class Unadjusted(Kernel):
    """A proposal map without accept/reject: the SIS kernel of L-MCVAE (Section 2.3).

    Args:
        proposal: the proposal map; `Langevin()` gives Algorithm 1.
        backward: ℓ_ψ, a module `(z_k [S, B, D], context [B, C] or None) -> Distribution` over z_{k−1}. By default
            the backward kernel is the proposal itself, ℓ_{k−1} = m_k, as in eq. (elbo_sis).
    """

    def __init__(self, proposal: Proposal, backward: nn.Module | None = None):
        super().__init__()
        if backward is not None and not proposal.has_transition_density:
            raise ValueError(
                f"a learned backward kernel needs a proposal with a density in z, and {proposal} has none: its noise "
                "is a momentum. Use Langevin() or RandomWalk(), or leave out the backward kernel."
            )
        self.proposal, self.backward = proposal, backward
        self.uses_score = proposal.uses_score

    def forward(
        self, bridge: Bridge, state: State, beta: Tensor, step_size: Tensor, *, generator: Generator | None = None
    ) -> Transition:
        """See `Kernel`."""
        noise = standard_normal(state.point.z, generator)
        proposed = self.proposal(bridge, state, beta, step_size, noise)
        new, log_forward, log_backward = proposed
        nonfinite = new.point.log_p.isnan()
        with torch.no_grad():
            log_hastings = _log_hastings(proposed, _log_change(bridge, beta, state, new))
        if self.backward is not None:
            log_backward = self.backward(new.point.z, bridge.context).log_prob(state.point.z)
        log_ratio = torch.where(nonfinite, -torch.inf, log_backward - log_forward)
        return Transition(new, log_ratio, torch.zeros_like(log_ratio), metropolis(log_hastings).exp(), nonfinite)

    def extra_repr(self) -> str:
        """Show the settings in `repr`."""
        return str(self.proposal)


Acceptance = Callable[[Tensor], Tensor]
"""Log Hastings ratio to log acceptance probability."""


def metropolis(log_hastings: Tensor) -> Tensor:
    """log of α = 1 ∧ r, eq. (mala_acceptance)."""
    return log_hastings.clamp(max=0.0)


def barker(log_hastings: Tensor) -> Tensor:
    """log of α = r / (1 + r); smooth, where Metropolis has a kink."""
    return nn.functional.logsigmoid(log_hastings)


class MetropolisHastings(Kernel):
    """A proposal map followed by accept/reject: the AIS kernel of A-MCVAE, eq. (mh_kernel).

    It leaves γ_β invariant and is its own reversal, so its log ratio is log γ_β(z) − log γ_β(z') and the AIS weight
    of eq. (AISweight) telescopes by itself. Where a proposal cannot be evaluated it is rejected and counted.

    Args:
        proposal: the proposal map; `Langevin()` gives MALA and Algorithm 2.
        acceptance: `metropolis` or `barker`.
    """

    def __init__(self, proposal: Proposal, acceptance: Acceptance = metropolis):
        super().__init__()
        if isinstance(proposal, Hamiltonian) and proposal.damping > 0:
            raise ValueError(
                f"Metropolis-Hastings expects a momentum that is drawn anew, got damping={proposal.damping}: a kept "
                "momentum would have to be flipped at every rejection. Use hmc() for damping 0, or underdamped() for "
                "damping without accept/reject."
            )
        self.proposal, self.acceptance = proposal, acceptance
        self.uses_score = proposal.uses_score

    def forward(
        self, bridge: Bridge, state: State, beta: Tensor, step_size: Tensor, *, generator: Generator | None = None
    ) -> Transition:
        """See `Kernel`."""
        old = state.point
        noise = standard_normal(old.z, generator)
        threshold = uniform(old.log_p, generator).log()
        proposed = self.proposal(bridge, State(old), beta, step_size, noise)
        log_change = _log_change(bridge, beta, state, proposed.state)
        log_alpha = self.acceptance(_log_hastings(proposed, log_change))
        accepted = threshold < log_alpha
        # The inner where keeps log(1 - 1) out of the gradient of accepted moves.
        log_reject = _log1mexp(torch.where(accepted, -1.0, log_alpha))
        log_accept = torch.where(accepted, log_alpha, log_reject)
        return Transition(
            State(select(accepted, proposed.state.point, old)),
            torch.where(accepted, -log_change, 0.0),
            log_accept,
            log_alpha.detach().exp(),
            proposed.state.point.log_p.isnan(),
        )

    def extra_repr(self) -> str:
        """Show the settings in `repr`."""
        return f"{self.proposal}, acceptance={getattr(self.acceptance, '__name__', self.acceptance)}"


class FlowStep(Kernel):
    """A bijection as a kernel; its log ratio is log |det J|. Between other kernels it makes a stochastic flow.

    Args:
        transform: a `torch.distributions.Transform`, or a module `context -> Transform` (a lazy transform of zuko).
    """

    uses_score = False

    def __init__(self, transform: Transform | nn.Module):
        super().__init__()
        if not isinstance(transform, Transform | nn.Module):
            raise TypeError(
                "a flow step needs a torch.distributions.Transform or a module context -> Transform, got "
                f"{type(transform).__name__}."
            )
        self.transform = transform

    def forward(
        self, bridge: Bridge, state: State, beta: Tensor, step_size: Tensor, *, generator: Generator | None = None
    ) -> Transition:
        """See `Kernel`; `beta` and `step_size` are not used."""
        transform = self.transform if isinstance(self.transform, Transform) else self.transform(bridge.context)
        old = state.point
        image = transform(old.z)
        log_jacobian: Tensor = transform.log_abs_det_jacobian(old.z, image)
        if transform.domain.event_dim == 0:  # elementwise
            log_jacobian = log_jacobian.sum(-1)
        point = bridge.evaluate(image, with_score=old.score_p is not None, fallback=old.z)
        nonfinite = point.log_p.isnan()
        log_ratio = torch.where(nonfinite, -torch.inf, log_jacobian)
        zero = torch.zeros_like(log_ratio)
        return Transition(State(point), log_ratio, zero, torch.where(nonfinite, 0.0, zero.exp()), nonfinite)


def ula() -> Unadjusted:
    """Unadjusted Langevin, the kernel of L-MCVAE (Algorithm 1)."""
    return Unadjusted(Langevin())


def mala(acceptance: Acceptance = metropolis) -> MetropolisHastings:
    """Metropolis-adjusted Langevin, the kernel of A-MCVAE (Algorithm 2)."""
    return MetropolisHastings(Langevin(), acceptance)


def rwm(acceptance: Acceptance = metropolis) -> MetropolisHastings:
    """Random-walk Metropolis: needs no score, hence any log density."""
    return MetropolisHastings(RandomWalk(), acceptance)


def hmc(num_leapfrog: int = 3, acceptance: Acceptance = metropolis) -> MetropolisHastings:
    """Hamiltonian Monte Carlo, the kernel of the paper's likelihood evaluation (Section 4.3)."""
    return MetropolisHastings(Hamiltonian(num_leapfrog), acceptance)


def underdamped(num_leapfrog: int = 1, damping: float = 0.9) -> Unadjusted:
    """Unadjusted underdamped Langevin; with damping 0, uncorrected Hamiltonian Monte Carlo."""
    return Unadjusted(Hamiltonian(num_leapfrog, damping))


def _log_change(bridge: Bridge, beta: Tensor, old: State, new: State) -> Tensor:
    """log γ_β(new) − log γ_β(old); NaN where the new point could not be evaluated."""
    return bridge.log_density(new.point, beta) - bridge.log_density(old.point, beta)


def _log_hastings(proposed: Proposed, log_change: Tensor) -> Tensor:
    """Log Hastings ratio; −inf where the proposal could not be evaluated, or both densities vanish."""
    log_hastings = log_change + proposed.log_backward - proposed.log_forward
    return torch.where(log_hastings.isnan(), -torch.inf, log_hastings)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 − exp(x)) for x < 0, accurate at both ends (Mächler, 2012) and with a finite gradient."""
    near_zero = x > -0.6931471805599453
    near = (-torch.expm1(torch.where(near_zero, x, -1.0))).log()
    far = torch.log1p(-torch.where(near_zero, -1.0, x).exp())
    return torch.where(near_zero, near, far)
