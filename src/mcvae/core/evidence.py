"""Evidence of any density: annealed importance sampling, and the sandwich of bidirectional Monte Carlo."""

from collections import Counter
from statistics import NormalDist
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor
from torch.distributions import Distribution

from mcvae.allocator import keep_memory
from mcvae.core.annealing import Trajectory, anneal
from mcvae.core.bounds import iwae
from mcvae.core.bridge import Bridge, State
from mcvae.core.diagnostics import effective_sample_size, pareto_k, standard_error
from mcvae.core.kernels import Kernel, hmc
from mcvae.core.paths import GeometricPath, Path
from mcvae.core.schedules import Schedule
from mcvae.core.scores import LogDensity
from mcvae.core.tuning import Spacing, Tuning, spaced, step_units, tune

__all__ = ["Evidence", "Plan", "Sandwich", "estimate_log_evidence", "run_chains", "sandwich_log_evidence"]


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
    """The step sizes used: what was given, or `[K, B, D]`."""
    temperatures: Tensor
    """The temperatures used, `[K]`."""
    moved: Tensor
    """By how much the estimate rose when the number of temperatures was last doubled, `[B]`; NaN if it was given."""
    tuning: Tuning | None
    """What the pilot found; hand it to `tuning=` to use it again."""
    tolerance: float
    """How far, in nats, `moved` may be from 0 in a converged estimate."""

    @property
    def num_steps(self) -> int:
        """K."""
        return len(self.temperatures)

    @property
    def converged(self) -> Tensor:
        """Whether nothing speaks against the estimate of a datum, `[B]`, bool."""
        return torch.tensor([not found for found in self.doubts()], device=self.log_evidence.device)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Interval for log p(x) from the spread of the chains, `[B]` each. Believe it only if `converged`."""
        half = NormalDist().inv_cdf(0.5 + level / 2) * self.standard_error
        return self.log_evidence - half, self.log_evidence + half

    def doubts(self) -> list[tuple[str, ...]]:
        """For every datum, the names of what speaks against its estimate: keys of `ADVICE`."""
        num_samples = len(self.log_weights)
        noise = 2.8 * self.standard_error  # twice the error of a difference
        failing = {
            "moving": self.moved.abs() > self.tolerance + noise,
            "tail": (self.pareto_k > 0.7) & (self.ess < 0.5 * num_samples),  # of few chains k alone is noise
            "few": self.ess < max(2.0, 0.1 * num_samples),
            "noisy": ~(self.standard_error <= 2 * self.tolerance),
            "stuck": self.acceptance < 0.3,
            "broken": self.num_nonfinite > 0.01 * num_samples,
            "empty": ~self.log_evidence.isfinite(),
        }
        flags = torch.stack(list(failing.values()), 1).tolist()
        return [tuple(name for name, flag in zip(failing, row, strict=True) if flag) for row in flags]

    def verdict(self) -> str:
        """One sentence for all data: converged, or why not and what to do."""
        return verdict(self.doubts())


ADVICE = {
    "moving": "it still moved by more than the tolerance when temperatures were doubled: raise max_steps",
    "tail": "its weights have a heavy tail (k > 0.7): use more temperatures",
    "few": "fewer than a tenth of its chains carry the weight: use more temperatures",
    "noisy": "its standard error exceeds twice the tolerance: use more chains, or more temperatures",
    "stuck": "its chains hardly move (acceptance below 0.3): let the pilot choose the step sizes, or give smaller ones",
    "broken": "more than 1 % of its chains met a density that could not be evaluated: check the model's numerics",
    "empty": "no chain ended where the density is positive: start from a wider distribution",
}
"""What can speak against an estimate, and what helps."""


def verdict(doubts: list[tuple[str, ...]]) -> str:
    """One sentence over the `doubts` of many data."""
    unsure = sum(bool(found) for found in doubts)
    if not unsure:
        return "converged"
    counted = Counter(name for found in doubts for name in found).most_common(3)
    share = f"{unsure} of {len(doubts)}: " if len(doubts) > 1 else ""
    return f"not converged, because ({share}" + "; ".join(f"{ADVICE[name]} [{n}]" for name, n in counted) + ")"


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


class Plan(NamedTuple):
    """Frozen settings of a run for any number of temperatures; nothing in it looks at the chains that count."""

    kernel: Kernel
    num_samples: int
    units: Tensor
    tuning: Tuning | None
    schedule: Schedule | None
    step_size: Tensor | None
    tolerance: float

    def at(self, num_steps: int) -> tuple[Tensor, Tensor]:
        """Temperatures `[K]` and step sizes for K steps."""
        if self.schedule is not None:
            betas = self.schedule().detach()
        elif self.tuning is not None:
            betas = self.tuning.temperatures(num_steps)
        else:
            betas = spaced("sigmoid", num_steps, self.units)
        betas = betas.to(self.units)
        if self.step_size is not None:
            return betas, self.step_size.expand(len(betas)) if self.step_size.dim() == 0 else self.step_size
        if not len(betas):
            return betas, self.units.new_zeros(0, 1, 1)
        assert self.tuning is not None
        return betas, self.tuning.step_sizes(betas).unsqueeze(-1) * self.units


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
    generator: Generator | None = None,
) -> Evidence:
    """Estimate log ∫ exp(log_joint(z)) dz by annealed importance sampling: pilot, freeze, run.

    Pilot chains find the step sizes and the temperatures, further ones their number; then everything is frozen, and
    fresh chains are weighted. `Evidence.verdict()` says whether to believe the result.

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
        generator: source of all randomness.

    >>> from torch.distributions import Independent, Normal
    >>> initial = Independent(Normal(torch.zeros(1, 2), 2 * torch.ones(1, 2)), 1)
    >>> log_joint = lambda z: -0.5 * (z - 1).square().sum(-1)  # log evidence: log 2π = 1.838
    >>> e = estimate_log_evidence(log_joint, initial, generator=torch.Generator().manual_seed(0))
    >>> bool((e.log_evidence - 1.838).abs() < 4 * e.standard_error + 0.01), e.verdict()
    (True, 'converged')
    """
    bridge = _bridge(log_joint, initial, path, context)
    with torch.no_grad():
        plan = make_plan(
            bridge,
            kernel=kernel,
            num_samples=num_samples,
            step_size=step_size,
            schedule=schedule,
            tuning=tuning,
            tolerance=tolerance,
            num_steps=num_steps,
            generator=generator,
        )
        chosen, moved = choose_num_steps(bridge, plan, num_steps, max_steps, generator)
        return run_chains(bridge, plan, chosen, moved=moved, generator=generator)


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
) -> Sandwich:
    """Bound log p(x) from both sides by bidirectional Monte Carlo (Grosse et al., 2015).

    On data simulated from the model, z ~ p(z) and x ~ p(x | z), that z *is* an exact sample of the posterior given x.
    Annealing backwards from it gives weights of mean 1/p(x), hence an upper bound.

    Args:
        posterior_sample: exact posterior samples, `[B, D]` (as from `model.simulate`) or `[S, B, D]`.
        log_joint, initial, kernel, num_steps, num_samples, step_size, schedule, tuning, tolerance, max_steps, path,
            context, generator: as for `estimate_log_evidence`; both directions share temperatures and step sizes.

    >>> from torch.distributions import Independent, Normal
    >>> initial = Independent(Normal(torch.zeros(1, 2), 2 * torch.ones(1, 2)), 1)
    >>> log_joint = lambda z: -0.5 * (z - 1).square().sum(-1)
    >>> generator = torch.Generator().manual_seed(0)
    >>> exact = 1 + torch.randn(64, 1, 2, generator=generator)
    >>> sandwich = sandwich_log_evidence(log_joint, initial, exact, generator=generator)
    >>> bool(sandwich.gap.abs() < 0.1)
    True
    """
    bridge = _bridge(log_joint, initial, path, context)
    with torch.no_grad():
        plan = make_plan(
            bridge,
            kernel=kernel,
            num_samples=num_samples,
            step_size=step_size,
            schedule=schedule,
            tuning=tuning,
            tolerance=tolerance,
            num_steps=num_steps,
            generator=generator,
        )
        chosen, moved = choose_num_steps(bridge, plan, num_steps, max_steps, generator)
        return run_sandwich(bridge, plan, chosen, posterior_sample, moved=moved, generator=generator)


def make_plan(
    bridge: Bridge,
    *,
    kernel: Kernel | None = None,
    num_samples: int = 64,
    step_size: float | Tensor | Literal["pilot"] = "pilot",
    schedule: Schedule | Spacing | None = None,
    tuning: Tuning | None = None,
    tolerance: float = 0.1,
    num_steps: int | Literal["auto"] = "auto",
    generator: Generator | None = None,
) -> Plan:
    """Check the settings, run the pilot if one is needed, and freeze."""
    if kernel is not None and not isinstance(kernel, Kernel):
        raise TypeError(f"kernel must be a Kernel such as mcvae.hmc(3), got {kernel}. Call a shorthand to build it.")
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}.")
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, in nats, got {tolerance}.")
    kernel = kernel if kernel is not None else hmc(3)
    given = schedule if isinstance(schedule, Schedule) else None
    units = step_units(bridge.initial, kernel, generator)
    fixed = None
    if not isinstance(step_size, str):
        fixed = torch.as_tensor(step_size, dtype=units.dtype, device=units.device)
    elif step_size != "pilot":
        raise ValueError(f'step_size must be a number, a tensor or "pilot", got "{step_size}".')
    without_pilot = fixed is not None and (given is not None or schedule in (None, "sigmoid"))
    if tuning is None and not without_pilot and num_steps != 0 and not (given is not None and given.num_steps == 0):
        spacing: Spacing = "sigmoid" if isinstance(schedule, Schedule) else schedule or "adaptive"
        tuning = tune(bridge, kernel, spacing=spacing, generator=generator)
    return Plan(kernel, num_samples, units, tuning, given, fixed, tolerance)


def choose_num_steps(
    bridge: Bridge, plan: Plan, num_steps: int | Literal["auto"], max_steps: int, generator: Generator | None
) -> tuple[int, Tensor]:
    """K, and by how much the estimate moved when it was last doubled, `[B]`; on chains that do not count."""
    unknown = torch.full(bridge.initial.batch_shape, torch.nan, dtype=torch.float64, device=plan.units.device)
    if plan.schedule is not None:
        return plan.schedule.num_steps, unknown
    if num_steps != "auto":
        if isinstance(num_steps, str) or num_steps < 0:
            raise ValueError(f'num_steps must be "auto" or a number, which must not be negative, got {num_steps!r}.')
        return num_steps, unknown
    if plan.step_size is not None and plan.step_size.dim() > 0:
        return len(plan.step_size), unknown
    current = min(_FIRST, max_steps)
    estimate = run_chains(bridge, plan, current, generator=generator)
    moved = torch.full_like(unknown, torch.inf)
    while 2 * current <= max_steps:
        current *= 2
        better = run_chains(bridge, plan, current, generator=generator)
        moved = (better.log_evidence - estimate.log_evidence).nan_to_num(nan=torch.inf)
        estimate = better
        if max(moved.abs().mean(), estimate.standard_error.mean()) < plan.tolerance:
            break
    return current, moved


_FIRST = 16


def run_chains(
    bridge: Bridge,
    plan: Plan,
    num_steps: int,
    *,
    moved: Tensor | None = None,
    max_rows: int | None = None,
    generator: Generator | None = None,
) -> Evidence:
    """Weigh fresh chains with frozen settings.

    Args:
        bridge: the densities.
        plan: the settings.
        num_steps: K.
        moved: to be noted in the result.
        max_rows: chains × data that are held in memory at once; chains run in portions if there are more.
        generator: source of all randomness.
    """
    keep_memory()
    betas, steps = plan.at(num_steps)
    trajectories = []
    for size in _portions(plan.num_samples, max_rows, bridge):
        point = bridge.sample(size, with_score=plan.kernel.uses_score, generator=generator)
        trajectories.append(anneal(bridge, State(point), plan.kernel, betas, steps, generator=generator))
    return _evidence(trajectories, betas, steps, plan, moved)


def run_sandwich(
    bridge: Bridge,
    plan: Plan,
    num_steps: int,
    posterior_sample: Tensor,
    *,
    moved: Tensor | None = None,
    max_rows: int | None = None,
    generator: Generator | None = None,
) -> Sandwich:
    """Both directions with frozen settings; see `sandwich_log_evidence` and `run_chains`."""
    shape = (plan.num_samples, *bridge.initial.batch_shape, *bridge.initial.event_shape)
    if posterior_sample.shape not in (shape, shape[1:]):
        raise ValueError(
            f"posterior_sample must have shape [B, D] = {list(shape[1:])} or [S, B, D] = {list(shape)}, got "
            f"{list(posterior_sample.shape)}."
        )
    forward = run_chains(bridge, plan, num_steps, moved=moved, max_rows=max_rows, generator=generator)
    betas, steps = plan.at(num_steps)
    betas, steps = betas.flip(0), steps.flip(0)
    trajectories = []
    for exact in torch.split(posterior_sample.expand(shape), _portions(plan.num_samples, max_rows, bridge)):
        point = bridge.evaluate(exact, with_score=plan.kernel.uses_score)
        if not bool(point.log_p.isfinite().all()):
            raise ValueError("log_joint is not finite at posterior_sample, so it cannot have come from the posterior.")
        trajectories.append(
            anneal(bridge, State(point), plan.kernel, betas, steps, start=1.0, end=0.0, generator=generator)
        )
    reverse = _evidence(trajectories, betas, steps, plan, None)
    if posterior_sample.dim() == 2:  # chains that share their start are not independent
        unknown = torch.full_like(reverse.ess, torch.nan)
        reverse = reverse._replace(standard_error=unknown, ess=unknown, pareto_k=unknown)
    lower, upper = forward.log_evidence, -reverse.log_evidence
    return Sandwich(lower, upper, upper - lower, forward, reverse)


def evaluations(plan: Plan, num_steps: int) -> int:
    """Passes through the model, forward or backward, that one chain costs."""
    per_move = getattr(getattr(plan.kernel, "proposal", None), "num_leapfrog", 1)
    return (1 + num_steps * per_move) * (2 if plan.kernel.uses_score else 1)


def _portions(num_samples: int, max_rows: int | None, bridge: Bridge) -> list[int]:
    size = num_samples if max_rows is None else max(1, min(num_samples, max_rows // bridge.initial.batch_shape[0]))
    return [min(size, num_samples - start) for start in range(0, num_samples, size)]


def _bridge(log_joint: LogDensity, initial: Distribution, path: Path | None, context: Tensor | None) -> Bridge:
    return Bridge(initial, log_joint, path if path is not None else GeometricPath(), context)


def _evidence(
    trajectories: list[Trajectory], betas: Tensor, step_sizes: Tensor, plan: Plan, moved: Tensor | None
) -> Evidence:
    log_weight = torch.cat([trajectory.log_weight for trajectory in trajectories])
    shares = [len(trajectory.log_weight) / len(log_weight) for trajectory in trajectories]
    acceptance = torch.stack([share * t.acceptance for share, t in zip(shares, trajectories, strict=True)]).sum(0)
    return Evidence(
        log_evidence=iwae(log_weight),
        standard_error=standard_error(log_weight),
        ess=effective_sample_size(log_weight),
        pareto_k=pareto_k(log_weight),
        acceptance=acceptance.mean(0),
        acceptance_per_step=acceptance,
        num_nonfinite=torch.cat([trajectory.nonfinite for trajectory in trajectories]).sum(0),
        log_weights=log_weight,
        step_sizes=step_sizes,
        temperatures=betas,
        moved=moved if moved is not None else torch.full_like(log_weight[0], torch.nan),
        tuning=plan.tuning,
        tolerance=plan.tolerance,
    )
