"""A VAE written and trained without this package: how likely are its test images, and how sure is that?

The architecture is the plain one of many tutorials (784-400-20-400-784 for MNIST), with its usual loop: Adam, BCE plus
KL. Then `evaluate` estimates log p(x), and closes the true value in between bounds on images that the model simulates.

    python examples/trained_elsewhere.py            # bundled digits, seconds
    python examples/trained_elsewhere.py mnist 10   # MNIST in the folder MCVAE_DATA, 10 epochs, minutes
"""

import sys

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Independent, Normal
from torch.nn.functional import binary_cross_entropy_with_logits, relu

import mcvae
from mcvae.data import load_images


class PlainVAE(nn.Module):
    """One hidden layer each."""

    def __init__(self, pixels: int, hidden: int, latent_dim: int):
        super().__init__()
        self.hidden = nn.Linear(pixels, hidden)
        self.mean, self.log_variance = nn.Linear(hidden, latent_dim), nn.Linear(hidden, latent_dim)
        self.back, self.pixels = nn.Linear(latent_dim, hidden), nn.Linear(hidden, pixels)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of q."""
        h = relu(self.hidden(x))
        return self.mean(h), self.log_variance(h)

    def decode(self, z: Tensor) -> Tensor:
        """Logits of the pixels."""
        logits: Tensor = self.pixels(relu(self.back(z)))
        return logits


def train(vae: PlainVAE, x: Tensor, epochs: int) -> None:
    """The usual loop."""
    optimizer = torch.optim.Adam(vae.parameters(), 1e-3)
    for _ in range(epochs):
        for batch in x[torch.randperm(len(x))].split(100):
            mean, log_variance = vae.encode(batch)
            logits = vae.decode(mean + (0.5 * log_variance).exp() * torch.randn_like(mean))
            bce = binary_cross_entropy_with_logits(logits, batch, reduction="sum")
            kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
            optimizer.zero_grad()
            ((bce + kl) / len(batch)).backward()
            optimizer.step()


def main(name: str = "digits", epochs: str = "30") -> None:
    """Train, then evaluate."""
    torch.manual_seed(0)
    images = load_images(name)
    train_x, test_x = (torch.bernoulli(part.flatten(1).float() / 255) for part in (images.train, images.test))
    vae = PlainVAE(train_x.shape[1], 400, 20)
    train(vae, train_x, int(epochs))

    # All that mcvae asks for: distributions of latents given data, and of data given latents.
    def encoder(x: Tensor) -> Independent:
        mean, log_variance = vae.encode(x)
        return Independent(Normal(mean, (0.5 * log_variance).exp()), 1)

    def decoder(z: Tensor) -> Independent:
        return Independent(Bernoulli(logits=vae.decode(z), validate_args=False), 1)

    model = mcvae.LatentVariableModel(encoder, decoder)
    summary = mcvae.evaluate(model, test_x[:100], compare_iwae=False, simulated=100).summary
    print(f"{summary['num_steps']} temperatures, {summary['num_samples']} chains")
    print(f"-log p(x) of 100 test images: {summary['nll']:.2f} ± {summary['nll_se']:.2f}, {summary['verdict']}")
    print(f"chains alone: ± {summary['nll_se_chains']:.3f}; ELBO {summary['bound']:.2f}")
    bounds = summary["sandwich"]
    print(f"log p of 100 simulated images lies between {bounds['lower']:.3f} and {bounds['upper']:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
