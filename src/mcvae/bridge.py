"""The bridge γ_0 = q, …, γ_K = p(x, ·), and the one place where a model is evaluated."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.distributions import Distribution

from mcvae.paths import GeometricPath, Path
from mcvae.randomness import draw

__all__ = ["Bridge", "LogDensity", "Point", "State", "select"]

LogDensity = Callable[[Tensor], Tensor]
"""An unnormalised log density of latents: `[S, B, D] -> [S, B]`, each row on its own."""


class Point(NamedTuple):
    """Latents with both endpoint log densities and their scores, computed once.

    A point where the joint could not be evaluated (the latent ran away, the density or its score is not a
    number) has `log_p = NaN`; everything else in it is finite, so it can be carried along and rejected.
    """

    z: Tensor
    """Latents `[S, B, D]`."""
    log_q: Tensor
    """log q(z) of the initial distribution, `[S, B]`."""
    log_p: Tensor
    """log p(x, z), `[S, B]`; −inf outside the support, NaN where it could not be evaluated."""
    score_q: Tensor | None
    """∇ log q(z), `[S, B, D]`, or None if no kernel asked for scores."""
    score_p: Tensor | None
    """∇ log p(x, z), `[S, B, D]`, or None if no kernel asked for scores."""


class State(NamedTuple):
    """What one step hands to the next: a point, and the momentum of underdamped dynamics."""

    point: Point
    momentum: Tensor | None = None


def select(mask: Tensor, chosen: Point, otherwise: Point) -> Point:
    """Take whole points: `chosen` where `mask [S, B]` holds, `otherwise` elsewhere."""

    rows = mask.unsqueeze(-1)

    def pick(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return None if a is None or b is None else torch.where(rows, a, b)

    return Point(
        torch.where(rows, chosen.z, otherwise.z),
        torch.where(mask, chosen.log_q, otherwise.log_q),
        torch.where(mask, chosen.log_p, otherwise.log_p),
        pick(chosen.score_q, otherwise.score_q),
        pick(chosen.score_p, otherwise.score_p),
    )


@dataclass(frozen=True, eq=False)
class Bridge:
    """The sequence of densities from `initial` to `log_joint` along `path`.

    Args:
        initial: q(z | x), normalised, with batch shape `[B]` and event shape `[D]`; a flow is fine.
        log_joint: log p(x, ·), `[S, B, D] -> [S, B]`. Rows must not influence each other (no batch
            normalisation), since the score of every row is taken from one backward pass.
        path: how γ_β interpolates; the paper's geometric path by default.
        context: what amortised backward kernels and flows may look at, `[B, C]`: usually the data x.

    >>> from torch.distributions import Independent, Normal
    >>> initial = Independent(Normal(torch.zeros(1, 2), torch.ones(1, 2)), 1)
    >>> bridge = Bridge(initial, lambda z: -(z - 1).square().sum(-1))
    >>> with torch.no_grad():
    ...     point = bridge.evaluate(torch.zeros(1, 1, 2))
    >>> bridge.log_density(point, 1.0)
    tensor([[-2.]])
    >>> bridge.score(point, 0.5)
    tensor([[[1., 1.]]])
    """

    initial: Distribution
    log_joint: LogDensity
    path: Path = field(default_factory=GeometricPath)
    context: Tensor | None = None

    def __post_init__(self) -> None:
        _check_initial(self.initial)

    def sample(self, num_samples: int, *, with_score: bool = True, generator: Generator | None = None) -> Point:
        """Draw `num_samples` latents per datum from q and evaluate them."""
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}.")
        point = self.evaluate(draw(self.initial, (num_samples,), generator), with_score=with_score)
        if not self.initial.has_rsample and point.log_q.requires_grad:
            raise ValueError(
                f"{_name(self.initial)} has learnable parameters but no reparameterised sampler (has_rsample is "
                "False), so its gradient would be wrong. Use a reparameterised distribution (a Gaussian, a flow), "
                "or wrap the call in torch.no_grad() if you need values only."
            )
        broken = int(point.log_p.isnan().sum())
        if broken:
            raise ValueError(
                f"log_joint, its score, or the initial distribution's density is NaN or +inf at {broken} of "
                f"{point.log_p.numel()} samples of the initial distribution. Return -inf (with any finite score) "
                "outside the support, and check the model's parameters and data for NaN."
            )
        return point

    def evaluate(self, z: Tensor, *, with_score: bool = True) -> Point:
        """Evaluate both endpoint densities, and their scores, at latents `[S, B, D]`.

        Differentiable to second order while gradients are enabled; under `torch.no_grad()` no graph is kept.
        """
        batch, latent = self.initial.batch_shape[0], self.initial.event_shape[0]
        if z.dim() != 3 or z.shape[1:] != (batch, latent):
            raise ValueError(f"latents must have shape [S, B, D] = [S, {batch}, {latent}], got {list(z.shape)}.")
        limit = torch.finfo(z.dtype).max ** 0.25  # beyond this a quartic log density, or a squared one, overflows
        inside = (z.abs() <= limit).all(-1)  # False for NaN
        z = torch.where(inside.unsqueeze(-1), z, 0.0)
        log_q, score_q = _value_and_score(self.initial.log_prob, z, with_score, "initial.log_prob")
        log_p, score_p = _value_and_score(self.log_joint, z, with_score, "log_joint")
        usable = inside & (log_q < torch.inf) & (log_p < torch.inf)
        if score_q is not None and score_p is not None:
            regular = (score_q.abs() <= limit).all(-1) & (score_p.abs() <= limit).all(-1)
            usable = usable & (regular | (log_p == -torch.inf) | (log_q == -torch.inf))
            # Where a density vanishes the drift is set to 0: any drift is valid that both transition densities use.
            score_q = torch.where(regular.unsqueeze(-1), score_q, 0.0)
            score_p = torch.where(regular.unsqueeze(-1), score_p, 0.0)
        return Point(z, torch.where(usable, log_q, 0.0), torch.where(usable, log_p, torch.nan), score_q, score_p)

    def log_density(self, point: Point, beta: Tensor | float) -> Tensor:
        """log γ_β of a point, `[S, B]`, without evaluating anything; NaN where the point could not be evaluated."""
        log_gamma, _, _, usable = self._along_path(point, beta)
        return torch.where(usable, log_gamma, torch.nan)

    def score(self, point: Point, beta: Tensor | float) -> Tensor:
        """∇ log γ_β of a point, `[S, B, D]`, without evaluating anything."""
        if point.score_q is None or point.score_p is None:
            raise ValueError(
                "this point carries no score. Evaluate it with with_score=True; a kernel that needs scores must "
                "have uses_score = True."
            )
        _, weight_q, weight_p, _ = self._along_path(point, beta)
        return weight_q * point.score_q + weight_p * point.score_p

    def _along_path(self, point: Point, beta: Tensor | float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        usable = ~point.log_p.isnan()
        beta = torch.as_tensor(beta, dtype=point.log_p.dtype, device=point.log_p.device)
        log_p = torch.where(usable, point.log_p, 0.0)  # keeps NaN out of the gradient with respect to beta
        return *self.path(point.log_q, log_p, beta), usable


def _value_and_score(log_density: LogDensity, z: Tensor, with_score: bool, name: str) -> tuple[Tensor, Tensor | None]:
    """log density `[S, B]` and its gradient `[S, B, D]` from one evaluation."""
    if not with_score:
        return _checked(log_density(z), z, name), None
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "scores need autograd, which torch.inference_mode() switches off for good. Use torch.no_grad() instead."
        )
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        if not (differentiable and z.requires_grad):
            z = z.detach().requires_grad_()
        value = _checked(log_density(z), z, name)
        if not value.requires_grad:
            raise ValueError(
                f"{name} must be differentiable in z by autograd, but its value has no graph. Did it call detach(), "
                "numpy() or item(), or run under torch.no_grad()?"
            )
        (score,) = torch.autograd.grad(value.sum(), z, create_graph=differentiable, materialize_grads=True)
    return (value, score) if differentiable else (value.detach(), score)


def _checked(value: Tensor, z: Tensor, name: str) -> Tensor:
    if value.shape != z.shape[:-1]:
        raise ValueError(
            f"{name} must map latents [S, B, D] = {list(z.shape)} to log densities [S, B] = {list(z.shape[:-1])}, "
            f"got {list(value.shape)}. Sum over the latent and data dimensions, and keep samples and batch apart."
        )
    return value


def _check_initial(initial: Distribution) -> None:
    if not isinstance(initial, Distribution):
        raise TypeError(
            "the initial distribution must be a torch.distributions.Distribution, which can be sampled and has a "
            f"normalised log_prob; got {type(initial).__name__}. An unnormalised density belongs in log_joint."
        )
    batch, event = list(initial.batch_shape), list(initial.event_shape)
    if len(batch) != 1 or len(event) != 1:
        advice = (
            "Wrap it: torch.distributions.Independent(distribution, 1)."
            if len(batch) == 2 and not event
            else "Give it a batch of one: distribution.expand((1,))."
            if not batch
            else "Flatten the latent to one dimension."
        )
        raise ValueError(
            "the initial distribution must have batch shape [B] and event shape [D], got "
            f"batch {batch} and event {event} from {_name(initial)}. {advice}"
        )
    try:
        support = initial.support
    except NotImplementedError:  # some flows do not say; they are continuous
        return
    if support is not None and support.is_discrete:
        raise ValueError(
            f"the initial distribution must be continuous, got {_name(initial)} with discrete support: Langevin and "
            "Hamiltonian moves need a density on R^D. Marginalise the discrete latents, or relax them."
        )


def _name(distribution: Distribution) -> str:
    base = getattr(distribution, "base_dist", None)
    name = type(distribution).__name__
    return f"{name}({type(base).__name__})" if isinstance(base, Distribution) else name
