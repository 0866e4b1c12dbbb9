"""The paper's toy model, whose posterior is a ring (Section 4.2 and supplement)."""

import math

import torch
from torch import Generator, Tensor, nn
from torch.distributions import Distribution, Independent, Normal

from mcvae.core.randomness import draw
from mcvae.models.latent_variable_model import standard_normal_prior
from mcvae.models.quadrature import log_integral

__all__ = ["Ring"]


class Ring(nn.Module):
    """z ~ N(0, I_d), x | z ~ N(ξ (‖z‖ + ζ), σ²): a decoder that knows its evidence in any dimension.

    The mean has ‖z‖, as the supplement and the experiments have it; the main text's ‖z‖² is a slip.

    Args:
        xi: ξ > 0.
        zeta: ζ.
        sigma: σ, not learned.
        latent_dim: d.

    >>> ring = Ring(xi=1.0, zeta=0.5, sigma=0.2, latent_dim=2)
    >>> x, z = ring.simulate(3, generator=torch.Generator().manual_seed(0))
    >>> x.shape, z.shape, ring.log_evidence(x).shape
    (torch.Size([3, 1]), torch.Size([3, 2]), torch.Size([3]))
    """

    def __init__(self, xi: float, zeta: float, sigma: float, latent_dim: int = 2):
        super().__init__()
        if xi <= 0 or sigma <= 0:
            raise ValueError(f"xi and sigma must be positive, got {xi} and {sigma}.")
        self.log_xi = nn.Parameter(torch.tensor(float(xi)).log())
        self.zeta = nn.Parameter(torch.tensor(float(zeta)))
        self.sigma, self.latent_dim = sigma, latent_dim

    def forward(self, z: Tensor) -> Distribution:
        """p(x | z), event `[1]`."""
        return self._likelihood(z.norm(dim=-1))

    def _likelihood(self, radius: Tensor) -> Distribution:
        mean = (self.log_xi.exp() * (radius + self.zeta)).unsqueeze(-1)
        return Independent(Normal(mean, torch.full_like(mean, self.sigma)), 1)

    def log_evidence(self, x: Tensor, num_points: int = 20001) -> Tensor:
        """log p(x) for x `[B, 1]`, by quadrature over the radius ‖z‖, which has a chi distribution."""
        half = self.latent_dim / 2
        normaliser = (1 - half) * math.log(2) - math.lgamma(half)

        def log_joint_of_radius(radius: Tensor) -> Tensor:
            radius = radius.to(x)
            log_chi = normaliser + (self.latent_dim - 1) * radius.log() - 0.5 * radius.square()
            return log_chi.unsqueeze(-1) + self._likelihood(radius.unsqueeze(-1)).log_prob(x)

        farthest = self.latent_dim**0.5 + 12.0  # the chi density beyond is below exp(-72)
        return log_integral(log_joint_of_radius, 1e-9, farthest, num_points)

    def log_posterior(self, x: Tensor, z: Tensor) -> Tensor:
        """log p(z | x) for x `[B, 1]` and z `[N, B, d]`, normalised: for a grid, or a divergence."""
        log_joint: Tensor = standard_normal_prior(z).log_prob(z) + self(z).log_prob(x)
        return log_joint - self.log_evidence(x)

    @torch.no_grad()
    def simulate(self, num_data: int, *, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draw `(x [N, 1], z [N, d])`."""
        z = draw(standard_normal_prior(self.zeta.new_empty(self.latent_dim)), (num_data,), generator)
        return draw(self(z), (), generator), z
