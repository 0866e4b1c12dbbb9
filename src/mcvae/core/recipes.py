"""The methods of the paper, each a composition. Every part can be replaced by hand.

>>> import mcvae
>>> objective = mcvae.recipes.l_mcvae(num_steps=5, latent_dim=64)
>>> objective = mcvae.recipes.a_mcvae(num_steps=3, latent_dim=64, schedule=mcvae.SigmoidSchedule)
"""

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from mcvae.core.bounds import Bound, ControlVariate, elbo, iwae as iwae_bound, leave_one_out
from mcvae.core.estimator import AnnealedEstimator
from mcvae.core.kernels import Kernel, Unadjusted, hmc, mala, ula, underdamped
from mcvae.core.proposals import Langevin
from mcvae.core.schedules import LinearSchedule, Schedule
from mcvae.core.step_sizes import Fixed, ScoreScaled, StepSizes

__all__ = ["a_mcvae", "ais_hmc", "iwae", "l_mcvae", "uha", "vae"]


class ScheduleFactory(Protocol):
    """What a recipe builds its schedule with: a `Schedule` class such as `SigmoidSchedule`."""

    def __call__(self, num_steps: int, *, interior: bool) -> Schedule:
        """Build the schedule."""
        ...


def vae(num_samples: int = 1) -> AnnealedEstimator:
    """The VAE of Kingma and Welling: K = 0 and the ELBO. With a flow for q it is VAE with RealNVP.

    Args:
        num_samples: samples per datum, averaged.
    """
    return _importance_sampling(num_samples, elbo)


def iwae(num_samples: int = 10) -> AnnealedEstimator:
    """The importance-weighted auto-encoder of Burda et al.: K = 0 and the log of the mean weight.

    Args:
        num_samples: importance samples per datum (the paper's tables call it K).
    """
    return _importance_sampling(num_samples, iwae_bound)


def l_mcvae(
    num_steps: int,
    latent_dim: int,
    *,
    schedule: ScheduleFactory = LinearSchedule,
    interior: bool = False,
    step_sizes: StepSizes | None = None,
    backward: Sequence[nn.Module] | None = None,
    num_samples: int = 1,
    bound: Bound = elbo,
) -> AnnealedEstimator:
    """Langevin Monte Carlo VAE, Algorithm 1: unadjusted Langevin steps, eq. (elbo_sis).

    Args:
        num_steps: K.
        latent_dim: D.
        schedule: `LinearSchedule`, `SigmoidSchedule` or `LearnedSchedule`.
        interior: temperatures k/K as in the paper (False), or k/(K+1) as in its public code (True).
        step_sizes: the paper's adaptive rule with ρ = 0.9 by default.
        backward: K modules, one learned backward kernel per step, such as `GaussianBackward`; the reversal by default.
        num_samples: chains per datum.
        bound: `elbo`, as in the paper, or another.
    """
    kernel: Kernel | list[Kernel] = ula()
    if backward is not None:
        if isinstance(backward, nn.Module) and not isinstance(backward, nn.ModuleList):
            raise TypeError("backward must be a sequence of K modules, one for each step; got one module.")
        kernel = [Unadjusted(Langevin(), module) for module in backward]
    return AnnealedEstimator(
        kernel,
        schedule(num_steps, interior=interior),
        step_sizes if step_sizes is not None else ScoreScaled(num_steps, latent_dim, target=0.9),
        num_samples=num_samples,
        bound=bound,
    )


def a_mcvae(
    num_steps: int,
    latent_dim: int,
    *,
    schedule: ScheduleFactory = LinearSchedule,
    step_sizes: StepSizes | None = None,
    num_samples: int = 5,
    bound: Bound = elbo,
    control_variate: ControlVariate = leave_one_out,
) -> AnnealedEstimator:
    """Annealed importance sampling VAE, Algorithm 2: MALA at interior temperatures, REINFORCE and control variates.

    Args:
        num_steps: K.
        latent_dim: D.
        schedule: `LinearSchedule`, `SigmoidSchedule` or `LearnedSchedule`.
        step_sizes: the paper's adaptive rule with ρ = 0.8 by default.
        num_samples: chains per datum; the control variate needs at least two.
        bound: `elbo`, as in the paper, or another.
        control_variate: `leave_one_out` or `none`.
    """
    return AnnealedEstimator(
        mala(),
        schedule(num_steps, interior=True),
        step_sizes if step_sizes is not None else ScoreScaled(num_steps, latent_dim, target=0.8),
        num_samples=num_samples,
        bound=bound,
        control_variate=control_variate,
    )


def uha(
    num_steps: int,
    latent_dim: int,
    *,
    num_leapfrog: int = 1,
    damping: float = 0.9,
    schedule: ScheduleFactory = LinearSchedule,
    interior: bool = False,
    step_sizes: StepSizes | None = None,
    num_samples: int = 1,
    bound: Bound = elbo,
) -> AnnealedEstimator:
    """Uncorrected Hamiltonian annealing: underdamped Langevin without accept/reject, fully differentiable.

    Args:
        num_steps: K.
        latent_dim: D.
        num_leapfrog: leapfrog steps per move.
        damping: share of the momentum that survives each move; 0 is uncorrected Hamiltonian Monte Carlo.
        schedule, interior, num_samples, bound: as for `l_mcvae`.
        step_sizes: the paper's adaptive rule with a hypothetical acceptance of 0.9 by default.
    """
    return AnnealedEstimator(
        underdamped(num_leapfrog, damping),
        schedule(num_steps, interior=interior),
        step_sizes if step_sizes is not None else ScoreScaled(num_steps, latent_dim, 0.1, target=0.9),
        num_samples=num_samples,
        bound=bound,
    )


def ais_hmc(
    num_steps: int,
    latent_dim: int,
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
        latent_dim: D.
        num_leapfrog: leapfrog steps per move.
        schedule: as for `a_mcvae`.
        step_sizes: the paper's adaptive rule with ρ = 0.8 by default.
        num_samples: chains per datum.
    """
    return AnnealedEstimator(
        hmc(num_leapfrog),
        schedule(num_steps, interior=True),
        step_sizes if step_sizes is not None else ScoreScaled(num_steps, latent_dim, 0.1, target=0.8),
        num_samples=num_samples,
        bound=iwae_bound,
    )


def _importance_sampling(num_samples: int, bound: Bound) -> AnnealedEstimator:
    return AnnealedEstimator([], LinearSchedule(0), Fixed(0), num_samples=num_samples, bound=bound)
