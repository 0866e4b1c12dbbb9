"""Witnesses that know nothing of the weighted chains: what they say makes "converged" more than a hope.

Weights that never saw the missing mass look perfect. So other chains start elsewhere: the evidence must be the same, and
so must the places where they end. Chains that move on must stay where they are. And a mode that a search finds must
have been visited.
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from mcvae.core.bounds import iwae
from mcvae.core.bridge import Bridge, Point, State, Step
from mcvae.core.diagnostics import effective_sample_size, standard_error
from mcvae.core.estimator import AnnealedEstimator
from mcvae.core.kernels import Kernel, hmc
from mcvae.core.schedules import FixedSchedule
from mcvae.core.starts import Frame, Laplace, Widened, laplace
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


WIDENING = (1.0, 2.0, 4.0, 8.0)
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
    wide = Bridge(Widened(bridge.initial, WIDENING), bridge.log_joint, bridge.path, bridge.context)
    walk = explore(wide, kernel, generator=generator)
    alive = walk.point.log_p > -torch.inf
    local = frame.bridge(bridge) if frame is not None else bridge
    mover, steps = kernel, walk.last_step(kernel, wide)
    if frame is not None:
        steps = estimator.step_sizes(local.initial)[-1]
    found, ended = walk.point.z, latents
    if frame is not None:
        found, ended = frame.from_latents(found), frame.from_latents(ended)
    settled = _moved_on(local, mover, found, steps, 10, generator).z
    before = local.evaluate(ended, with_score=bool(kernel.uses_score))
    after = _moved_on(local, mover, ended, steps, 6, generator)
    fit = None
    if kernel.uses_score:
        origin = settled if frame is None else frame.to_latents(settled)
        fit = laplace(bridge, torch.cat([_heaviest(latents, log_weights), origin[:: max(1, len(origin) // 3)][:3]]))
    value, error = _second_estimate(bridge, wide, walk.tuning, fit, kernel, estimator, generator)
    log_evidence = iwae(log_weights)
    return Checks(
        value,
        error,
        _strays(settled, alive, ended, log_weights),
        _hidden(fit, log_evidence, latents, log_weights),
        _drift(before, after, log_weights),
    )


def _moved_on(
    bridge: Bridge, kernel: Kernel, z: Tensor, step_size: Tensor, number: int, generator: Generator | None
) -> Point:
    """Where chains are after moves that leave the target invariant."""
    one = torch.ones((), dtype=torch.float64, device=z.device)
    state = State(bridge.evaluate(z, with_score=bool(kernel.uses_score)))
    for _ in range(number):
        state = kernel(bridge, state, Step(1, 1, one, one, step_size.to(z)), generator=generator).state
    return state.point


def _second_estimate(
    bridge: Bridge,
    wide: Bridge,
    tuning: Tuning,
    fit: Laplace | None,
    kernel: Kernel,
    estimator: AnnealedEstimator,
    generator: Generator | None,
) -> tuple[Tensor, Tensor]:
    """The evidence from another start, and its standard error: the wider one, or around a mode if that is too far."""
    start, run = tuning, wide
    if tuning.length > _TOO_FAR and fit is not None and bool(fit.found.all()):
        run = fit.frame.bridge(bridge, 1.5)
        start = tune(run, kernel, generator=generator)
    number = min(max(16, math.ceil(2 * start.length**2)), 256)
    betas = start.temperatures(number)
    second = AnnealedEstimator(
        kernel,
        FixedSchedule(betas),
        start.relative_step_sizes(kernel, betas),
        num_samples=min(64, estimator.num_samples),
        bound=iwae,
    )
    log_weight = second.run(run, generator=generator).log_weight
    return iwae(log_weight), standard_error(log_weight)


_TOO_FAR = 10.0  # length of a path along which 200 temperatures leave half of the chains


def _heaviest(latents: Tensor, log_weights: Tensor) -> Tensor:
    """The end state of the chain with the largest weight, `[1, B, D]`."""
    best = log_weights.argmax(0).reshape(1, -1, 1)
    return latents.gather(0, best.expand(-1, -1, latents.shape[-1]))


def _strays(found: Tensor, alive: Tensor, ended: Tensor, log_weights: Tensor) -> Tensor:
    """Share of `found [N, B, D]` farther from every weighted state than those are from each other, `[B]`."""
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
    far = (nearest > (largest + 3 * spread + 1.0).unsqueeze(-1)) & alive.T
    return far.sum(-1) / alive.sum(0).clamp(min=1)


def _hidden(fit: Laplace | None, log_evidence: Tensor, latents: Tensor, log_weights: Tensor) -> Tensor:
    """Share of the evidence in the Gaussian around a mode, less what the weights show there, `[B]`."""
    if fit is None:
        return torch.zeros_like(log_evidence)
    distance = fit.frame.from_latents(latents).square().sum(-1)
    dim = latents.shape[-1]
    inside = distance < dim + 4 * math.sqrt(2 * dim)
    shown = (log_weights.softmax(0) * inside).sum(0)
    total = torch.logaddexp(fit.log_mass.to(log_evidence), log_evidence + torch.log1p(-shown.clamp(max=1 - 1e-9)))
    claimed = (fit.log_mass.to(log_evidence) - total).exp()
    return (claimed - shown).clamp(min=0.0).nan_to_num(nan=0.0)


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
