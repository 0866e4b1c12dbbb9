"""Methods by name: the recipes of the paper as `mcvae train --method NAME` knows them."""

from collections.abc import Callable
from typing import NamedTuple

from mcvae.core import recipes
from mcvae.core.estimator import AnnealedEstimator
from mcvae.core.schedules import LearnedSchedule, LinearSchedule, SigmoidSchedule
from mcvae.core.step_sizes import FixedStepSizes, LearnedStepSizes, ScoreScaled, StepSizes
from mcvae.training.config import MethodConfig

__all__ = ["METHODS", "Method", "build_objective"]

_SCHEDULES: dict[str, recipes.ScheduleFactory] = {
    "linear": LinearSchedule,
    "sigmoid": SigmoidSchedule,
    "learned": LearnedSchedule,
}


Builder = Callable[[MethodConfig, int], AnnealedEstimator]
"""`(settings, latent_dim) -> estimator`."""


class Method(NamedTuple):
    """A method of the command line."""

    description: str
    build: Builder
    flow: str | None = None
    """The flow that q needs, if the method is defined by one."""


def build_objective(config: MethodConfig, latent_dim: int) -> AnnealedEstimator:
    """The estimator that a method configuration describes."""
    if config.name not in METHODS:
        raise ValueError(f"unknown method {config.name!r}; known are {', '.join(METHODS)}.")
    return METHODS[config.name].build(config, latent_dim)


def _step_sizes(config: MethodConfig, latent_dim: int, target: float) -> StepSizes:
    if config.step_sizes == "adaptive":
        return ScoreScaled(config.num_steps, latent_dim, config.step_size, target=target)
    return (FixedStepSizes if config.step_sizes == "fixed" else LearnedStepSizes)(config.num_steps, config.step_size)


def _annealed(recipe: Callable[..., AnnealedEstimator], num_samples: int, target: float) -> Builder:
    """Build with a recipe that anneals, its default number of samples and its acceptance ρ."""

    def build(config: MethodConfig, latent_dim: int) -> AnnealedEstimator:
        return recipe(
            config.num_steps,
            latent_dim,
            schedule=_SCHEDULES[config.schedule],
            step_sizes=_step_sizes(config, latent_dim, target),
            num_samples=config.num_samples or num_samples,
        )

    return build


METHODS = {
    "vae": Method("ELBO with one Gaussian sample (Kingma and Welling)", lambda c, d: recipes.vae(c.num_samples or 1)),
    "iwae": Method(
        "importance-weighted bound, --method.num_samples (Burda et al.)", lambda c, d: recipes.iwae(c.num_samples or 10)
    ),
    "l-mcvae": Method(
        "K unadjusted Langevin steps, reparameterised (the paper's Algorithm 1)", _annealed(recipes.l_mcvae, 1, 0.9)
    ),
    "a-mcvae": Method(
        "K MALA steps, REINFORCE with control variates (the paper's Algorithm 2)", _annealed(recipes.a_mcvae, 5, 0.8)
    ),
    "uha": Method("K underdamped Hamiltonian steps without accept/reject", _annealed(recipes.uha, 1, 0.9)),
    "realnvp": Method("ELBO with a RealNVP flow for q", lambda c, d: recipes.vae(c.num_samples or 1), flow="realnvp"),
}
"""Every method, in the order that tables show them."""
