"""Whole numbers that are names of categories, or levels without an assumption about their order."""

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent

from mcvae.models.likelihoods.interface import Datum, Likelihood

__all__ = ["CategoricalLikelihood", "categorical"]


class CategoricalLikelihood(Likelihood):
    """Levels 0, 1, …, L − 1 with a logit for each from the network.

    Args:
        shape: of one datum.
        levels: L.

    >>> p = CategoricalLikelihood((2,), levels=4)(torch.zeros(1, 8))
    >>> p.log_prob(torch.tensor([[0.0, 3.0]])).exp().item(), p.mean.tolist()
    (0.0625, [[1.5, 1.5]])
    """

    log_frequency: Tensor

    def __init__(self, shape: tuple[int, ...], levels: int):
        super().__init__()
        if not 2 <= levels <= 256:
            raise ValueError(f"expected 2 to 256 levels, got {levels}. For larger counts choose negative-binomial.")
        self.shape, self.channels_per_channel = shape, levels
        self.register_buffer("log_frequency", torch.zeros(*shape, levels))

    def start(self, data: Tensor) -> None:
        """Take the frequency of every level, as if each had been seen one time more."""
        counted = torch.nn.functional.one_hot(data.long(), self.channels_per_channel).sum(0) + 1
        self.log_frequency.copy_((counted / counted.sum(-1, keepdim=True)).log())

    def forward(self, output: Tensor) -> Distribution:
        """See `Likelihood`."""
        apart = output.reshape(len(output), self.channels_per_channel, *self.shape)
        logits = apart.movedim(1, -1) + self.log_frequency
        return Independent(_Levels(logits=logits, validate_args=False), output.dim() - 1)


class _Levels(Categorical):
    """Categorical, with the mean level as its mean, for pictures of it."""

    @property
    def mean(self) -> Tensor:
        levels = torch.arange(self.logits.shape[-1], dtype=self.logits.dtype, device=self.logits.device)
        mean: Tensor = self.probs @ levels
        return mean


def categorical(datum: Datum, sigma: float) -> CategoricalLikelihood:
    """For pixels or other whole numbers below 256; σ has no meaning here."""
    return CategoricalLikelihood(datum.shape, datum.levels)
