"""Values of 0 and 1."""

from torch import Tensor
from torch.distributions import Bernoulli, Distribution, Independent

from mcvae.models.likelihoods.interface import Datum, Likelihood

__all__ = ["BernoulliLikelihood", "bernoulli"]


class BernoulliLikelihood(Likelihood):
    """Binary data with logits from the network: the paper's choice for MNIST."""

    def forward(self, output: Tensor) -> Distribution:
        """See `Likelihood`."""
        return Independent(Bernoulli(logits=output, validate_args=False), output.dim() - 1)


def bernoulli(datum: Datum, sigma: float) -> BernoulliLikelihood:
    """For pixels that are binarised, or whole numbers that are binary."""
    if datum.kind == "counts" and datum.levels > 2:
        raise ValueError(
            f"the bernoulli likelihood needs data of 0 and 1, got whole numbers up to {datum.levels - 1}. Choose "
            "poisson, negative-binomial or categorical."
        )
    return BernoulliLikelihood()
