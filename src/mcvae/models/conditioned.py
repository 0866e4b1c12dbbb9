"""Networks that also see conditions y: features of x and y together, and a prior p(z | y)."""

import math

import torch
from torch import Tensor, nn

from mcvae.models.networks import Shape, mlp

__all__ = ["ConditionedFeatures", "ConditionedLatents"]


class ConditionedFeatures(nn.Module):
    """Features of x and y together, from those of x: rows `[B, size + C]` of both to `[B, outputs]`.

    Args:
        network: features of x, `[B, outputs]`.
        shape: of x.
        outputs: of the network, and in all.
        conditions: C.
    """

    def __init__(self, network: nn.Module, shape: Shape, outputs: int, conditions: int):
        super().__init__()
        self.network, self.shape = network, shape
        self.joined = mlp([outputs + conditions, 64, outputs])

    def forward(self, rows: Tensor) -> Tensor:
        """`[B, size + C]` to `[B, outputs]`."""
        size = math.prod(self.shape)
        x, y = rows[:, :size], rows[:, size:]
        features: Tensor = self.network(x.reshape(len(x), *self.shape))
        joined: Tensor = self.joined(torch.cat([features, y], 1))
        return features + joined


class ConditionedLatents(nn.Module):
    """The prior p(z | y) = N(μ(y), σ²(y)): rows of standardised latents and y, `[N, D + C]`, to (z, y).

    A chain moves where the prior is standard, whatever y; the densities are the same.
    """

    def __init__(self, latent_dim: int, conditions: int):
        super().__init__()
        self.latent_dim, self.network = latent_dim, mlp([conditions, 32, 2 * latent_dim])
        final = self.network[-1]
        nn.init.zeros_(final.weight)  # type: ignore[arg-type]
        nn.init.zeros_(final.bias)  # type: ignore[arg-type] # starts as N(0, 1)

    def forward(self, rows: Tensor) -> Tensor:
        """`[N, D + C]` to the same shape."""
        standardised, y = rows[:, : self.latent_dim], rows[:, self.latent_dim :]
        location, log_scale = self.network(y).chunk(2, 1)
        return torch.cat([location + log_scale.exp() * standardised, y], 1)
