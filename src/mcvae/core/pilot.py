"""The pilot: chains that do not count decide on the start, the temperatures, their number and the step sizes."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from mcvae.core.bounds import iwae
from mcvae.core.bridge import Bridge
from mcvae.core.compiled import CompiledChain, CompiledKernel
from mcvae.core.diagnostics import standard_error
from mcvae.core.estimator import AnnealedEstimator
from mcvae.core.frames import Frame
from mcvae.core.kernels import Kernel, hmc
from mcvae.core.modes import find_modes
from mcvae.core.randomness import draw
from mcvae.core.resampling import Resampling
from mcvae.core.schedules import FixedSchedule, Schedule
from mcvae.core.starts import FIT_DERIVATIVES, FIT_STEPS, fit as fit_to
from mcvae.core.step_sizes import FixedStepSizes, StepSizes
from mcvae.core.tuning import Spacing, Tuning, spaced
from mcvae.core.walks import tune

__all__ = ["Pilot", "affordable_climbs", "pilot"]


class Pilot(NamedTuple):
    """What pilot chains decided; from here on nothing is tuned."""

    estimator: AnnealedEstimator
    """Frozen."""
    tuning: Tuning | None
    """What the pilot found; None if step sizes and temperatures were given."""
    moved: Tensor
    """By how much the estimate rose when the number of temperatures was last doubled, `[B]`; NaN if it was given."""
    error: Tensor
    """Standard error of the chains with which it was last doubled, in the mean over data; NaN if it was given."""

    def bridge(self, bridge: Bridge) -> Bridge:
        """The bridge on which the estimator runs: from the initial distribution, or from a better start."""
        frame = self.frame
        return bridge if frame is None else frame.bridge(bridge)

    @property
    def frame(self) -> Frame | None:
        """Coordinates of a better start, if there is one."""
        return None if self.tuning is None else self.tuning.frame

    def around(self, frame: Frame) -> "Pilot":
        """The same plan for data whose chains start in this frame."""
        assert self.tuning is not None
        return self._replace(tuning=self.tuning._replace(frame=frame))


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
    fit: bool = False,
    resample: Resampling | float | None = None,
    compile: bool = False,
    generator: Generator | None = None,
) -> Pilot:
    """Check the settings, tune what is not given on chains that do not count, and freeze.

    Args:
        bridge: the densities.
        shared: one step size for all data, in units of their scales, to be used for other data; see `Pilot.around`.
        fit: look for a better start than the initial distribution: a Gaussian around a mode.
        kernel, num_steps, num_samples, step_size, schedule, tuning, tolerance, max_steps, resample, compile,
            generator: as for `estimate_log_evidence`.
    """
    search = _Search(
        bridge=bridge,
        kernel=hmc(3) if kernel is None else kernel,
        num_steps=num_steps,
        num_samples=num_samples,
        step_size=step_size,
        schedule=schedule,
        tolerance=tolerance,
        max_steps=max_steps,
        shared=shared,
        resample=resample if resample is None or isinstance(resample, Resampling) else Resampling(resample),
        compile=compile,
        generator=generator,
    )
    if tuning is not None and tuning.fitted and tuning.frame is None:
        tuning = tuning._replace(frame=fit_to(bridge, generator=generator).frame)
    by_rule = isinstance(schedule, Schedule) or schedule in (None, "sigmoid")
    if tuning is not None or search.number == 0 or (by_rule and search.given_steps is not None):
        return search.tried(tuning, max_steps)
    return search.tuned(fit)


@dataclass(frozen=True)
class _Search:
    """What is given, and how the rest is found; fields as for `pilot`."""

    bridge: Bridge
    kernel: Kernel
    num_steps: int | Literal["auto"]
    num_samples: int
    step_size: float | Tensor | Literal["pilot"]
    schedule: Schedule | Spacing | None
    tolerance: float
    max_steps: int
    shared: bool
    resample: Resampling | None
    compile: bool
    generator: Generator | None

    def __post_init__(self) -> None:
        if not isinstance(self.kernel, Kernel):
            raise TypeError(
                f"kernel must be a Kernel such as mcvae.hmc(3), got {self.kernel}. Call a shorthand to build it."
            )
        if self.num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {self.num_samples}.")
        if not self.tolerance > 0:
            raise ValueError(f"tolerance must be positive, in nats, got {self.tolerance}.")
        if self.num_steps != "auto" and (isinstance(self.num_steps, str) or self.num_steps < 0):
            raise ValueError(
                f'num_steps must be "auto" or a number, which must not be negative, got {self.num_steps!r}.'
            )
        if self.num_steps == "auto" and self.max_steps < 1:
            raise ValueError(f'max_steps must be at least 1 if num_steps is "auto", got {self.max_steps}.')
        if isinstance(self.step_size, str) and self.step_size != "pilot":
            raise ValueError(f'step_size must be a number, a tensor or "pilot", got "{self.step_size}".')

    @property
    def number(self) -> int | None:
        """K, if it is given."""
        if isinstance(self.schedule, Schedule):
            return self.schedule.num_steps
        return None if self.num_steps == "auto" else self.num_steps

    @property
    def given_steps(self) -> Tensor | None:
        """Step sizes, if they are given."""
        if self.step_size is None or isinstance(self.step_size, str):
            return None
        return self.step_size if isinstance(self.step_size, Tensor) else torch.tensor(self.step_size, device="cpu")

    def tuned(self, fit: bool) -> Pilot:
        """Tune on chains from the initial distribution and, if wanted, from a better start, and take what is better."""
        spacing: Spacing = "sigmoid" if isinstance(self.schedule, Schedule) else self.schedule or "adaptive"
        kernel = CompiledKernel(self.kernel) if self.compile else self.kernel
        better = first = None
        if fit and spacing == "adaptive" and self.given_steps is None and kernel.accepts and kernel.uses_score:
            better = self._fitted(kernel)
        if better is not None and not self.shared and self.number is None and better.length < _SHORT:
            first = self.tried(better, min(self.max_steps, _ENOUGH))
            if bool(first.error < self.tolerance):
                return first
        knots = None if spacing == "adaptive" or self.number is None else min(self.number, 20)
        own = tune(self.bridge, kernel, spacing=spacing, num_knots=knots, generator=self.generator)
        if self.shared and better is not None and better.length < own.length:
            return self.tried(better, self.max_steps)
        second = self.tried(own, self.max_steps)
        return first if first is not None and bool(first.error < second.error) else second

    def _fitted(self, kernel: Kernel) -> Tuning | None:
        """The tuning of chains that start around a mode, in coordinates where its covariance is the identity.

        For densities of one's own, the heaviest mode of several climbs. If the plan is for other data, every datum will
        be fitted, from its own q; None if that would cost too much, or if most data have no mode or several.
        """
        bridge, generator = self.bridge, self.generator
        if self.shared:
            climbs = affordable_climbs(bridge.initial.event_shape[0], self.num_samples * kernel.num_evaluations)
            found = fit_to(bridge, num_starts=climbs, generator=generator) if climbs else None
            if found is None or found.alone.double().mean() < 0.5:
                return None
            frame = found.frame
        else:
            modes = find_modes(bridge, draw(bridge.initial, (4,), generator))
            if modes is None or not modes.everywhere():
                return None
            frame = modes.heaviest().inflated()
        return tune(frame.bridge(bridge), kernel, generator=generator)._replace(frame=frame, fitted=True)

    def tried(self, found: Tuning | None, max_steps: int) -> Pilot:
        """The frozen estimator of a tuning, with K as given, or doubled on chains that do not count."""
        run = self.bridge if found is None or found.frame is None else found.frame.bridge(self.bridge)
        found = found.shared() if found is not None and self.shared else found
        chain = CompiledChain() if self.compile else None  # one for all numbers of steps
        unknown = torch.full(self.bridge.initial.batch_shape, torch.nan, dtype=torch.float64, device="cpu")
        number, given = self.number, self.given_steps
        if number is None and given is not None and given.dim() > 0:
            number = len(given)
        if number is not None:
            return Pilot(self._frozen(found, number, chain), found, unknown, unknown.mean())
        estimator = self._frozen(found, min(_FIRST, max_steps), chain)
        log_weight = estimator.run(run, generator=self.generator).log_weight
        moved = torch.full_like(log_weight[0], torch.inf)
        errors = [standard_error(log_weight)]
        while 2 * estimator.num_steps <= max_steps:
            estimator = self._frozen(found, 2 * estimator.num_steps, chain)
            before, log_weight = log_weight, estimator.run(run, generator=self.generator).log_weight
            moved = (iwae(log_weight) - iwae(before)).nan_to_num(nan=torch.inf)
            errors.append(standard_error(log_weight))
            noise = (errors[-1].square() + errors[-2].square()).sqrt()
            # fresh chains will scatter, so a tenth is kept in reserve
            if errors[-1].mean() < 0.9 * self.tolerance and (moved.abs() - noise).mean() < self.tolerance:
                break
            # more chains may help, not more steps
            if estimator.num_steps >= _ENOUGH and errors[-1].mean() > 0.9 * errors[max(0, len(errors) - 4)].mean():
                break
        return Pilot(estimator, found, moved, errors[-1].mean())

    def _frozen(self, found: Tuning | None, number: int, chain: CompiledChain | None) -> AnnealedEstimator:
        """An estimator with a number of temperatures, and nothing left to tune."""
        if isinstance(self.schedule, Schedule):
            schedule = self.schedule
        else:
            schedule = FixedSchedule(spaced("sigmoid", number) if found is None else found.temperatures(number))
        step_sizes: StepSizes
        if self.given_steps is not None:
            step_sizes = FixedStepSizes(number, self.given_steps)
        elif found is None:
            step_sizes = FixedStepSizes(number)
        else:
            step_sizes = found.relative_step_sizes(self.kernel, schedule().detach())
        estimator = AnnealedEstimator(
            self.kernel, schedule, step_sizes, num_samples=self.num_samples, bound=iwae, resample=self.resample
        )
        estimator.compiled = chain
        return estimator


_FIRST = 8
"""Temperatures of the first trial."""

_ENOUGH = 128
"""Temperatures after which those that do not help are no longer doubled, and a fitted start is given up."""

_SHORT = 4.0
"""Length of a path that a few dozen temperatures bridge."""


def affordable_climbs(latent_dim: int, cost: int) -> int:
    """How many climbs to modes, up to 16, cost no more than chains through 64 temperatures, a fit included.

    At least one if that costs no more than 128 temperatures, else none.

    Args:
        latent_dim: second derivatives take one score more than this.
        cost: scores that chains take per datum and temperature.
    """
    derivatives = 64 * cost // (latent_dim + 1)
    if 2 * derivatives < FIT_DERIVATIVES + FIT_STEPS:
        return 0
    return min(16, max(1, (derivatives - FIT_DERIVATIVES) // FIT_STEPS))
