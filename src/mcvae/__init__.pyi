"""The public names, and where they live."""

from . import allocator as allocator, models as models
from .allocator import keep_memory as keep_memory
from .core import recipes as recipes
from .core.acceptance import barker as barker, metropolis as metropolis
from .core.annealing import Trajectory as Trajectory, anneal as anneal
from .core.backward import GaussianBackward as GaussianBackward
from .core.bounds import elbo as elbo, iwae as iwae, renyi as renyi
from .core.bridge import (
    Bridge as Bridge,
    LogDensity as LogDensity,
    NonFiniteDensityError as NonFiniteDensityError,
    Point as Point,
    State as State,
    Step as Step,
    select as select,
)
from .core.constrained import Constrained as Constrained, constrained as constrained
from .core.diagnostics import (
    effective_sample_size as effective_sample_size,
    jackknife_bias as jackknife_bias,
    pareto_k as pareto_k,
    standard_error as standard_error,
)
from .core.drifts import (
    AtNextStep as AtNextStep,
    Controlled as Controlled,
    DriftNetwork as DriftNetwork,
    score as score,
)
from .core.estimator import AnnealedEstimator as AnnealedEstimator, Estimate as Estimate
from .core.evidence import (
    Evidence as Evidence,
    Sandwich as Sandwich,
    bayes_factor as bayes_factor,
    estimate_log_evidence as estimate_log_evidence,
    sandwich_log_evidence as sandwich_log_evidence,
)
from .core.gradients import (
    leave_one_out as leave_one_out,
    no_control_variate as no_control_variate,
    predicted as predicted,
    stopped as stopped,
    surrogate as surrogate,
)
from .core.kernels import (
    FlowStep as FlowStep,
    Kernel as Kernel,
    MetropolisHastings as MetropolisHastings,
    Transition as Transition,
    Unadjusted as Unadjusted,
    hmc as hmc,
    mala as mala,
    rwm as rwm,
    ula as ula,
    underdamped as underdamped,
)
from .core.paths import GeometricPath as GeometricPath, MixturePath as MixturePath, Path as Path
from .core.proposals import (
    Hamiltonian as Hamiltonian,
    Langevin as Langevin,
    Proposal as Proposal,
    Proposed as Proposed,
    RandomWalk as RandomWalk,
)
from .core.randomness import draw as draw, standard_normal as standard_normal, uniform as uniform
from .core.refreshments import Friction as Friction, PartialRefreshment as PartialRefreshment
from .core.resampling import Resampling as Resampling
from .core.schedules import (
    FixedSchedule as FixedSchedule,
    LearnedSchedule as LearnedSchedule,
    LinearSchedule as LinearSchedule,
    Schedule as Schedule,
    SigmoidSchedule as SigmoidSchedule,
)
from .core.step_sizes import (
    AcceptanceAdapted as AcceptanceAdapted,
    FixedStepSizes as FixedStepSizes,
    LearnedStepSizes as LearnedStepSizes,
    RelativeStepSizes as RelativeStepSizes,
    ScoreScaled as ScoreScaled,
    StepSizes as StepSizes,
)
from .core.tuning import Tuning as Tuning
from .core.walks import pilot_step_sizes as pilot_step_sizes, tune as tune
from .evaluation import Evaluation as Evaluation, Protocol as Protocol, evaluate as evaluate
from .models import LatentVariableModel as LatentVariableModel
from .training.loading import load as load, save as save

__version__: str
