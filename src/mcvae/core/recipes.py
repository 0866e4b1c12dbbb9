"""The methods of the paper and its successors, each a composition. Every part can be replaced by hand.

>>> import mcvae
>>> objective = mcvae.recipes.l_mcvae(num_steps=5)
>>> objective = mcvae.recipes.a_mcvae(num_steps=3, schedule=mcvae.SigmoidSchedule)
>>> objective = mcvae.recipes.cmcd(num_steps=3, latent_dim=64, context_dim=784)

Only recipes with networks of their own must know their sizes; `model.objective(mcvae.recipes.cmcd, x, num_steps=3)`
takes them from a model and its data.

With s = ∇log γ_β and networks u, r that start at 0, variances 2η (see `Langevin` and `Hamiltonian`):

| recipe | forward | backward |
|---|---|---|
| `l_mcvae` | z + η s(z) | z' + η s(z') |
| `mcd` | z + η s(z) | z' + η s(z') + η r_k(z') |
| `cmcd` | z + η s_k(z) − η u_k(z) | z' + η s_{k+1}(z') + η u_{k+1}(z') |
| `dbs` | z + η s(z) + η u_k(z) | z' + η s(z') + η r_k(z') |
| `uha` | ρ' ~ N(h ρ, 1 − h²) | the same |
| `ldvi` | ρ' ~ N((1 − γε) ρ, 2γε) | N((1 − γε) ρ' + 2γε r_k(z, ρ'), 2γε) |
| `cmcd_ud` | ρ' ~ N((1 − γε) ρ − 2γε u_k(z, ρ), 2γε) | N((1 − γε) ρ' + 2γε u_k(z, ρ'), 2γε) |
"""

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from mcvae.core.bounds import Bound, elbo, iwae as iwae_bound
from mcvae.core.drifts import AtNextStep, Controlled, DriftNetwork
from mcvae.core.estimator import AnnealedEstimator
from mcvae.core.gradients import ControlVariate, Gradient, stopped
from mcvae.core.kernels import Kernel, Unadjusted, hmc, mala, ula
from mcvae.core.proposals import Hamiltonian, Langevin
from mcvae.core.refreshments import Friction, PartialRefreshment
from mcvae.core.schedules import LearnedSchedule, LinearSchedule, Schedule
from mcvae.core.step_sizes import FixedStepSizes, LearnedStepSizes, RelativeStepSizes, ScoreScaled, StepSizes

__all__ = ["a_mcvae", "ais_hmc", "cmcd", "cmcd_ud", "dbs", "iwae", "l_mcvae", "ldvi", "mcd", "uha", "vae"]


class ScheduleFactory(Protocol):
    """What a recipe builds its schedule with: a `Schedule` class such as `SigmoidSchedule`."""

    def __call__(self, num_steps: int, *, interior: bool) -> Schedule:
        """Build the schedule."""
        ...


def vae(num_samples: int = 1, *, bound: Bound = elbo, gradient: Gradient = "pathwise") -> AnnealedEstimator:
    """The VAE of Kingma and Welling: K = 0 and the ELBO. With a flow for q it is VAE with RealNVP.

    Args:
        num_samples: samples per datum, averaged.
        bound: `elbo`, or another.
        gradient: "pathwise", "sticking-the-landing" or "doubly-reparameterised".
    """
    return AnnealedEstimator(
        [], LinearSchedule(0), FixedStepSizes(0), num_samples=num_samples, bound=bound, gradient=gradient
    )


def iwae(num_samples: int = 10, *, gradient: Gradient = "pathwise") -> AnnealedEstimator:
    """The importance-weighted auto-encoder of Burda et al.: K = 0 and the log of the mean weight.

    Args:
        num_samples: importance samples per datum (the paper's tables call it K).
        gradient: "pathwise" or "doubly-reparameterised".
    """
    return vae(num_samples, bound=iwae_bound, gradient=gradient)


