"""Gradients of bounds: what `backward()` must see so that they are unbiased.

Pathwise gradients flow through the log-weights. Decisions to accept or reject have none, so they need REINFORCE, and a
control variate: something that does not depend on the decision, to compare its outcome with. Without chains (VAE and
IWAE) there are pathwise gradients of smaller variance, which leave out or replace the score of q.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from mcvae.core.annealing import Trajectory
from mcvae.core.bounds import Bound, elbo, iwae
from mcvae.core.bridge import Bridge, Point
from mcvae.core.scores import distribution_and_score

__all__ = [
    "ControlVariate",
    "Gradient",
    "check_gradient",
    "leave_one_out",
    "no_control_variate",
    "predicted",
    "reparameterised",
    "stopped",
    "surrogate",
]

ControlVariate = Callable[[Bound, Trajectory], Tensor]
"""`(bound, trajectory) -> [K, S, B]` or `[S, B]`: for every decision, a value of the bound that it cannot change."""


def stopped(bound: Bound, trajectory: Trajectory) -> Tensor:
    """The bound with sample i replaced by what it would be if its chain had stopped before decision k, `[K, S, B]`.

    V_{k−1}, the weight of a chain that jumps from z_{k−1} to the end, is known before the decision and costs nothing:
    the past cancels, and the future is compared with standing still. One chain is enough.
    """
    assert trajectory.steps is not None
    return _replaced(bound, trajectory.log_weight, trajectory.steps.stopped)


def predicted(bound: Bound, trajectory: Trajectory) -> Tensor:
    """What the bound is expected to be before decision k, `[K, S, B]`: `stopped`, plus the gain that is still to come.

    The gain is predicted from the chains of the other data in the batch, by a straight line in how far they were at
    that step. A decision cannot change what happens to other data, so the gradient stays unbiased. A batch of one is
    `stopped`.
    """
    reached = stopped(bound, trajectory)
    return reached + _line_of_others(reached, bound(trajectory.log_weight) - reached)


def _line_of_others(x: Tensor, y: Tensor) -> Tensor:
    """For every datum, y at its x by least squares through the points of all other data, `[K, S, B]`; 0 if none.

    The slope is shrunk as if ten more points lay on a horizontal line, and the line ends three deviations from its
    middle.
    """
    known = x.isfinite() & y.isfinite()
    x, y = (torch.where(known, values, 0.0) for values in (x, y))

    def of_others(values: Tensor) -> Tensor:
        own = torch.where(known, values, 0.0).sum(1, keepdim=True)
        return own.sum(2, keepdim=True) - own

    number = of_others(torch.ones_like(x))
    x = x - x.sum((1, 2), keepdim=True) / known.sum((1, 2), keepdim=True).clamp(min=1)  # against cancellation
    count = number.clamp(min=1)
    middle, level = of_others(x) / count, of_others(y) / count
    variance = (of_others(x.square()) / count - middle.square()).clamp(min=0)
    slope = (of_others(x * y) / count - middle * level) / variance.clamp(min=1e-12) * number / (number + 10)
    reach = 3 * variance.sqrt()
    return torch.where(known, level + slope * (x - middle).clamp(-reach, reach), 0.0)


def leave_one_out(bound: Bound, trajectory: Trajectory) -> Tensor:
    """The bound with sample i replaced by the mean log-weight of the others, `[S, B]`.

    For `elbo` this is the paper's control variate W̃_{n,i} (Section 3.2); for `iwae` it is VIMCO (Mnih and Rezende).
    Weights of 0 do not enter the mean.
    """
    log_weight = trajectory.log_weight
    if len(log_weight) < 2:
        raise ValueError(
            "the control variate leave_one_out compares samples with each other and needs num_samples >= 2, got "
            f"{len(log_weight)}. Raise num_samples, or choose control_variate=mcvae.stopped."
        )
    others = ~_identity(log_weight) & log_weight.isfinite().unsqueeze(1)  # [S, i, B]
    total = torch.where(others, log_weight.unsqueeze(1), 0.0).sum(0)
    return _replaced(bound, log_weight, total / others.sum(0).clamp(min=1))


def no_control_variate(bound: Bound, trajectory: Trajectory) -> Tensor:
    """Sample i is replaced by 0, `[S, B]`, so that for `elbo` the signal is W_i / n, eq. (reinforce_ais)."""
    return _replaced(bound, trajectory.log_weight, torch.zeros_like(trajectory.log_weight))


def _replaced(bound: Bound, log_weight: Tensor, substitute: Tensor) -> Tensor:
    """The bound of the log-weights whose i-th is replaced by the i-th substitute, `[..., S, B] -> [..., S, B]`."""
    rows = torch.where(_identity(log_weight), substitute.unsqueeze(-3), log_weight.unsqueeze(1))  # [..., S, i, B]
    return bound(rows.movedim(-3, 0).flatten(1)).reshape(substitute.shape)


def _identity(log_weight: Tensor) -> Tensor:
    return torch.eye(len(log_weight), dtype=torch.bool, device=log_weight.device).unsqueeze(-1)


def surrogate(trajectory: Trajectory, bound: Bound = elbo, control_variate: ControlVariate = stopped) -> Tensor:
    """What `backward()` must see, `[B]`: its gradient is unbiased for that of E[bound].

    Its value is the bound. Its gradient is pathwise through the log-weights, plus REINFORCE for the accept/reject
    decisions: Σ_k [W − W̃_k] ∇log α_k, which is eq. (grad_elbo_ais_cv) if W̃ is the same for all decisions.
    """
    value = bound(trajectory.log_weight)
    if trajectory.steps is None or not trajectory.steps.log_accept.requires_grad:  # no decisions, or no gradient
        return value
    log_accept = trajectory.steps.log_accept
    with torch.no_grad():
        signal = value - control_variate(bound, trajectory)
        signal = torch.where(signal.isfinite(), signal, 0.0)  # a bound of -inf has no gradient to estimate
    return value + (signal * (log_accept - log_accept.detach())).sum((0, 1))  # value 0, gradient signal ∇log α


Gradient = Literal["pathwise", "sticking-the-landing", "doubly-reparameterised"]
"""Pathwise estimators for q's parameters. All have the same mean where they are allowed."""


