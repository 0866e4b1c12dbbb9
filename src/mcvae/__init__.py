"""Monte Carlo variational auto-encoders: tight bounds, unbiased gradients, log-likelihoods to trust."""

from importlib.metadata import version

from mcvae import models, recipes
from mcvae.annealing import Trajectory, anneal
from mcvae.backward import GaussianBackward
from mcvae.bounds import elbo, iwae, leave_one_out, none, renyi, surrogate
from mcvae.bridge import Bridge, LogDensity, Point, State
from mcvae.diagnostics import effective_sample_size, pareto_k, standard_error
from mcvae.estimator import AnnealedEstimator, Estimate
from mcvae.evidence import Evidence, Sandwich, estimate_log_evidence, pilot_step_sizes, sandwich_log_evidence
from mcvae.kernels import (
    FlowStep,
    Kernel,
    MetropolisHastings,
    Transition,
    Unadjusted,
    barker,
    hmc,
    mala,
    metropolis,
    rwm,
    ula,
    underdamped,
)
from mcvae.models import LatentVariableModel
from mcvae.paths import GeometricPath, MixturePath, Path
from mcvae.proposals import Hamiltonian, Langevin, Proposal, Proposed, RandomWalk
from mcvae.schedules import FixedSchedule, LearnedSchedule, LinearSchedule, Schedule, SigmoidSchedule
from mcvae.step_sizes import AcceptanceAdapted, Fixed, Learned, ScoreScaled, StepSizes

__version__ = version("mcvae")

__all__ = [
    "AcceptanceAdapted",
    "AnnealedEstimator",
    "Bridge",
    "Estimate",
    "Evidence",
    "Fixed",
    "FixedSchedule",
    "FlowStep",
    "GaussianBackward",
    "GeometricPath",
    "Hamiltonian",
    "Kernel",
    "Langevin",
    "LatentVariableModel",
    "Learned",
    "LearnedSchedule",
    "LinearSchedule",
    "LogDensity",
    "MetropolisHastings",
    "MixturePath",
    "Path",
    "Point",
    "Proposal",
    "Proposed",
    "RandomWalk",
    "Sandwich",
    "Schedule",
    "ScoreScaled",
    "SigmoidSchedule",
    "State",
    "StepSizes",
    "Trajectory",
    "Transition",
    "Unadjusted",
    "anneal",
    "barker",
    "effective_sample_size",
    "elbo",
    "estimate_log_evidence",
    "hmc",
    "iwae",
    "leave_one_out",
    "mala",
    "metropolis",
    "models",
    "none",
    "pareto_k",
    "pilot_step_sizes",
    "recipes",
    "renyi",
    "rwm",
    "sandwich_log_evidence",
    "standard_error",
    "surrogate",
    "ula",
    "underdamped",
]
