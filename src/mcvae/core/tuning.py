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

from mcvae.core.bridge import Bridge, Point, State, Step, check_start, select
from mcvae.core.initials import standard_deviation
from mcvae.core.kernels import Kernel
from mcvae.core.schedules import LinearSchedule, SigmoidSchedule
from mcvae.core.starts import Frame
from mcvae.core.step_sizes import FixedStepSizes, RelativeStepSizes

__all__ = ["Exploration", "Spacing", "Tuning", "explore", "pilot_step_sizes", "spaced", "tune"]

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
    reached: float = 1.0
    """Temperature at which the pilot stopped for want of knots; 1 if it reached the end."""
    frame: Frame | None = None
    """Coordinates in which chains start from N(0, I), if the pilot found a better start than the initial one."""
    fitted: bool = False
    """Whether chains start around a mode of their own density; without a `frame`, one is fitted to the data at hand."""

    @property
    def length(self) -> float:
        """How far the densities are apart: the spread, integrated over temperatures.

        The relative variance of weights is at best its square over the number of temperatures.
        """
        grid = torch.cat([self.knots.new_zeros(1), self.knots, self.knots.new_ones(1)])
        spread = torch.cat([self.spread, self.spread[-1:]])
        return float(((spread[1:] + spread[:-1]) / 2 * grid.diff()).sum())

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
        """One step size for all data, the median, and no frame: for data that the pilot did not see."""
        return self._replace(log_steps=self.log_steps.median(1, keepdim=True).values, frame=None)

    def save(self, path: str | PathLike[str]) -> None:
        """Write as JSON."""
        content = {name: getattr(self, name).tolist() for name in ("knots", "log_steps", "spread")}
        frame = None if self.frame is None else {name: value.tolist() for name, value in self.frame._asdict().items()}
        content |= {"spacing": self.spacing, "reached": self.reached, "frame": frame, "fitted": self.fitted}
        File(path).write_text(json.dumps(content) + "\n")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Tuning":
        """Read what `save` wrote."""
        content = json.loads(File(path).read_text())
        knots, log_steps, spread = (torch.tensor(content[name]) for name in ("knots", "log_steps", "spread"))
        frame = content.get("frame")
        if frame is not None:
            frame = Frame(torch.tensor(frame["mean"]), torch.tensor(frame["factor"]))
        fitted = content.get("fitted", frame is not None)
        return cls(knots, log_steps, spread, content["spacing"], content.get("reached", 1.0), frame, fitted)


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
    walk = _walk(
        bridge,
        kernel,
        None if spacing == "adaptive" else spaced(spacing, num_knots or 20),
        target,
        num_chains,
        generator,
        num_knots or _MOST_KNOTS,
    )
    return Tuning(walk.knots, walk.log_steps, walk.spread, spacing, walk.reached)


_MOST_KNOTS = 1000  # of an adaptive pilot; N(0, I) to a hundredth of its width in 500 dimensions takes about 300


class Exploration(NamedTuple):
    """Chains that walked to p(x, ·) for the sake of where they end."""

    tuning: Tuning
    """What they needed on their way."""
    point: Point
    """Where they ended, `[N, B, D]`."""

    def last_step(self, kernel: Kernel, bridge: Bridge) -> Tensor:
        """The step size they had at the end, `[B, D]`."""
        return self.tuning.log_steps[-1].exp().unsqueeze(-1) * step_units(bridge, kernel)


@torch.no_grad()
def explore(bridge: Bridge, kernel: Kernel, *, num_chains: int = 64, generator: Generator | None = None) -> Exploration:
    """Walk from q to p(x, ·) in large steps, larger on a long way, and see where chains end.

    Args:
        bridge: the densities.
        kernel: the kernel that moves them.
        num_chains: per datum.
        generator: source of all randomness.
    """
    walk = _walk(bridge, kernel, None, None, num_chains, generator, _MOST_KNOTS, loss=1.0, growth=0.1, forgiving=True)
    return Exploration(Tuning(walk.knots, walk.log_steps, walk.spread, "adaptive", walk.reached), walk.point)


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
        walk = _walk(bridge, kernel, betas, target, num_chains, generator)
        return walk.log_steps.exp().unsqueeze(-1) * units


def step_units(bridge: Bridge, kernel: Kernel) -> Tensor:
    """Step sizes of one standard deviation of the initial distribution in every dimension, `[B, D]`: HMC's mass."""
    return kernel.step_unit(standard_deviation(bridge.initial)).detach()


class _Walk(NamedTuple):
    """What pilot chains met on their way."""

    knots: Tensor
    log_steps: Tensor
    spread: Tensor
    point: Point
    reached: float


