"""Pilot chains: temperatures and step sizes for annealed importance sampling, found once and frozen.

Whatever is tuned on the chains whose weights count makes those weights biased. So pilot chains walk up the temperatures
first, and are thrown away.
"""

import json
import math
from os import PathLike
from pathlib import Path as File
from typing import Literal, NamedTuple, get_args

import torch
from torch import Generator, Tensor

from mcvae.core.bridge import Bridge, State, Step, select
from mcvae.core.kernels import Kernel
from mcvae.core.schedules import LinearSchedule, SigmoidSchedule
from mcvae.core.step_sizes import FixedStepSizes, RelativeStepSizes, standard_deviation

__all__ = ["Spacing", "Tuning", "pilot_step_sizes", "spaced", "tune"]

Spacing = Literal["adaptive", "sigmoid", "linear"]
"""How temperatures are spaced: by equal losses of conditional effective sample size as the pilot saw them, or fixed."""


class Tuning(NamedTuple):
    """What pilot chains found, for any number of temperatures."""

    knots: Tensor
    """Temperatures of the pilot, `[M]`."""
    log_steps: Tensor
    """Log step sizes there, in units of the initial distribution's scales: `[M, 1]`, or `[M, B]` for one per datum."""
    spread: Tensor
    """Spread of ∂ log γ_β / ∂β at 0 and there, `[M + 1]`: the rate at which weights drift apart."""
    spacing: Spacing = "adaptive"

    def temperatures(self, num_steps: int) -> Tensor:
        """K interior temperatures, `[K]`.

        A small step Δβ costs a share (Δβ · spread)² of the conditional effective sample size; the adaptive ladder makes
        all these losses equal.
        """
        if self.spacing != "adaptive" or num_steps == 0:
            return spaced("linear" if self.spacing == "linear" else "sigmoid", num_steps)
        knots, spread = self.knots.double().cpu(), self.spread.double().cpu()
        grid = torch.cat([knots.new_zeros(1), knots, knots.new_ones(1)])
        spread = torch.cat([spread, spread[-1:]])
        length = torch.cat([knots.new_zeros(1), ((spread[1:] + spread[:-1]) / 2 * grid.diff()).cumsum(0)])
        return _interpolate(length[-1] * spaced("linear", num_steps), length, grid)

    def step_sizes(self, betas: Tensor) -> Tensor:
        """Step sizes at `betas [K]` in units of the initial distribution's scales, `[K, 1]` or `[K, B]`."""
        return _interpolate(betas.to(self.knots), self.knots, self.log_steps).exp()

    def relative_step_sizes(self, kernel: Kernel, betas: Tensor) -> RelativeStepSizes:
        """Frozen step sizes at `betas [K]`, in units of the scales of the initial distribution they are used on."""
        return RelativeStepSizes(FixedStepSizes(len(betas), self.step_sizes(betas)), kernel.step_unit)

    def shared(self) -> "Tuning":
        """One step size for all data, the median: for data that the pilot did not see."""
        return self._replace(log_steps=self.log_steps.median(1, keepdim=True).values)

    def save(self, path: str | PathLike[str]) -> None:
        """Write as JSON."""
        content = {name: getattr(self, name).tolist() for name in ("knots", "log_steps", "spread")}
        File(path).write_text(json.dumps(content | {"spacing": self.spacing}) + "\n")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Tuning":
        """Read what `save` wrote."""
        content = json.loads(File(path).read_text())
        knots, log_steps, spread = (torch.tensor(content[name]) for name in ("knots", "log_steps", "spread"))
        return cls(knots, log_steps, spread, content["spacing"])


def spaced(spacing: Literal["sigmoid", "linear"], num_steps: int) -> Tensor:
    """K interior temperatures by a rule, `[K]`, float64."""
    rule = LinearSchedule if spacing == "linear" else SigmoidSchedule
    with torch.device("cpu"):
        return rule(num_steps, interior=True).double()().detach()