def check_gradient(gradient: Gradient, bound: Bound, num_steps: int) -> None:
    """Refuse a choice that would be biased, or that is not defined, and explain."""
    if gradient not in get_args(Gradient):
        raise ValueError(f"gradient must be one of {', '.join(get_args(Gradient))}, got {gradient!r}.")
    if gradient == "pathwise":
        return
    if num_steps > 0:
        raise ValueError(
            f'gradient="{gradient}" drops the score of q, whose mean is 0 for samples of q alone. After K = '
            f'{num_steps} moves the weight depends on q through every temperature. Use gradient="pathwise".'
        )
    if gradient == "sticking-the-landing" and bound is not elbo:
        raise ValueError(
            'gradient="sticking-the-landing" is unbiased for the ELBO only: in a bound over several samples the score '
            'of q is weighted, and its mean is not 0. Use "doubly-reparameterised" for iwae.'
        )
    if gradient == "doubly-reparameterised" and bound not in (elbo, iwae):
        raise ValueError(f'gradient="doubly-reparameterised" is for elbo and iwae, got {bound}. Use "pathwise".')


def reparameterised(bridge: Bridge, point: Point, bound: Bound) -> Tensor:
    """Surrogate for samples of q without chains, `[B]`, in which q's own parameters get no score.

    For `elbo` it is sticking the landing (Roeder et al., 2017): the gradient of log q reaches q's parameters through z
    only. For `iwae` it is doubly reparameterised (Tucker et al., 2019): with normalised weights v, what flows through
    z_i is weighted by v_i², and the model's own gradient by v_i.
    """
    z = point.z
    with torch.no_grad():
        _, score_q = distribution_and_score(bridge.initial, z)
        value = bound(point.log_p - point.log_q)
    assert score_q is not None
    log_q = point.log_q.detach() + (score_q * (z - z.detach())).sum(-1)
    log_weight = point.log_p - log_q
    if bound is elbo:
        return value + _gradient_only(log_weight.mean(0))
    share = (point.log_p - point.log_q).detach().softmax(0).nan_to_num(nan=0.0)
    if z.requires_grad:
        z.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: share.unsqueeze(-1).to(gradient) * gradient
        )
    return value + _gradient_only((share * log_weight).sum(0))


def _gradient_only(values: Tensor) -> Tensor:
    """Value 0, with the gradient of `values`."""
    finite = torch.where(values.isfinite(), values, 0.0)
    return finite - finite.detach()
