"""Evidence of any density: annealed importance sampling, and the sandwich of bidirectional Monte Carlo.

A pilot tunes and returns a frozen estimator; its chains are run; the evidence is the diagnosis of their weights.
"""

from collections import Counter
from collections.abc import Callable
from statistics import NormalDist
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor
from torch.distributions import Distribution

from mcvae.core.annealing import Trajectory
from mcvae.core.bounds import iwae
from mcvae.core.bridge import Bridge, State, Step
from mcvae.core.compiled import CompiledChain, CompiledKernel
from mcvae.core.diagnostics import effective_sample_size, pareto_k, standard_error
from mcvae.core.estimator import AnnealedEstimator
from mcvae.core.kernels import Kernel, hmc
from mcvae.core.paths import GeometricPath, Path
from mcvae.core.resampling import Resampling, systematic
from mcvae.core.schedules import FixedSchedule, Schedule
from mcvae.core.scores import LogDensity
from mcvae.core.step_sizes import FixedStepSizes, StepSizes
from mcvae.core.tuning import Spacing, Tuning, spaced, tune

__all__ = ["Evidence", "Pilot", "Sandwich", "diagnose", "estimate_log_evidence", "pilot", "sandwich_log_evidence"]


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
    latents: Tensor
    """Where the chains ended, `[S, B, D]`, with weights `log_weights`."""
    estimator: AnnealedEstimator
    """The frozen estimator whose chains these are."""
    bridge: Bridge
    """The densities."""
    moved: Tensor
    """By how much the estimate rose when the number of temperatures was last doubled, `[B]`; NaN if it was given."""
    tuning: Tuning | None
    """What the pilot found; hand it to `tuning=` to use it again."""
    tolerance: float
    """How far, in nats, `moved` may be from 0 in a converged estimate."""

    @property
    def num_steps(self) -> int:
        """K."""
        return self.estimator.num_steps

    @property
    def temperatures(self) -> Tensor:
        """The temperatures used, `[K]`."""
        return self.estimator.schedule().detach()

    @property
    def step_sizes(self) -> Tensor:
        """The step sizes used: what was given, or `[K, B, D]`."""
        return self.estimator.step_sizes(self.bridge.initial).detach()

    def posterior(self, num_samples: int, *, num_moves: int = 10, generator: Generator | None = None) -> Tensor:
        """Equally weighted samples of the posterior, `[N, B, D]`.

        The end states are resampled by their weights. Where that makes copies, moves that leave the posterior
        invariant pull them apart; a kernel without accept/reject does not make any. Samples are as good as the
        weights: look at `verdict()` first.

        Args:
            num_samples: N.
            num_moves: of the estimator's last kernel at β = 1, if it accepts and rejects.
            generator: source of all randomness.
        """
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}.")
        if not bool(self.log_evidence.isfinite().all()):
            raise ValueError("there is no posterior sample of a datum whose chains all have weight 0.")
        rows = systematic(self.log_weights, num_samples, generator)
        z = self.latents.gather(0, rows.unsqueeze(-1).expand(-1, -1, self.latents.shape[-1]))
        kernels = self.estimator.kernels
        if not self.num_steps or not kernels[-1].accepts or not num_moves:
            return z
        one, step_size = self.temperatures.new_ones(()), self.step_sizes[-1].to(z)
        with torch.no_grad():
            state = State(self.bridge.evaluate(z, with_score=bool(kernels[-1].uses_score)))
            for _ in range(num_moves):
                step = Step(self.num_steps, self.num_steps, one, one, step_size)
                state = kernels[-1](self.bridge, state, step, generator=generator).state
        return state.point.z

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
            "stuck": self.acceptance < 0.375 * self.estimator.target_acceptance,
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
    "stuck": "its chains hardly move (acceptance far below the target): let the pilot choose the step sizes, or give "
    "smaller ones",
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


class Pilot(NamedTuple):
    """What pilot chains decided; from here on nothing is tuned."""

    estimator: AnnealedEstimator
    """Frozen."""
    tuning: Tuning | None
    """What the pilot found; None if step sizes and temperatures were given."""
    moved: Tensor
    """By how much the estimate rose when the number of temperatures was last doubled, `[B]`; NaN if it was given."""


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
        resample: `Resampling(...)`, or a threshold for its default: chains of little weight are replaced by copies of
            others on the way (an SMC sampler), and the error comes from independent islands of chains.
        compile: compile a move, which takes seconds, for the pilot and for the chains: pays for small models and long
            chains. See `AnnealedEstimator`.
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
            resample=resample,
            compile=compile,
            generator=generator,
        )
        return diagnose(bridge, found, tolerance=tolerance, generator=generator)


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


