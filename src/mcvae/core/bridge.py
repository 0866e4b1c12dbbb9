"""The bridge γ_0 = q, …, γ_K = p(x, ·), and the one place where a model is evaluated."""

from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor
from torch.distributions import Distribution

from mcvae.core.initials import check_initial, name_of
from mcvae.core.paths import GeometricPath, Path
from mcvae.core.randomness import draw
from mcvae.core.scores import LogDensity, distribution_and_score, recomputed, value_and_score
from mcvae.core.validation import Unvalidated, is_refusal

__all__ = ["Bridge", "LogDensity", "NonFiniteDensityError", "Point", "State", "Step", "select"]


class NonFiniteDensityError(ValueError):
    """The model is NaN or +inf where the initial distribution itself samples: a mistake, or training has diverged."""


class Point(NamedTuple):
    """Latents with both endpoint log densities and their scores, computed once.

    A point where the joint could not be evaluated (the latent ran away, the density or its score is not a
    number) has `log_p = NaN`; everything else in it is finite, so it can be carried along and rejected.
    """

    z: Tensor
    """Latents `[S, B, D]`."""
    log_q: Tensor
    """log q(z) of the initial distribution, `[S, B]`, float64: weights are differences of large terms."""
    log_p: Tensor
    """log p(x, z), `[S, B]`, float64; −inf outside the support, NaN where it could not be evaluated."""
    score_q: Tensor | None
    """∇ log q(z), `[S, B, D]`, or None if no kernel asked for scores."""
    score_p: Tensor | None
    """∇ log p(x, z), `[S, B, D]`, or None if no kernel asked for scores."""
    sound: Tensor | None = None
    """Whether all of a row is finite, `[S, B]`; None if every row is known to be."""


class State(NamedTuple):
    """What one move hands to the next: a point, and the momentum of underdamped dynamics."""

    point: Point
    momentum: Tensor | None = None


class Step(NamedTuple):
    """What a move knows about its place in the chain."""

    index: int | Tensor  # type: ignore[assignment] # the paper's k, not tuple.index
    """k = 1, …, K."""
    num_steps: int | Tensor
    """K. In a compiled chain index and K are tensors, so that one compiled move serves all places."""
    beta: Tensor
    """Temperature of this move."""
    next_beta: Tensor
    """Temperature of the next move; that of the end for the last one."""
    step_size: Tensor
    """Scalar, or broadcasts against latents `[S, B, D]`."""

    def next(self) -> "Step":
        """This step, one place further: where a backward transition stands in controlled diffusions."""
        return self._replace(index=self.index + 1, beta=self.next_beta)


def check_start(point: Point) -> None:
    """Refuse a point of q where the model could not be evaluated."""
    if point.sound is not None:
        refuse_start(int(point.log_p.isnan().sum()), point.log_p.numel())


def refuse_start(broken: int, number: int) -> None:
    """Raise if the model could not be evaluated at some of a number of samples of q."""
    if broken:
        raise NonFiniteDensityError(
            f"log_joint, its score, or the initial distribution's density is NaN or +inf at {broken} of "
            f"{number} samples of the initial distribution. Return -inf (with any finite score) "
            "outside the support, and check the model's parameters and data for NaN."
        )


