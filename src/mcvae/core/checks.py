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

from mcvae.core.bounds import iwae
from mcvae.core.bridge import Bridge, NonFiniteDensityError, Point, State, Step
from mcvae.core.diagnostics import effective_sample_size, standard_error
from mcvae.core.estimator import AnnealedEstimator
from mcvae.core.kernels import Kernel, hmc
from mcvae.core.randomness import draw, standard_normal
from mcvae.core.schedules import FixedSchedule
from mcvae.core.scores import LogDensity
from mcvae.core.starts import Frame, Modes, Widened, find_modes
from mcvae.core.tuning import Tuning, explore, tune

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


WIDENING = (1.0, 3.0, 9.0)
"""Factors by which the wider start stretches the initial distribution."""


@torch.no_grad()
def check(
    bridge: Bridge,
    frame: Frame | None,
    estimator: AnnealedEstimator,
    log_weights: Tensor,
    latents: Tensor,
    *,
    generator: Generator | None = None,
) -> Checks:
    """Look for evidence against weighted chains where they themselves cannot.

    Args:
        bridge: the densities, from the user's start.
        frame: the coordinates in which the chains ran, if not those of the latents.
        estimator: the frozen estimator of the chains.
        log_weights: `[S, B]`.
        latents: where the chains ended, `[S, B, D]`.
        generator: source of all randomness.
    """
    kernel = next((k for k in estimator.kernels if isinstance(k, Kernel) and k.accepts), None) or hmc(3)
    highest = _Highest(bridge.log_joint)
    watched = replace(bridge, log_joint=highest)
    wide = replace(watched, initial=Widened(bridge.initial, WIDENING))
    chains = min(256, max(32, 1024 // latents.shape[1]))  # many data share the cost
    walk = explore(wide, kernel, num_chains=chains, generator=generator)
    alive = walk.point.log_p > -torch.inf
    local, found, ended, steps = watched, walk.point.z, latents, walk.last_step(kernel, wide)
    if frame is not None:
        local, found, ended = frame.bridge(watched), frame.from_latents(found), frame.from_latents(ended)
        steps = estimator.step_sizes(local.initial)[-1]
    before = local.evaluate(ended, with_score=bool(kernel.uses_score))
    lowest = torch.where(log_weights > log_weights.amax(0) - 5, before.log_p, torch.inf).amin(0)
    for _ in range(_MOST_ROUNDS):  # chains from far away may be on their way still
        point = local.evaluate(found, with_score=bool(kernel.uses_score))
        later = _moved_on(local, kernel, found, steps, 10, generator)
        frozen = (later.log_p == point.log_p) & (later.log_p < lowest - 10)  # they failed, and bear no witness
        found, (far, farthest) = later.z, _strays(later.z, alive & ~frozen, ended, log_weights)
        if not _climbing(later.log_p - point.log_p, far):
            break
    after = _moved_on(local, kernel, ended, steps, 6, generator)
    local.evaluate(_around(ended, log_weights, generator), with_score=False)  # for `highest`
    log_evidence, error = iwae(log_weights), standard_error(log_weights)
    second = torch.full_like(log_evidence, torch.nan), torch.full_like(error, torch.inf)
    if walk.tuning.length <= _TOO_FAR:
        second = _estimate(wide, walk.tuning, kernel, generator)
    modes = None
    if kernel.uses_score:
        farthest = farthest if frame is None else frame.to_latents(farthest)
        pulled = _pulled_away(wide, latents, log_weights, generator)
        modes = _search(bridge, torch.cat([_heaviest(latents, log_weights), farthest, highest.latents, pulled]))
        second = _second(bridge, second, modes, kernel, (log_evidence, error), generator)
    return Checks(
        *second,
        far.sum(0) / alive.sum(0).clamp(min=1),
        _hidden(modes, log_evidence, latents, log_weights),
        _drift(before, after, log_weights),
    )


_MOST_ROUNDS = 6


def _search(bridge: Bridge, starts: Tensor) -> Modes | None:
    """Modes by climbs from `starts [P, B, D]`, in portions: other data of the batch are no reason not to look."""
    number, _, dim = starts.shape
    small = number * (dim + 1) <= _ROWS and starts.numel() * dim <= _MOST_DERIVATIVES
    return find_modes(bridge, starts, max_rows=_ROWS if small else None)


_ROWS = 4096  # latents that one evaluation of a search may hold
_MOST_DERIVATIVES = 10**7  # second ones, that it may hold over all data


def _pulled_away(wide: Bridge, latents: Tensor, log_weights: Tensor, generator: Generator | None) -> Tensor:
    """Of many samples of the wider start, the four highest outside the chains' bulk whose score leads away from it.

    A narrow mode is seldom met by a chain, but its slopes reach far: `[4, B, D]`, or none if none leads away.
    """
    if generator is not None:  # a stream of its own, whatever the other witnesses draw
        generator = Generator(generator.device).manual_seed(generator.initial_seed() + 1)
    batch, dim = latents.shape[1:]
    share = log_weights.softmax(0).unsqueeze(-1).to(latents)
    mean = (share * latents).sum(0)
    scale = (share * (latents - mean).square()).sum(0).sqrt().clamp(min=1e-30)
    size = max(1, _NET // (8 * batch))
    found, highest = latents[:0], log_weights[:0]
    for _ in range(max(_NET // batch, _OWN_NET) // size):
        point = wide.evaluate(draw(wide.initial, (size,), generator), with_score=True)
        assert point.score_p is not None
        outwards = (point.z - mean) / scale
        away = ((point.score_p * scale * outwards).sum(-1) > 0) & (outwards.norm(dim=-1) > dim**0.5 + 2)
        rank = torch.where(away, point.log_p, -torch.inf).nan_to_num(nan=-torch.inf)
        found, rank = torch.cat([found, point.z]), torch.cat([highest, rank.to(highest)])
        highest, best = rank.topk(min(4, len(rank)), 0)
        found = found.gather(0, best.unsqueeze(-1).expand(-1, -1, dim))
    known = highest > -torch.inf
    if not bool(known.any()):
        return found[:0]
    # where nothing leads away, climbs from far out would only get lost
    return torch.where(known.unsqueeze(-1), found, _heaviest(latents, log_weights)[:1].to(found))


_OWN_NET = 8192  # samples that a datum has for itself, however many share


def _climbing(change: Tensor, far: Tensor) -> bool:
    """Whether log p of the chains that are `far [N, B]` still rises, for any datum."""
    number = far.sum(0)
    change = torch.where(far, change, 0.0).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    mean = change.sum(0) / number.clamp(min=1)
    error = ((change.square().sum(0) / number.clamp(min=1) - mean.square()).clamp(min=0) / number.clamp(min=1)).sqrt()
    return bool(((number > 0) & (mean > error + 0.1)).any())


class _Highest:
    """A log density that remembers where it was highest: what a chain passed, but did not stop at.

    Witnesses go further out than the user's start. Where the density cannot be evaluated there, it is taken to be 0.
    """

    latents: Tensor

    def __init__(self, log_joint: LogDensity):
        self.log_joint = log_joint
        self.value: Tensor | None = None

    def __call__(self, z: Tensor) -> Tensor:
        value = self.log_joint(z)
        height, row = value.detach().nan_to_num(nan=-torch.inf, posinf=-torch.inf).max(0)
        here = z.detach().gather(0, row.reshape(1, -1, 1).expand(1, -1, z.shape[-1]))
        if self.value is None:
            self.value, self.latents = height, here
        better = height > self.value
        self.value = torch.where(better, height, self.value)
        self.latents = torch.where(better.unsqueeze(-1), here, self.latents)
        return torch.where(value < torch.inf, value, -torch.inf)


def _moved_on(
    bridge: Bridge, kernel: Kernel, z: Tensor, step_size: Tensor, number: int, generator: Generator | None
) -> Point:
    """Where chains are after moves that leave the target invariant."""
    one = torch.ones((), dtype=torch.float64, device=z.device)
    state = State(bridge.evaluate(z, with_score=bool(kernel.uses_score)))
    for _ in range(number):
        state = kernel(bridge, state, Step(1, 1, one, one, step_size.to(z)), generator=generator).state
    return state.point


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
    fit = None if modes is None or not bool(unsure.any()) else modes.heaviest()
    if fit is None:
        return wide
    around = fit.bridge(bridge, 1.5)
    try:
        tuning = tune(around, kernel, generator=generator)
    except NonFiniteDensityError:
        return wide
    near, near_error = _estimate(around, tuning, kernel, generator)
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


_TOO_FAR = 10.0  # length of a path that 256 temperatures are too few for


def _heaviest(latents: Tensor, log_weights: Tensor) -> Tensor:
    """The end state of the chain with the largest weight, `[1, B, D]`."""
    best = log_weights.argmax(0).reshape(1, -1, 1)
    return latents.gather(0, best.expand(-1, -1, latents.shape[-1]))


def _around(ended: Tensor, log_weights: Tensor, generator: Generator | None) -> Tensor:
    """Points of a Gaussian a little wider than the weighted states, `[N, B, D]`: a net for spikes between chains."""
    share = log_weights.softmax(0).unsqueeze(-1).to(ended)
    mean = (share * ended).sum(0)
    scale = (share * (ended - mean).square()).sum(0).sqrt()
    number = max(512, _NET // ended.shape[1])
    return mean + 1.2 * scale * standard_normal(ended.new_empty(number, *ended.shape[1:]), generator)


_NET = 32768  # points over all data: as many as 64 chains see at 40 temperatures


def _strays(found: Tensor, alive: Tensor, ended: Tensor, log_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Which of `found [N, B, D]` are farther from every weighted state than those from each other, `[N, B]`.

    And the farthest four, `[4, B, D]`.
    """
    ended, log_weights = ended[:512], log_weights[:512]
    share = log_weights.softmax(0)
    counts = (share > 0.05 / len(share)).T  # [B, S]
    mean = (share.unsqueeze(-1) * ended).sum(0)
    deviation = (share.unsqueeze(-1) * (ended - mean).square()).sum(0).sqrt().clamp(min=1e-30)
    here, there = ((values / deviation).transpose(0, 1).double() for values in (ended, found))  # [B, ., D]
    among = torch.cdist(here, here)
    same = torch.eye(among.shape[-1], dtype=torch.bool, device=among.device)
    among = torch.where(same | ~counts.unsqueeze(1), torch.inf, among).amin(-1)
    among = torch.where(counts & among.isfinite(), among, torch.nan)  # a resampled chain may have copies
    usual = among.nanmean(-1)
    spread = (among - usual.unsqueeze(-1)).square().nanmean(-1).sqrt()
    largest = among.nan_to_num(nan=0.0).amax(-1)
    nearest = torch.where(counts.unsqueeze(1), torch.cdist(there, here), torch.inf).amin(-1)
    far = (nearest > (largest + 3 * spread + 2.0).unsqueeze(-1)) & alive.T
    farthest = torch.where(alive.T, nearest, -torch.inf).topk(4, -1).indices.T.unsqueeze(-1)
    return far.T, found.gather(0, farthest.expand(-1, -1, found.shape[-1]))


def _hidden(modes: Modes | None, log_evidence: Tensor, latents: Tensor, log_weights: Tensor) -> Tensor:
    """Share of the evidence in the Gaussian around a mode, less what the weights show there, the largest, `[B]`."""
    if modes is None:
        return torch.zeros_like(log_evidence)
    dim = latents.shape[-1]
    missing = [torch.zeros_like(log_evidence)]
    for frame, mass in zip(modes.frames(), modes.log_mass.to(log_evidence), strict=True):
        inside = frame.from_latents(latents).square().sum(-1) < dim + 4 * math.sqrt(2 * dim)
        shown = (log_weights.softmax(0) * inside).sum(0)
        total = torch.logaddexp(mass, log_evidence + torch.log1p(-shown.clamp(max=1 - 1e-9)))
        missing.append(((mass - total).exp() - shown).clamp(min=0.0).nan_to_num(nan=0.0))
    return torch.stack(missing).amax(0)


def _drift(before: Point, after: Point, log_weights: Tensor) -> Tensor:
    """The largest change of a weighted mean of log p, of a coordinate or of its square, in standard errors, `[B]`."""
    share = log_weights.softmax(0).unsqueeze(-1)
    mean = (share * before.z).sum(0)

    def moments(point: Point) -> Tensor:
        centred = (point.z - mean).double()
        return torch.cat([point.log_p.unsqueeze(-1), centred, centred.square()], -1)

    first, last = moments(before), moments(after)
    usable = first.isfinite().all(-1, keepdim=True) & last.isfinite().all(-1, keepdim=True)
    change = torch.where(usable, last - first, 0.0)
    average = (share * change).sum(0)
    error = (share.square() * (change - average).square()).sum(0).sqrt()
    scale = (share * torch.where(usable, first - (share * torch.where(usable, first, 0.0)).sum(0), 0.0).square()).sum(0)
    relevant = average.abs() > 0.1 * scale.sqrt()
    few = effective_sample_size(log_weights).unsqueeze(-1) < 5
    score = torch.where(relevant & ~few, average.abs() / error.clamp(min=1e-30), 0.0)
    return score.amax(-1)
