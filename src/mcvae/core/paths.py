"""Annealing paths: how the bridge density γ_β moves from the initial density q to the joint p(x, ·)."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["GeometricPath", "MixturePath", "Path"]


class Path(Protocol):
    """A rule for log γ_β and for its score, given the two endpoint log densities, which are finite.

    The score of γ_β is `weight_q * ∇log q + weight_p * ∇log p`, so that changing β costs no evaluation. `Bridge` takes
    care of densities that vanish.
    """

    def __call__(self, log_q: Tensor, log_p: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return `(log_gamma [S, B], weight_q, weight_p)`; the weights broadcast against scores `[S, B, D]`."""
        ...


@dataclass(frozen=True)
class GeometricPath:
    """The paper's path (Section 2.1): γ_β = q^(1−β) p^β.

    >>> log_q, log_p = torch.tensor([[-1.0]]), torch.tensor([[-3.0]])
    >>> log_gamma, weight_q, weight_p = GeometricPath()(log_q, log_p, torch.tensor(0.25))
    >>> log_gamma.item(), weight_q.item(), weight_p.item()
    (-1.5, 0.75, 0.25)
    """

    def __call__(self, log_q: Tensor, log_p: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Path`."""
        return torch.lerp(log_q, log_p, beta), 1 - beta, beta


@dataclass(frozen=True)
class MixturePath:
    """The arithmetic path γ_β = (1−β) q + β p; the weights of the score are responsibilities.

    >>> log_gamma, weight_q, weight_p = MixturePath()(torch.zeros(1, 1), torch.zeros(1, 1), torch.tensor(0.5))
    >>> log_gamma.item(), weight_q.item(), weight_p.item()
    (0.0, 0.5, 0.5)
    """

    def __call__(self, log_q: Tensor, log_p: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Path`."""
        terms = torch.stack([_log(1 - beta) + log_q, _log(beta) + log_p])
        responsibility_q, responsibility_p = terms.softmax(0).unsqueeze(-1)
        return terms.logsumexp(0), responsibility_q, responsibility_p


def _log(x: Tensor) -> Tensor:
    """log x whose gradient at x = 0 is 0 instead of NaN."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).log(), -torch.inf)
