"""From the settings of a method to its estimator. torch is imported when a builder is called, not before."""

from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcvae.core.estimator import AnnealedEstimator
    from mcvae.runs.method import MethodConfig

__all__ = ["Builder", "annealed", "sampled"]

Builder = Callable[["MethodConfig", int, int], "AnnealedEstimator"]
"""`(whole settings, latent_dim, size of a datum) -> estimator`."""


def sampled(config: "MethodConfig", latent_dim: int, context_dim: int) -> "AnnealedEstimator":
    """Build an estimator without annealing."""
    from mcvae.core import recipes

    return recipes.vae(config.num_samples or 1, bound=_bound(config), gradient=config.gradient or "pathwise")


def annealed(recipe: str, target: float = 0.9) -> Builder:
    """Build with a recipe that anneals; adaptive step sizes aim at the acceptance ρ = `target`."""

    def build(config: "MethodConfig", latent_dim: int, context_dim: int) -> "AnnealedEstimator":
        from mcvae.core import recipes, schedules, step_sizes

        num_steps, step_size = config.num_steps, config.step_size or 0.01
        steps: step_sizes.StepSizes = step_sizes.LearnedStepSizes(num_steps, step_size)
        if config.step_sizes == "adaptive":
            steps = step_sizes.ScoreScaled(num_steps, latent_dim, step_size, target=target)
        elif config.step_sizes == "fixed":
            steps = step_sizes.FixedStepSizes(num_steps, step_size)
        spacing = {
            "linear": schedules.LinearSchedule,
            "sigmoid": schedules.SigmoidSchedule,
            "learned": schedules.LearnedSchedule,
        }
        make, special = getattr(recipes, recipe), _special(config, latent_dim, context_dim)
        built: AnnealedEstimator = make(
            num_steps,
            latent_dim,
            schedule=spacing[config.schedule or "linear"],
            step_sizes=steps,
            num_samples=config.num_samples,
            bound=_bound(config),
            **{name: special[name] for name in signature(make).parameters if name in special},
        )
        if config.step_sizes == "relative":
            kernel: Any = built.kernels[0]
            built.step_sizes = step_sizes.RelativeStepSizes(steps, kernel.step_unit)
        return built

    return build


def _bound(config: "MethodConfig") -> Any:
    from mcvae.core import bounds

    return {"elbo": bounds.elbo, "iwae": bounds.iwae, "renyi": bounds.renyi(config.alpha)}[config.bound or "elbo"]


def _special(config: "MethodConfig", latent_dim: int, context_dim: int) -> dict[str, Any]:
    """Arguments that only some recipes have, by name."""
    from mcvae.core import gradients
    from mcvae.core.backward import GaussianBackward

    scale = (2 * (config.step_size or 0.01)) ** 0.5
    control_variates = {
        "predicted": gradients.predicted,
        "stopped": gradients.stopped,
        "leave-one-out": gradients.leave_one_out,
    }
    return {
        "context_dim": context_dim,
        "damping": config.damping,
        "friction": config.damping,
        "backward": GaussianBackward(latent_dim, context_dim, scale=scale) if config.backward == "learned" else None,
        "control_variate": control_variates.get(config.control_variate or "predicted", gradients.no_control_variate),
    }
