"""Which polynomial? The evidence of a Bayesian regression, first where it is known, then where it is not.

With Gaussian noise the evidence has a closed form to compare with. With Student's noise, which forgives outliers, it
has none, and the program does not change.
"""

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal, StudentT

import mcvae


def evidence(features: Tensor, y: Tensor, noise: Distribution) -> mcvae.Evidence:
    """log p(y) with weights z ~ N(0, I) and y = features · z + noise."""

    def log_joint(z: Tensor) -> Tensor:
        residuals = y - z @ features.T
        return Normal(0.0, 1.0).log_prob(z).sum(-1) + noise.log_prob(residuals).sum(-1)

    fit = torch.linalg.lstsq(features, y.unsqueeze(1)).solution.T  # [1, D]: a rough start, preferably too wide
    initial = Independent(Normal(fit, 0.3), 1)
    generator = torch.Generator().manual_seed(1)
    return mcvae.estimate_log_evidence(log_joint, initial, num_steps=24, num_samples=32, generator=generator)


def main() -> None:
    """A parabola with noise, and one outlier."""
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-1, 1, 25)
    y = 0.5 + x - 1.5 * x.square() + 0.2 * torch.randn(25, generator=generator)
    spoiled = y.clone()
    spoiled[12] += 3.0
    print(f"{'degree':<8}{'exact':>8}{'estimated':>18}{'outlier, Gauss':>18}{'outlier, Student':>18}")
    for degree in range(1, 4):
        features = torch.stack([x**power for power in range(degree + 1)], 1)
        covariance = features @ features.T + 0.2**2 * torch.eye(25)
        exact = MultivariateNormal(torch.zeros(25), covariance).log_prob(y).item()
        noises = (y, Normal(0.0, 0.2)), (spoiled, Normal(0.0, 0.2)), (spoiled, StudentT(3.0, 0.0, 0.2))
        found = [evidence(features, data, noise) for data, noise in noises]
        shown = [f"{e.log_evidence.item():.2f} ± {e.standard_error.item():.2f}" for e in found]
        print(f"{degree:<8}{exact:>8.2f}" + "".join(f"{text:>18}" for text in shown))
        assert abs(found[0].log_evidence.item() - exact) < 5 * found[0].standard_error.item() + 0.1


if __name__ == "__main__":
    main()