def l_mcvae(
    num_steps: int,
    latent_dim: int | None = None,
    *,
    schedule: ScheduleFactory = LinearSchedule,
    interior: bool = False,
    step_sizes: StepSizes | None = None,
    backward: nn.Module | Sequence[nn.Module] | None = None,
    num_samples: int = 1,
    bound: Bound = elbo,
    compile: bool = False,
) -> AnnealedEstimator:
    """Langevin Monte Carlo VAE, Algorithm 1: unadjusted Langevin steps, eq. (elbo_sis).

    Args:
        num_steps: K.
        latent_dim: D; found by the first adaptation if None.
        schedule: `LinearSchedule`, `SigmoidSchedule` or `LearnedSchedule`.
        interior: temperatures k/K as in the paper (False), or k/(K+1) as in its public code (True).
        step_sizes: the paper's adaptive rule with ρ = 0.9 by default.
        backward: learned backward kernels such as `GaussianBackward`, one for all steps or K of them; the reversal by
            default.
        num_samples: chains per datum.
        bound: `elbo`, as in the paper, or another.
        compile: see `AnnealedEstimator`; for small models.
    """
    kernel: Kernel | list[Kernel] = ula()
    if isinstance(backward, Sequence | nn.ModuleList):
        kernel = [Unadjusted(Langevin(), module) for module in backward]
    elif backward is not None:
        kernel = Unadjusted(Langevin(), backward)
    ladder = _ladder(schedule, num_steps, interior)
    steps = ScoreScaled(num_steps, latent_dim, target=0.9) if step_sizes is None else step_sizes
    return AnnealedEstimator(kernel, ladder, steps, num_samples=num_samples, bound=bound, compile=compile)


def a_mcvae(
    num_steps: int,
    latent_dim: int | None = None,
    *,
    schedule: ScheduleFactory = LinearSchedule,
    step_sizes: StepSizes | None = None,
    num_samples: int = 1,
    bound: Bound = elbo,
    control_variate: ControlVariate = stopped,
    compile: bool = False,
) -> AnnealedEstimator:
    """Annealed importance sampling VAE, Algorithm 2: MALA at interior temperatures, REINFORCE and control variates.

    Args:
        num_steps: K.
        latent_dim: D; found by the first adaptation if None.
        schedule: `LinearSchedule`, `SigmoidSchedule` or `LearnedSchedule`.
        step_sizes: the paper's adaptive rule with ρ = 0.8 by default.
        num_samples: chains per datum; one is enough for `stopped`, the paper's control variate takes five.
        bound: `elbo`, as in the paper, or another.
        control_variate: `stopped`; `predicted`, for a batch of different data; `leave_one_out`, the paper's, for two
            chains or more; or `no_control_variate`.
        compile: see `AnnealedEstimator`; for small models.
    """
    return AnnealedEstimator(
        mala(),
        _ladder(schedule, num_steps, True),
        ScoreScaled(num_steps, latent_dim, target=0.8) if step_sizes is None else step_sizes,
        num_samples=num_samples,
        bound=bound,
        control_variate=control_variate,
        compile=compile,
    )


def uha(
    num_steps: int,
    latent_dim: int | None = None,
    *,
    num_leapfrog: int = 1,
    damping: float = 0.9,
    learned_damping: bool = False,
    schedule: ScheduleFactory = LinearSchedule,
    interior: bool = False,
    step_sizes: StepSizes | None = None,
    num_samples: int = 1,
    bound: Bound = elbo,
    compile: bool = False,
) -> AnnealedEstimator:
    """Uncorrected Hamiltonian annealing: underdamped Langevin without accept/reject, fully differentiable.

    Args:
        num_steps: K.
        latent_dim: D; found by the first adaptation if None.
        num_leapfrog: leapfrog steps per move.
        damping: share of the momentum that survives each move; 0 is uncorrected Hamiltonian Monte Carlo.
        learned_damping: whether the damping is a parameter.
        schedule, interior, num_samples, bound, compile: as for `l_mcvae`.
        step_sizes: the paper's adaptive rule with a hypothetical acceptance of 0.9 by default.
    """
    refreshment = PartialRefreshment(damping, learned=learned_damping) if damping > 0 else None
    kernel = Unadjusted(Hamiltonian(num_leapfrog, refreshment=refreshment))
    ladder = _ladder(schedule, num_steps, interior)
    steps = ScoreScaled(num_steps, latent_dim, 0.1, target=0.9) if step_sizes is None else step_sizes
    return AnnealedEstimator(kernel, ladder, steps, num_samples=num_samples, bound=bound, compile=compile)


