"""Bounds on log p(x) from log-weights."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Bound", "elbo", "iwae", "renyi"]

Bound = Callable[[Tensor], Tensor]
"""Log-weights `[S, B]` to a bound `[B]`."""


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
    if not isinstance(alpha, float | int):
        raise TypeError(f"alpha must be a number, got {alpha!r}.")
    return elbo if alpha == 1 else _Renyi(alpha)


@dataclass(frozen=True)
class _Renyi:
    alpha: float

    def __call__(self, log_weight: Tensor) -> Tensor:
        return iwae((1 - self.alpha) * log_weight) / (1 - self.alpha)

    def __repr__(self) -> str:
        return f"renyi({self.alpha})"
