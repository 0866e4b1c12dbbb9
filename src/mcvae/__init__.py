"""Monte Carlo variational auto-encoders: tight bounds, unbiased gradients, log-likelihoods to trust.

Names are imported when first used, so that `mcvae --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcvae import models as models, recipes as recipes
    from mcvae.allocator import keep_memory as keep_memory
    from mcvae.annealing import Trajectory as Trajectory, anneal as anneal
    from mcvae.backward import GaussianBackward as GaussianBackward
    from mcvae.bounds import (
        elbo as elbo,
        iwae as iwae,
        leave_one_out as leave_one_out,
        none as none,
        renyi as renyi,
        surrogate as surrogate,
    )
    from mcvae.bridge import (
        Bridge as Bridge,
        LogDensity as LogDensity,
        NonFiniteDensityError as NonFiniteDensityError,
        Point as Point,
        State as State,
    )
    from mcvae.diagnostics import (
        effective_sample_size as effective_sample_size,
        pareto_k as pareto_k,
        standard_error as standard_error,
    )
    from mcvae.estimator import AnnealedEstimator as AnnealedEstimator, Estimate as Estimate
    from mcvae.evaluation import Evaluation as Evaluation, Protocol as Protocol, evaluate as evaluate
    from mcvae.evidence import (
        Evidence as Evidence,
        Sandwich as Sandwich,
        estimate_log_evidence as estimate_log_evidence,
        sandwich_log_evidence as sandwich_log_evidence,
    )
    from mcvae.kernels import (
        FlowStep as FlowStep,
        Kernel as Kernel,
        MetropolisHastings as MetropolisHastings,
        Transition as Transition,
        Unadjusted as Unadjusted,
        barker as barker,
        hmc as hmc,
        mala as mala,
        metropolis as metropolis,
        rwm as rwm,
        ula as ula,
        underdamped as underdamped,
    )
    from mcvae.models import LatentVariableModel as LatentVariableModel
    from mcvae.paths import GeometricPath as GeometricPath, MixturePath as MixturePath, Path as Path
    from mcvae.proposals import (
        Hamiltonian as Hamiltonian,
        Langevin as Langevin,
        Proposal as Proposal,
        Proposed as Proposed,
        RandomWalk as RandomWalk,
    )
    from mcvae.schedules import (
        FixedSchedule as FixedSchedule,
        LearnedSchedule as LearnedSchedule,
        LinearSchedule as LinearSchedule,
        Schedule as Schedule,
        SigmoidSchedule as SigmoidSchedule,
    )
    from mcvae.step_sizes import (
        AcceptanceAdapted as AcceptanceAdapted,
        Fixed as Fixed,
        Learned as Learned,
        ScoreScaled as ScoreScaled,
        StepSizes as StepSizes,
    )
    from mcvae.training.files import load as load
    from mcvae.tuning import Tuning as Tuning, pilot_step_sizes as pilot_step_sizes, tune as tune

_HOME = {
    "keep_memory": "mcvae.allocator",
    "Trajectory": "mcvae.annealing",
    "anneal": "mcvae.annealing",
    "GaussianBackward": "mcvae.backward",
    "elbo": "mcvae.bounds",
    "iwae": "mcvae.bounds",
    "leave_one_out": "mcvae.bounds",
    "none": "mcvae.bounds",
    "renyi": "mcvae.bounds",
    "surrogate": "mcvae.bounds",
    "Bridge": "mcvae.bridge",
    "LogDensity": "mcvae.bridge",
    "NonFiniteDensityError": "mcvae.bridge",
    "Point": "mcvae.bridge",
    "State": "mcvae.bridge",
    "effective_sample_size": "mcvae.diagnostics",
    "pareto_k": "mcvae.diagnostics",
    "standard_error": "mcvae.diagnostics",
    "AnnealedEstimator": "mcvae.estimator",
    "Estimate": "mcvae.estimator",
    "Evaluation": "mcvae.evaluation",
    "Protocol": "mcvae.evaluation",
    "evaluate": "mcvae.evaluation",
    "Evidence": "mcvae.evidence",
    "Sandwich": "mcvae.evidence",
    "estimate_log_evidence": "mcvae.evidence",
    "sandwich_log_evidence": "mcvae.evidence",
    "FlowStep": "mcvae.kernels",
    "Kernel": "mcvae.kernels",
    "MetropolisHastings": "mcvae.kernels",
    "Transition": "mcvae.kernels",
    "Unadjusted": "mcvae.kernels",
    "barker": "mcvae.kernels",
    "hmc": "mcvae.kernels",
    "mala": "mcvae.kernels",
    "metropolis": "mcvae.kernels",
    "rwm": "mcvae.kernels",
    "ula": "mcvae.kernels",
    "underdamped": "mcvae.kernels",
    "LatentVariableModel": "mcvae.models",
    "GeometricPath": "mcvae.paths",
    "MixturePath": "mcvae.paths",
    "Path": "mcvae.paths",
    "Hamiltonian": "mcvae.proposals",
    "Langevin": "mcvae.proposals",
    "Proposal": "mcvae.proposals",
    "Proposed": "mcvae.proposals",
    "RandomWalk": "mcvae.proposals",
    "FixedSchedule": "mcvae.schedules",
    "LearnedSchedule": "mcvae.schedules",
    "LinearSchedule": "mcvae.schedules",
    "Schedule": "mcvae.schedules",
    "SigmoidSchedule": "mcvae.schedules",
    "AcceptanceAdapted": "mcvae.step_sizes",
    "Fixed": "mcvae.step_sizes",
    "Learned": "mcvae.step_sizes",
    "ScoreScaled": "mcvae.step_sizes",
    "StepSizes": "mcvae.step_sizes",
    "load": "mcvae.training.files",
    "Tuning": "mcvae.tuning",
    "pilot_step_sizes": "mcvae.tuning",
    "tune": "mcvae.tuning",
}
_MODULES = ("models", "recipes")

__all__ = sorted([*_HOME, *_MODULES])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("mcvae")
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    try:
        return import_module(f"mcvae.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"mcvae.{name}":
            raise
        raise AttributeError(f"module 'mcvae' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
