"""Normalising flows of zuko as q(z | x)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal

from mcvae._extras import needs_extra
from mcvae.models.networks import single
from mcvae.runs.naming import check_name

__all__ = ["FLOWS", "FlowEncoder"]

FLOWS = {
    "realnvp": "affine couplings (Dinh et al., 2017), the paper's baseline",
    "nsf": "neural spline couplings (Durkan et al., 2019)",
}
"""Names of the flows that can be built, with a line on each."""


def couplings(flow: str, latent_dim: int, num_layers: int, hidden: int, context: int = 0) -> Any:
    """A flow of zuko over D latents, whose networks also see `context` numbers."""
    from zuko.flows import NSF, RealNVP  # only users of flows pay for the import

    check_name("flow", flow, FLOWS)
    options: dict[str, Any] = {"transforms": num_layers, "hidden_features": (hidden,), "activation": nn.SiLU}
    if flow == "nsf":
        return NSF(latent_dim, context, passes=2, **options)
    return RealNVP(latent_dim, context, **options)


class FlowEncoder(nn.Module):
    """q(z | x): a Gaussian N(μ(x), diag σ²(x)) pushed through couplings that see the same features.

    Args:
        network: `x [B, ...] -> [B, 2 D]`, the features: location and raw scale of the Gaussian.
        latent_dim: D.
        flow: one of `FLOWS`.
        num_layers: couplings.
        hidden: width of the coupling networks.
    """

    def __init__(
        self, network: nn.Module, latent_dim: int, flow: str = "realnvp", num_layers: int = 4, hidden: int = 128
    ):
        super().__init__()
        with needs_extra("FlowEncoder"):
            lazy = couplings(flow, latent_dim, num_layers, hidden, context=2 * latent_dim)
        self.network, self.transform = network, lazy.transform

    def _apply(self, *args: Any, **kwargs: Any) -> "FlowEncoder":
        """Move to another device or type; couplings stay in single precision, in half their density has no digits."""
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in self.transform.parameters()):
            self.transform.float()
        return self

    def forward(self, x: Tensor) -> Distribution:
        """Distribution of the latents, batch `[B]`, event `[D]`."""
        from zuko.distributions import NormalizingFlow

        features = single(self.network(x))
        location, raw_scale = features.chunk(2, -1)
        base = Independent(Normal(location, nn.functional.softplus(raw_scale), validate_args=False), 1)
        flow: Distribution = NormalizingFlow(self.transform(features), base)
        return flow
