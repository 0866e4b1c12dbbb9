"""Counts whose variance is their mean."""

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Poisson

from mcvae.models.likelihoods.interface import Datum, Likelihood

__all__ = ["CountLikelihood", "PoissonLikelihood", "poisson"]


class CountLikelihood(Likelihood):
    """Counts whose log mean is the network's output plus that of the training data.

    Args:
        shape: of one datum.
    """

    log_mean: Tensor

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.register_buffer("log_mean", torch.zeros(shape))

    def start(self, data: Tensor) -> None:
        """Take the log mean of every count, as if half a count more had been seen: none is impossible."""
        mean = (data.double().sum(0) + 0.5) / len(data)
        self.log_mean.copy_(mean.log().to(torch.get_default_dtype()))


class PoissonLikelihood(CountLikelihood):
    """Counts with rate exp(output + log mean): the network says by what factor a count differs from its mean.

    Args:
        shape: of one datum.

    >>> likelihood = PoissonLikelihood((2,))
    >>> likelihood.start(torch.tensor([[1.0, 9.0], [3.0, 7.0]]))
    >>> [round(mean, 2) for mean in likelihood(torch.zeros(1, 2)).mean[0].tolist()]
    [2.25, 8.25]
    """

    def forward(self, output: Tensor) -> Distribution:
        """See `Likelihood`."""
        rate = (output + self.log_mean).exp()
        return Independent(Poisson(rate, validate_args=False), output.dim() - 1)


def poisson(datum: Datum, sigma: float) -> PoissonLikelihood:
    """For counts; σ has no meaning here."""
    return PoissonLikelihood(datum.shape)
