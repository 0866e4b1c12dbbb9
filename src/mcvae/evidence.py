"""Evidence of any density: annealed importance sampling, and the sandwich of bidirectional Monte Carlo."""

from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor
from torch.distributions import Distribution

from mcvae.annealing import Trajectory, anneal
from mcvae.bounds import iwae
from mcvae.bridge import Bridge, LogDensity, State, select
from mcvae.diagnostics import effective_sample_size, pareto_k, standard_error
from mcvae.kernels import Kernel, MetropolisHastings, hmc
from mcvae.paths import GeometricPath, Path
from mcvae.schedules import Schedule, SigmoidSchedule

__all__ = ["Evidence", "Sandwich", "estimate_log_evidence", "pilot_step_sizes", "sandwich_log_evidence"]


class Evidence(NamedTuple):
    """An estimate of log p(x) for every datum, with what is needed to doubt it."""

    log_evidence: Tensor
    """log of the mean weight, `[B]`: below log p(x) in expectation (Jensen)."""
    standard_error: Tensor
    """Standard error of `log_evidence`, `[B]`."""
    ess: Tensor
    """Effective sample size, `[B]`, between 1 and S."""
    pareto_k: Tensor
    """Tail shape of the weights, `[B]`; above 0.7 do not trust the estimate. NaN for 20 samples or fewer."""
    acceptance: Tensor
    """Mean acceptance, `[B]`; hypothetical for unadjusted kernels, NaN without steps."""
    acceptance_per_step: Tensor
    """Acceptance of every step, `[K, B]`."""
    num_nonfinite: Tensor
    """Chains that met a density they could not evaluate, `[B]`; they count, with weight 0 or a rejection."""
    log_weights: Tensor
    """`[S, B]`, float64."""
    step_sizes: Tensor
    """The step sizes used, `[K]`, `[K, D]` or `[K, B, 1]`."""


class Sandwich(NamedTuple):
    """Stochastic bounds on log p(x) from both sides; all but the last two are `[B]`."""

    lower: Tensor
    upper: Tensor
    gap: Tensor
    """`upper - lower`: in expectation at least the error of either."""
    forward: Evidence
    """The chains behind `lower`."""
    reverse: Evidence
    """The reversed chains: an estimate of log 1/p(x). Standard error, ESS and k̂ are NaN if all chains of a datum
    started from one posterior sample: they are not independent."""


def estimate_log_evidence(
    log_joint: LogDensity,
    initial: Distribution,
    *,
    kernel: Kernel | None = None,
    num_steps: int = 100,
    num_samples: int = 64,
    step_size: float | Tensor | Literal["pilot"] = "pilot",
    schedule: Schedule | None = None,
    path: Path | None = None,
    context: Tensor | None = None,
    generator: Generator | None = None,
) -> Evidence:
    """Estimate log ∫ exp(log_joint(z)) dz by annealed importance sampling.

    Args:
        log_joint: unnormalised log density, `[S, B, D] -> [S, B]`.
        initial: where chains start, batch `[B]`, event `[D]`: a rough, preferably too wide, approximation.
        kernel: `hmc(3)` by default.
        num_steps: K temperatures between the two; more tighten the estimate.
        num_samples: S independent chains per datum.
        step_size: a number, `[K]`, `[K, D]`, `[K, B, 1]`, or "pilot": tuned on chains of their own and frozen
            before the chains that count, because tuning on those would bias the estimate.
        schedule: K temperatures; overrides `num_steps`. Sigmoidal by default.
        path: geometric by default.
        context: what amortised kernels look at, `[B, C]`.
        generator: source of all randomness.

    >>> from torch.distributions import Independent, Normal
    >>> initial = Independent(Normal(torch.zeros(1, 2), 2 * torch.ones(1, 2)), 1)
    >>> log_joint = lambda z: -0.5 * (z - 1).square().sum(-1)  # log evidence: log 2π = 1.838
    >>> e = estimate_log_evidence(log_joint, initial, generator=torch.Generator().manual_seed(0))
    >>> bool((e.log_evidence - 1.838).abs() < 4 * e.standard_error + 0.01)
    True
    """
    bridge, kernel, betas = _set_up(log_joint, initial, kernel, num_steps, schedule, path, context)
    with torch.no_grad():
        steps = _step_sizes(bridge, kernel, betas, step_size, generator)
        point = bridge.sample(num_samples, with_score=kernel.uses_score, generator=generator)
        return _evidence(anneal(bridge, State(point), kernel, betas, steps, generator=generator), steps)


