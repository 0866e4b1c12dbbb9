"""Learned backward kernels ℓ_ψ(z_k → z_{k−1} | x), as proper densities of z_{k−1} (supplement, PPCA)."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.distributions import Distribution, Independent, Normal

from mcvae.core.bridge import Bridge, State, Step
from mcvae.core.drifts import StepEncoding, amortised_over

__all__ = ["GaussianBackward"]


class GaussianBackward(nn.Module):
    """ℓ_ψ(z, z') = N(z'; μ_ψ(z, x, k), diag σ²_ψ(z, x, k)) with a fully connected network and a variance of its own.

    It starts as N(z, scale²), the kernel of a random walk, and learns the rest. One module may serve all steps, which
    it tells apart, or one each.

    Args:
        latent_dim: D.
        context_dim: C, the size of what it is amortised over (`Bridge.context`, usually the data); 0 for none.
        hidden: sizes of the hidden layers; `()` makes it linear.
        scale: initial σ; √(2η) matches a Langevin step of size η.

    >>> backward = GaussianBackward(latent_dim=2, scale=0.5)
    >>> backward.log_scale.exp().detach()
    tensor([0.5000, 0.5000])
    """

    def __init__(self, latent_dim: int, context_dim: int = 0, hidden: Sequence[int] = (128,), scale: float = 0.1):
        super().__init__()
        if scale <= 0:
            raise ValueError(f"the initial scale must be positive, got {scale}.")
        self.latent_dim, self.context_dim = latent_dim, context_dim
        self.encoding = StepEncoding()
        sizes = [latent_dim + context_dim + self.encoding.num_features, *hidden]
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(sizes):
            layers += [nn.Linear(fan_in, fan_out), nn.SiLU()]
        head = nn.Linear(sizes[-1], 2 * latent_dim)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        self.network = nn.Sequential(*layers, head)
        self.log_scale = nn.Parameter(torch.tensor(scale).log().expand(latent_dim).clone())

    def forward(self, bridge: Bridge, state: State, step: Step) -> Distribution:
        """Distribution of z_{k−1} given the state at z_k."""
        z = state.point.z
        inputs = [z, self.encoding(step, z).expand(*z.shape[:2], -1)]
        if self.context_dim:
            inputs.append(amortised_over(bridge, self.context_dim).to(z).expand(z.shape[0], -1, -1))
        shift, log_scale = self.network(torch.cat(inputs, -1)).chunk(2, -1)
        return Independent(Normal(z + shift, (self.log_scale + log_scale).exp(), validate_args=False), 1)
