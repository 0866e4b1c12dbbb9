"""Transition kernels. A kernel owes the estimator one thing: log ℓ(z' → z) − log m(z → z'), its `log_ratio`."""

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.distributions import Transform

from mcvae.core.acceptance import Acceptance, log1mexp, metropolis
from mcvae.core.bridge import Bridge, State, Step, select
from mcvae.core.proposals import Hamiltonian, Langevin, Proposal, Proposed, RandomWalk
from mcvae.core.randomness import standard_normal, uniform

__all__ = [
    "FlowStep",
    "Kernel",
    "MetropolisHastings",
    "Transition",
    "Unadjusted",
    "hmc",
    "mala",
    "rwm",
    "ula",
    "underdamped",
]


class Transition(NamedTuple):
    """One step of every chain; all but the state are `[S, B]`."""

    state: State
    log_ratio: Tensor
    """log ℓ_{k−1}(z_k → z_{k−1}) − log m_k(z_{k−1} → z_k)."""
    log_accept: Tensor | None
    """Log probability of the accept/reject decision that was taken; None if there was none to take."""
    acceptance: Tensor
    """Acceptance probability, without gradient; hypothetical for unadjusted kernels."""
    nonfinite: Tensor | None = None
    """Whether the density could not be evaluated where the chain wanted to go; None if it could everywhere."""
    sound: Tensor | None = None
    """Whether everything was finite where the chain wanted to go, derivatives included; None if it was everywhere."""


