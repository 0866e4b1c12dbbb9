"""How other chains, searches and later moves bear witness on weighted chains: the measures behind `check`."""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from mcvae.core.bridge import Bridge, Point
from mcvae.core.diagnostics import effective_sample_size
from mcvae.core.modes import Modes
from mcvae.core.randomness import draw, standard_normal
from mcvae.core.scores import LogDensity

__all__ = ["Highest", "WeightedStates", "around", "climbing", "drift", "hidden", "pulled_away", "strays"]

_NET = 32768
"""Points of a net, shared by all data: as many as 64 chains see at 40 temperatures with eight moves each."""
_OWN_NET = 8192
"""Points of the net for narrow modes that a datum has for itself, however many share."""


class WeightedStates(NamedTuple):
    """Where weighted chains ended."""

    latents: Tensor
    """`[S, B, D]`."""
    log_weights: Tensor
    """`[S, B]`."""

    def mean_and_scale(self) -> tuple[Tensor, Tensor]:
        """Weighted mean and standard deviation in every dimension, `[B, D]` each."""
        share = self.log_weights.softmax(0).unsqueeze(-1).to(self.latents)
        mean = (share * self.latents).sum(0)
        return mean, (share * (self.latents - mean).square()).sum(0).sqrt().clamp(min=1e-30)

    def heaviest(self) -> Tensor:
        """The end state of the chain with the largest weight, `[1, B, D]`."""
        best = self.log_weights.argmax(0).reshape(1, -1, 1)
        return self.latents.gather(0, best.expand(-1, -1, self.latents.shape[-1]))


class Highest:
    """A log density that remembers where it was highest: what a chain passed, but did not stop at.

    Witnesses go further out than the user's start. Where the density cannot be evaluated there, it is taken to be 0.
    """

    latents: Tensor

    def __init__(self, log_joint: LogDensity):
        self.log_joint = log_joint
        self.value: Tensor | None = None

    def __call__(self, z: Tensor) -> Tensor:
        """Log density, `[S, B, D] -> [S, B]`."""
        value = self.log_joint(z)
        height, row = value.detach().nan_to_num(nan=-torch.inf, posinf=-torch.inf).max(0)
        here = z.detach().gather(0, row.reshape(1, -1, 1).expand(1, -1, z.shape[-1]))
        if self.value is None:
            self.value, self.latents = height, here
        better = height > self.value
        self.value = torch.where(better, height, self.value)
        self.latents = torch.where(better.unsqueeze(-1), here, self.latents)
        return torch.where(value < torch.inf, value, -torch.inf)


def pulled_away(wide: Bridge, chains: WeightedStates, generator: Generator | None) -> Tensor:
    """Of many samples of the wider start, those that most betray another mode: `[8, B, D]`, or none if none does.

    A narrow mode is seldom met by a chain, but its slopes reach far. Outside the chains' bulk, four are the highest
    whose score leads away from it, four those whose score points past its middle by the widest angle.
    """
    if generator is not None:  # a stream of its own, whatever the other witnesses draw
        generator = Generator(generator.device).manual_seed(generator.initial_seed() + 1)
    batch, dim = chains.latents.shape[1:]
    mean, scale = chains.mean_and_scale()
    size = max(1, _NET // (8 * batch))
    none = chains.latents[:0], chains.log_weights[:0]
    away, past = none, none
    for _ in range(max(_NET // batch, _OWN_NET) // size):
        point = wide.evaluate(draw(wide.initial, (size,), generator), with_score=True)
        assert point.score_p is not None
        outwards, score = (point.z - mean) / scale, point.score_p * scale
        far = outwards.norm(dim=-1) > dim**0.5 + 2
        cosine = torch.nn.functional.cosine_similarity(score, outwards, -1)  # −1 for the chains' own Gaussian
        away = _highest(*away, point.z, torch.where(far & (cosine > 0), point.log_p, -torch.inf))
        past = _highest(*past, point.z, torch.where(far & (cosine > -0.8), cosine, -torch.inf))
    found, rank = (torch.cat(both) for both in zip(away, past, strict=True))
    leads = rank > -torch.inf
    if not bool(leads.any()):
        return found[:0]
    # where nothing leads away, climbs from far out would only get lost
    return torch.where(leads.unsqueeze(-1), found, chains.heaviest().to(found))


def _highest(found: Tensor, rank: Tensor, z: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
    """The four of highest rank, of those found before and of `z [S, B, D]`, and their ranks."""
    rank = torch.cat([rank, more.nan_to_num(nan=-torch.inf).to(rank)])
    rank, best = rank.topk(min(4, len(rank)), 0)
    return torch.cat([found, z]).gather(0, best.unsqueeze(-1).expand(-1, -1, z.shape[-1])), rank


def around(chains: WeightedStates, generator: Generator | None) -> Tensor:
    """Points of a Gaussian a little wider than the weighted states, `[N, B, D]`: a net for spikes between chains."""
    mean, scale = chains.mean_and_scale()
    number = max(512, _NET // mean.shape[0])
    return mean + 1.2 * scale * standard_normal(mean.new_empty(number, *mean.shape), generator)


def climbing(change: Tensor, far: Tensor) -> bool:
    """Whether log p of the chains that are `far [N, B]` still rises, for any datum."""
    number = far.sum(0)
    change = torch.where(far, change, 0.0).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    mean = change.sum(0) / number.clamp(min=1)
    error = ((change.square().sum(0) / number.clamp(min=1) - mean.square()).clamp(min=0) / number.clamp(min=1)).sqrt()
    return bool(((number > 0) & (mean > error + 0.1)).any())


def strays(found: Tensor, alive: Tensor, chains: WeightedStates) -> tuple[Tensor, Tensor]:
    """Which of `found [N, B, D]` are farther from every weighted state than those from each other, `[N, B]`.

    And the farthest four, `[4, B, D]`.
    """
    ended, log_weights = chains.latents[:512], chains.log_weights[:512]
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


def hidden(modes: Modes | None, log_evidence: Tensor, chains: WeightedStates) -> Tensor:
    """Share of the evidence in the Gaussian around a mode, less what the weights show there, the largest, `[B]`."""
    if modes is None:
        return torch.zeros_like(log_evidence)
    dim, share = chains.latents.shape[-1], chains.log_weights.softmax(0)
    missing = [torch.zeros_like(log_evidence)]
    for frame, mass in zip(modes.frames(), modes.log_mass.to(log_evidence), strict=True):
        inside = frame.from_latents(chains.latents).square().sum(-1) < dim + 4 * math.sqrt(2 * dim)
        shown = (share * inside).sum(0)
        total = torch.logaddexp(mass, log_evidence + torch.log1p(-shown.clamp(max=1 - 1e-9)))
        missing.append(((mass - total).exp() - shown).clamp(min=0.0).nan_to_num(nan=0.0))
    return torch.stack(missing).amax(0)


def drift(before: Point, after: Point, log_weights: Tensor) -> Tensor:
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
