"""Pilot chains: temperatures and step sizes for annealed importance sampling, found once and frozen.

Whatever is tuned on the chains whose weights count makes those weights biased. So pilot chains walk up the temperatures
first, and are thrown away.
"""

import json
import math
from os import PathLike
from pathlib import Path as File
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Generator, Tensor
from torch.distributions import Distribution

from mcvae.bridge import Bridge, State, select
from mcvae.kernels import Kernel, MetropolisHastings
from mcvae.randomness import draw
from mcvae.schedules import LinearSchedule, SigmoidSchedule

__all__ = ["Spacing", "Tuning", "pilot_step_sizes", "step_units", "tune"]

Spacing = Literal["adaptive", "sigmoid", "linear"]
"""How temperatures are spaced: by equal losses of conditional effective sample size as the pilot saw them, or fixed."""


class Tuning(NamedTuple):
    """What pilot chains found, for any number of temperatures."""

    knots: Tensor
    """Temperatures of the pilot, `[M]`."""
    log_steps: Tensor
    """Log step sizes there, in units of the initial distribution's scales: `[M, 1]`, or `[M, B]` for one per datum."""
    spread: Tensor
    """Standard deviation of ∂ log γ_β / ∂β there, `[M]`: the rate at which weights drift apart."""
    spacing: Spacing = "adaptive"

    def temperatures(self, num_steps: int) -> Tensor:
        """K interior temperatures, `[K]`.

        A small step Δβ costs a share (Δβ · spread)² of the conditional effective sample size; the adaptive ladder makes
        all these losses equal.
        """
        if self.spacing != "adaptive" or num_steps == 0:
            rule = LinearSchedule if self.spacing == "linear" else SigmoidSchedule
            return rule(num_steps, interior=True)().detach().to(self.knots)
        ends = self.knots.new_tensor([0.0]), self.knots.new_tensor([1.0])
        grid = torch.cat([ends[0], self.knots, ends[1]])
        spread = torch.cat([self.spread[:1], self.spread, self.spread[-1:]])
        length = torch.cat([ends[0], ((spread[1:] + spread[:-1]) / 2 * grid.diff()).cumsum(0)])
        wanted = length[-1] * torch.arange(1, num_steps + 1).to(grid) / (num_steps + 1)
        betas = _interpolate(wanted, length, grid)
        share = 0.02  # of evenly spaced temperatures: a pilot that saw no spread must not leave a gap
        return (1 - share) * betas + share * torch.arange(1, num_steps + 1).to(grid) / (num_steps + 1)

    def step_sizes(self, betas: Tensor) -> Tensor:
        """Step sizes at `betas [K]` in units of the initial distribution's scales, `[K, 1]` or `[K, B]`."""
        return _interpolate(betas.to(self.knots), self.knots, self.log_steps).exp()

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
    num_knots: int = 20,
    num_chains: int = 16,
    target: float | None = None,
    generator: Generator | None = None,
) -> Tuning:
    """Let pilot chains walk from q to p(x, ·), twice for an adaptive ladder, and note what they need.

    Args:
        bridge: the densities.
        kernel: the kernel to tune.
        spacing: "adaptive", "sigmoid" or "linear".
        num_knots: temperatures of the pilot; between them step sizes are interpolated.
        num_chains: pilot chains per datum.
        target: acceptance; see `pilot_step_sizes`.
        generator: source of all randomness.

    >>> from torch.distributions import Independent, Normal
    >>> from mcvae.kernels import hmc
    >>> bridge = Bridge(Independent(Normal(torch.zeros(1, 2), torch.ones(1, 2)), 1), lambda z: -8 * z.square().sum(-1))
    >>> tuning = tune(bridge, hmc(3), generator=torch.Generator().manual_seed(0))
    >>> betas = tuning.temperatures(5)
    >>> bool((betas.diff() > 0).all()), tuning.step_sizes(betas).shape
    (True, torch.Size([5, 1]))
    """
    if spacing not in get_args(Spacing):
        raise ValueError(f"spacing must be one of {', '.join(get_args(Spacing))}, got {spacing!r}.")
    rule = LinearSchedule if spacing == "linear" else SigmoidSchedule
    knots = rule(num_knots, interior=True)().detach()
    log_steps, spread = _walk(bridge, kernel, knots, None, target, num_chains, generator)
    tuning = Tuning(knots.to(spread), log_steps, spread, spacing)
    if spacing == "adaptive":
        knots = tuning.temperatures(num_knots)
        log_steps, spread = _walk(bridge, kernel, knots, log_steps[0], target, num_chains, generator)
        tuning = Tuning(knots, log_steps, spread, spacing)
    return tuning


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
        target: acceptance ρ. By default the paper's: 0.8, and 0.9 without accept/reject; 0.3 for random walks.
        num_chains: pilot chains per datum.
        generator: source of all randomness.
    """
    with torch.no_grad():
        units = step_units(bridge.initial, kernel, generator)
        if not len(betas):
            return units.new_zeros(0, 1, 1)
        log_steps, _ = _walk(bridge, kernel, betas, None, target, num_chains, generator)
        return log_steps.exp().unsqueeze(-1) * units


def step_units(initial: Distribution, kernel: Kernel, generator: Generator | None = None) -> Tensor:
    """Step sizes of one standard deviation of `initial` in every dimension, `[B, D]`: the mass of HMC."""
    try:
        scale = initial.stddev
    except NotImplementedError:  # a flow: look at samples
        scale = draw(initial, (100,), generator).std(0)
    proposal: Any = getattr(kernel, "proposal", None)
    unit: Tensor = proposal.step_unit(scale) if hasattr(proposal, "step_unit") else torch.ones_like(scale)
    return unit.detach()


def _walk(
    bridge: Bridge,
    kernel: Kernel,
    betas: Tensor,
    log_step: Tensor | None,
    target: float | None,
    num_chains: int,
    generator: Generator | None,
) -> tuple[Tensor, Tensor]:
    """Log step sizes `[M, B]` and spread `[M]` along `betas [M]`, from a first guess `[B]` or from a search."""
    if target is None:
        target = 0.9 if not isinstance(kernel, MetropolisHastings) else 0.8 if kernel.uses_score else 0.3
    state = State(bridge.sample(num_chains, with_score=kernel.uses_score, generator=generator))
    units = step_units(bridge.initial, kernel, generator)
    searching, betas = log_step is None, betas.to(state.point.z)
    log_step = torch.full_like(units[:, 0], math.log(0.2)) if log_step is None else log_step.expand(len(units))
    tuned, spreads = list[Tensor](), list[Tensor]()
    for beta, following in zip(betas, torch.cat([betas[1:], torch.ones_like(betas[:1])]), strict=True):
        num_trials = 40 if searching and not tuned else 4
        log_step = _dual_averaging(bridge, kernel, state, beta, log_step, units, target, num_trials, generator)
        tuned.append(log_step)
        step = log_step.exp().unsqueeze(-1) * units
        transition = kernel(bridge, state, beta, step, generator=generator)
        usable = ~transition.state.point.log_p.isnan()
        state = State(select(usable, transition.state.point, state.point), transition.state.momentum)
        spreads.append(_spread(bridge, state, beta, following))
    return torch.stack(tuned), torch.stack(spreads)


def _dual_averaging(
    bridge: Bridge,
    kernel: Kernel,
    state: State,
    beta: Tensor,
    start: Tensor,
    units: Tensor,
    target: float,
    num_trials: int,
    generator: Generator | None,
) -> Tensor:
    """Log step sizes `[B]` for an acceptance `target`, by trial moves from where the chains are.

    The averaging of Hoffman and Gelman (2014), with their constants.
    """
    shrinkage, early, decay = 0.05, 10.0, 0.75
    alive = state.point.log_p > -torch.inf
    log_step, averaged, error = start, start, torch.zeros_like(start)
    for trial in range(1, num_trials + 1):
        step = log_step.exp().unsqueeze(-1) * units
        acceptance = kernel(bridge, state, beta, step, generator=generator).acceptance
        short = target - ((acceptance * alive).sum(0) / alive.sum(0).clamp(min=1)).to(start)
        short = torch.where(alive.any(0), short, 0.0)
        error = error + (short - error) / (trial + early)
        log_step = start - math.sqrt(trial) / shrinkage * error
        averaged = averaged + trial**-decay * (log_step - averaged)
    return averaged


def _spread(bridge: Bridge, state: State, beta: Tensor, following: Tensor) -> Tensor:
    """Root mean square over data of the standard deviation of ∂ log γ / ∂β over chains, a scalar."""
    change = bridge.log_density(state.point, following) - bridge.log_density(state.point, beta)
    rate = change / (following - beta).clamp(min=1e-6)
    finite = rate.isfinite()
    number = finite.sum(0).clamp(min=2)
    rate = torch.where(finite, rate, 0.0)
    mean = rate.sum(0) / number
    variance = torch.where(finite, (rate - mean).square(), 0.0).sum(0) / (number - 1)
    return variance.mean().sqrt().to(state.point.z).clamp(min=1e-6)
