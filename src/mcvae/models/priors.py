"""Priors p(z) that are learned with the model: modules without arguments that return a distribution."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, MixtureSameFamily, Normal

from mcvae._extras import needs_extra
from mcvae.models.flows import couplings
from mcvae.models.precision import InSinglePrecision
from mcvae.runs.naming import check_name

__all__ = ["PRIORS", "FlowPrior", "MixturePrior", "VampPrior", "build_prior"]


class MixturePrior(InSinglePrecision):
    """p(z) = Σ_m π_m N(z; μ_m, diag σ_m²), all learned.

    Args:
        latent_dim: D.
        num_components: how many Gaussians.

    >>> MixturePrior(2, 3)().log_prob(torch.zeros(4, 5, 2)).shape
    torch.Size([4, 5])
    """

    def __init__(self, latent_dim: int, num_components: int = 10):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(num_components))
        self.location = nn.Parameter(torch.randn(num_components, latent_dim))
        self.log_scale = nn.Parameter(torch.zeros(num_components, latent_dim))

    def forward(self) -> Distribution:
        """The mixture, event `[D]`."""
        components = Independent(Normal(self.location, self.log_scale.exp(), validate_args=False), 1)
        return MixtureSameFamily(Categorical(logits=self.logits, validate_args=False), components, validate_args=False)


class VampPrior(nn.Module):
    """p(z) = mean over m of q(z | u_m): the encoder's q at learned pseudo-data u_m (Tomczak and Welling, 2018).

    Args:
        encoder: q(z | x), a Gaussian; shared with the model, whose weights it is.
        shape: of what the encoder sees.
        num_components: how many pseudo-data.

    >>> encoder = lambda x: Independent(Normal(x, torch.ones_like(x)), 1)
    >>> VampPrior(encoder, (2,), 5)().log_prob(torch.zeros(4, 2)).shape
    torch.Size([4])
    """

    def __init__(self, encoder: Callable[[Tensor], Distribution], shape: tuple[int, ...], num_components: int = 10):
        super().__init__()
        self._encoder = (encoder,)  # in a tuple, so that its weights are the model's and not counted twice
        self.pseudo_data = nn.Parameter(torch.rand(num_components, *shape))

    def start(self, data: Tensor) -> None:
        """Take pseudo-data from training data `[N, ...]`, evenly spaced."""
        number = len(self.pseudo_data)
        with torch.no_grad():
            self.pseudo_data.copy_(data[torch.linspace(0, len(data) - 1, number).long()])

    def forward(self) -> Distribution:
        """The mixture, event `[D]`."""
        components = self._encoder[0](self.pseudo_data)
        weights = Categorical(logits=self.pseudo_data.new_zeros(len(self.pseudo_data)), validate_args=False)
        return MixtureSameFamily(weights, components, validate_args=False)


class FlowPrior(InSinglePrecision):
    """p(z): a standard normal pushed through couplings of zuko, which are learned.

    Args:
        latent_dim: D.
        flow: "realnvp" or "nsf".
        num_layers: couplings.
        hidden: width of their networks.

    >>> FlowPrior(3)().log_prob(torch.zeros(4, 5, 3)).shape
    torch.Size([4, 5])
    """

    def __init__(self, latent_dim: int, flow: str = "realnvp", num_layers: int = 4, hidden: int = 64):
        super().__init__()
        with needs_extra("FlowPrior"):
            self.flow = couplings(flow, latent_dim, num_layers, hidden)

    def forward(self) -> Distribution:
        """The flow, event `[D]`."""
        distribution: Distribution = self.flow()
        return distribution


PRIORS = {
    "standard-normal": "N(0, 1), nothing learned",
    "mixture": "a learned mixture of Gaussians",
    "vamp": "a mixture of the encoder's q at learned pseudo-data",
    "realnvp": "a flow of affine couplings",
    "nsf": "a flow of neural spline couplings",
}
"""Names of the priors that can be built, with a line on each."""


def build_prior(
    name: str, latent_dim: int, encoder: Callable[[Tensor], Distribution], shape: tuple[int, ...], components: int
) -> nn.Module | None:
    """The prior of this name; None for a standard normal.

    Args:
        name: one of `PRIORS`.
        latent_dim: D.
        encoder: of the model, for "vamp".
        shape: of what the encoder sees.
        components: of the mixtures.
    """
    check_name("prior", name, PRIORS)
    if name == "mixture":
        return MixturePrior(latent_dim, components)
    if name == "vamp":
        return VampPrior(encoder, shape, components)
    return None if name == "standard-normal" else FlowPrior(latent_dim, name)
