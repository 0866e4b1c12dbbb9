"""What the experiments without images share: a plain training loop; methods and networks for the ring."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from mcvae.allocator import keep_memory
from mcvae.core.bridge import Bridge
from mcvae.core.estimator import AnnealedEstimator
from mcvae.core.randomness import seeded_generator
from mcvae.models import FlowEncoder, GaussianEncoder, LatentVariableModel
from mcvae.models.networks import mlp
from mcvae.runs.method import MethodConfig, method_named

__all__ = ["TOY_METHODS", "TOY_SEEDS", "encoder", "evaluations_per_datum", "fit", "maximise", "toy_objective"]

TOY_METHODS = ("vae", "iwae", "realnvp", "a-mcvae", "l-mcvae", "mcd", "cmcd", "ldvi", "cmcd-ud")
"""In the order of Figure 1, then the successors."""
TOY_SEEDS = {"quick": 1, "paper": 3}
"""How many, by preset."""


def toy_objective(method: str, num_steps: int, latent_dim: int) -> AnnealedEstimator:
    """The estimator of a method for scalar data, with K steps if it anneals."""
    return method_named(method).build(MethodConfig(method, num_steps), latent_dim, context_dim=1)


def encoder(method: str, latent_dim: int, data: Tensor) -> Callable[[Tensor], Distribution]:
    """q(z | x) for scalar x, standardised as `data` are: fully connected, Gaussian, or pushed through RealNVP."""
    network = nn.Sequential(_Standardise(data), mlp([1, 64, 64, 2 * latent_dim]))
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
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> dict[str, Any]:
    """Maximise the bound on batches of 100; return the cost: model evaluations and seconds.

    Parameters that do not require a gradient stay as they are.
    """
    keep_memory()
    parameters = [p for p in nn.ModuleList([model, objective]).parameters() if p.requires_grad]
    batches = seeded_generator("batches", seed)

    def bridge() -> Bridge:
        rows = torch.randint(len(data), (min(_BATCH_SIZE, len(data)),), generator=batches)
        return model.bridge(data[rows])

    begin = time.perf_counter()
    maximise(objective, bridge, [{"params": parameters, "lr": learning_rate}], num_updates, seed)
    evaluations = num_updates * _BATCH_SIZE * evaluations_per_datum(objective)
    return {"evaluations": evaluations, "seconds": round(time.perf_counter() - begin, 2)}


_BATCH_SIZE = 100


def maximise(
    objective: AnnealedEstimator,
    bridge: Callable[[], Bridge],
    groups: list[dict[str, Any]],
    num_updates: int,
    seed: int,
) -> None:
    """Maximise the bound by Adam, whose learning rates fall to zero along a cosine.

    Every update asks for a bridge; `groups` are parameters with their learning rates, as Adam takes them. Gradients are
    clipped for every method: one diverging chain would otherwise stall Adam for a thousand updates.
    """
    optimizer = torch.optim.Adam(groups)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_updates)
    parameters = [parameter for group in groups for parameter in group["params"]]
    noise = seeded_generator("chains", seed)
    for _ in range(num_updates):
        estimate = objective(bridge(), generator=noise)
        optimizer.zero_grad()
        torch.autograd.backward(estimate.loss.mean())
        nn.utils.clip_grad_norm_(parameters, 10.0)
        optimizer.step()
        scheduler.step()
        objective.adapt(estimate)