def pilot(
    bridge: Bridge,
    *,
    kernel: Kernel | None = None,
    num_steps: int | Literal["auto"] = "auto",
    num_samples: int = 64,
    step_size: float | Tensor | Literal["pilot"] = "pilot",
    schedule: Schedule | Spacing | None = None,
    tuning: Tuning | None = None,
    tolerance: float = 0.1,
    max_steps: int = 1024,
    shared: bool = False,
    resample: Resampling | float | None = None,
    compile: bool = False,
    generator: Generator | None = None,
) -> Pilot:
    """Check the settings, tune what is not given on chains that do not count, and freeze.

    Args:
        bridge: the densities.
        shared: one step size for all data, in units of their scales, to be used for other data.
        kernel, num_steps, num_samples, step_size, schedule, tuning, tolerance, max_steps, resample, compile,
            generator: as for `estimate_log_evidence`.
    """
    kernel = hmc(3) if kernel is None else kernel
    _check_settings(kernel, num_steps, num_samples, step_size, tolerance, max_steps)
    if resample is not None and not isinstance(resample, Resampling):
        resample = Resampling(resample)
    given = schedule if isinstance(schedule, Schedule) else None
    fixed = None if isinstance(step_size, str) else step_size
    if isinstance(fixed, float | int):
        fixed = torch.tensor(float(fixed), device="cpu")
    without_steps = num_steps == 0 or (given is not None and given.num_steps == 0)
    untuned = fixed is not None and (given is not None or schedule in (None, "sigmoid"))
    if tuning is None and not untuned and not without_steps:
        spacing: Spacing = "sigmoid" if isinstance(schedule, Schedule) else schedule or "adaptive"
        tuning = tune(bridge, CompiledKernel(kernel) if compile else kernel, spacing=spacing, generator=generator)
    tuning = tuning.shared() if tuning is not None and shared else tuning

    chain = CompiledChain() if compile else None  # one for all numbers of steps

    def frozen(number: int) -> AnnealedEstimator:
        temperatures = tuning.temperatures(number) if tuning is not None else spaced("sigmoid", number)
        ladder = FixedSchedule(temperatures) if given is None else given
        if fixed is not None or tuning is None:
            steps: StepSizes = FixedStepSizes(ladder.num_steps, ladder().new_ones(()) if fixed is None else fixed)
        else:
            steps = tuning.relative_step_sizes(kernel, ladder().detach())
        estimator = AnnealedEstimator(kernel, ladder, steps, num_samples=num_samples, bound=iwae, resample=resample)
        estimator.compiled = chain
        return estimator

    number, moved = _choose_num_steps(bridge, frozen, num_steps, given, fixed, tolerance, max_steps, generator)
    return Pilot(frozen(number), tuning, moved)


def _check_settings(
    kernel: Kernel,
    num_steps: int | str,
    num_samples: int,
    step_size: float | Tensor | str,
    tolerance: float,
    max_steps: int,
) -> None:
    if not isinstance(kernel, Kernel):
        raise TypeError(f"kernel must be a Kernel such as mcvae.hmc(3), got {kernel}. Call a shorthand to build it.")
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}.")
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, in nats, got {tolerance}.")
    if num_steps != "auto" and (isinstance(num_steps, str) or num_steps < 0):
        raise ValueError(f'num_steps must be "auto" or a number, which must not be negative, got {num_steps!r}.')
    if num_steps == "auto" and max_steps < 1:
        raise ValueError(f'max_steps must be at least 1 if num_steps is "auto", got {max_steps}.')
    if isinstance(step_size, str) and step_size != "pilot":
        raise ValueError(f'step_size must be a number, a tensor or "pilot", got "{step_size}".')


_FIRST = 16
"""Temperatures of the first trial."""


def _choose_num_steps(
    bridge: Bridge,
    frozen: Callable[[int], AnnealedEstimator],
    num_steps: int | Literal["auto"],
    schedule: Schedule | None,
    step_size: Tensor | None,
    tolerance: float,
    max_steps: int,
    generator: Generator | None,
) -> tuple[int, Tensor]:
    """K, and by how much the estimate moved when it was last doubled, `[B]`; on chains that do not count."""
    unknown = torch.full(bridge.initial.batch_shape, torch.nan, dtype=torch.float64, device="cpu")
    if schedule is not None:
        return schedule.num_steps, unknown
    if num_steps != "auto":
        return num_steps, unknown
    if step_size is not None and step_size.dim() > 0:
        return len(step_size), unknown
    current = min(_FIRST, max_steps)
    log_weight = frozen(current).run(bridge, generator=generator).log_weight
    moved = torch.full_like(log_weight[0], torch.inf)
    while 2 * current <= max_steps:
        current *= 2
        better = frozen(current).run(bridge, generator=generator).log_weight
        moved = (iwae(better) - iwae(log_weight)).nan_to_num(nan=torch.inf)
        log_weight = better
        if max(moved.abs().mean(), standard_error(log_weight).mean()) < tolerance:
            break
    return current, moved


