"""Counts that vary more than Poisson's, such as those of genes in cells."""

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, NegativeBinomial

from mcvae.models.likelihoods.interface import Datum
from mcvae.models.likelihoods.poisson import CountLikelihood

__all__ = ["NegativeBinomialLikelihood", "negative_binomial"]


class NegativeBinomialLikelihood(CountLikelihood):
    """Counts with mean μ = exp(output + log mean) and variance μ + μ²/r, with an r for every dimension, learned.

    Args:
        shape: of one datum.

    >>> p = NegativeBinomialLikelihood((2,))(torch.zeros(1, 2))
    >>> p.mean.tolist(), p.variance.tolist()  # r starts at 1
    ([[1.0, 1.0]], [[2.0, 2.0]])
    """

    def __init__(self, shape: tuple[int, ...]):
        super().__init__(shape)
        self.log_r = nn.Parameter(torch.zeros(shape))

    def forward(self, output: Tensor) -> Distribution:
        """See `Likelihood`."""
        log_r = self.log_r.clamp(-10, 10)  # beyond, the density is that of a point at 0, or Poisson's
        logits = output + self.log_mean - log_r
        return Independent(
            NegativeBinomial(log_r.exp().expand_as(logits), logits=logits, validate_args=False), output.dim() - 1
        )


def negative_binomial(datum: Datum, sigma: float) -> NegativeBinomialLikelihood:
    """For counts; σ has no meaning here."""
    return NegativeBinomialLikelihood(datum.shape)
