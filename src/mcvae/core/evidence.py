"""Evidence of any density: annealed importance sampling, and the sandwich of bidirectional Monte Carlo.

A pilot tunes and returns a frozen estimator; its chains are run; the evidence is the diagnosis of their weights.
"""

from typing import Literal

import torch
from torch import Generator, Tensor
from torch.distributions import Distribution

from mcvae.core.bridge import Bridge, NonFiniteDensityError
from mcvae.core.diagnosis import Evidence, Sandwich
from mcvae.core.initials import standard_deviation
from mcvae.core.kernels import Kernel
from mcvae.core.paths import GeometricPath, Path
from mcvae.core.pilot import pilot
from mcvae.core.randomness import seeded_generator
from mcvae.core.resampling import Resampling
from mcvae.core.schedules import Schedule
from mcvae.core.scores import LogDensity
from mcvae.core.tuning import Spacing, Tuning
from mcvae.core.weighing import diagnose, diagnose_sandwich, with_checks

__all__ = [
    "Evidence",
    "Sandwich",
    "bayes_factor",
    "diagnose",
    "diagnose_sandwich",
    "estimate_log_evidence",
    "sandwich_log_evidence",
]


def estimate_log_evidence(
    log_joint: LogDensity,
    initial: Distribution,
    *,
    kernel: Kernel | None = None,
    num_steps: int | Literal["auto"] = "auto",
    num_samples: int = 64,
    step_size: float | Tensor | Literal["pilot"] = "pilot",
    schedule: Schedule | Spacing | None = None,
    tuning: Tuning | None = None,
    tolerance: float = 0.1,
    max_steps: int = 1024,
    path: Path | None = None,
    context: Tensor | None = None,
    resample: Resampling | float | None = None,
    compile: bool = False,
    check: bool = True,
    generator: Generator | None = None,
    seed: int | None = None,
) -> Evidence:
    """Estimate log ∫ exp(log_joint(z)) dz by annealed importance sampling: pilot, freeze, run.

    Pilot chains find the start, the step sizes and the temperatures, further ones their number; then everything is
    frozen, and fresh chains are weighted. Others, from other starts, look for what these may have missed.
    `Evidence.verdict()` says whether to believe the result.

    Args:
        log_joint: unnormalised log density, `[S, B, D] -> [S, B]`.
        initial: where chains start, batch `[B]`, event `[D]`: a rough, preferably too wide, approximation.
        kernel: `hmc(3)` by default.
        num_steps: K temperatures between the two; more tighten the estimate. "auto" doubles them until change and
            standard error, in the mean over data, are below `tolerance`, or `max_steps` are reached.
        num_samples: S independent chains per datum.
        step_size: a number, `[K]`, `[K, D]`, `[K, B, 1]`, or "pilot": dual averaging to a target acceptance, in units
            of the initial distribution's scales.
        schedule: a `Schedule`, which decides `num_steps`, or how temperatures are spaced: "adaptive" (equal losses of
            conditional effective sample size in a pilot, the default if there is one), "sigmoid" (the default if step
            sizes are given) or "linear".
        tuning: that of an earlier estimate, instead of a pilot.
        tolerance: in nats; for "auto" and for the verdict.
        max_steps: budget of "auto".
        path: geometric by default.
        context: what amortised kernels look at, `[B, C]`.
        resample: `Resampling(...)`, or a threshold for its default: chains of little weight are replaced by copies of
            others on the way (an SMC sampler), and the error comes from independent islands of chains.
        compile: compile a move, which takes seconds, for the pilot and for the chains: pays for small models and long
            chains. See `AnnealedEstimator`.
        check: ask independent witnesses, without which nothing is called converged; see `Evidence.checks`.
        generator: source of all randomness.
        seed: instead of a generator.

    >>> from torch.distributions import Independent, Normal
    >>> initial = Independent(Normal(torch.zeros(1, 2), 2 * torch.ones(1, 2)), 1)
    >>> log_joint = lambda z: -0.5 * (z - 1).square().sum(-1)  # log evidence: log 2π = 1.838
    >>> e = estimate_log_evidence(log_joint, initial, seed=0)
    >>> bool((e.log_evidence - 1.838).abs() < 4 * e.standard_error + 0.01), e.verdict()
    (True, 'converged')
    """
    bridge = Bridge(initial, log_joint, GeometricPath() if path is None else path, context)
    generator = _source(generator, seed, initial)

    def run(fit: bool) -> Evidence:
        found = pilot(
            bridge,
            kernel=kernel,
            num_steps=num_steps,
            num_samples=num_samples,
            step_size=step_size,
            schedule=schedule,
            tuning=tuning,
            tolerance=tolerance,
            max_steps=max_steps,
            fit=fit,
            resample=resample,
            compile=compile,
            generator=generator,
        )
        return diagnose(bridge, found, tolerance=tolerance, generator=generator)

    with torch.no_grad():
        try:
            evidence = run(num_steps == "auto")
        except NonFiniteDensityError:  # a start of our own may reach where the density cannot be evaluated
            if num_steps != "auto":
                raise
            evidence = run(False)
        return with_checks(evidence, generator=generator) if check else evidence