def sandwich_log_evidence(
    log_joint: LogDensity,
    initial: Distribution,
    posterior_sample: Tensor,
    *,
    kernel: Kernel | None = None,
    num_steps: int = 100,
    num_samples: int = 64,
    step_size: float | Tensor | Literal["pilot"] = "pilot",
    schedule: Schedule | None = None,
    path: Path | None = None,
    context: Tensor | None = None,
    generator: Generator | None = None,
) -> Sandwich:
    """Bound log p(x) from both sides by bidirectional Monte Carlo (Grosse et al., 2015).

    On data simulated from the model, z ~ p(z) and x ~ p(x | z), that z *is* an exact sample of the posterior given x.
    Annealing backwards from it gives weights of mean 1/p(x), hence an upper bound.

    Args:
        posterior_sample: exact posterior samples, `[B, D]` (as from `model.simulate`) or `[S, B, D]`.
        log_joint, initial, kernel, num_steps, num_samples, step_size, schedule, path, context, generator: as for
            `estimate_log_evidence`; both directions share the temperatures and the step sizes.

    >>> from torch.distributions import Independent, Normal
    >>> initial = Independent(Normal(torch.zeros(1, 2), 2 * torch.ones(1, 2)), 1)
    >>> log_joint = lambda z: -0.5 * (z - 1).square().sum(-1)
    >>> generator = torch.Generator().manual_seed(0)
    >>> exact = 1 + torch.randn(64, 1, 2, generator=generator)
    >>> sandwich = sandwich_log_evidence(log_joint, initial, exact, generator=generator)
    >>> bool(sandwich.gap.abs() < 0.1)
    True
    """
    bridge, kernel, betas = _set_up(log_joint, initial, kernel, num_steps, schedule, path, context)
    shape = (num_samples, *initial.batch_shape, *initial.event_shape)
    if posterior_sample.shape not in (shape, shape[1:]):
        raise ValueError(
            f"posterior_sample must have shape [B, D] = {list(shape[1:])} or [S, B, D] = {list(shape)}, got "
            f"{list(posterior_sample.shape)}."
        )
    with torch.no_grad():
        steps = _step_sizes(bridge, kernel, betas, step_size, generator)
        point = bridge.sample(num_samples, with_score=kernel.uses_score, generator=generator)
        forward = _evidence(anneal(bridge, State(point), kernel, betas, steps, generator=generator), steps)
        exact = bridge.evaluate(posterior_sample.expand(shape), with_score=kernel.uses_score)
        if not bool(exact.log_p.isfinite().all()):
            raise ValueError("log_joint is not finite at posterior_sample, so it cannot have come from the posterior.")
        backwards = anneal(
            bridge, State(exact), kernel, betas.flip(0), steps.flip(0), start=1.0, end=0.0, generator=generator
        )
        reverse = _evidence(backwards, steps.flip(0))
    if posterior_sample.dim() == 2:  # chains that share their start are not independent
        unknown = torch.full_like(reverse.ess, torch.nan)
        reverse = reverse._replace(standard_error=unknown, ess=unknown, pareto_k=unknown)
    lower, upper = forward.log_evidence, -reverse.log_evidence
    return Sandwich(lower, upper, upper - lower, forward, reverse)


