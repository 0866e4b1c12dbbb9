"""Resampling between the moves of annealed chains: with it, annealed importance sampling is an SMC sampler.

Chains whose weight has become negligible are replaced by copies of others. The evidence is then a product of means,
still unbiased, but chains of one group are no longer independent. So chains live on islands, each resampled on its
own: the estimates of the islands are independent, and their spread gives the error.
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from mcvae.core.bridge import Bridge, Point, State
from mcvae.core.diagnostics import effective_sample_size
from mcvae.core.randomness import uniform

__all__ = ["Resampling", "systematic"]


class Resampling(NamedTuple):
    """When and where to resample.

    Args:
        threshold: share of the chains of an island; resample where the effective sample size falls below it.
        islands: groups of equal size into which the chains are divided.
    """

    threshold: float = 0.5
    islands: int = 8

    def check(self, num_samples: int) -> None:
        """Complain about settings that cannot work with S chains."""
        if not 0 < self.threshold <= 1:
            raise ValueError(f"the threshold of resampling must lie in (0, 1], got {self.threshold}.")
        if self.islands < 1 or num_samples % self.islands or num_samples < 2 * self.islands:
            raise ValueError(
                f"resampling needs islands of equal size, with at least two chains each: {num_samples} chains cannot "
                f"be divided into {self.islands}. Choose num_samples as a multiple of the number of islands."
            )

    def __call__(
        self, bridge: Bridge, state: State, log_weight: Tensor, beta: Tensor, generator: Generator | None
    ) -> tuple[State, Tensor]:
        """Resample chains that stand before a move at temperature `beta`.

        Args:
            bridge: the densities.
            state: of S chains.
            log_weight: what `anneal` has summed up so far, `[S, B]`.
            beta: the temperature whose density closes the weight here.
            generator: source of all randomness.
        """
        num_samples, batch = log_weight.shape
        islands, size = self.islands, num_samples // self.islands
        log_gamma = bridge.log_density(state.point, beta)
        closed = (log_weight + log_gamma).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        grouped = closed.reshape(islands, size, batch).transpose(0, 1).flatten(1)  # [M, I * B]
        log_mean = grouped.logsumexp(0) - math.log(size)
        due = (effective_sample_size(grouped) < self.threshold * size) & log_mean.isfinite()
        if not bool(due.any()):
            return state, log_weight
        kept = torch.arange(size, device=due.device).unsqueeze(-1)
        chosen = torch.where(due, systematic(torch.where(due, grouped, 0.0), size, generator), kept)
        offset = size * torch.arange(islands, device=due.device).repeat_interleave(batch)
        rows = (chosen + offset).reshape(size, islands, batch).transpose(0, 1).reshape(num_samples, batch)
        state = _taken(state, rows)
        due, log_mean = (
            values.reshape(1, islands, batch).expand(size, -1, -1).transpose(0, 1).reshape(num_samples, batch)
            for values in (due, log_mean)
        )
        # A resampled chain starts anew: its weight is the mean of its island, closed at beta.
        return state, torch.where(due, log_mean - bridge.log_density(state.point, beta), log_weight)


def systematic(log_weight: Tensor, number: int, generator: Generator | None = None) -> Tensor:
    """Systematic resampling: indices of `number` chains for each column, `[S, B] -> [N, B]`.

    A chain of weight w is chosen N w / Σ w times, rounded up or down.

    >>> systematic(torch.tensor([[0.0], [-torch.inf], [0.0]]), 4).squeeze(-1)
    tensor([0, 0, 2, 2])
    """
    cumulated = log_weight.softmax(0).cumsum(0)
    start = uniform(cumulated[:1], generator)
    places = (torch.arange(number, device=cumulated.device).unsqueeze(-1) + start) / number
    found = torch.searchsorted(cumulated.T.contiguous(), places.T.contiguous(), right=True).T
    last = log_weight.shape[0] - 1 - log_weight.flip(0).isfinite().int().argmax(0)  # the sum may round below 1
    return torch.minimum(found, last)


def _taken(state: State, rows: Tensor) -> State:
    """The states at `rows [S, B]`, whole."""

    def take(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        index = rows if values.dim() == 2 else rows.unsqueeze(-1).expand(-1, -1, values.shape[-1])
        return values.gather(0, index)

    return State(Point(*map(take, state.point)), take(state.momentum))  # type: ignore[arg-type]
