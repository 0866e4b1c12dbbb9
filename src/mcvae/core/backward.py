"""Learned backward kernels ℓ_ψ(z_k → z_{k−1} | x), as proper densities of z_{k−1} (supplement, PPCA)."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal

__all__ = ["GaussianBackward"]


class GaussianBackward(nn.Module):
    """ℓ_ψ(z, z') = N(z'; μ_ψ(z, x), diag σ²_ψ(z, x)) with a fully connected network, one module per step k.

    It starts as N(z, scale²), the kernel of a random walk, and learns the rest.

    Args:
        latent_dim: D.
        context_dim: C, the size of what it is amortised over (`Bridge.context`, usually the data); 0 for none.
        hidden: sizes of the hidden layers; `()` makes it linear.
        scale: initial σ; √(2η) matches a Langevin step of size η.

    >>> backward = GaussianBackward(latent_dim=2, context_dim=3, scale=0.5)
    >>> backward(torch.zeros(4, 1, 2), torch.ones(1, 3)).log_prob(torch.zeros(4, 1, 2)).shape
    torch.Size([4, 1])
    """

    def __init__(self, latent_dim: int, context_dim: int = 0, hidden: Sequence[int] = (128,), scale: float = 0.1):
        super().__init__()
        if scale <= 0:
            raise ValueError(f"the initial scale must be positive, got {scale}.")
        self.latent_dim, self.context_dim = latent_dim, context_dim
        sizes = [latent_dim + context_dim, *hidden]
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(sizes):
            layers += [nn.Linear(fan_in, fan_out), nn.SiLU()]
        head = nn.Linear(sizes[-1], 2 * latent_dim)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        self.network = nn.Sequential(*layers, head)
        self.log_scale = nn.Parameter(torch.tensor(scale).log().expand(latent_dim).clone())

    def forward(self, z: Tensor, context: Tensor | None) -> Distribution:
        """Distribution of z_{k−1} given z_k `[S, B, D]` and the context `[B, C]`."""
        inputs = z
        if self.context_dim:
            got = None if context is None else list(context.shape)
            if context is None or got != [z.shape[1], self.context_dim]:
                raise ValueError(
                    f"this backward kernel is amortised over a context [B, C] = [{z.shape[1]}, {self.context_dim}], "
                    f"got {got}. Pass Bridge(..., context=x.flatten(1)), or build it with context_dim=0."
                )
            inputs = torch.cat([z, context.expand(z.shape[0], -1, -1)], -1)
        shift, log_scale = self.network(inputs).chunk(2, -1)
        return Independent(Normal(z + shift, (self.log_scale + log_scale).exp()), 1)
