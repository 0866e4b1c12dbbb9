"""Supplement, toy example: the error of (ξ, ζ) when the model is learned on each bound, as the dimension grows."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcvae.core.randomness import seeded_generator
from mcvae.experiments.cell import Cell
from mcvae.experiments.fitting import TOY_METHODS, TOY_SEEDS, encoder, fit, toy_objective
from mcvae.experiments.paper import ReproductionOptions
from mcvae.models import LatentVariableModel, Ring
from mcvae.runs.records import Record

__all__ = ["cells", "maximum_likelihood", "run"]

TRUTH = {"xi": 1.0, "zeta": 0.5, "sigma": 0.5}
START = {"xi": 0.7, "zeta": 0.0, "sigma": 0.5}
SIZES: dict[str, dict[str, Any]] = {
    "quick": {"dimensions": (2, 20, 100), "num_updates": 500, "num_steps": 5, "num_data": 2000},
    "paper": {
        "dimensions": (2, 5, 10, 20, 50, 100, 150, 200, 300),
        "num_updates": 1000,
        "num_steps": 5,
        "num_data": 5000,
    },
}


def cells(options: ReproductionOptions) -> list[Cell]:
    """A cell per dimension, method and seed; `mle` maximises the exact likelihood of the same data."""
    size = dict(SIZES[options.preset])
    dimensions = size.pop("dimensions")
    return [
        Cell(
            f"ring-parameters-{dimension}-{method}-s{seed}",
            f"{__name__}:run",
            {"method": method, "latent_dim": dimension, "seed": seed} | size,
        )
        for seed in range(options.seeds or TOY_SEEDS[options.preset])
        for dimension in dimensions
        for method in ("mle", *TOY_METHODS)
    ]


def run(folder: Path, settings: dict[str, Any]) -> list[Record]:
    """Learn (ξ, ζ), and q with it, from a wrong start; record the squared error."""
    method, seed, latent_dim = settings["method"], settings["seed"], settings["latent_dim"]
    data, _ = Ring(**TRUTH, latent_dim=latent_dim).simulate(
        settings["num_data"], generator=seeded_generator("ring", latent_dim, seed)
    )
    ring = Ring(**START, latent_dim=latent_dim)
    cost = dict[str, Any]()
    if method == "mle":
        maximum_likelihood(ring, data)
    else:
        torch.manual_seed(seed)
        model = LatentVariableModel(encoder(method, latent_dim, data), ring)
        objective = toy_objective(method, settings["num_steps"], latent_dim)
        cost = fit(model, objective, data, num_updates=settings["num_updates"], learning_rate=5e-3, seed=seed)
    xi, zeta = float(ring.log_xi.detach().exp()), float(ring.zeta.detach())
    values = {
        "squared_error": (xi - TRUTH["xi"]) ** 2 + (zeta - TRUTH["zeta"]) ** 2,
        "xi": xi,
        "zeta": zeta,
        "log_likelihood": float(ring.log_evidence(data, num_points=1001).detach().mean()),
    }
    dataset = f"ring-{latent_dim}"
    return [Record("toy-parameters", dataset, method, name, value, seed, **cost) for name, value in values.items()]


def maximum_likelihood(ring: Ring, data: Tensor) -> None:
    """Maximise the exact likelihood, found by quadrature, in ξ and ζ: what no bound can do better than."""
    ring.double()
    optimizer = torch.optim.LBFGS(ring.parameters(), max_iter=100, line_search_fn="strong_wolfe")
    rows = data.double()

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -ring.log_evidence(rows, num_points=1001).mean()
        torch.autograd.backward(value)
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
