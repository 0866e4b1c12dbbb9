"""Evaluate a decoder that was trained elsewhere, and that has no encoder: start from the prior.

The decoder here is scikit-learn's PCA, read as p(x | z) = N(x; W z + μ, σ²), so that its own exact log-likelihood is
there to compare with. Yours may be anything that maps rows of latents to a distribution.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from torch import Tensor
from torch.distributions import Independent, Normal

import mcvae


def main() -> None:
    """Estimate log p(x) of held-out images and compare it with PCA's own."""
    pixels = load_digits().data / 16
    pca = PCA(n_components=3).fit(pixels[:1500])
    noise = pca.noise_variance_
    loadings = torch.tensor(pca.components_.T * (pca.explained_variance_ - noise) ** 0.5, dtype=torch.float32)
    mean = torch.tensor(pca.mean_, dtype=torch.float32)

    def decoder(z: Tensor) -> Independent:
        return Independent(Normal(z @ loadings.T + mean, noise**0.5), 1)

    def prior(x: Tensor) -> Independent:  # instead of an encoder; better guesses need fewer temperatures
        return Independent(Normal(torch.zeros(len(x), 3), torch.ones(len(x), 3)), 1)

    held_out = pixels[1500:1510]
    model = mcvae.LatentVariableModel(prior, decoder)
    protocol = mcvae.Protocol(num_steps=100, num_samples=64, start="prior")  # or "thorough", which finds the number
    x = torch.tensor(held_out, dtype=torch.float32)
    summary = mcvae.evaluate(model, x, protocol=protocol, compare_iwae=False, simulated=0).summary
    print(f"{summary['num_steps']} temperatures, {summary['num_samples']} chains: {summary['verdict']}")
    print(f"estimated log p(x)  {-summary['nll']:.3f} ± {summary['nll_se_chains']:.3f} (of the chains)")
    print(f"exact log p(x)      {pca.score(held_out):.3f}")


if __name__ == "__main__":
    main()
