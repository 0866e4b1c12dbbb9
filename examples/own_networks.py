"""Your own networks in a plain loop: a VAE and an L-MCVAE on 8 × 8 digits, without the command line or Lightning."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributions import Bernoulli, Independent, Normal

import mcvae


class Encoder(nn.Module):
    """Pixels to a Gaussian over 8 latents."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 16))

    def forward(self, x: Tensor) -> Independent:
        """q(z | x)."""
        location, log_scale = self.net(x).chunk(2, -1)
        return Independent(Normal(location, log_scale.exp()), 1)


class Decoder(nn.Module):
    """Latents to black or white pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 128), nn.SiLU(), nn.Linear(128, 64))

    def forward(self, z: Tensor) -> Independent:
        """p(x | z)."""
        return Independent(Bernoulli(logits=self.net(z)), 1)


def train(objective: mcvae.AnnealedEstimator, x: Tensor, epochs: int) -> mcvae.LatentVariableModel:
    """Adam on the bound; nothing else changes between methods."""
    model = mcvae.LatentVariableModel(Encoder(), Decoder())
    mcvae.keep_memory()
    optimizer = torch.optim.Adam([*model.parameters(), *objective.parameters()], lr=3e-3)
    for _ in range(epochs):
        for batch in x[torch.randperm(len(x))].split(100):
            estimate = objective(model.bridge(batch))
            optimizer.zero_grad()
            estimate.loss.mean().backward()
            optimizer.step()
            objective.adapt(estimate)  # the only thing that changes step sizes
    return model


def main() -> None:
    """Train both, and compare them on images they have not seen."""
    images = (torch.tensor(load_digits().data) > 8).float()
    train_images, test_images = images[:1500], images[1500:1550]
    for name, objective in {"VAE": mcvae.recipes.vae(), "L-MCVAE, K = 3": mcvae.recipes.l_mcvae(3, 8)}.items():
        torch.manual_seed(0)
        model = train(objective, train_images, epochs=5)
        found = mcvae.evaluate(
            model, test_images, objective=objective, protocol=mcvae.Protocol(num_steps=10, num_samples=16), simulated=0
        ).summary
        print(f"{name:<15} bound {found['bound']:.2f}   NLL {found['nll']:.2f} ± {found['nll_se']:.2f}")


if __name__ == "__main__":
    main()