def bayes_factor(first: Evidence, second: Evidence) -> tuple[Tensor, Tensor]:
    """Log Bayes factor of the first model over the second for every datum, and its standard error, `[B]` each.

    The two must come from independent random streams: other seeds.

    >>> from torch.distributions import Independent, Normal
    >>> initial = Independent(Normal(torch.zeros(1, 2), 2 * torch.ones(1, 2)), 1)
    >>> first = estimate_log_evidence(lambda z: -0.5 * z.square().sum(-1), initial, seed=0)
    >>> second = estimate_log_evidence(lambda z: -0.5 * z.square().sum(-1) - 1.0, initial, seed=1)
    >>> factor, error = bayes_factor(first, second)
    >>> bool((factor - 1.0).abs() < 4 * error)
    True
    """
    if not (isinstance(first, Evidence) and isinstance(second, Evidence)):
        raise TypeError("a Bayes factor compares two results of estimate_log_evidence.")
    if first.log_evidence.shape != second.log_evidence.shape:
        raise ValueError(
            f"a Bayes factor compares two models on the same data, got {len(first.log_evidence)} and "
            f"{len(second.log_evidence)} of them."
        )
    error = (first.standard_error.square() + second.standard_error.square()).sqrt()
    return first.log_evidence - second.log_evidence, error


def sandwich_log_evidence(
    log_joint: LogDensity,
    initial: Distribution,
    posterior_sample: Tensor,
    *,
    kernel: Kernel | None = None,
    num_steps: int | Literal["auto"] = "auto",
    num_samples: int = 64,
    step_size: float | Tensor | Literal["pilot"] = "pilot",
    schedule: Schedule | Spacing | None = None,
    tuning: Tuning | None = None,
    tolerance: float = 0.1,
    max_steps: int = 1024,
    path: Path | None = None,
    context: Tensor | None = None,
    generator: Generator | None = None,
    seed: int | None = None,
) -> Sandwich:
    """Bound log p(x) from both sides by bidirectional Monte Carlo (Grosse et al., 2015).

    On data simulated from the model, z ~ p(z) and x ~ p(x | z), that z *is* an exact sample of the posterior given x.
    Annealing backwards from it gives weights of mean 1/p(x), hence an upper bound.

    Args:
        posterior_sample: exact posterior samples, `[B, D]` (as from `model.simulate`) or `[S, B, D]`.
        log_joint, initial, kernel, num_steps, num_samples, step_size, schedule, tuning, tolerance, max_steps, path,
            context, generator, seed: as for `estimate_log_evidence`; both directions share temperatures and step sizes.

    >>> from torch.distributions import Independent, Normal
    >>> initial = Independent(Normal(torch.zeros(1, 2), 2 * torch.ones(1, 2)), 1)
    >>> log_joint = lambda z: -0.5 * (z - 1).square().sum(-1)
    >>> generator = torch.Generator().manual_seed(0)
    >>> exact = 1 + torch.randn(64, 1, 2, generator=generator)
    >>> sandwich = sandwich_log_evidence(log_joint, initial, exact, generator=generator)
    >>> bool(sandwich.gap.abs() < 0.1)
    True
    """
    bridge = Bridge(initial, log_joint, GeometricPath() if path is None else path, context)
    generator = _source(generator, seed, initial)
    with torch.no_grad():
        found = pilot(
            bridge,
            kernel=kernel,
            num_steps=num_steps,
            num_samples=num_samples,
            step_size=step_size,
            schedule=schedule,
            tuning=tuning,
            tolerance=tolerance,
            max_steps=max_steps,
            generator=generator,
        )
        return diagnose_sandwich(bridge, found, posterior_sample, tolerance=tolerance, generator=generator)


def _source(generator: Generator | None, seed: int | None, initial: Distribution) -> Generator | None:
    if seed is None:
        return generator
    if generator is not None:
        raise ValueError("give a generator or a seed, not both.")
    return seeded_generator("evidence", seed, device=standard_deviation(initial).device)
