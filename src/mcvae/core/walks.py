"""Pilot chains: they walk from the initial distribution to p(x, ·), note what they need, and are thrown away.

Whatever is tuned on the chains whose weights count makes those weights biased, so these do not count.
"""

import math
from typing import NamedTuple, get_args

import torch
from torch import Generator, Tensor

from mcvae.core.bridge import Bridge, Point, State, Step, select
from mcvae.core.initials import standard_deviation
from mcvae.core.kernels import Kernel
from mcvae.core.tuning import Spacing, Tuning, spaced

__all__ = ["Exploration", "explore", "pilot_step_sizes", "tune"]


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
    point = bridge.sample(num_chains, with_score=kernel.uses_score, generator=generator)
    ladder = _Adaptive(num_knots or _MOST_KNOTS) if spacing == "adaptive" else spaced(spacing, num_knots or 20)
    walked = _Walk(bridge, kernel, point, target, generator).through(ladder)
    return walked.tuning._replace(spacing=spacing)


_MOST_KNOTS = 1000
"""Of an adaptive pilot; N(0, I) to a hundredth of its width in 500 dimensions takes about 300."""


class Exploration(NamedTuple):
    """Chains that walked to p(x, ·), and what they needed on their way."""

    tuning: Tuning
    """Temperatures and step sizes."""
    point: Point
    """Where the chains ended, `[N, B, D]`."""

    def last_step(self, kernel: Kernel, bridge: Bridge) -> Tensor:
        """The step size that chains had at the end, `[B, D]`."""
        return self.tuning.log_steps[-1].exp().unsqueeze(-1) * step_units(bridge, kernel)


@torch.no_grad()
def explore(bridge: Bridge, kernel: Kernel, *, num_chains: int = 64, generator: Generator | None = None) -> Exploration:
    """Walk from q to p(x, ·) in large steps, larger on a long way, and see where chains end.

    A density that cannot be evaluated where chains start is taken to be 0 there: they may start far out.

    Args:
        bridge: the densities.
        kernel: the kernel that moves them.
        num_chains: per datum.
        generator: source of all randomness.
    """
    point = bridge.evaluate(bridge.draw(num_chains, generator=generator), with_score=kernel.uses_score)
    point = point._replace(log_p=torch.where(point.log_p.isnan(), -torch.inf, point.log_p))
    return _Walk(bridge, kernel, point, None, generator).through(_Adaptive(_MOST_KNOTS, loss=1.0, growth=0.1))


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
    """Find step sizes for given temperatures, `[K, B, D]`, on pilot chains that are then thrown away.

    Args:
        bridge: the densities.
        kernel: the kernel to tune.
        betas: temperatures `[K]`.
        target: acceptance ρ; the kernel's own by default.
        num_chains: pilot chains per datum.
        generator: source of all randomness.
    """
    units = step_units(bridge, kernel)
    if not len(betas):
        return units.new_zeros(0, 1, 1)
    point = bridge.sample(num_chains, with_score=kernel.uses_score, generator=generator)
    walked = _Walk(bridge, kernel, point, target, generator).through(betas)
    return walked.tuning.log_steps.exp().unsqueeze(-1) * units


def step_units(bridge: Bridge, kernel: Kernel) -> Tensor:
    """Step sizes of one standard deviation of the initial distribution in every dimension, `[B, D]`: HMC's mass."""
    return kernel.step_unit(standard_deviation(bridge.initial)).detach()


class _Adaptive(NamedTuple):
    """Temperatures that are chosen on the way: log-weights spread by `loss` from one to the next."""

    most: int
    loss: float = 0.5
    growth: float = 0.0
    """What is added to `loss` at every temperature."""

    def stride(self, number: int, spread: Tensor) -> Tensor:
        """How far the next temperature is, after a number of them."""
        return ((self.loss + self.growth * number) / spread).clamp(max=0.2)


