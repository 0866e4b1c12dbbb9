"""Coordinates in which a density is about standard normal, and densities in them."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Independent, Normal

from mcvae.core.bridge import Bridge
from mcvae.core.scores import LogDensity, ScoredDensity

__all__ = ["Frame"]


class Frame(NamedTuple):
    """Coordinates u in which a density is about standard normal: z = mean + factor u."""

    mean: Tensor
    """`[B, D]`."""
    factor: Tensor
    """Invertible, `[B, D, D]`."""

    def of(self, data: Tensor) -> "Frame":
        """The coordinates of some data, by index or mask."""
        return Frame(self.mean[data], self.factor[data])

    def inflated(self) -> "Frame":
        """The same coordinates, a little wider: the tails of a start should not be lighter than the density's."""
        return Frame(self.mean, 1.1 * self.factor)

    def to_latents(self, u: Tensor) -> Tensor:
        """Coordinates `[S, B, D]` to latents."""
        latents: Tensor = self.mean.to(u) + torch.einsum("bij,sbj->sbi", self.factor.to(u), u)
        return latents

    def from_latents(self, z: Tensor) -> Tensor:
        """Latents `[S, B, D]` to coordinates."""
        u: Tensor = torch.linalg.solve(self.factor.to(z), (z - self.mean.to(z)).movedim(0, -1)).movedim(-1, 0)
        return u

    def bridge(self, bridge: Bridge, inflation: float = 1.0) -> Bridge:
        """The bridge in these coordinates, from N(0, inflation² I)."""
        like = self.mean
        initial = Independent(Normal(torch.zeros_like(like), torch.full_like(like, inflation)), 1)
        known = isinstance(bridge.log_joint, ScoredDensity)
        changed = _ScoredInFrame(bridge.log_joint, self) if known else _InFrame(bridge.log_joint, self)
        return replace(bridge, initial=initial, log_joint=changed)


class _InFrame:
    """A log density in the coordinates of a frame."""

    def __init__(self, log_joint: LogDensity, frame: Frame):
        self.log_joint, self.frame = log_joint, frame
        self.log_det: Tensor = torch.linalg.slogdet(frame.factor).logabsdet

    def __call__(self, u: Tensor) -> Tensor:
        return self.log_joint(self.frame.to_latents(u)) + self.log_det.to(u)


class _ScoredInFrame(_InFrame):
    """One that knows its score, because the original does."""

    def value_and_score(self, u: Tensor) -> tuple[Tensor, Tensor]:
        value, score = self.log_joint.value_and_score(self.frame.to_latents(u))  # type: ignore[attr-defined]
        return value + self.log_det.to(value), torch.einsum("bij,sbi->sbj", self.frame.factor.to(score), score)
