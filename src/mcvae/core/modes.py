"""Modes of a density, found by Newton's method, and the Gaussians around them (Laplace)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mcvae.core.bridge import Bridge
from mcvae.core.frames import Frame
from mcvae.core.initials import standard_deviation

__all__ = ["MOST_ROWS", "Modes", "evaluate_in_portions", "find_modes", "quadratic"]


class Modes(NamedTuple):
    """Where climbs ended, and the Gaussian with the height and curvature that the density has there."""

    mean: Tensor
    """`[P, B, D]`."""
    factor: Tensor
    """A square root of the covariance, `[P, B, D, D]`."""
    log_mass: Tensor
    """Log of the integral of the Gaussian, `[P, B]`; −inf where there is no proper mode."""

    def heaviest(self) -> Frame:
        """The Gaussian of the largest mass for every datum; where there is no mode, one with the initial scales."""
        best = self.log_mass.max(0).indices
        data = torch.arange(len(best), device=best.device)
        return Frame(self.mean[best, data], self.factor[best, data])

    def everywhere(self) -> bool:
        """Whether every datum has a mode."""
        return bool((self.log_mass > -torch.inf).any(0).all())

    def frames(self) -> list[Frame]:
        """The Gaussians of every climb."""
        return [Frame(mean, factor) for mean, factor in zip(self.mean, self.factor, strict=True)]


MOST_ROWS = 4096
"""Latents that one evaluation of all second derivatives may take."""


@torch.no_grad()
def find_modes(bridge: Bridge, starts: Tensor, *, num_steps: int = 15, max_rows: int | None = None) -> Modes | None:
    """Climb from `starts [P, B, D]` to modes by Newton's method, and fit a Gaussian around each (Laplace).

    Second derivatives are differences of scores, so that a step evaluates the model D + 1 times.

    Args:
        bridge: the densities.
        starts: where to start.
        num_steps: the most steps.
        max_rows: latents that one evaluation may hold; more are evaluated in portions. If None, more than a few
            thousand are not tried at all: the answer is None.
    """
    number, batch, dim = starts.shape
    if max_rows is None and number * batch * (dim + 1) > MOST_ROWS:
        return None
    max_rows = max_rows or MOST_ROWS
    scale = standard_deviation(bridge.initial).to(starts)
    z, log_p, score, precision = starts, *quadratic(bridge, starts, scale, max_rows)
    lengths = starts.new_tensor([1.0, 0.5, 0.2, 0.05, 0.01, 0.0]).reshape(-1, 1, 1, 1)
    for _ in range(num_steps):
        values, vectors = torch.linalg.eigh(precision)
        steepness = values.abs()
        steepness = steepness.clamp(min=1e-6 * float(steepness.max()) + 1e-12)
        along = torch.einsum("pbji,pbj->pbi", vectors, score) / steepness
        step = torch.einsum("pbij,pbj->pbi", vectors, along)
        longest = 20 * dim**0.5 / (step / scale).norm(dim=-1, keepdim=True).clamp(min=1e-30)
        tried = z + lengths * step * longest.clamp(max=1.0)
        height = evaluate_in_portions(bridge, tried.flatten(0, 1), max_rows, with_score=False)[0].nan_to_num(
            nan=-torch.inf
        )
        best = height.reshape(len(lengths), number, batch).argmax(0)
        z = tried.gather(0, best.reshape(1, number, batch, 1).expand(-1, -1, -1, dim)).squeeze(0)
        before = log_p
        log_p, score, precision = quadratic(bridge, z, scale, max_rows)
        if not bool((log_p - before > 1e-3).any()):
            break
    return _gaussians(bridge, z, log_p, score, precision, scale, max_rows)


def evaluate_in_portions(bridge: Bridge, z: Tensor, max_rows: int, *, with_score: bool) -> tuple[Tensor, Tensor | None]:
    """log p `[S, B]` and its score `[S, B, D]`, in portions of at most `max_rows` latents."""
    portions = torch.split(z, max(1, max_rows // z.shape[1]))
    points = [bridge.evaluate(portion, with_score=with_score) for portion in portions]
    scores = [point.score_p for point in points if point.score_p is not None]
    return torch.cat([point.log_p for point in points]), torch.cat(scores) if scores else None


def quadratic(bridge: Bridge, z: Tensor, scale: Tensor, max_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """log p `[P, B]`, its score `[P, B, D]` and minus its second derivatives `[P, B, D, D]`, by differences."""
    number, batch, dim = z.shape
    width = torch.finfo(z.dtype).eps ** (1 / 3) * scale
    offsets = torch.cat([torch.zeros_like(z[:1, :1]), torch.eye(dim, dtype=z.dtype, device=z.device).unsqueeze(1)])
    rows = z + (offsets * width).unsqueeze(1)  # [D + 1, P, B, D]
    values, scores = evaluate_in_portions(bridge, rows.flatten(0, 1), max_rows, with_score=True)
    assert scores is not None
    scores = scores.reshape(dim + 1, number, batch, dim)
    change = (scores[1:] - scores[0]) / width.T.reshape(dim, 1, batch, 1)
    second = change.permute(1, 2, 0, 3)
    log_p = values.reshape(dim + 1, number, batch)[0].nan_to_num(nan=-torch.inf)
    return log_p, scores[0], -(second + second.mT).nan_to_num() / 2


_STEEPEST = 100.0
"""Nats that a density may fall in one deviation from its mode. It falls further from a top that is almost flat."""


def _gaussians(
    bridge: Bridge, z: Tensor, log_p: Tensor, score: Tensor, precision: Tensor, scale: Tensor, max_rows: int
) -> Modes:
    values, vectors = torch.linalg.eigh(precision)
    along = torch.einsum("pbji,pbj->pbi", vectors, score)
    # A condition of 10⁶ is still a mode, also where single precision rounds it; the top of a quartic is none.
    curved = (values > 5e-7 * values.abs().amax(-1, keepdim=True).clamp(min=1e-12)).all(-1)
    values = torch.where(curved.unsqueeze(-1), values, 1.0)
    at_rest = (along.square() / values).sum(-1) < 0.1  # twice what a Newton step would still gain, in nats
    log_mass = log_p + 0.5 * z.shape[-1] * math.log(2 * math.pi) - 0.5 * values.log().sum(-1)
    axes = (vectors * values.rsqrt().unsqueeze(-2)).movedim(-1, 0)  # [D, P, B, D]
    away = torch.stack([z + axes, z - axes])
    height = evaluate_in_portions(bridge, away.flatten(0, 2), max_rows, with_score=False)[0].nan_to_num(nan=-torch.inf)
    fallen = log_p - height.reshape(away.shape[:-1]).amax(0).amin(0)  # 1/2 where a Gaussian describes the density
    proper = curved & at_rest & log_p.isfinite() & (fallen < _STEEPEST)
    factor = torch.where(
        proper.reshape(*proper.shape, 1, 1), vectors * values.rsqrt().unsqueeze(-2), torch.diag_embed(scale)
    )
    return Modes(z, factor, torch.where(proper, log_mass, -torch.inf))