def _walk(
    bridge: Bridge,
    kernel: Kernel,
    betas: Tensor | None,
    target: float | None,
    num_chains: int,
    generator: Generator | None,
    max_knots: int = 0,
    loss: float = 0.5,
    growth: float = 0.0,
    forgiving: bool = False,
) -> _Walk:
    """Walk through temperatures `[M]`, those given or adaptive ones, and adapt the step on every move.

    An adaptive temperature is put where log-weights spread by `loss` on the way to it, and by `growth` more each time.
    """
    target = kernel.target_acceptance if target is None else target
    point = bridge.evaluate(bridge.draw(num_chains, generator=generator), with_score=kernel.uses_score)
    if forgiving:  # far out, a density that cannot be evaluated is taken to be 0
        point = point._replace(log_p=torch.where(point.log_p.isnan(), -torch.inf, point.log_p))
    check_start(point)
    state = State(point)
    scale = standard_deviation(bridge.initial)
    units = kernel.step_unit(scale).detach()
    log_step = torch.full_like(units[:, 0], math.log(0.2))
    beta = units.new_zeros(())
    knots, tuned, spreads = list[Tensor](), list[Tensor](), [_spread(bridge, state, beta)]
    while len(knots) < (max_knots if betas is None else len(betas)):
        beta = (
            beta + ((loss + growth * len(knots)) / spreads[-1]).clamp(max=0.2)
            if betas is None
            else betas[len(knots)].to(units)
        )
        if betas is None and beta > 0.999:
            break
        unit = Step(len(knots) + 1, max_knots if betas is None else len(betas), beta, beta, units)
        state, log_step = _adapt(bridge, kernel, state, unit, log_step, target, scale, not tuned, generator)
        knots.append(beta)
        tuned.append(log_step)
        spreads.append(_spread(bridge, state, beta))
    finished = betas is not None or len(knots) < max_knots
    log_steps = _smooth(torch.stack(tuned))
    return _Walk(
        torch.stack(knots), log_steps, torch.stack(spreads), state.point, 1.0 if finished else float(knots[-1])
    )


def _adapt(
    bridge: Bridge,
    kernel: Kernel,
    state: State,
    unit: Step,
    log_step: Tensor,
    target: float,
    scale: Tensor,
    first: bool,
    generator: Generator | None,
) -> tuple[State, Tensor]:
    """Move chains at one temperature while log step sizes `[B]` approach an acceptance `target`.

    Stochastic approximation with the mean over chains, which is precise enough for a gain that hardly falls. `unit` is
    a step of relative size 1.
    """
    gains = [2.0] * 8 + [1.0] * 4 if first else [1.5, 1.0, 0.7]
    flatness = (0.16 if kernel.accepts else 0.4) / (target * (1 - target))  # near 1 it hardly answers to the step
    for gain in gains:
        alive = state.point.log_p > -torch.inf
        step = unit._replace(step_size=log_step.exp().unsqueeze(-1) * unit.step_size)
        transition = kernel(bridge, state, step, generator=generator)
        excess = ((transition.acceptance * alive).sum(0) / alive.sum(0).clamp(min=1)).to(log_step) - target
        log_step = log_step + flatness * gain * torch.where(alive.any(0), excess, 0.0)
        log_step = torch.minimum(log_step, _quarter_turn(kernel, state.point.z, scale))
        usable = ~transition.state.point.log_p.isnan()
        state = State(select(usable, transition.state.point, state.point), transition.state.momentum)
    return state, log_step


def _quarter_turn(kernel: Kernel, z: Tensor, scale: Tensor) -> Tensor:
    """The largest log step `[B]`: a move turns around where the chains are by a quarter, and no further.

    Dynamics in a Gaussian are rotations. After a quarter turn a state is independent of where it was; after a half turn
    it is its mirror image, every move is accepted, and nothing mixes. Acceptance alone would lead there.
    """
    if len(z) < 4:
        return torch.full_like(z[0, :, 0], torch.inf)
    low, high = z.quantile(z.new_tensor([0.1587, 0.8413]), 0)
    relative = ((high - low) / 2 / scale).clamp(min=1e-12)
    typical = relative.square().reciprocal().mean(-1).rsqrt()  # narrow dimensions turn fastest
    return kernel.step_unit(math.pi / 2 / kernel.num_evaluations * typical).log()


def _smooth(log_steps: Tensor) -> Tensor:
    """Means over five neighbours, `[M, B]`: what is left of noise would be frozen into every chain."""
    padded = torch.cat([log_steps[:1]] * 2 + [log_steps] + [log_steps[-1:]] * 2)
    return padded.unfold(0, 5, 1).mean(-1)


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
