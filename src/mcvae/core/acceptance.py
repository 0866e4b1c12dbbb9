"""Acceptance rules: from the log Hastings ratio to the log acceptance probability."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (the field's name for it)

__all__ = ["Acceptance", "barker", "log1mexp", "metropolis"]

Acceptance = Callable[[Tensor], Tensor]
"""Log Hastings ratio to log acceptance probability."""


def metropolis(log_hastings: Tensor) -> Tensor:
    """log of α = 1 ∧ r, eq. (mala_acceptance)."""
    return log_hastings.clamp(max=0.0)


def barker(log_hastings: Tensor) -> Tensor:
    """log of α = r / (1 + r); smooth, where Metropolis has a kink."""
    return F.logsigmoid(log_hastings)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 − exp(x)) for x < 0, accurate at both ends (Mächler, 2012) and with a finite gradient."""
    near_zero = x > -0.6931471805599453
    near = (-torch.expm1(torch.where(near_zero, x, -1.0))).log()
    far = torch.log1p(-torch.where(near_zero, -1.0, x).exp())
    return torch.where(near_zero, near, far)
