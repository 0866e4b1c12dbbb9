"""Run the chains of a frozen estimator, forwards and backwards, and say what their weights are worth."""

import torch
from torch import Generator, Tensor

from mcvae.core.annealing import Trajectory
from mcvae.core.bounds import iwae
from mcvae.core.bridge import Bridge
from mcvae.core.checks import check
from mcvae.core.diagnosis import Evidence, Sandwich
from mcvae.core.diagnostics import effective_sample_size, pareto_k, standard_error
from mcvae.core.pilot import Pilot
from mcvae.core.resampling import Resampling
from mcvae.core.scores import RoundedDensity
from mcvae.core.witnesses import WeightedStates

__all__ = ["diagnose", "diagnose_sandwich", "with_checks"]


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
    chains = WeightedStates(evidence.latents, evidence.log_weights)
    found = check(evidence.bridge, evidence.frame, evidence.estimator, chains, generator=generator)
    gap, error = found.gap(evidence.log_evidence, evidence.standard_error)
    excess = (gap - 2.5 * error).clamp(min=0).nan_to_num(nan=0.0)
    return evidence._replace(checks=found, standard_error=torch.hypot(evidence.standard_error, excess))


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


def _evidence(bridge: Bridge, pilot: Pilot, trajectories: list[Trajectory], tolerance: float) -> Evidence:
    log_weight = torch.cat([trajectory.log_weight for trajectory in trajectories])
    shares = [len(trajectory.log_weight) / len(log_weight) for trajectory in trajectories]
    acceptance = torch.stack([share * t.acceptance for share, t in zip(shares, trajectories, strict=True)]).sum(0)
    latents = torch.cat([trajectory.state.point.z for trajectory in trajectories])
    log_p = torch.cat([trajectory.state.point.log_p for trajectory in trajectories])
    typical = torch.where(log_p.isfinite(), log_p.abs(), torch.nan).nanmedian(0).values.nan_to_num(nan=0.0)
    resolution = torch.finfo(latents.dtype).eps * typical
    latents = latents if pilot.frame is None else pilot.frame.to_latents(latents)
    if isinstance(bridge.log_joint, RoundedDensity):
        resolution = torch.maximum(resolution, _largest(bridge.log_joint.rounding(latents), log_weight))
    resample, independent = pilot.estimator.resample, log_weight
    if resample is not None:
        independent = torch.cat([_by_island(trajectory.log_weight, resample.islands) for trajectory in trajectories])
    return Evidence(
        log_evidence=iwae(log_weight),
        standard_error=standard_error(independent),
        ess=effective_sample_size(log_weight),
        pareto_k=pareto_k(log_weight) if resample is None else torch.full_like(log_weight[0], torch.nan),
        acceptance=acceptance.mean(0),
        acceptance_per_step=acceptance,
        num_nonfinite=torch.cat([trajectory.nonfinite for trajectory in trajectories]).sum(0),
        log_weights=log_weight,
        latents=latents,
        estimator=pilot.estimator,
        bridge=bridge,
        moved=pilot.moved.to(log_weight).expand(log_weight.shape[1:]),
        tuning=pilot.tuning,
        tolerance=tolerance,
        resolution=resolution,
    )


def _largest(rounding: Tensor, log_weight: Tensor) -> Tensor:
    """What half a percent of the weight exceeds, `[S, B] -> [B]`."""
    rounding, order = rounding.sort(0, descending=True)
    share = log_weight.softmax(0).gather(0, order).cumsum(0)
    return rounding.gather(0, (share < 0.005).sum(0, keepdim=True).clamp(max=len(share) - 1))[0]


def _by_island(log_weight: Tensor, islands: int) -> Tensor:
    """The estimate of every island, `[S, B] -> [I, B]`."""
    size = len(log_weight) // islands
    return torch.stack([iwae(part) for part in torch.split(log_weight, size)])
