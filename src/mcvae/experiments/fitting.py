"""What the toy experiments share: methods, networks for the ring, and a plain training loop."""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from mcvae.allocator import keep_memory
from mcvae.core.estimator import AnnealedEstimator
from mcvae.core.randomness import seeded_generator
from mcvae.models import FlowEncoder, GaussianEncoder, LatentVariableModel
from mcvae.models.networks import mlp
from mcvae.runs.method import MethodConfig, method_named

__all__ = ["TOY_METHODS", "encoder", "evaluations_per_datum", "fit", "toy_objective"]

TOY_METHODS = ("vae", "iwae", "realnvp", "a-mcvae", "l-mcvae", "mcd", "cmcd", "ldvi", "cmcd-ud")
"""In the order of Figure 1, then the successors."""


def toy_objective(method: str, num_steps: int, latent_dim: int) -> AnnealedEstimator:
    """The estimator of a method for scalar data, with K steps if it anneals."""
    return method_named(method).build(MethodConfig(method, num_steps), latent_dim, context_dim=1)


def encoder(method: str, latent_dim: int, data: Tensor, hidden: int = 64) -> Callable[[Tensor], Distribution]:
    """q(z | x) for scalar x, standardised as `data` are: fully connected, Gaussian, or pushed through RealNVP."""
    network = nn.Sequential(_Standardise(data), mlp([1, hidden, hidden, 2 * latent_dim]))
    return FlowEncoder(network, latent_dim) if method == "realnvp" else GaussianEncoder(network)


class _Standardise(nn.Module):
    def __init__(self, data: Tensor):
        super().__init__()
        self.register_buffer("mean", data.mean(0))
        self.register_buffer("scale", data.std(0))

    mean: Tensor
    scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.scale


def evaluations_per_datum(objective: AnnealedEstimator) -> int:
    """Passes through the decoder for one datum of one optimiser step: S (K + 1)."""
    return objective.num_samples * objective.num_evaluations


def fit(
    model: LatentVariableModel,
    objective: AnnealedEstimator,
    data: Tensor,
    *,
    num_updates: int,
    batch_size: int = 100,
    learning_rate: float = 1e-3,
    clip: float = 10.0,
    seed: int = 0,
) -> float:
    """Maximise the bound by Adam, its learning rate going down to zero along a cosine; return the seconds it took.

    Parameters that do not require a gradient stay as they are. Gradients are clipped for every method: a chain that
    diverges once would otherwise stall Adam for a thousand updates.
    """
    keep_memory()
    parameters = [p for p in nn.ModuleList([model, objective]).parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, learning_rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_updates)
    batches, noise = seeded_generator("batches", seed), seeded_generator("chains", seed)
    begin = time.perf_counter()
    for _ in range(num_updates):
        rows = torch.randint(len(data), (min(batch_size, len(data)),), generator=batches)
        estimate = objective(model.bridge(data[rows]), generator=noise)
        optimizer.zero_grad()
        torch.autograd.backward(estimate.loss.mean())
        nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        scheduler.step()
        objective.adapt(estimate)
    return time.perf_counter() - begin