class Kernel(nn.Module, ABC):
    """A Markov kernel with a backward kernel. A new one needs this one method; attributes say what it can do."""

    uses_score: bool = True
    """Whether `forward` reads scores. If False, chains without other kernels save their computation."""
    accepts: bool = False
    """Whether the kernel accepts and rejects, and so leaves γ_β invariant."""
    target_acceptance: float = 0.9
    """The acceptance that step sizes are tuned to; the paper's 0.9 without accept/reject."""
    num_evaluations: int = 1
    """New latents per move, at each of which the bridge is evaluated."""

    @abstractmethod
    def forward(self, bridge: Bridge, state: State, step: Step, *, generator: Generator | None = None) -> Transition:
        """Move every chain one step."""

    def step_unit(self, scale: Tensor) -> Tensor:
        """The step size that means "one standard deviation" where a density has standard deviations `scale`."""
        return torch.ones_like(scale)

    def start(self, state: State, generator: Generator | None) -> State:
        """What the first move starts from: the state, with whatever else the kernel keeps in it."""
        return state

    def noise(self, state: State, generator: Generator | None) -> tuple[Tensor, ...]:
        """All randomness of one move from a state."""
        raise NotImplementedError(f"{type(self).__name__} does not separate its randomness from its moves.")

    def move(self, bridge: Bridge, state: State, step: Step, *noise: Tensor) -> Transition:
        """The transition as a deterministic function of its `noise`: what can be compiled."""
        raise NotImplementedError(f"{type(self).__name__} does not separate its randomness from its moves.")

    def __call__(self, *args: Any, **kwargs: Any) -> Transition:
        """Call `forward`."""
        transition: Transition = super().__call__(*args, **kwargs)
        return transition

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let kernels written for (bridge, state, beta, step_size) work for one more release."""
        super().__init_subclass__(**kwargs)
        old = cls.__dict__.get("forward")
        if old is not None and "beta" in inspect.signature(old).parameters:
            cls.forward = _adapted(old)  # type: ignore[method-assign]


def _adapted(old: Callable[..., Transition]) -> Callable[..., Transition]:
    def forward(
        self: Kernel, bridge: Bridge, state: State, step: Step, *, generator: Generator | None = None
    ) -> Transition:
        warnings.warn(
            f"{type(self).__name__}.forward(bridge, state, beta, step_size) is now forward(bridge, state, step): read "
            "step.beta and step.step_size.",
            DeprecationWarning,
            stacklevel=2,
        )
        return old(self, bridge, state, step.beta, step.step_size, generator=generator)

    return forward


class Unadjusted(Kernel):
    """A proposal map without accept/reject: the SIS kernel of L-MCVAE (Section 2.3).

    Args:
        proposal: the proposal map; `Langevin()` gives Algorithm 1, and its own backward density is the default.
        backward: ℓ_ψ instead of the proposal's own, as any density: a module `(bridge, state, step) -> Distribution`
            over z_{k−1} given the state at z_k.
    """

    def __init__(self, proposal: Proposal, backward: nn.Module | None = None):
        super().__init__()
        if backward is not None and not proposal.has_transition_density:
            raise ValueError(
                f"a learned backward kernel needs a proposal with a density in z, and {type(proposal).__name__} has "
                "none: its noise is a momentum. Use Langevin() or RandomWalk(), or leave out the backward kernel."
            )
        self.proposal, self.backward = proposal, backward
        self.uses_score, self.num_evaluations = proposal.uses_score, proposal.num_evaluations

    def step_unit(self, scale: Tensor) -> Tensor:
        """See `Kernel`."""
        return self.proposal.step_unit(scale)

    def forward(self, bridge: Bridge, state: State, step: Step, *, generator: Generator | None = None) -> Transition:
        """See `Kernel`."""
        state = self.start(state, generator)
        return self.move(bridge, state, step, *self.noise(state, generator))

    def start(self, state: State, generator: Generator | None) -> State:
        """See `Kernel`; a momentum, if the proposal keeps one."""
        if self.proposal.keeps_momentum and state.momentum is None:
            return State(state.point, standard_normal(state.point.z, generator))
        return state

    def noise(self, state: State, generator: Generator | None) -> tuple[Tensor, ...]:
        """See `Kernel`; u ~ N(0, I)."""
        return (standard_normal(state.point.z, generator),)

    def move(self, bridge: Bridge, state: State, step: Step, *noise: Tensor) -> Transition:
        """See `Kernel`."""
        proposed = self.proposal(bridge, state, step, *noise)
        new, log_forward, log_backward = proposed
        with torch.no_grad():  # what a step-size rule would like to know
            acceptance = metropolis(_log_hastings(proposed, _log_change(bridge, step.beta, state, new))).exp()
        if self.backward is not None:
            log_backward = self.backward(bridge, new, step).log_prob(state.point.z)
        log_ratio = log_backward - log_forward
        nonfinite = None
        if new.point.sound is not None:
            nonfinite = new.point.log_p.isnan()
            log_ratio = torch.where(nonfinite, -torch.inf, log_ratio)
        new = new if self.proposal.keeps_momentum else State(new.point)
        return Transition(new, log_ratio, None, acceptance, nonfinite, new.point.sound)


class MetropolisHastings(Kernel):
    """A proposal map followed by accept/reject: the AIS kernel of A-MCVAE, eq. (mh_kernel).

    It leaves γ_β invariant and is its own reversal, so its log ratio is log γ_β(z) − log γ_β(z') and the AIS weight
    of eq. (AISweight) telescopes by itself. Where a proposal cannot be evaluated it is rejected and counted.

    Args:
        proposal: the proposal map; `Langevin()` gives MALA and Algorithm 2.
        acceptance: `metropolis` or `barker`.
    """

    accepts = True

    def __init__(self, proposal: Proposal, acceptance: Acceptance = metropolis):
        super().__init__()
        if not proposal.is_reversible:
            raise ValueError(
                f"Metropolis-Hastings expects a proposal that is its own reversal, got {type(proposal).__name__}: a "
                "kept momentum would have to be flipped at every rejection, and a backward drift of its own is not the "
                "density of the way back. Use hmc() or mala(), or Unadjusted(...) without accept/reject."
            )
        self.proposal, self.acceptance = proposal, acceptance
        self.uses_score, self.num_evaluations = proposal.uses_score, proposal.num_evaluations
        self.target_acceptance = 0.8 if proposal.uses_score else 0.234  # the paper's; optimal for random walks

    def step_unit(self, scale: Tensor) -> Tensor:
        """See `Kernel`."""
        return self.proposal.step_unit(scale)

    def forward(self, bridge: Bridge, state: State, step: Step, *, generator: Generator | None = None) -> Transition:
        """See `Kernel`."""
        return self.move(bridge, state, step, *self.noise(state, generator))

    def noise(self, state: State, generator: Generator | None) -> tuple[Tensor, ...]:
        """See `Kernel`; u ~ N(0, I), and what the probability of acceptance is compared with."""
        return standard_normal(state.point.z, generator), uniform(state.point.log_p, generator)

    def move(self, bridge: Bridge, state: State, step: Step, *noise: Tensor) -> Transition:
        """See `Kernel`."""
        old, (innovation, threshold) = state.point, noise
        proposed = self.proposal(bridge, State(old), step, innovation)
        log_change = _log_change(bridge, step.beta, state, proposed.state)
        log_alpha = self.acceptance(_log_hastings(proposed, log_change))
        accepted = threshold.log() < log_alpha
        log_accept = None
        if torch.is_grad_enabled():
            # The inner where keeps log(1 - 1) out of the gradient of accepted moves.
            log_reject = log1mexp(torch.where(accepted, -1.0, log_alpha))
            log_accept = torch.where(accepted, log_alpha, log_reject)
        new = proposed.state.point
        return Transition(
            State(select(accepted, new, old)),
            torch.where(accepted, -log_change, 0.0),
            log_accept,
            log_alpha.detach().exp(),
            None if new.sound is None else new.log_p.isnan(),
            new.sound,
        )

    def extra_repr(self) -> str:
        """Show the settings in `repr`."""
        return f"acceptance={getattr(self.acceptance, '__name__', self.acceptance)}"


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

    def forward(self, bridge: Bridge, state: State, step: Step, *, generator: Generator | None = None) -> Transition:
        """See `Kernel`; the temperature and the step size are not used."""
        transform = self.transform if isinstance(self.transform, Transform) else self.transform(bridge.context)
        old = state.point
        image = transform(old.z)
        log_jacobian: Tensor = transform.log_abs_det_jacobian(old.z, image)
        log_jacobian = log_jacobian.reshape(*old.z.shape[:-1], -1).sum(-1)  # [S, B, D] if elementwise
        point = bridge.evaluate(image, with_score=old.score_p is not None, fallback=old.z)
        moved = torch.ones_like(log_jacobian)
        if point.sound is None:
            return Transition(State(point), log_jacobian, None, moved)
        nonfinite = point.log_p.isnan()
        log_ratio = torch.where(nonfinite, -torch.inf, log_jacobian)
        return Transition(State(point), log_ratio, None, torch.where(nonfinite, 0.0, moved), nonfinite, point.sound)


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
    if proposed.state.point.sound is None:
        return log_hastings
    return torch.where(log_hastings.isnan(), -torch.inf, log_hastings)