class _Walk:
    """Chains on their way from one temperature to the next, and the step size that suits them where they are."""

    def __init__(self, bridge: Bridge, kernel: Kernel, point: Point, target: float | None, generator: Generator | None):
        self.bridge, self.kernel, self.generator = bridge, kernel, generator
        self.target = kernel.target_acceptance if target is None else target
        self.state = State(point)
        self.scale = standard_deviation(bridge.initial)
        self.units = step_units(bridge, kernel)
        self.log_step = torch.full_like(self.units[:, 0], math.log(0.2))
        """Relative to `units`, `[B]`."""

    def through(self, ladder: Tensor | _Adaptive) -> Exploration:
        """Move at all temperatures of a ladder, `[M]`, or of one that is chosen on the way."""
        beta = self.units.new_zeros(())
        knots, tuned, spreads = list[Tensor](), list[Tensor](), [self._spread(beta)]
        most = ladder.most if isinstance(ladder, _Adaptive) else len(ladder)
        for number in range(most):
            if isinstance(ladder, _Adaptive):
                beta = beta + ladder.stride(number, spreads[-1])
                if beta > 0.999:
                    break
            else:
                beta = ladder[number].to(self.units)
            self._adapt(Step(number + 1, most, beta, beta, self.units))
            knots.append(beta)
            tuned.append(self.log_step)
            spreads.append(self._spread(beta))
        unfinished = isinstance(ladder, _Adaptive) and len(knots) == most
        reached = float(knots[-1]) if unfinished else 1.0
        found = Tuning(torch.stack(knots), _smooth(torch.stack(tuned)), torch.stack(spreads), reached=reached)
        return Exploration(found, self.state.point)

    def _adapt(self, unit: Step) -> None:
        """Move at one temperature, while step sizes approach the target acceptance. `unit` is a step of size 1.

        Stochastic approximation with the mean over chains, which is precise enough for a gain that hardly falls.
        """
        gains = [2.0] * 8 + [1.0] * 4 if unit.index == 1 else [1.5, 1.0, 0.7]
        # near 1, the acceptance hardly answers to the step
        flatness = (0.16 if self.kernel.accepts else 0.4) / (self.target * (1 - self.target))
        for gain in gains:
            point = self.state.point
            alive = point.log_p > -torch.inf
            step = unit._replace(step_size=self.log_step.exp().unsqueeze(-1) * unit.step_size)
            transition = self.kernel(self.bridge, self.state, step, generator=self.generator)
            acceptance = (transition.acceptance * alive).sum(0) / alive.sum(0).clamp(min=1)
            excess = acceptance.to(self.log_step) - self.target
            log_step = self.log_step + flatness * gain * torch.where(alive.any(0), excess, 0.0)
            self.log_step = torch.minimum(log_step, self._quarter_turn(point.z))
            moved = transition.state
            self.state = State(select(~moved.point.log_p.isnan(), moved.point, point), moved.momentum)

    def _quarter_turn(self, z: Tensor) -> Tensor:
        """The largest log step `[B]`: a move turns around where the chains are by a quarter, and no further.

        Dynamics in a Gaussian are rotations. After a quarter turn a state is independent of where it was; after a half
        turn it is its mirror image, every move is accepted, and nothing mixes. Acceptance alone would lead there.
        """
        if len(z) < 4:
            return torch.full_like(z[0, :, 0], torch.inf)
        low, high = z.quantile(z.new_tensor([0.1587, 0.8413]), 0)
        relative = ((high - low) / 2 / self.scale).clamp(min=1e-12)
        typical = relative.square().reciprocal().mean(-1).rsqrt()  # narrow dimensions turn fastest
        return self.kernel.step_unit(math.pi / 2 / self.kernel.num_evaluations * typical).log()

    def _spread(self, beta: Tensor) -> Tensor:
        """Root mean square over data of the spread of ∂ log γ / ∂β over chains, a scalar.

        By quartiles: a chain far out would dominate a standard deviation, but weighs nothing in an effective sample
        size.
        """
        bridge, point, step = self.bridge, self.state.point, 1e-3 if beta < 0.5 else -1e-3
        change = bridge.log_density(point, beta + step) - bridge.log_density(point, beta)
        rate = torch.where(change.isfinite(), change / step, torch.nan)
        low, high = rate.nanquantile(rate.new_tensor([0.25, 0.75]), 0)
        spread: Tensor = ((high - low) / 1.349).nan_to_num(nan=0.0)
        return spread.square().mean().sqrt().to(point.z).clamp(min=1e-6)


def _smooth(log_steps: Tensor) -> Tensor:
    """Means over five neighbours, `[M, B]`: what is left of noise would be frozen into every chain."""
    padded = torch.cat([log_steps[:1]] * 2 + [log_steps] + [log_steps[-1:]] * 2)
    return padded.unfold(0, 5, 1).mean(-1)
