"""Other places for chains to start: a Gaussian fitted around a mode, and the initial distribution made wider.

The evidence does not depend on where chains start. A better start saves temperatures; a different one is an independent
witness.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.distributions import Distribution, Independent, Normal, constraints

from mcvae.core.bridge import Bridge
from mcvae.core.randomness import draw, standard_normal
from mcvae.core.scores import LogDensity, ScoredDensity
from mcvae.core.step_sizes import standard_deviation

__all__ = ["Fit", "Frame", "Modes", "Widened", "find_modes", "fit"]


class Frame(NamedTuple):
    """Coordinates u in which a density is about standard normal: z = mean + factor u."""

    mean: Tensor
    """`[B, D]`."""
    factor: Tensor
    """Invertible, `[B, D, D]`."""

    def of(self, data: Tensor) -> "Frame":
        """The coordinates of some data, by index or mask."""
        return Frame(self.mean[data], self.factor[data])

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


class Widened(Distribution):
    """An initial distribution, stretched about its centre by one of several factors, at random.

    Chains from it meet modes and tails that chains from the original miss.

    Args:
        initial: the original, with batch `[B]` and event `[D]`.
        factors: each with the same probability.

    >>> from torch.distributions import Independent, Normal
    >>> narrow = Independent(Normal(torch.zeros(1, 1), torch.ones(1, 1)), 1)
    >>> wide = Widened(narrow, (2.0,))
    >>> expected = Normal(0.0, 2.0).log_prob(torch.tensor(1.5))
    >>> bool(torch.isclose(wide.log_prob(torch.full((1, 1, 1), 1.5)), expected))
    True
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 # as torch declares it
    has_rsample = False

    def __init__(self, initial: Distribution, factors: tuple[float, ...]):
        super().__init__(initial.batch_shape, initial.event_shape, validate_args=False)
        self.initial, self.factors, self.centre = initial, factors, centre(initial)

    @property
    def support(self) -> Any:
        """All of R^D."""
        return constraints.real_vector

    @property
    def stddev(self) -> Tensor:
        """Scales of a typical component, `[B, D]`; those of the widest would not do for chains near the centre."""
        typical = math.exp(sum(math.log(factor) for factor in self.factors) / len(self.factors))
        return typical * standard_deviation(self.initial)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Samples `[..., B, D]`."""
        z = self.initial.sample(sample_shape)
        factors = z.new_tensor(self.factors)
        chosen = factors[torch.randint(len(factors), z.shape[:-1], device=z.device)]
        return self.centre + chosen.unsqueeze(-1) * (z - self.centre)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density, `[..., B]`."""
        parts = [
            self.initial.log_prob(self.centre + (value - self.centre) / factor) - value.shape[-1] * math.log(factor)
            for factor in self.factors
        ]
        return torch.stack(parts).logsumexp(0) - math.log(len(parts))


def centre(initial: Distribution) -> Tensor:
    """The mean of an initial distribution, `[B, D]`; the median of samples for flows and heavy tails."""
    try:
        mean = initial.mean
        if bool(mean.isfinite().all()):
            return mean.detach()
    except NotImplementedError:
        pass
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return initial.sample(torch.Size([200])).median(0).values


class Modes(NamedTuple):
    """Where climbs ended, and the Gaussian with the height and curvature that the density has there."""

    mean: Tensor
    """`[P, B, D]`."""
    factor: Tensor
    """A square root of the covariance, `[P, B, D, D]`."""
    log_mass: Tensor
    """Log of the integral of the Gaussian, `[P, B]`; −inf where there is no proper mode."""

    def heaviest(self) -> Frame | None:
        """The Gaussian of the largest mass for every datum; None if some datum has no mode."""
        log_mass, best = self.log_mass.max(0)
        if not bool((log_mass > -torch.inf).all()):
            return None
        data = torch.arange(len(best), device=best.device)
        return Frame(self.mean[best, data], self.factor[best, data])

    def frames(self) -> list[Frame]:
        """The Gaussians of every climb."""
        return [Frame(mean, factor) for mean, factor in zip(self.mean, self.factor, strict=True)]


