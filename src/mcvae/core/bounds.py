"""Bounds on log p(x) from log-weights, and surrogates whose gradient is unbiased under accept/reject."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mcvae.core.annealing import Trajectory

__all__ = ["Bound", "ControlVariate", "elbo", "iwae", "leave_one_out", "none", "renyi", "surrogate"]

Bound = Callable[[Tensor], Tensor]
"""Log-weights `[S, B]` to a bound `[B]`."""

ControlVariate = Callable[[Bound, Tensor], Tensor]
"""`(bound, log_weight [S, B]) -> [S, B]`: for every sample, a value of the bound that does not depend on it."""


def elbo(log_weight: Tensor) -> Tensor:
    """E[log w]: the paper's bound, eq. (generalELBO), averaged over samples.

    >>> elbo(torch.tensor([[1.0], [3.0]]))
    tensor([2.])
    """
    return log_weight.mean(0)


def iwae(log_weight: Tensor) -> Tensor:
    """log of the mean weight: the importance-weighted bound of Burda et al., tighter with every sample.

    >>> iwae(torch.tensor([[0.5], [0.5]]))
    tensor([0.5000])
    """
    vanishes = (log_weight == -torch.inf).all(0)  # whose logsumexp would have a NaN gradient
    log_sum = torch.where(vanishes, 0.0, log_weight).logsumexp(0)
    return torch.where(vanishes, -torch.inf, log_sum) - math.log(log_weight.shape[0])


def renyi(alpha: float) -> Bound:
    """The Rényi bound log E[w^(1−α)] / (1−α) of Li and Turner: `iwae` at α = 0, `elbo` as α → 1.

    Args:
        alpha: order; between 0 and 1 it is a lower bound on log p(x).

    >>> renyi(0.0)(torch.tensor([[0.5], [0.5]]))
    tensor([0.5000])
    """
    return elbo if alpha == 1 else _Renyi(alpha)


@dataclass(frozen=True)
class _Renyi:
    alpha: float

    def __call__(self, log_weight: Tensor) -> Tensor:
        return iwae((1 - self.alpha) * log_weight) / (1 - self.alpha)

    def __repr__(self) -> str:
        return f"renyi({self.alpha})"


def leave_one_out(bound: Bound, log_weight: Tensor) -> Tensor:
    """The bound with sample i replaced by the mean log-weight of the others.

    For `elbo` this is the paper's control variate W̃_{n,i} (Section 3.2); for `iwae` it is VIMCO (Mnih and Rezende).
    Weights of 0 do not enter the mean.
    """
    num_samples = log_weight.shape[0]
    if num_samples < 2:
        raise ValueError(
            "the control variate leave_one_out compares samples with each other and needs num_samples >= 2, got "
            f"{num_samples}. Raise num_samples, or choose control_variate=mcvae.none."
        )
    others = ~_identity(log_weight) & log_weight.isfinite().unsqueeze(1)  # [S, i, B]
    total = torch.where(others, log_weight.unsqueeze(1), 0.0).sum(0)
    return _replaced(bound, log_weight, total / others.sum(0).clamp(min=1))


def none(bound: Bound, log_weight: Tensor) -> Tensor:
    """No control variate: sample i is replaced by 0, so that for `elbo` the signal is W_i / n, eq. (reinforce_ais)."""
    return _replaced(bound, log_weight, torch.zeros_like(log_weight))


def _replaced(bound: Bound, log_weight: Tensor, substitute: Tensor) -> Tensor:
    """`[S, B]`: row i is the bound of the log-weights whose i-th is replaced by the i-th substitute."""
    replaced = torch.where(_identity(log_weight), substitute, log_weight.unsqueeze(1))  # [S, i, B]
    return bound(replaced.flatten(1)).reshape(log_weight.shape)


def _identity(log_weight: Tensor) -> Tensor:
    return torch.eye(log_weight.shape[0], dtype=torch.bool, device=log_weight.device).unsqueeze(-1)


def surrogate(trajectory: Trajectory, bound: Bound = elbo, control_variate: ControlVariate = leave_one_out) -> Tensor:
    """What `backward()` must see, `[B]`: its gradient is unbiased for that of E[bound].

    Its value is the bound. Its gradient is pathwise through the log-weights, plus REINFORCE for the accept/reject
    decisions, [W − W̃] ∇log A of eq. (grad_elbo_ais_cv).
    """
    value = bound(trajectory.log_weight)
    if not trajectory.log_accept.requires_grad:  # no decisions, or no gradient asked for
        return value
    with torch.no_grad():
        signal = value - control_variate(bound, trajectory.log_weight)
        signal = torch.where(signal.isfinite(), signal, 0.0)  # a bound of -inf has no gradient to estimate
    score = trajectory.log_accept - trajectory.log_accept.detach()  # value 0, gradient ∇log A
    return value + (signal * score).sum(0)
