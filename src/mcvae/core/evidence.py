"""Evidence of any density: annealed importance sampling, and the sandwich of bidirectional Monte Carlo.

A pilot tunes and returns a frozen estimator; its chains are run; the evidence is the diagnosis of their weights.
"""

from collections.abc import Callable
from importlib import import_module
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor
from torch.distributions import Distribution

from mcvae.core.annealing import Trajectory
from mcvae.core.bounds import iwae
from mcvae.core.bridge import Bridge, NonFiniteDensityError, State, Step
from mcvae.core.checks import Checks, check
from mcvae.core.diagnostics import effective_sample_size, pareto_k, standard_error
from mcvae.core.estimator import AnnealedEstimator
from mcvae.core.kernels import Kernel
from mcvae.core.paths import GeometricPath, Path
from mcvae.core.pilot import Pilot, pilot
from mcvae.core.randomness import seeded_generator
from mcvae.core.resampling import Resampling, systematic
from mcvae.core.schedules import Schedule
from mcvae.core.scores import LogDensity
from mcvae.core.starts import Frame
from mcvae.core.step_sizes import standard_deviation
from mcvae.core.tuning import Spacing, Tuning
from mcvae.core.verdict import verdict

__all__ = [
    "Evidence",
    "Sandwich",
    "bayes_factor",
    "diagnose",
    "diagnose_sandwich",
    "estimate_log_evidence",
    "sandwich_log_evidence",
]


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
    resolution: Tensor
    """Rounding of the log density at the end states, in nats, `[B]`."""
    checks: Checks | None = None
    """What independent witnesses found; None if they were not asked."""

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
        """The step sizes used: what was given, or `[K, B, D]`, in the coordinates of `frame`."""
        return self.estimator.step_sizes(self._run_bridge.initial).detach()

    @property
    def frame(self) -> Frame | None:
        """Coordinates in which the chains ran, if the pilot found a better start; else those of the latents."""
        return None if self.tuning is None else self.tuning.frame

    @property
    def _run_bridge(self) -> Bridge:
        return self.bridge if self.frame is None else self.frame.bridge(self.bridge)

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
        bridge, frame = self._run_bridge, self.frame
        z = z if frame is None else frame.from_latents(z)
        with torch.no_grad():
            state = State(bridge.evaluate(z, with_score=bool(kernels[-1].uses_score)))
            for _ in range(num_moves):
                step = Step(self.num_steps, self.num_steps, one, one, step_size)
                state = kernels[-1](bridge, state, step, generator=generator).state
        return state.point.z if frame is None else frame.to_latents(state.point.z)

    def expectation(self, function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """E[f(z)] under the posterior, and its standard error, `[B, ...]` each: a weighted mean over the chains.

        Args:
            function: f, `[S, B, D] -> [S, B, ...]`.

        >>> from torch.distributions import Independent, Normal
        >>> initial = Independent(Normal(torch.zeros(1, 2), 2 * torch.ones(1, 2)), 1)
        >>> e = estimate_log_evidence(lambda z: -0.5 * (z - 1).square().sum(-1), initial, seed=0)
        >>> mean, error = e.expectation(lambda z: z)
        >>> bool(((mean - 1).abs() < 4 * error).all())
        True
        """
        values = function(self.latents).double()
        if values.shape[:2] != self.log_weights.shape:
            raise ValueError(
                f"function must return [S, B, ...] = {list(self.log_weights.shape)} and more, got "
                f"{list(values.shape)}. It gets latents [S, B, D] and must keep the first two dimensions."
            )
        share = self.log_weights.softmax(0).to(values).reshape(*self.log_weights.shape, *[1] * (values.dim() - 2))
        mean = (share * values).sum(0)
        number = len(share)
        error = (share.square() * (values - mean).square()).sum(0).sqrt() * (number / max(1, number - 1)) ** 0.5
        return mean, error

    def to_arviz(self, num_samples: int = 1000, *, name: str = "z", generator: Generator | None = None) -> Any:
        """Posterior samples as `arviz.InferenceData`: one chain of N draws, `[D]` each, or `[B, D]` of several data.

        Needs the extra `mcvae[arviz]`. Draws are resampled, so they are equally weighted, and copies count as such.

        Args:
            num_samples: N.
            name: of the variable.
            generator: source of all randomness.
        """
        try:
            arviz: Any = import_module("arviz")
        except ImportError as error:
            raise ImportError("e.to_arviz() needs ArviZ: pip install 'mcvae[arviz]'.") from error
        draws = self.posterior(num_samples, generator=generator)
        draws = draws.squeeze(1) if draws.shape[1] == 1 else draws
        found = arviz.from_dict(posterior={name: draws.detach().cpu().numpy()[None]})
        found.posterior.attrs.update(
            log_evidence=self.log_evidence.tolist(),
            standard_error=self.standard_error.tolist(),
            verdict=self.verdict(),
        )
        return found

    @property
    def confirmed(self) -> Tensor:
        """Whether independent evidence was asked for, and precise enough to agree or not, `[B]`, bool."""
        if self.checks is None:
            return torch.zeros_like(self.log_evidence, dtype=torch.bool)
        return self.checks.standard_error <= 3 * self.tolerance

    @property
    def converged(self) -> Tensor:
        """Whether nothing speaks against the estimate of a datum, and independent evidence for it, `[B]`, bool."""
        sound = torch.tensor([not found for found in self.doubts()], device=self.log_evidence.device)
        return sound & self.confirmed

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Interval for log p(x) from the spread of the chains, `[B]` each. Believe it only if `converged`."""
        half = NormalDist().inv_cdf(0.5 + level / 2) * self.standard_error
        return self.log_evidence - half, self.log_evidence + half

    def doubts(self) -> list[tuple[str, ...]]:
        """For every datum, the names of what speaks against its estimate: keys of `ADVICE`."""
        num_samples = len(self.log_weights)
        noise = 2.8 * self.standard_error  # twice the error of a difference
        share = self.ess / num_samples
        failing = {
            "empty": ~self.log_evidence.isfinite(),
            "broken": self.num_nonfinite > 0.01 * num_samples,
            "coarse": self.resolution > self.tolerance,
            "stuck": self.acceptance < 0.375 * self.estimator.target_acceptance,
            "unfinished": torch.full_like(share, self.tuning is not None and self.tuning.reached < 1, dtype=torch.bool),
            **self._contradictions(),
            "moving": self.moved.abs() > self.tolerance + noise,
            "few": self.ess < max(2.0, 0.1 * num_samples),
            # of nearly equal weights k is mostly noise, and at last rounding
            "tail": (self.pareto_k > torch.where(share < 0.5, 0.7, 1.0)) & (share < 0.99),
            "noisy": ~(self.standard_error <= 2 * self.tolerance),
        }
        flags = torch.stack(list(failing.values()), 1).tolist()
        return [tuple(name for name, flag in zip(failing, row, strict=True) if flag) for row in flags]

    def _contradictions(self) -> dict[str, Tensor]:
        """What independent witnesses say against the estimate, `[B]` each."""
        if self.checks is None:
            return {}
        gap, error = _gap(self, self.checks)
        return {
            "elsewhere": self.checks.strays > 0.02,  # more than one of 64 chains
            "hidden": self.checks.hidden > 0.15,
            "disagreeing": gap > 3 * error + 0.5 * self.tolerance,
            "drifting": self.checks.drift > 5,
        }

    def verdict(self) -> str:
        """One sentence for all data: converged, no contradiction found, or not converged, why and what to do."""
        return verdict(self.doubts(), self.confirmed.tolist())


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
    bridge = _bridge(log_joint, initial, path, context)
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
    bridge = _bridge(log_joint, initial, path, context)
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
    estimator, run = pilot.estimator, pilot.bridge(bridge)
    trajectories = [
        estimator.run(run, size, generator=generator)
        for size in _portions(estimator.num_samples, max_rows, bridge, estimator.resample)
    ]
    return _evidence(bridge, pilot, trajectories, tolerance)


@torch.no_grad()
def with_checks(evidence: Evidence, *, generator: Generator | None = None) -> Evidence:
    """Ask independent witnesses. What they say beyond their noise and that of the chains widens the standard error."""
    if not bool(evidence.log_evidence.isfinite().all()):
        return evidence
    found = check(
        evidence.bridge,
        evidence.frame,
        evidence.estimator,
        evidence.log_weights,
        evidence.latents,
        generator=generator,
    )
    gap, error = _gap(evidence, found)
    excess = (gap - 2.5 * error).clamp(min=0).nan_to_num(nan=0.0)
    return evidence._replace(checks=found, standard_error=torch.hypot(evidence.standard_error, excess))


def _gap(evidence: Evidence, found: Checks) -> tuple[Tensor, Tensor]:
    """How far the second estimate is from the first, and the error of that, `[B]` each.

    The mean of the weights seldom exceeds the evidence, and often falls short of it. So a second estimate that is
    higher says more against the first than one that is lower, whose error counts one and a half times; and one that is
    lower because few chains carry its weight says nothing.
    """
    difference = found.log_evidence - evidence.log_evidence
    difference = torch.where((difference < 0) & (found.standard_error > 0.5), 0.0, difference)
    error = torch.hypot(evidence.standard_error, found.standard_error)
    return difference.abs(), torch.where(difference < 0, 1.5 * error, error)


def diagnose_sandwich(
    bridge: Bridge,
    pilot: Pilot,
    posterior_sample: Tensor,
    *,
    reverse: Pilot | None = None,
    tolerance: float = 0.1,
    max_rows: int | None = None,
    generator: Generator | None = None,
) -> Sandwich:
    """Both directions with frozen settings, those of `pilot` or, for chains that run in `reverse`, others.

    See `sandwich_log_evidence` and `diagnose`.
    """
    back = pilot if reverse is None else reverse
    number = back.estimator.num_samples
    shape = (number, *bridge.initial.batch_shape, *bridge.initial.event_shape)
    if posterior_sample.shape not in (shape, shape[1:]):
        raise ValueError(
            f"posterior_sample must have shape [B, D] = {list(shape[1:])} or [S, B, D] = {list(shape)}, got "
            f"{list(posterior_sample.shape)}."
        )
    forward = diagnose(bridge, pilot, tolerance=tolerance, max_rows=max_rows, generator=generator)
    parts = list(torch.split(posterior_sample.expand(shape), _portions(number, max_rows, bridge)))
    run, frame = back.bridge(bridge), back.frame
    parts = [exact if frame is None else frame.from_latents(exact) for exact in parts]
    trajectories = [back.estimator.run_reverse(run, exact, generator=generator) for exact in parts]
    found = _evidence(bridge, back, trajectories, tolerance)
    found = found._replace(moved=torch.full_like(found.moved, torch.nan))
    if posterior_sample.dim() == 2:  # chains that share their start are not independent
        unknown = torch.full_like(found.ess, torch.nan)
        found = found._replace(standard_error=unknown, ess=unknown, pareto_k=unknown)
    lower, upper = forward.log_evidence, -found.log_evidence
    return Sandwich(lower, upper, upper - lower, forward, found)


def _portions(num_samples: int, max_rows: int | None, bridge: Bridge, resample: Resampling | None = None) -> list[int]:
    """Sizes of the portions in which chains run; islands stay whole."""
    whole = 1 if resample is None else resample.islands
    size = num_samples if max_rows is None else min(num_samples, max_rows // bridge.initial.batch_shape[0])
    size = max(2 * whole if resample is not None else 1, size // whole * whole)
    return [min(size, num_samples - start) for start in range(0, num_samples, size)]


def _source(generator: Generator | None, seed: int | None, initial: Distribution) -> Generator | None:
    if seed is None:
        return generator
    if generator is not None:
        raise ValueError("give a generator or a seed, not both.")
    return seeded_generator("evidence", seed, device=standard_deviation(initial).device)


def _bridge(log_joint: LogDensity, initial: Distribution, path: Path | None, context: Tensor | None) -> Bridge:
    return Bridge(initial, log_joint, path if path is not None else GeometricPath(), context)


def _evidence(bridge: Bridge, pilot: Pilot, trajectories: list[Trajectory], tolerance: float) -> Evidence:
    log_weight = torch.cat([trajectory.log_weight for trajectory in trajectories])
    shares = [len(trajectory.log_weight) / len(log_weight) for trajectory in trajectories]
    acceptance = torch.stack([share * t.acceptance for share, t in zip(shares, trajectories, strict=True)]).sum(0)
    latents = torch.cat([trajectory.state.point.z for trajectory in trajectories])
    log_p = torch.cat([trajectory.state.point.log_p for trajectory in trajectories])
    typical = torch.where(log_p.isfinite(), log_p.abs(), torch.nan).nanmedian(0).values.nan_to_num(nan=0.0)
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
        latents=latents if pilot.frame is None else pilot.frame.to_latents(latents),
        estimator=pilot.estimator,
        bridge=bridge,
        moved=pilot.moved.to(log_weight).expand(log_weight.shape[1:]),
        tuning=pilot.tuning,
        tolerance=tolerance,
        resolution=torch.finfo(latents.dtype).eps * typical,
    )


def _by_island(log_weight: Tensor, islands: int) -> Tensor:
    """The estimate of every island, `[S, B] -> [I, B]`."""
    size = len(log_weight) // islands
    return torch.stack([iwae(part) for part in torch.split(log_weight, size)])