def select(mask: Tensor, chosen: Point, otherwise: Point) -> Point:
    """Take whole points: `chosen` where `mask [S, B]` holds, `otherwise` elsewhere."""
    rows = mask.unsqueeze(-1)

    def pick(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return None if a is None or b is None else torch.where(rows, a, b)

    sound = None
    if chosen.sound is not None or otherwise.sound is not None:
        sound = torch.where(mask, _all_if_none(chosen.sound, mask), _all_if_none(otherwise.sound, mask))
    return Point(
        torch.where(rows, chosen.z, otherwise.z),
        torch.where(mask, chosen.log_q, otherwise.log_q),
        torch.where(mask, chosen.log_p, otherwise.log_p),
        pick(chosen.score_q, otherwise.score_q),
        pick(chosen.score_p, otherwise.score_p),
        sound,
    )


def _all_if_none(sound: Tensor | None, like: Tensor) -> Tensor:
    return torch.ones_like(like) if sound is None else sound


@dataclass(frozen=True, eq=False)
class Bridge:
    """The sequence of densities from `initial` to `log_joint` along `path`.

    Args:
        initial: q(z | x), normalised, with batch shape `[B]` and event shape `[D]`; a flow is fine.
        log_joint: log p(x, ·), `[S, B, D] -> [S, B]`. Rows must not influence each other (no batch
            normalisation), since the score of every row is taken from one backward pass.
        path: how γ_β interpolates; the paper's geometric path by default.
        context: what amortised drifts, backward kernels and flows may look at, `[B, C]`: usually the data x.
        memory: "low" forgets the activations of every evaluation and computes them again in the backward pass, so
            that memory grows with K D and not with K times the model's activations; costs about half as much again.
        guarded: look at every state whether a row failed. On a CPU this is always so. On an accelerator it would wait
            for the device, so a chain is looked at once, and run again with a guarded bridge if a row failed.

    A `log_joint` with a method `value_and_score(z) -> ([S, B], [S, B, D])` is asked for its score; autograd finds
    that of all others.

    >>> from torch.distributions import Independent, Normal
    >>> initial = Independent(Normal(torch.zeros(1, 2), torch.ones(1, 2)), 1)
    >>> bridge = Bridge(initial, lambda z: -(z - 1).square().sum(-1))
    >>> with torch.no_grad():
    ...     point = bridge.evaluate(torch.zeros(1, 1, 2))
    >>> bridge.log_density(point, 1.0).item()
    -2.0
    >>> bridge.score(point, 0.5)
    tensor([[[1., 1.]]])
    """

    initial: Distribution
    log_joint: LogDensity
    path: Path = field(default_factory=GeometricPath)
    context: Tensor | None = None
    memory: Literal["normal", "low"] = "normal"
    guarded: bool = False

    def __post_init__(self) -> None:
        check_initial(self.initial)
        if self.memory not in ("normal", "low"):
            raise ValueError(f'memory must be "normal" or "low", got {self.memory!r}.')

    def sample(self, num_samples: int, *, with_score: bool = True, generator: Generator | None = None) -> Point:
        """Draw `num_samples` latents per datum from q and evaluate them."""
        point = self._evaluate(self.draw(num_samples, generator=generator), with_score, None)
        check_start(point)
        return point

    def draw(self, num_samples: int, *, generator: Generator | None = None) -> Tensor:
        """Draw `num_samples` latents per datum from q, `[S, B, D]`."""
        if num_samples < 1:
            raise ValueError(f"num_samples must be at least 1, got {num_samples}.")
        z = draw(self.initial, (num_samples,), generator)
        z = z.to(torch.promote_types(z.dtype, torch.float32))  # a chain in half precision forgets its small steps
        if generator is not None and generator.device.type != z.device.type:
            raise ValueError(f"the generator is on {generator.device}, but latents are on {z.device}.")
        if torch.is_grad_enabled() and not self.initial.has_rsample and self.initial.log_prob(z).requires_grad:
            raise ValueError(
                f"{name_of(self.initial)} has learnable parameters but no reparameterised sampler (has_rsample is "
                "False), so its gradient would be wrong. Use a reparameterised distribution (a Gaussian, a flow), "
                "or wrap the call in torch.no_grad() if you need values only."
            )
        return z

    def evaluate(self, z: Tensor, *, with_score: bool = True, fallback: Tensor | None = None) -> Point:
        """Evaluate both endpoint densities, and their scores, at latents `[S, B, D]`.

        Differentiable to second order while gradients are enabled; under `torch.no_grad()` no graph is kept.

        Args:
            z: the latents.
            with_score: whether to compute scores.
            fallback: latents where the model is known to be well behaved, such as those a proposal started from. If
                some rows fail while gradients are enabled, the model is evaluated once more with those rows replaced,
                because the gradient of a failed row is NaN even where it is multiplied by 0.
        """
        batch, latent = self.initial.batch_shape[0], self.initial.event_shape[0]
        if z.dim() != 3 or z.shape[1:] != (batch, latent):
            raise ValueError(f"latents must have shape [S, B, D] = [S, {batch}, {latent}], got {list(z.shape)}.")
        return self._evaluate(z, with_score, fallback)

    def _evaluate(self, z: Tensor, with_score: bool, fallback: Tensor | None) -> Point:
        largest = torch.finfo(z.dtype).max
        near, moderate = largest**0.25, largest**0.5  # beyond, a quartic log density or a square overflows
        looks = self.guarded or looking_is_free(z.device)
        inside = None
        refuge = torch.zeros_like(z) if fallback is None else fallback.detach()
        if not looks or not _largest(z) <= near:  # also where it is NaN
            inside = (z.abs() <= near).all(-1)
            z = torch.where(inside.unsqueeze(-1), z, refuge)
        point = self._attempt(z, with_score)
        if looks and inside is None and _is_moderate(point, moderate):
            return point
        vanishes = (point.log_q == -torch.inf) | (point.log_p == -torch.inf)
        smooth = torch.ones_like(vanishes)
        if point.score_q is not None and point.score_p is not None:
            smooth = ((point.score_q.abs() <= moderate) & (point.score_p.abs() <= moderate)).all(-1)
        usable = (point.log_q < torch.inf) & (point.log_p < torch.inf) & (smooth | vanishes)
        usable = usable if inside is None else usable & inside
        sound = usable & smooth & (point.log_q > -moderate) & (point.log_p > -moderate)
        if looks and fallback is not None and torch.is_grad_enabled() and not bool(sound.all()):
            again = self._attempt(torch.where(sound.unsqueeze(-1), z, refuge), with_score)
            point = select(sound, again, _detached(point))
        # Where a density vanishes the drift may be anything finite, as long as both transition densities use the same.
        steep = ~smooth.unsqueeze(-1)
        return Point(
            point.z,
            torch.where(usable, point.log_q, 0.0),
            torch.where(usable, point.log_p, torch.nan),
            None if point.score_q is None else torch.where(steep, 0.0, point.score_q),
            None if point.score_p is None else torch.where(steep, 0.0, point.score_p),
            sound,
        )

    def _attempt(self, z: Tensor, with_score: bool) -> Point:
        """Both endpoints as they come out; NaN where the model's distributions refuse their parameters."""
        try:
            return self._endpoints(z, with_score)
        except ValueError as error:
            if not is_refusal(error):
                raise
        with Unvalidated():
            return self._endpoints(z, with_score)

    def _endpoints(self, z: Tensor, with_score: bool) -> Point:
        log_q, score_q = distribution_and_score(self.initial, z, with_score)
        if torch.is_grad_enabled():
            joint = partial(value_and_score, self.log_joint, z, with_score, "log_joint")
            forgets = self.memory == "low" and not torch.compiler.is_compiling()  # a compiled chain forgets anyway
            log_p, score_p = recomputed(joint, z.device) if forgets else joint()
        else:
            samples = max(1, _CHUNK_ROWS // z.shape[1]) if z.device.type == "cpu" else len(z)
            chunks = [
                value_and_score(self.log_joint, part, with_score, "log_joint") for part in torch.split(z, samples)
            ]
            log_p = chunks[0][0] if len(chunks) == 1 else torch.cat([value for value, _ in chunks])
            scores = [score for _, score in chunks if score is not None]
            score_p = None if not scores else scores[0] if len(scores) == 1 else torch.cat(scores)
        total = torch.float32 if z.device.type == "mps" else torch.float64  # Apple GPUs have no doubles
        return Point(z, log_q.to(total), log_p.to(total), score_q, score_p)

    def log_density(self, point: Point, beta: Tensor | float) -> Tensor:
        """log γ_β of a point, `[S, B]`, without evaluating anything; NaN where the point could not be evaluated."""
        log_gamma = self._along_path(point, beta)[0]
        if point.sound is None:
            return log_gamma
        log_gamma = torch.where(log_gamma < -(_NOTHING**0.75), -torch.inf, log_gamma)
        return torch.where(point.log_p.isnan(), torch.nan, log_gamma)

    def score(self, point: Point, beta: Tensor | float) -> Tensor:
        """∇ log γ_β of a point, `[S, B, D]`, without evaluating anything."""
        if point.score_q is None or point.score_p is None:
            raise ValueError(
                "this point carries no score. Evaluate it with with_score=True; a kernel that needs scores must "
                "have uses_score = True."
            )
        _, weight_q, weight_p = self._along_path(point, beta)
        dtype = point.score_p.dtype
        return weight_q.to(dtype) * point.score_q + weight_p.to(dtype) * point.score_p

    def _along_path(self, point: Point, beta: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
        """What the path says of a point. A density of 0 stands in as e^-1e30, so that no 0 * inf reaches the path."""
        log_q, log_p = point.log_q, point.log_p
        if point.sound is not None:
            log_p = torch.where(log_p.isnan(), 0.0, log_p)  # 0 for NaN, also in the gradient
            log_q, log_p = log_q.clamp(min=-_NOTHING), log_p.clamp(min=-_NOTHING)
        return self.path(log_q, log_p, torch.as_tensor(beta, dtype=log_p.dtype, device=log_p.device))


def looking_is_free(device: torch.device) -> bool:
    """Whether Python may look at values without waiting: on a CPU, unless a compiler is tracing."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


_NOTHING = 1e30
"""−log of what stands in for a density of 0: beyond any log density of a model, within float32."""

_CHUNK_ROWS = 512
"""Rows per evaluation without gradients on a CPU: fewer waste time between layers, more gain nothing and hold more."""


def _largest(values: Tensor) -> float:
    """Largest absolute value, NaN if there is one."""
    return float(torch.linalg.vector_norm(values.detach(), torch.inf))


def _is_moderate(point: Point, limit: float) -> bool:
    """Whether all of a point is finite and far from overflow: the common case, found out with few operators."""
    if not _largest(point.log_q.detach() + point.log_p.detach()) < limit:
        return False
    if point.score_q is None or point.score_p is None:
        return True
    return _largest(point.score_q.detach() + point.score_p.detach()) < limit


def _detached(point: Point) -> Point:
    return Point(*(value.detach() if isinstance(value, Tensor) else None for value in point))  # type: ignore[arg-type]