def _interpolate(at: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Piecewise linear y(x) at `at [K]`, constant outside; y is `[M]` or `[M, B]`, x increasing."""
    if len(x) == 1:
        return y.expand(len(at), *y.shape[1:])
    right = torch.searchsorted(x.contiguous(), at.contiguous()).clamp(1, len(x) - 1)
    share = ((at - x[right - 1]) / (x[right] - x[right - 1]).clamp(min=1e-12)).clamp(0, 1)
    share = share.reshape(-1, *[1] * (y.dim() - 1))
    return (1 - share) * y[right - 1] + share * y[right]


@torch.no_grad()
def tune(
    bridge: Bridge,
    kernel: Kernel,
    *,
    spacing: Spacing = "adaptive",
    num_knots: int | None = None,
    num_chains: int | None = None,
    target: float | None = None,
    generator: Generator | None = None,
) -> Tuning:
    """Let pilot chains walk from q to p(x, ·), and note what they need.

    For adaptive spacing, each temperature is chosen where the chains stand, so that the step to it costs a fixed share
    of the conditional effective sample size; there are as many as that takes.

    Args:
        bridge: the densities.
        kernel: the kernel to tune.
        spacing: "adaptive", "sigmoid" or "linear".
        num_knots: temperatures of the pilot, or the most of an adaptive one; between them step sizes are interpolated.
        num_chains: pilot chains per datum; between 8, for many data, and 32, for a few, by default.
        target: acceptance; see `pilot_step_sizes`.
        generator: source of all randomness.

    >>> from torch.distributions import Independent, Normal
    >>> from mcvae.core.kernels import hmc
    >>> bridge = Bridge(Independent(Normal(torch.zeros(1, 2), torch.ones(1, 2)), 1), lambda z: -8 * z.square().sum(-1))
    >>> tuning = tune(bridge, hmc(3), generator=torch.Generator().manual_seed(0))
    >>> betas = tuning.temperatures(5)
    >>> bool((betas.diff() > 0).all()), tuning.step_sizes(betas).shape
    (True, torch.Size([5, 1]))
    """
    if spacing not in get_args(Spacing):
        raise ValueError(f"spacing must be one of {', '.join(get_args(Spacing))}, got {spacing!r}.")
    num_chains = min(32, max(8, 256 // bridge.initial.batch_shape[0])) if num_chains is None else num_chains
    if spacing == "adaptive":
        walk = _walk(bridge, kernel, None, target, num_chains, generator, num_knots or 200)
    else:
        walk = _walk(bridge, kernel, spaced(spacing, num_knots or 20), target, num_chains, generator)
    return Tuning(*walk, spacing)


def pilot_step_sizes(
    bridge: Bridge,
    kernel: Kernel,
    betas: Tensor,
    *,
    target: float | None = None,
    num_chains: int = 32,
    generator: Generator | None = None,
) -> Tensor:
    """Find step sizes for given temperatures, `[K, B, D]`, on pilot chains that are then thrown away.

    Args:
        bridge: the densities.
        kernel: the kernel to tune.
        betas: temperatures `[K]`.
        target: acceptance ρ; the kernel's own by default.
        num_chains: pilot chains per datum.
        generator: source of all randomness.
    """
    with torch.no_grad():
        units = step_units(bridge, kernel)
        if not len(betas):
            return units.new_zeros(0, 1, 1)
        _, log_steps, _ = _walk(bridge, kernel, betas, target, num_chains, generator)
        return log_steps.exp().unsqueeze(-1) * units


def step_units(bridge: Bridge, kernel: Kernel) -> Tensor:
    """Step sizes of one standard deviation of the initial distribution in every dimension, `[B, D]`: HMC's mass."""
    return kernel.step_unit(standard_deviation(bridge.initial)).detach()


def _walk(
    bridge: Bridge,
    kernel: Kernel,
    betas: Tensor | None,
    target: float | None,
    num_chains: int,
    generator: Generator | None,
    max_knots: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Temperatures `[M]`, those given or adaptive ones, with log step sizes `[M, B]` and spread `[M + 1]`."""
    target = kernel.target_acceptance if target is None else target
    state = State(bridge.sample(num_chains, with_score=kernel.uses_score, generator=generator))
    units = step_units(bridge, kernel)
    log_step = torch.full_like(units[:, 0], math.log(0.2))
    beta = units.new_zeros(())
    knots, tuned, spreads = list[Tensor](), list[Tensor](), [_spread(bridge, state, beta)]
    while len(knots) < (max_knots if betas is None else len(betas)):
        beta = beta + (_LOSS / spreads[-1]).clamp(max=0.2) if betas is None else betas[len(knots)].to(units)
        if betas is None and beta > 0.999:
            break
        step = Step(len(knots) + 1, max_knots if betas is None else len(betas), beta, beta, units)
        log_step = _dual_averaging(bridge, kernel, state, step, log_step, target, 4 if tuned else 40, generator)
        step = step._replace(step_size=log_step.exp().unsqueeze(-1) * units)
        transition = kernel(bridge, state, step, generator=generator)
        usable = ~transition.state.point.log_p.isnan()
        state = State(select(usable, transition.state.point, state.point), transition.state.momentum)
        knots.append(beta)
        tuned.append(log_step)
        spreads.append(_spread(bridge, state, beta))
    return torch.stack(knots), torch.stack(tuned), torch.stack(spreads)


_LOSS = 0.5  # spread of log-weights from one temperature of an adaptive pilot to the next


def _dual_averaging(
    bridge: Bridge,
    kernel: Kernel,
    state: State,
    unit: Step,
    start: Tensor,
    target: float,
    num_trials: int,
    generator: Generator | None,
) -> Tensor:
    """Log step sizes `[B]` for an acceptance `target`, by trial moves from where the chains are.

    The averaging of Hoffman and Gelman (2014), with their constants. `unit` is a step of relative size 1.
    """
    shrinkage, early, decay = 0.05, 10.0, 0.75
    alive = state.point.log_p > -torch.inf
    log_step, averaged, error = start, start, torch.zeros_like(start)
    for trial in range(1, num_trials + 1):
        step = unit._replace(step_size=log_step.exp().unsqueeze(-1) * unit.step_size)
        acceptance = kernel(bridge, state, step, generator=generator).acceptance
        short = target - ((acceptance * alive).sum(0) / alive.sum(0).clamp(min=1)).to(start)
        short = torch.where(alive.any(0), short, 0.0)
        error = error + (short - error) / (trial + early)
        log_step = start - math.sqrt(trial) / shrinkage * error
        averaged = averaged + trial**-decay * (log_step - averaged)
    return averaged


def _spread(bridge: Bridge, state: State, beta: Tensor) -> Tensor:
    """Root mean square over data of the spread of ∂ log γ / ∂β over chains, a scalar.

    By quartiles: a chain far out would dominate a standard deviation, but weighs nothing in an effective sample size.
    """
    step = 1e-3 if beta < 0.5 else -1e-3
    change = bridge.log_density(state.point, beta + step) - bridge.log_density(state.point, beta)
    rate = torch.where(change.isfinite(), change / step, torch.nan)
    low, high = rate.nanquantile(rate.new_tensor([0.25, 0.75]), 0)
    spread: Tensor = ((high - low) / 1.349).nan_to_num(nan=0.0)
    return spread.square().mean().sqrt().to(state.point.z).clamp(min=1e-6)
