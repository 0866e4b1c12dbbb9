"""The pilot: chains that do not count decide on the start, the temperatures, their number and the step sizes."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from mcvae.core.bounds import iwae
from mcvae.core.bridge import Bridge
from mcvae.core.compiled import CompiledChain, CompiledKernel
from mcvae.core.diagnostics import standard_error
from mcvae.core.estimator import AnnealedEstimator
from mcvae.core.kernels import Kernel, hmc
from mcvae.core.randomness import draw
from mcvae.core.resampling import Resampling
from mcvae.core.schedules import FixedSchedule, Schedule
from mcvae.core.starts import FIT_DERIVATIVES, FIT_STEPS, INFLATION, Frame, find_modes, fit as fit_to
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

    def tried(found: Tuning | None, most: int) -> tuple[Pilot, Tensor]:
        run = bridge if found is None or found.frame is None else found.frame.bridge(bridge)
        found = found.shared() if found is not None and shared else found
        chain = CompiledChain() if compile else None  # one for all numbers of steps

        def frozen(number: int) -> AnnealedEstimator:
            temperatures = found.temperatures(number) if found is not None else spaced("sigmoid", number)
            ladder = FixedSchedule(temperatures) if given is None else given
            if fixed is not None or found is None:
                steps: StepSizes = FixedStepSizes(ladder.num_steps, ladder().new_ones(()) if fixed is None else fixed)
            else:
                steps = found.relative_step_sizes(kernel, ladder().detach())
            estimator = AnnealedEstimator(kernel, ladder, steps, num_samples=num_samples, bound=iwae, resample=resample)
            estimator.compiled = chain
            return estimator

        number, moved, error = _choose_num_steps(run, frozen, num_steps, given, fixed, tolerance, most, generator)
        return Pilot(frozen(number), found, moved), error

    if tuning is not None and tuning.fitted and tuning.frame is None:
        tuning = tuning._replace(frame=fit_to(bridge).frame)
    if tuning is not None or untuned or without_steps:
        return tried(tuning, max_steps)[0]
    spacing: Spacing = "sigmoid" if isinstance(schedule, Schedule) else schedule or "adaptive"
    tuned = CompiledKernel(kernel) if compile else kernel
    better = None
    if fit and spacing == "adaptive" and fixed is None and kernel.accepts and kernel.uses_score:
        better = _fitted(bridge, tuned, shared, num_samples, generator)
    known = given.num_steps if given is not None else num_steps
    knots = None if spacing == "adaptive" or isinstance(known, str) else min(known, 20)
    first = None
    if better is not None and not shared and known == "auto" and better.length < _SHORT:
        first = tried(better, min(max_steps, _ENOUGH))
        if bool(first[1] < tolerance):
            return first[0]
    own = tune(bridge, tuned, spacing=spacing, num_knots=knots, generator=generator)
    if shared and better is not None and better.length < own.length:  # whether the number of steps is known or not
        return tried(better, max_steps)[0]
    second = tried(own, max_steps)
    return first[0] if first is not None and bool(first[1] < second[1]) else second[0]


_SHORT = 4.0
"""Length of a path that a few dozen temperatures bridge."""


def _fitted(
    bridge: Bridge, kernel: Kernel, shared: bool, num_samples: int, generator: Generator | None
) -> Tuning | None:
    """The tuning of chains that start around a mode, in coordinates where its covariance is the identity.

    For densities of one's own, the heaviest mode of several climbs. If the plan is for other data, every datum will be
    fitted, from its own q; None if that would cost too much, or if most data have no mode or several.
    """
    if shared:
        climbs = affordable_climbs(bridge.initial.event_shape[0], num_samples * kernel.num_evaluations)
        found = fit_to(bridge, num_starts=climbs, generator=generator) if climbs else None
        if found is None or found.alone.double().mean() < 0.5:
            return None
        frame = found.frame
    else:
        modes = find_modes(bridge, draw(bridge.initial, (4,), generator))
        best = None if modes is None else modes.heaviest()
        if best is None:
            return None
        frame = Frame(best.mean, INFLATION * best.factor)
    return tune(frame.bridge(bridge), kernel, generator=generator)._replace(frame=frame, fitted=True)


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


_FIRST = 8
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
) -> tuple[int, Tensor, Tensor]:
    """K, by how much the estimate moved when it was last doubled, `[B]`, and its mean standard error.

    On chains that do not count.
    """
    unknown = torch.full(bridge.initial.batch_shape, torch.nan, dtype=torch.float64, device="cpu")
    if schedule is not None:
        return schedule.num_steps, unknown, unknown.mean()
    if num_steps != "auto":
        return num_steps, unknown, unknown.mean()
    if step_size is not None and step_size.dim() > 0:
        return len(step_size), unknown, unknown.mean()
    current = min(_FIRST, max_steps)
    log_weight = frozen(current).run(bridge, generator=generator).log_weight
    moved = torch.full_like(log_weight[0], torch.inf)
    errors = [standard_error(log_weight)]
    while 2 * current <= max_steps:
        current *= 2
        better = frozen(current).run(bridge, generator=generator).log_weight
        moved = (iwae(better) - iwae(log_weight)).nan_to_num(nan=torch.inf)
        log_weight = better
        errors.append(standard_error(better))
        noise = (errors[-1].square() + errors[-2].square()).sqrt()
        # fresh chains will scatter, so a tenth is kept in reserve
        if errors[-1].mean() < 0.9 * tolerance and (moved.abs() - noise).mean() < tolerance:
            break
        if (
            current >= _ENOUGH and errors[-1].mean() > 0.9 * errors[max(0, len(errors) - 4)].mean()
        ):  # more chains may help, not more steps
            break
    return current, moved, errors[-1].mean()


_ENOUGH = 128
"""Temperatures after which those that do not help are no longer doubled, and a fitted start is given up."""