_MOST_ROWS = 4096  # latents that one evaluation of all second derivatives may take


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
    if max_rows is None and number * batch * (dim + 1) > _MOST_ROWS:
        return None
    max_rows = max_rows or _MOST_ROWS
    scale = standard_deviation(bridge.initial).to(starts)
    z, log_p, score, precision = starts, *_quadratic(bridge, starts, scale, max_rows)
    lengths = starts.new_tensor([1.0, 0.5, 0.2, 0.05, 0.01, 0.0]).reshape(-1, 1, 1, 1)
    for _ in range(num_steps):
        values, vectors = torch.linalg.eigh(precision)
        steepness = values.abs()
        steepness = steepness.clamp(min=1e-6 * float(steepness.max()) + 1e-12)
        along = torch.einsum("pbji,pbj->pbi", vectors, score) / steepness
        step = torch.einsum("pbij,pbj->pbi", vectors, along)
        longest = 20 * dim**0.5 / (step / scale).norm(dim=-1, keepdim=True).clamp(min=1e-30)
        tried = z + lengths * step * longest.clamp(max=1.0)
        height = _evaluate(bridge, tried.flatten(0, 1), max_rows, with_score=False)[0].nan_to_num(nan=-torch.inf)
        best = height.reshape(len(lengths), number, batch).argmax(0)
        z = tried.gather(0, best.reshape(1, number, batch, 1).expand(-1, -1, -1, dim)).squeeze(0)
        before = log_p
        log_p, score, precision = _quadratic(bridge, z, scale, max_rows)
        if not bool((log_p - before > 1e-3).any()):
            break
    return _gaussians(bridge, z, log_p, score, precision, scale, max_rows)


class Fit(NamedTuple):
    """A Gaussian fitted to the density of every datum."""

    frame: Frame
    alone: Tensor
    """Whether it is a proper mode and no climb found another of comparable mass, `[B]`."""


