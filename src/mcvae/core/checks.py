"""Witnesses that know nothing of the weighted chains: what they say makes "converged" more than a hope.

Weights that never saw the missing mass look perfect. So other chains start elsewhere: the evidence must be the same,
and so must the places where they end. Chains that move on must stay where they are. And a mode that a search finds
must have been visited.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from mcvae.core.annealing import moved_on
from mcvae.core.bounds import iwae
from mcvae.core.bridge import Bridge, NonFiniteDensityError
from mcvae.core.diagnostics import standard_error
from mcvae.core.estimator import AnnealedEstimator
from mcvae.core.frames import Frame
from mcvae.core.kernels import Kernel, hmc
from mcvae.core.modes import MOST_ROWS, Modes, find_modes
from mcvae.core.schedules import FixedSchedule
from mcvae.core.starts import Widened
from mcvae.core.tuning import Tuning
from mcvae.core.walks import explore, tune
from mcvae.core.witnesses import Highest, WeightedStates, around, climbing, drift, hidden, pulled_away, strays

__all__ = ["Checks", "check"]


class Checks(NamedTuple):
    """What independent witnesses found, `[B]` each."""

    log_evidence: Tensor
    """Estimate from another start; NaN if there was none to be had."""
    standard_error: Tensor
    """Of that estimate."""
    strays: Tensor
    """Share of the chains from a wider start that ended where no weighted chain did."""
    hidden: Tensor
    """Share of the evidence in the heaviest mode that a search found, as far as the weighted chains do not show it."""
    drift: Tensor
    """By how many standard errors any moment changed as chains moved on at the last temperature."""

    def gap(self, log_evidence: Tensor, standard_error: Tensor) -> tuple[Tensor, Tensor]:
        """How far the second estimate is from the first, whose value and error are given, and the error of that.

        The mean of the weights seldom exceeds the evidence, and often falls short of it. So a second estimate that is
        higher says more against the first than one that is lower, whose error counts one and a half times; and one that
        is lower because few chains carry its weight says nothing.
        """
        difference = self.log_evidence - log_evidence
        difference = torch.where((difference < 0) & (self.standard_error > 0.5), 0.0, difference)
        error = torch.hypot(standard_error, self.standard_error)
        return difference.abs(), torch.where(difference < 0, 1.5 * error, error)


WIDENING = (1.0, 3.0, 9.0)
"""Factors by which the wider start stretches the initial distribution."""


@torch.no_grad()
def check(
    bridge: Bridge,
    frame: Frame | None,
    estimator: AnnealedEstimator,
    chains: WeightedStates,
    *,
    generator: Generator | None = None,
) -> Checks:
    """Look for evidence against weighted chains where they themselves cannot.

    Args:
        bridge: the densities, from the user's start.
        frame: the coordinates in which the chains ran, if not those of the latents.
        estimator: the frozen estimator of the chains.
        chains: where they ended, and their weights.
        generator: source of all randomness.
    """
    kernel = next((k for k in estimator.kernels if isinstance(k, Kernel) and k.accepts), None) or hmc(3)
    highest = Highest(bridge.log_joint)
    watched = replace(bridge, log_joint=highest)
    wide = replace(watched, initial=Widened(bridge.initial, WIDENING))
    number = min(256, max(32, 1024 // chains.latents.shape[1]))  # many data share the cost
    walk = explore(wide, kernel, num_chains=number, generator=generator)
    alive = walk.point.log_p > -torch.inf
    local, found, steps = watched, walk.point.z, walk.last_step(kernel, wide)
    ended, log_weights = chains, chains.log_weights
    if frame is not None:
        local, found = frame.bridge(watched), frame.from_latents(found)
        ended = WeightedStates(frame.from_latents(chains.latents), log_weights)
        steps = estimator.step_sizes(local.initial)[-1]
    before = local.evaluate(ended.latents, with_score=kernel.uses_score)
    lowest = torch.where(log_weights > log_weights.amax(0) - 5, before.log_p, torch.inf).amin(0)
    for _ in range(_MOST_ROUNDS):  # chains from far away may be on their way still
        point = local.evaluate(found, with_score=kernel.uses_score)
        later = moved_on(local, kernel, found, steps, 10, generator)
        frozen = (later.log_p == point.log_p) & (later.log_p < lowest - 10)  # they failed, and bear no witness
        found, (far, farthest) = later.z, strays(later.z, alive & ~frozen, ended)
        if not climbing(later.log_p - point.log_p, far):
            break
    after = moved_on(local, kernel, ended.latents, steps, 6, generator)
    local.evaluate(around(ended, generator), with_score=False)  # for `highest`
    log_evidence, error = iwae(log_weights), standard_error(log_weights)
    second = torch.full_like(log_evidence, torch.nan), torch.full_like(error, torch.inf)
    if walk.tuning.length <= _TOO_FAR:
        second = _estimate(wide, walk.tuning, kernel, generator)
    modes = None
    if kernel.uses_score:
        farthest = farthest if frame is None else frame.to_latents(farthest)
        pulled = pulled_away(wide, chains, generator)
        modes = _search(bridge, torch.cat([chains.heaviest(), farthest, highest.latents, pulled]))
        second = _second(bridge, second, modes, kernel, (log_evidence, error), generator)
    return Checks(
        *second,
        far.sum(0) / alive.sum(0).clamp(min=1),
        hidden(modes, log_evidence, chains),
        drift(before, after, log_weights),
    )


_MOST_ROUNDS = 6
"""Of ten moves each, for chains from the wider start."""


def _search(bridge: Bridge, starts: Tensor) -> Modes | None:
    """Modes by climbs from `starts [P, B, D]`, in portions: other data of the batch are no reason not to look."""
    dim = starts.shape[-1]
    small = dim <= _MOST_DIMENSIONS and starts.numel() * dim <= _MOST_DERIVATIVES
    return find_modes(bridge, starts, max_rows=MOST_ROWS if small else None)


_MOST_DIMENSIONS = 400
"""Of latents, for a search: D + 1 scores a step cost too much beyond."""
_MOST_DERIVATIVES = 10**7
"""Second derivatives that a search may hold, of all data."""


def _second(
    bridge: Bridge,
    wide: tuple[Tensor, Tensor],
    modes: Modes | None,
    kernel: Kernel,
    first: tuple[Tensor, Tensor],
    generator: Generator | None,
) -> tuple[Tensor, Tensor]:
    """The evidence from another start, and its standard error, `[B]` each.

    The wider start comes first: if it finds more, mass was missed. If it finds less, or cannot tell, it may be too far
    away, and a start around a mode is asked, too. Whether chains from the wider one went elsewhere is another question.
    """
    value, error = wide
    short = first[0] - value > 2 * (error.square() + first[1].square()).sqrt()
    unsure = short | ~(error < 0.25)
    if modes is None or not bool(unsure.any()) or not modes.everywhere():
        return wide
    nearby = modes.heaviest().bridge(bridge, 1.5)
    try:
        tuning = tune(nearby, kernel, generator=generator)
    except NonFiniteDensityError:
        return wide
    near, near_error = _estimate(nearby, tuning, kernel, generator)
    better = unsure & (near_error < error.clamp(min=0.1))
    return torch.where(better, near, value), torch.where(better, near_error, error)


def _estimate(bridge: Bridge, tuning: Tuning, kernel: Kernel, generator: Generator | None) -> tuple[Tensor, Tensor]:
    """log p̂ with as many temperatures as the path is long, and its standard error; NaN where it cannot be had."""
    betas = tuning.temperatures(min(max(16, math.ceil(4 * tuning.length**2)), 256))
    steps = tuning.relative_step_sizes(kernel, betas)
    chains = AnnealedEstimator(kernel, FixedSchedule(betas), steps, num_samples=64, bound=iwae)
    try:
        log_weight = chains.run(bridge, generator=generator).log_weight
    except NonFiniteDensityError:  # a wider start than the user's may reach where nothing can be evaluated
        unknown = torch.full(bridge.initial.batch_shape, torch.nan, dtype=torch.float64, device=betas.device)
        return unknown, torch.full_like(unknown, torch.inf)
    return iwae(log_weight), standard_error(log_weight)


_TOO_FAR = 10.0
"""Length of a path that 256 temperatures are too few for."""