def mcd(
    num_steps: int,
    latent_dim: int,
    *,
    context_dim: int = 0,
    hidden: int = 64,
    schedule: ScheduleFactory = LearnedSchedule,
    interior: bool = False,
    step_sizes: StepSizes | None = None,
    num_samples: int = 1,
    bound: Bound = elbo,
    compile: bool = False,
) -> AnnealedEstimator:
    """Monte Carlo diffusion (Doucet et al., 2022): L-MCVAE whose reversal is corrected by a learned score.

    Args:
        num_steps: K.
        latent_dim: D.
        context_dim: size of `Bridge.context`, which the network sees: amortised over data. 0 for one density.
        hidden: width of the network.
        schedule: learned temperatures by default.
        interior: temperatures k/K (False) or k/(K+1) (True).
        step_sizes: learned in units of q's scales by default: by the paper's rule, which aims at an acceptance, steps
            are too short for a network to do anything.
        num_samples, bound, compile: as for `l_mcvae`.
    """
    correction = DriftNetwork(latent_dim, context_dim, hidden=hidden)
    kernel = Unadjusted(Langevin(backward_drift=Controlled(correction)))
    ladder = _ladder(schedule, num_steps, interior)
    steps = _learned_steps(num_steps, 0.05, kernel) if step_sizes is None else step_sizes
    return AnnealedEstimator(kernel, ladder, steps, num_samples=num_samples, bound=bound, compile=compile)


def cmcd(
    num_steps: int,
    latent_dim: int,
    *,
    context_dim: int = 0,
    hidden: int = 64,
    schedule: ScheduleFactory = LearnedSchedule,
    interior: bool = True,
    step_sizes: StepSizes | None = None,
    num_samples: int = 1,
    bound: Bound = elbo,
    compile: bool = False,
) -> AnnealedEstimator:
    """Controlled Monte Carlo diffusion (Vargas et al., 2024): one control transports chains along the bridge.

    Args:
        num_steps, latent_dim, context_dim, hidden, schedule, step_sizes, num_samples, bound, compile: as for `mcd`.
        interior: temperatures k/(K+1): the last move goes from there to the end, where its reversal starts.
    """
    control = DriftNetwork(latent_dim, context_dim, hidden=hidden)
    kernel = Unadjusted(Langevin(Controlled(control, -1.0), AtNextStep(Controlled(control, +1.0))))
    ladder = _ladder(schedule, num_steps, interior)
    steps = _learned_steps(num_steps, 0.05, kernel) if step_sizes is None else step_sizes
    return AnnealedEstimator(kernel, ladder, steps, num_samples=num_samples, bound=bound, compile=compile)


def dbs(
    num_steps: int,
    latent_dim: int,
    *,
    context_dim: int = 0,
    hidden: int = 64,
    schedule: ScheduleFactory = LearnedSchedule,
    interior: bool = False,
    step_sizes: StepSizes | None = None,
    num_samples: int = 1,
    bound: Bound = elbo,
    compile: bool = False,
) -> AnnealedEstimator:
    """Diffusion bridge sampler (Richter and Berner, 2024): independent controls in both directions.

    Args:
        num_steps, latent_dim, context_dim, hidden, schedule, interior, step_sizes, num_samples, bound, compile: as for
            `mcd`.
    """
    forward, backward = (DriftNetwork(latent_dim, context_dim, hidden=hidden) for _ in range(2))
    kernel = Unadjusted(Langevin(Controlled(forward), Controlled(backward)))
    ladder = _ladder(schedule, num_steps, interior)
    steps = _learned_steps(num_steps, 0.05, kernel) if step_sizes is None else step_sizes
    return AnnealedEstimator(kernel, ladder, steps, num_samples=num_samples, bound=bound, compile=compile)


