"""Bounds on log p(x) from log-weights, and surrogates whose gradient is unbiased under accept/reject."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mcvae.annealing import Trajectory

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
    return log_weight.logsumexp(0) - math.log(log_weight.shape[0])


def renyi(alpha: float) -> Bound:
    """The Rényi bound log E[w^(1−α)] / (1−α) of Li and Turner: `iwae` at α = 0, `elbo` as α → 1.

    Args:
        alpha: order; between 0 and 1 it is a lower bound on log p(x).

    >>> renyi(0.0)(torch.tensor([[0.5], [0.5]]))
    tensor([0.5000])
    """
    if alpha == 1:
        return elbo

    def bound(log_weight: Tensor) -> Tensor:
        return iwae((1 - alpha) * log_weight) / (1 - alpha)

    bound.__name__ = f"renyi({alpha})"
    return bound


def leave_one_out(bound: Bound, log_weight: Tensor) -> Tensor:
    """The bound with sample i replaced by the mean log-weight of the others.

    For `elbo` this is the paper's control variate W̃_{n,i} (Section 3.2); for `iwae` it is VIMCO (Mnih and Rezende).
    """
    num_samples = log_weight.shape[0]
    if num_samples < 2:
        raise ValueError(
            "the control variate leave_one_out compares samples with each other and needs num_samples >= 2, got "
            f"{num_samples}. Raise num_samples, or choose control_variate=mcvae.none."
        )
    rest = torch.where(_identity(log_weight), 0.0, log_weight.unsqueeze(1))
    return _replaced(bound, log_weight, rest.sum(0) / (num_samples - 1))


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

    The gradient is pathwise through the log-weights, plus REINFORCE for the accept/reject decisions,
    [W − W̃] ∇log A of eq. (grad_elbo_ais_cv). Its value is not the bound; `Estimate.bound` is.
    """
    value = bound(trajectory.log_weight)
    if not trajectory.log_accept.requires_grad:  # no decisions, or no gradient asked for
        return value
    with torch.no_grad():
        signal = value - control_variate(bound, trajectory.log_weight)
    return value + (signal * trajectory.log_accept).sum(0)
