"""Other places for chains to start: the Gaussian nearest to a density, and the initial distribution made wider.

The evidence does not depend on where chains start. A better start saves temperatures; a different one is an independent
witness.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.distributions import Distribution, constraints

from mcvae.core.bridge import Bridge, refuse_start
from mcvae.core.frames import Frame
from mcvae.core.initials import centre, standard_deviation
from mcvae.core.modes import MOST_ROWS, evaluate_in_portions, find_modes, quadratic
from mcvae.core.randomness import draw, standard_normal

__all__ = ["Fit", "Widened", "fit"]


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


class Fit(NamedTuple):
    """A Gaussian fitted to the density of every datum."""

    frame: Frame
    alone: Tensor
    """Whether it is a proper mode and no climb found another of comparable mass, `[B]`."""


@torch.no_grad()
def fit(bridge: Bridge, *, num_starts: int = 1, max_rows: int = MOST_ROWS, generator: Generator | None = None) -> Fit:
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
    wide = (standard_deviation(bridge.initial) > 0).all(-1)  # an encoder's scale underflows far from all it has seen
    refuse_start(int((~wide).sum()), len(wide))
    starts = middle = centre(bridge.initial).unsqueeze(0)
    if num_starts > 1:  # a sample and its mirror image seldom lead to the same one of two modes
        samples = draw(bridge.initial, (num_starts // 2,), generator)
        starts = torch.cat([middle, samples, 2 * middle - samples])[:num_starts]
    modes = find_modes(bridge, starts, num_steps=FIT_STEPS, max_rows=max_rows)
    assert modes is not None
    log_mass, frame, dim = modes.log_mass.amax(0), modes.heaviest().inflated(), starts.shape[-1]
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
        _, score, precision = quadratic(frame.bridge(bridge), torch.cat([u, -u]), unit, max_rows)
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
    first, second = (
        evaluate_in_portions(it.bridge(bridge), u, max_rows, with_score=False)[0].mean(0) for it in (around, frame)
    )
    better = (second > first.nan_to_num(nan=-torch.inf)).reshape(-1, 1, 1)  # both have the entropy of N(0, I)
    return Frame(torch.where(better[..., 0], frame.mean, around.mean), torch.where(better, frame.factor, around.factor))


_RATES = (0.6, 0.5, 0.4, 0.3)
"""Of natural gradients; two samples each. On MNIST more of either gain little."""

FIT_DERIVATIVES = 2 * len(_RATES)
"""Second derivatives that a fit takes per datum, besides climbs."""


_COMPARABLE = 5.0
"""Nats by which a second mode may be lighter and still matter: it holds more than 0.7 % of the mass."""

FIT_STEPS = 6
"""Newton steps to a mode from the encoder's mean; all of 24 images of MNIST arrived within six."""
