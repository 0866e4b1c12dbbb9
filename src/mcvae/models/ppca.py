"""Probabilistic principal component analysis, solved exactly (Section 4.2)."""

import torch
from torch import Generator, Tensor, nn
from torch.distributions import Distribution, Independent, LowRankMultivariateNormal, MultivariateNormal, Normal

from mcvae.core.randomness import draw
from mcvae.models.latent_variable_model import standard_normal_prior

__all__ = ["PPCA"]


class PPCA(nn.Module):
    """p(x, z) = N(z; 0, I_d) N(x; θ₀ + θ₁ z, σ² I_p). It is a decoder, and knows evidence and posterior.

    Args:
        theta_0: mean of the data, `[P]`.
        theta_1: loadings, `[P, D]`.
        sigma: σ.

    >>> ppca = PPCA(torch.zeros(3), torch.ones(3, 2), sigma=0.5)
    >>> x = torch.zeros(4, 3)
    >>> ppca.log_evidence(x).shape, ppca.posterior(x).mean.shape
    (torch.Size([4]), torch.Size([4, 2]))
    """

    def __init__(self, theta_0: Tensor, theta_1: Tensor, sigma: float):
        super().__init__()
        if theta_1.dim() != 2 or theta_0.shape != theta_1.shape[:1]:
            raise ValueError(
                f"theta_0 must be [P] and theta_1 [P, D], got {list(theta_0.shape)} and {list(theta_1.shape)}."
            )
        if sigma <= 0:
            raise ValueError(f"sigma must be positive, got {sigma}.")
        self.theta_0, self.theta_1, self.sigma = nn.Parameter(theta_0), nn.Parameter(theta_1), sigma

    @classmethod
    def random(
        cls, latent_dim: int, data_dim: int, sigma: float = 0.5, *, generator: Generator | None = None
    ) -> "PPCA":
        """A model with loadings of variance 1/d, so that signal and noise are of one order."""
        theta_1 = torch.randn(data_dim, latent_dim, generator=generator) / latent_dim**0.5
        return cls(torch.randn(data_dim, generator=generator), theta_1, sigma)

    def forward(self, z: Tensor) -> Distribution:
        """p(x | z)."""
        mean = self.theta_0 + z @ self.theta_1.T
        return Independent(Normal(mean, torch.full_like(mean, self.sigma)), 1)

    def log_evidence(self, x: Tensor) -> Tensor:
        """log p(x) = log N(x; θ₀, θ₁θ₁ᵀ + σ²I), `[B]`; its gradient by autograd is exact."""
        noise = torch.full_like(self.theta_0, self.sigma**2)
        marginal: Distribution = LowRankMultivariateNormal(self.theta_0, self.theta_1, noise)
        return marginal.log_prob(x)

    def posterior(self, x: Tensor) -> MultivariateNormal:
        """p(z | x), batch `[B]`, event `[D]`."""
        identity = torch.eye(self.theta_1.shape[1], dtype=x.dtype, device=x.device)
        precision = identity + self.theta_1.T @ self.theta_1 / self.sigma**2
        projected = (x - self.theta_0) @ self.theta_1 / self.sigma**2
        mean = torch.linalg.solve(precision, projected.unsqueeze(-1)).squeeze(-1)
        return MultivariateNormal(mean, precision_matrix=precision.expand(*mean.shape, -1))

    @torch.no_grad()
    def simulate(self, num_data: int, *, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draw `(x [N, P], z [N, D])`."""
        z = draw(standard_normal_prior(self.theta_1[0]), (num_data,), generator)
        return draw(self(z), (), generator), z