@torch.no_grad()
def fit(bridge: Bridge, *, num_starts: int = 1, max_rows: int = _MOST_ROWS, generator: Generator | None = None) -> Fit:
    """The Gaussian nearest to each datum's density, from the mode that its initial distribution leads to.

    Chains that start there need fewer temperatures than from an amortised q, whose scales are diagonal and whose
    centre is off. They would miss a second mode, so climbs from several places look for one.

    Args:
        bridge: the densities.
        num_starts: climbs: from the centre of the initial distribution, from samples of it, and from their mirror
            images.
        max_rows: latents that one evaluation may hold.
        generator: source of the samples.
    """
    starts = middle = centre(bridge.initial).unsqueeze(0)
    if num_starts > 1:  # a sample and its mirror image seldom lead to the same one of two modes
        samples = draw(bridge.initial, (num_starts // 2,), generator)
        starts = torch.cat([middle, samples, 2 * middle - samples])[:num_starts]
    modes = find_modes(bridge, starts, num_steps=FIT_STEPS, max_rows=max_rows)
    assert modes is not None
    log_mass, best = modes.log_mass.max(0)
    data = torch.arange(len(best), device=best.device)
    frame = Frame(modes.mean[best, data], INFLATION * modes.factor[best, data])
    dim = starts.shape[-1]
    elsewhere = frame.from_latents(modes.mean).square().sum(-1) > dim + 4 * math.sqrt(2 * dim)
    rivals = elsewhere & (modes.log_mass > log_mass - _COMPARABLE)
    return Fit(_nearest(bridge, frame, max_rows, generator), (log_mass > -torch.inf) & ~rivals.any(0))


def _nearest(bridge: Bridge, around: Frame, max_rows: int, generator: Generator | None) -> Frame:
    """The Gaussian q of least KL(q ‖ p), by natural gradients from the one around a mode.

    In many dimensions a density has little mass where it is highest, and another curvature where its mass is. So score
    and curvature are averaged over q: in coordinates where q is N(0, I) its precision moves towards the mean of
    −∇²log p, and its mean along the mean of ∇log p. A datum keeps the Gaussian around its mode if that has the larger
    evidence lower bound.
    """
    frame, unit = around, torch.ones_like(around.mean)
    for rate in _RATES:
        u = standard_normal(unit.unsqueeze(0), generator)
        _, score, precision = _quadratic(frame.bridge(bridge), torch.cat([u, -u]), unit, max_rows)
        score, precision = score.mean(0), precision.mean(0)
        known = (score.isfinite() & (precision.abs().amax(-1) < 1e30)).all(-1)  # elsewhere q stays as it is
        precision = torch.where(known.reshape(-1, 1, 1), precision, torch.diag_embed(unit))
        values, vectors = torch.linalg.eigh(precision)
        values = 1 + rate * (values.clamp(min=0.0) - 1)
        along = torch.einsum("bji,bj->bi", vectors, torch.where(known.unsqueeze(-1), score, 0.0)) / values
        step = rate * torch.einsum("bij,bj->bi", vectors, along)
        step = step * (step.shape[-1] ** 0.5 / step.norm(dim=-1, keepdim=True).clamp(min=1e-30)).clamp(max=1.0)
        mean = frame.mean + torch.einsum("bij,bj->bi", frame.factor, step)
        frame = Frame(mean, frame.factor @ (vectors * values.rsqrt().unsqueeze(-2)))
    u = standard_normal(unit.expand(8, *unit.shape), generator)
    first, second = (_evaluate(it.bridge(bridge), u, max_rows, with_score=False)[0].mean(0) for it in (around, frame))
    better = (second > first.nan_to_num(nan=-torch.inf)).reshape(-1, 1, 1)  # both have the entropy of N(0, I)
    return Frame(torch.where(better[..., 0], frame.mean, around.mean), torch.where(better, frame.factor, around.factor))


_STEEPEST = 100.0
"""Nats that a density may fall in one deviation from its mode. It falls further from a top that is almost flat."""

_RATES = (0.6, 0.5, 0.4, 0.3)
"""Of natural gradients; two samples each. On MNIST more of either gain little."""

FIT_DERIVATIVES = 2 * len(_RATES)
"""Second derivatives that a fit takes per datum, besides climbs."""


_COMPARABLE = 5.0
"""Nats by which a second mode may be lighter and still matter: it holds more than 0.7 % of the mass."""

FIT_STEPS = 6
"""Newton steps to a mode from the encoder's mean; all of 24 images of MNIST arrived within six."""

INFLATION = 1.1
"""Of a fitted Gaussian: its tails should not be lighter than the density's."""


def _evaluate(bridge: Bridge, z: Tensor, max_rows: int, *, with_score: bool) -> tuple[Tensor, Tensor | None]:
    """log p `[S, B]` and its score `[S, B, D]`, in portions of at most `max_rows` latents."""
    portions = torch.split(z, max(1, max_rows // z.shape[1]))
    points = [bridge.evaluate(portion, with_score=with_score) for portion in portions]
    scores = [point.score_p for point in points if point.score_p is not None]
    return torch.cat([point.log_p for point in points]), torch.cat(scores) if scores else None


def _quadratic(bridge: Bridge, z: Tensor, scale: Tensor, max_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """log p `[P, B]`, its score `[P, B, D]` and minus its second derivatives `[P, B, D, D]`, by differences."""
    number, batch, dim = z.shape
    width = torch.finfo(z.dtype).eps ** (1 / 3) * scale
    offsets = torch.cat([torch.zeros_like(z[:1, :1]), torch.eye(dim, dtype=z.dtype, device=z.device).unsqueeze(1)])
    rows = z + (offsets * width).unsqueeze(1)  # [D + 1, P, B, D]
    values, scores = _evaluate(bridge, rows.flatten(0, 1), max_rows, with_score=True)
    assert scores is not None
    scores = scores.reshape(dim + 1, number, batch, dim)
    change = (scores[1:] - scores[0]) / width.T.reshape(dim, 1, batch, 1)
    second = change.permute(1, 2, 0, 3)
    log_p = values.reshape(dim + 1, number, batch)[0].nan_to_num(nan=-torch.inf)
    return log_p, scores[0], -(second + second.mT).nan_to_num() / 2


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
    height = _evaluate(bridge, away.flatten(0, 2), max_rows, with_score=False)[0].nan_to_num(nan=-torch.inf)
    fallen = log_p - height.reshape(away.shape[:-1]).amax(0).amin(0)  # 1/2 where a Gaussian describes the density
    proper = curved & at_rest & log_p.isfinite() & (fallen < _STEEPEST)
    factor = torch.where(
        proper.reshape(*proper.shape, 1, 1), vectors * values.rsqrt().unsqueeze(-2), torch.diag_embed(scale)
    )
    return Modes(z, factor, torch.where(proper, log_mass, -torch.inf))