def diagnose(
    bridge: Bridge,
    pilot: Pilot,
    *,
    tolerance: float = 0.1,
    max_rows: int | None = None,
    generator: Generator | None = None,
) -> Evidence:
    """Run the chains of a frozen estimator, and say what their weights are worth.

    Args:
        bridge: the densities.
        pilot: the estimator, and what the pilot knows of it.
        tolerance: in nats, for the verdict.
        max_rows: chains × data that are held in memory at once; chains run in portions if there are more.
        generator: source of all randomness.
    """
    estimator = pilot.estimator
    trajectories = [
        estimator.run(bridge, size, generator=generator)
        for size in _portions(estimator.num_samples, max_rows, bridge, estimator.resample)
    ]
    return _evidence(bridge, pilot, trajectories, tolerance)


def diagnose_sandwich(
    bridge: Bridge,
    pilot: Pilot,
    posterior_sample: Tensor,
    *,
    tolerance: float = 0.1,
    max_rows: int | None = None,
    generator: Generator | None = None,
) -> Sandwich:
    """Both directions with frozen settings; see `sandwich_log_evidence` and `diagnose`."""
    estimator = pilot.estimator
    shape = (estimator.num_samples, *bridge.initial.batch_shape, *bridge.initial.event_shape)
    if posterior_sample.shape not in (shape, shape[1:]):
        raise ValueError(
            f"posterior_sample must have shape [B, D] = {list(shape[1:])} or [S, B, D] = {list(shape)}, got "
            f"{list(posterior_sample.shape)}."
        )
    forward = diagnose(bridge, pilot, tolerance=tolerance, max_rows=max_rows, generator=generator)
    parts = torch.split(posterior_sample.expand(shape), _portions(estimator.num_samples, max_rows, bridge))
    trajectories = [estimator.run_reverse(bridge, exact, generator=generator) for exact in parts]
    reverse = _evidence(bridge, pilot, trajectories, tolerance)
    reverse = reverse._replace(moved=torch.full_like(reverse.moved, torch.nan))
    if posterior_sample.dim() == 2:  # chains that share their start are not independent
        unknown = torch.full_like(reverse.ess, torch.nan)
        reverse = reverse._replace(standard_error=unknown, ess=unknown, pareto_k=unknown)
    lower, upper = forward.log_evidence, -reverse.log_evidence
    return Sandwich(lower, upper, upper - lower, forward, reverse)


def _portions(num_samples: int, max_rows: int | None, bridge: Bridge, resample: Resampling | None = None) -> list[int]:
    """Sizes of the portions in which chains run; islands stay whole."""
    whole = 1 if resample is None else resample.islands
    size = num_samples if max_rows is None else min(num_samples, max_rows // bridge.initial.batch_shape[0])
    size = max(2 * whole if resample is not None else 1, size // whole * whole)
    return [min(size, num_samples - start) for start in range(0, num_samples, size)]


def _bridge(log_joint: LogDensity, initial: Distribution, path: Path | None, context: Tensor | None) -> Bridge:
    return Bridge(initial, log_joint, path if path is not None else GeometricPath(), context)


def _evidence(bridge: Bridge, pilot: Pilot, trajectories: list[Trajectory], tolerance: float) -> Evidence:
    log_weight = torch.cat([trajectory.log_weight for trajectory in trajectories])
    shares = [len(trajectory.log_weight) / len(log_weight) for trajectory in trajectories]
    acceptance = torch.stack([share * t.acceptance for share, t in zip(shares, trajectories, strict=True)]).sum(0)
    resample = pilot.estimator.resample
    independent = log_weight
    if resample is not None:
        islands = [_by_island(trajectory.log_weight, resample.islands) for trajectory in trajectories]
        independent = torch.cat(islands)
    return Evidence(
        log_evidence=iwae(log_weight),
        standard_error=standard_error(independent),
        ess=effective_sample_size(log_weight),
        pareto_k=pareto_k(log_weight) if resample is None else torch.full_like(log_weight[0], torch.nan),
        acceptance=acceptance.mean(0),
        acceptance_per_step=acceptance,
        num_nonfinite=torch.cat([trajectory.nonfinite for trajectory in trajectories]).sum(0),
        log_weights=log_weight,
        latents=torch.cat([trajectory.state.point.z for trajectory in trajectories]),
        estimator=pilot.estimator,
        bridge=bridge,
        moved=pilot.moved.to(log_weight).expand(log_weight.shape[1:]),
        tuning=pilot.tuning,
        tolerance=tolerance,
    )


def _by_island(log_weight: Tensor, islands: int) -> Tensor:
    """The estimate of every island, `[S, B] -> [I, B]`."""
    size = len(log_weight) // islands
    return torch.stack([iwae(part) for part in torch.split(log_weight, size)])