@torch.no_grad()
def pilot_step_sizes(
    bridge: Bridge,
    kernel: Kernel,
    betas: Tensor,
    *,
    target: float | None = None,
    num_chains: int = 32,
    generator: Generator | None = None,
) -> Tensor:
    """Find a step size per temperature and datum, `[K, B, 1]`, on pilot chains that are then thrown away.

    The chains walk up the temperatures as those of the run will, one move each. Before the move, trial moves from
    where the chains are drive the step size to the target acceptance by stochastic approximation.

    Args:
        bridge: the densities.
        kernel: the kernel to tune.
        betas: temperatures `[K]`.
        target: acceptance ρ. By default the paper's: 0.8, and 0.9 without accept/reject; 0.3 for random walks.
        num_chains: pilot chains per datum.
        generator: source of all randomness.
    """
    if target is None:
        target = 0.9 if not isinstance(kernel, MetropolisHastings) else 0.8 if kernel.uses_score else 0.3
    if not len(betas):
        return betas.reshape(0, 1, 1)
    state = State(bridge.sample(num_chains, with_score=kernel.uses_score, generator=generator))
    z = state.point.z
    log_step = torch.full_like(z[0, :, :1], 0.1).log()
    tuned = []
    for index, beta in enumerate(betas.to(z)):
        # Neighbouring temperatures want nearly the same step; only the first has to search for it.
        gains = [1.0] * 4 if index else [5 / (1 + 0.1 * trial) for trial in range(40)]
        alive = state.point.log_p > -torch.inf
        for gain in gains:
            acceptance = kernel(bridge, state, beta, log_step.exp(), generator=generator).acceptance
            excess = ((acceptance - target) * alive).sum(0) / alive.sum(0).clamp(min=1)
            log_step = log_step + gain * excess.to(z).unsqueeze(-1)
        tuned.append(log_step)
        transition = kernel(bridge, state, beta, log_step.exp(), generator=generator)
        usable = ~transition.state.point.log_p.isnan()
        state = State(select(usable, transition.state.point, state.point), transition.state.momentum)
    return torch.stack(tuned).exp()


def _set_up(
    log_joint: LogDensity,
    initial: Distribution,
    kernel: Kernel | None,
    num_steps: int,
    schedule: Schedule | None,
    path: Path | None,
    context: Tensor | None,
) -> tuple[Bridge, Kernel, Tensor]:
    if kernel is not None and not isinstance(kernel, Kernel):
        raise TypeError(f"kernel must be a Kernel such as mcvae.hmc(3), got {kernel}. Call a shorthand to build it.")
    bridge = Bridge(initial, log_joint, path if path is not None else GeometricPath(), context)
    schedule = schedule if schedule is not None else SigmoidSchedule(num_steps, interior=True)
    return bridge, kernel if kernel is not None else hmc(3), schedule().detach()


def _step_sizes(
    bridge: Bridge, kernel: Kernel, betas: Tensor, step_size: float | Tensor | str, generator: Generator | None
) -> Tensor:
    if isinstance(step_size, str):
        if step_size != "pilot":
            raise ValueError(f'step_size must be a number, a tensor or "pilot", got "{step_size}".')
        return pilot_step_sizes(bridge, kernel, betas, generator=generator)
    steps = torch.as_tensor(step_size, dtype=betas.dtype, device=betas.device)
    return steps.expand(len(betas)) if steps.dim() == 0 else steps


def _evidence(trajectory: Trajectory, step_sizes: Tensor) -> Evidence:
    log_weight = trajectory.log_weight
    return Evidence(
        log_evidence=iwae(log_weight),
        standard_error=standard_error(log_weight),
        ess=effective_sample_size(log_weight),
        pareto_k=pareto_k(log_weight),
        acceptance=trajectory.acceptance.mean(0),
        acceptance_per_step=trajectory.acceptance,
        num_nonfinite=trajectory.nonfinite.sum(0),
        log_weights=log_weight,
        step_sizes=step_sizes,
    )
