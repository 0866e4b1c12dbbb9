"""Methods by name: the recipes of the paper as `mcvae train --method NAME` knows them."""

from collections.abc import Callable
from typing import NamedTuple

from mcvae import recipes
from mcvae.estimator import AnnealedEstimator
from mcvae.schedules import LearnedSchedule, LinearSchedule, SigmoidSchedule
from mcvae.step_sizes import Fixed, Learned, ScoreScaled, StepSizes
from mcvae.training.config import MethodConfig

__all__ = ["METHODS", "Method", "build_objective"]

_SCHEDULES: dict[str, recipes.ScheduleFactory] = {
    "linear": LinearSchedule,
    "sigmoid": SigmoidSchedule,
    "learned": LearnedSchedule,
}


class Method(NamedTuple):
    """A method of the command line."""

    description: str
    build: Callable[[MethodConfig, int], AnnealedEstimator]
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
    return {"fixed": Fixed, "learned": Learned}[config.step_sizes](config.num_steps, config.step_size)


def _l_mcvae(config: MethodConfig, latent_dim: int) -> AnnealedEstimator:
    return recipes.l_mcvae(
        config.num_steps,
        latent_dim,
        schedule=_SCHEDULES[config.schedule],
        step_sizes=_step_sizes(config, latent_dim, target=0.9),
        num_samples=config.num_samples or 1,
    )


def _a_mcvae(config: MethodConfig, latent_dim: int) -> AnnealedEstimator:
    return recipes.a_mcvae(
        config.num_steps,
        latent_dim,
        schedule=_SCHEDULES[config.schedule],
        step_sizes=_step_sizes(config, latent_dim, target=0.8),
        num_samples=config.num_samples or 5,
    )


def _uha(config: MethodConfig, latent_dim: int) -> AnnealedEstimator:
    return recipes.uha(
        config.num_steps,
        latent_dim,
        schedule=_SCHEDULES[config.schedule],
        step_sizes=_step_sizes(config, latent_dim, target=0.9),
        num_samples=config.num_samples or 1,
    )


METHODS = {
    "vae": Method("ELBO with one Gaussian sample (Kingma and Welling)", lambda c, d: recipes.vae(c.num_samples or 1)),
    "iwae": Method(
        "importance-weighted bound, --method.num_samples (Burda et al.)", lambda c, d: recipes.iwae(c.num_samples or 10)
    ),
    "l-mcvae": Method("K unadjusted Langevin steps, reparameterised (the paper's Algorithm 1)", _l_mcvae),
    "a-mcvae": Method("K MALA steps, REINFORCE with control variates (the paper's Algorithm 2)", _a_mcvae),
    "uha": Method("K underdamped Hamiltonian steps without accept/reject", _uha),
    "realnvp": Method("ELBO with a RealNVP flow for q", lambda c, d: recipes.vae(c.num_samples or 1), flow="realnvp"),
}
"""Every method, in the order that tables show them."""
