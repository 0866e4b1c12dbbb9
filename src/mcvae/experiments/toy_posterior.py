"""Figure 1: how near q comes to a posterior that is a ring."""

import math
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Generator, Tensor

from mcvae.core.randomness import seeded_generator
from mcvae.experiments.cell import Cell
from mcvae.experiments.fitting import TOY_METHODS, TOY_SEEDS, encoder, fit, toy_objective
from mcvae.experiments.paper import ReproductionOptions
from mcvae.models import LatentVariableModel, Ring
from mcvae.runs.naming import check_name
from mcvae.runs.records import Record

__all__ = ["arrays", "cells", "energy_distance", "posterior_samples", "ring", "run"]

OBSERVATION = 2.0
"""The x whose posterior is shown."""
SIZES = {
    "quick": {"num_updates": 600, "num_steps": 10, "num_data": 2000, "batches": 5},
    "paper": {"num_updates": 3000, "num_steps": 10, "num_data": 5000, "batches": 10},
}


def cells(options: ReproductionOptions) -> list[Cell]:
    """A cell per method and seed."""
    methods, size = options.methods or TOY_METHODS, SIZES[options.preset]
    for method in methods:
        check_name("method", method, TOY_METHODS)
    return [
        Cell(f"ring-posterior-{method}-s{seed}", f"{__name__}:run", {"method": method, "seed": seed} | size)
        for method in methods
        for seed in range(options.seeds or TOY_SEEDS[options.preset])
    ]


def arrays(root: Path, cells: list[Cell]) -> dict[str, Any]:
    """What the figure shows: samples of every method's first seed, and the exact posterior on a grid."""
    found = {
        str(cell.settings["method"]): numpy.load(root / cell.name / "samples.npy")
        for cell in cells
        if cell.settings["seed"] == 0 and (root / cell.name / "samples.npy").exists()
    }
    axis = torch.linspace(-4, 4, 201)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1).reshape(-1, 1, 2)
    found["exact"] = ring().log_posterior(torch.tensor([[OBSERVATION]]), grid).exp().reshape(201, 201).numpy()
    return found


def ring() -> Ring:
    """The model, with its parameters fixed."""
    return Ring(xi=1.0, zeta=0.0, sigma=0.5, latent_dim=2).requires_grad_(False)


def run(folder: Path, settings: dict[str, Any]) -> list[Record]:
    """Fit q with the model's parameters fixed, and measure its samples at one x against exact ones.

    `energy_distance` is of single draws: of q, or the last states of the chains. For `energy_distance_resampled`, one
    of ten draws is chosen by its weight, for every method alike, as IWAE's bound weighs them.
    """
    method, seed, batches = settings["method"], settings["seed"], settings["batches"]
    decoder = ring()
    data, _ = decoder.simulate(settings["num_data"], generator=seeded_generator("ring", seed))
    torch.manual_seed(seed)
    model = LatentVariableModel(encoder(method, 2, data), decoder)
    objective = toy_objective(method, settings["num_steps"], 2)
    cost = fit(model, objective, data, num_updates=settings["num_updates"], seed=seed)
    objective.num_samples, generator = 10, seeded_generator("draws", seed)
    x = torch.tensor([[OBSERVATION]])
    exact = torch.split(posterior_samples(decoder, x, 2000 * batches, generator), 2000)
    single, chosen, gaps = list[Tensor](), list[Tensor](), list[Tensor]()
    with torch.no_grad():
        for _ in range(batches):
            estimate = objective(model.bridge(x.expand(2000, 1)), generator=generator)
            z, log_weight = estimate.trajectory.state.point.z, estimate.trajectory.log_weight
            index = torch.multinomial(log_weight.T.softmax(-1), 1, generator=generator).squeeze(-1)
            single.append(z[0])
            chosen.append(z[index, torch.arange(2000)])
            gaps.append((decoder.log_evidence(x) - estimate.bound).mean())
    numpy.save(folder / "samples.npy", torch.cat(single)[:4000].numpy())

    def record(metric: str, values: Tensor) -> Record:
        mean, error = float(values.mean()), float(values.std() / math.sqrt(batches))
        return Record("toy-posterior", "ring-2", method, metric, mean, seed, standard_error=error, **cost)

    return [
        record("energy_distance", _distances(single, exact)),
        record("energy_distance_resampled", _distances(chosen, exact)),
        record("bound_gap", torch.stack(gaps)),
    ]


def posterior_samples(decoder: Ring, x: Tensor, number: int, generator: Generator | None = None) -> Tensor:
    """Exact samples of the two-dimensional ring's posterior: the radius by inversion, the angle uniform."""
    radius = torch.linspace(1e-6, 8.0, 40001, dtype=torch.float64)
    along = torch.stack([radius, torch.zeros_like(radius)], -1).unsqueeze(1)
    density = radius * decoder.log_posterior(x.double(), along).squeeze(-1).exp()
    cumulated = density.cumsum(0) / density.sum()
    level, turn = torch.rand(2, number, dtype=torch.float64, generator=generator)
    r, angle = radius[torch.searchsorted(cumulated, level).clamp(max=len(radius) - 1)], 2 * math.pi * turn
    return torch.stack([r * angle.cos(), r * angle.sin()], -1).to(x)


def energy_distance(a: Tensor, b: Tensor) -> Tensor:
    """2 E‖a − b‖ − E‖a − a'‖ − E‖b − b'‖ between samples `[N, D]`, without bias; 0 for equal distributions.

    >>> a, b = torch.randn(2, 500, 2, generator=torch.Generator().manual_seed(0))
    >>> bool(energy_distance(a, b).abs() < 0.02), bool(energy_distance(a, b + 1.0) > 0.3)
    (True, True)
    """
    within = sum(torch.cdist(c, c).sum() / (len(c) * (len(c) - 1)) for c in (a, b))
    return 2 * torch.cdist(a, b).mean() - within


def _distances(found: list[Tensor], exact: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([energy_distance(a, b) for a, b in zip(found, exact, strict=True)])