def ldvi(
    num_steps: int,
    latent_dim: int,
    *,
    context_dim: int = 0,
    hidden: int = 64,
    friction: float = 1.0,
    num_leapfrog: int = 1,
    schedule: ScheduleFactory = LearnedSchedule,
    interior: bool = False,
    step_sizes: StepSizes | None = None,
    num_samples: int = 1,
    bound: Bound = elbo,
    compile: bool = False,
) -> AnnealedEstimator:
    """Langevin diffusion variational inference (Geffner and Domke, 2023): underdamped, with a learned reversal.

    Args:
        num_steps, latent_dim, context_dim, hidden, schedule, interior, num_samples, bound, compile: as for `mcd`.
        friction: γ, where it starts; it is learned.
        num_leapfrog: leapfrog steps per move.
        step_sizes: as for `mcd`.
    """
    refreshment = Friction(friction)
    correction = DriftNetwork(latent_dim, context_dim, hidden=hidden, uses_momentum=True)
    proposal = Hamiltonian(
        num_leapfrog, refreshment=refreshment, backward_refreshment=refreshment.controlled(correction)
    )
    kernel = Unadjusted(proposal)
    ladder = _ladder(schedule, num_steps, interior)
    steps = _learned_steps(num_steps, 0.2, kernel) if step_sizes is None else step_sizes
    return AnnealedEstimator(kernel, ladder, steps, num_samples=num_samples, bound=bound, compile=compile)


def cmcd_ud(
    num_steps: int,
    latent_dim: int,
    *,
    context_dim: int = 0,
    hidden: int = 64,
    friction: float = 1.0,
    num_leapfrog: int = 1,
    schedule: ScheduleFactory = LearnedSchedule,
    interior: bool = False,
    step_sizes: StepSizes | None = None,
    num_samples: int = 1,
    bound: Bound = elbo,
    compile: bool = False,
) -> AnnealedEstimator:
    """Underdamped controlled Monte Carlo diffusion (Vargas et al., 2024): one control in both refreshments.

    Args:
        num_steps, latent_dim, context_dim, hidden, friction, num_leapfrog, schedule, interior, step_sizes,
            num_samples, bound, compile: as for `ldvi`.
    """
    friction_alone = Friction(friction)
    control = DriftNetwork(latent_dim, context_dim, hidden=hidden, uses_momentum=True)
    proposal = Hamiltonian(
        num_leapfrog,
        refreshment=friction_alone.controlled(control, -1.0),
        backward_refreshment=friction_alone.controlled(control, +1.0),
    )
    kernel = Unadjusted(proposal)
    ladder = _ladder(schedule, num_steps, interior)
    steps = _learned_steps(num_steps, 0.2, kernel) if step_sizes is None else step_sizes
    return AnnealedEstimator(kernel, ladder, steps, num_samples=num_samples, bound=bound, compile=compile)


def ais_hmc(
    num_steps: int,
    latent_dim: int | None = None,
    *,
    num_leapfrog: int = 3,
    schedule: ScheduleFactory = LinearSchedule,
    step_sizes: StepSizes | None = None,
    num_samples: int = 10,
) -> AnnealedEstimator:
    """Annealed importance sampling with HMC: the paper's likelihood evaluation (K = 5, three leapfrogs).

    For a likelihood to report, use `estimate_log_evidence`, which tunes, freezes and diagnoses.

    Args:
        num_steps: K.
        latent_dim: D; found by the first adaptation if None.
        num_leapfrog: leapfrog steps per move.
        schedule: as for `a_mcvae`.
        step_sizes: the paper's adaptive rule with ρ = 0.8 by default.
        num_samples: chains per datum.
    """
    ladder = _ladder(schedule, num_steps, True)
    steps = ScoreScaled(num_steps, latent_dim, 0.1, target=0.8) if step_sizes is None else step_sizes
    return AnnealedEstimator(hmc(num_leapfrog), ladder, steps, num_samples=num_samples, bound=iwae_bound)


def _learned_steps(num_steps: int, step_size: float, kernel: Kernel) -> StepSizes:
    """Learned step sizes in units of q's scales, from where to start."""
    return RelativeStepSizes(LearnedStepSizes(num_steps, step_size), kernel.step_unit)


def _ladder(schedule: ScheduleFactory, num_steps: int, interior: bool) -> Schedule:
    if not callable(schedule):
        raise TypeError(f"schedule must be a class such as mcvae.SigmoidSchedule, got {schedule!r}.")
    if not isinstance(num_steps, int):
        raise TypeError(f"num_steps must be a whole number, got {num_steps!r}.")
    return schedule(num_steps, interior=interior)
