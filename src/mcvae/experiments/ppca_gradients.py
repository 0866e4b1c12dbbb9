"""Figure 2 and supplement: bounds and their gradients on probabilistic PCA, where both have exact answers."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Generator, Tensor, nn

from mcvae.core import recipes
from mcvae.core.backward import GaussianBackward
from mcvae.core.bounds import elbo
from mcvae.core.estimator import AnnealedEstimator
from mcvae.core.gradients import ControlVariate, leave_one_out, no_control_variate, stopped
from mcvae.core.randomness import seeded_generator
from mcvae.core.step_sizes import FixedStepSizes
from mcvae.data import DataError, load_images
from mcvae.experiments.cell import Cell
from mcvae.experiments.fitting import evaluations_per_datum, fit
from mcvae.experiments.paper import ReproductionOptions
from mcvae.models import PPCA, GaussianEncoder, LatentVariableModel
from mcvae.runs.records import Record

__all__ = ["ESTIMATORS", "arrays", "cells", "measure", "run"]

SIZES: dict[str, dict[str, Any]] = {
    "quick": {"latent_dim": 20, "data_dim": 100, "replicates": 100, "num_updates": 500},
    "paper": {"latent_dim": 100, "data_dim": 784, "replicates": 200, "num_updates": 3000},
}


_PILOT = 200
"""Runs that adapt step sizes before they are frozen."""


class _Estimator(NamedTuple):
    build: Callable[[int, int], AnnealedEstimator]
    """`(D, size of a datum) -> estimator`."""
    learned_backward: bool = False
    pathwise: bool = False
    """Leave out REINFORCE: the named wrong version, which must show as biased."""


def _a_mcvae(num_steps: int, num_samples: int, control_variate: ControlVariate) -> _Estimator:
    return _Estimator(
        lambda d, _: recipes.a_mcvae(num_steps, d, num_samples=num_samples, control_variate=control_variate)
    )


ESTIMATORS = {
    "vae": _Estimator(lambda d, _: recipes.vae()),
    "l-mcvae-k5": _Estimator(lambda d, _: recipes.l_mcvae(5, d)),
    "l-mcvae-k10": _Estimator(lambda d, _: recipes.l_mcvae(10, d)),
    "a-mcvae-k5": _a_mcvae(5, 1, no_control_variate),
    "a-mcvae-k10": _a_mcvae(10, 1, no_control_variate),
    "a-mcvae-k5-n5": _a_mcvae(5, 5, no_control_variate),
    "a-mcvae-k5-n5-cv": _a_mcvae(5, 5, leave_one_out),
    "a-mcvae-k5-n2-cv": _a_mcvae(5, 2, leave_one_out),
    "a-mcvae-k5-stopped": _a_mcvae(5, 1, stopped),
    "l-mcvae-k1": _Estimator(lambda d, _: recipes.l_mcvae(1, d)),
    "l-mcvae-k1-learned": _Estimator(lambda d, _: recipes.l_mcvae(1, d), learned_backward=True),
    "l-mcvae-k2": _Estimator(lambda d, _: recipes.l_mcvae(2, d)),
    "l-mcvae-k2-learned": _Estimator(lambda d, _: recipes.l_mcvae(2, d), learned_backward=True),
    "uha-k5": _Estimator(lambda d, _: recipes.uha(5, d)),
    "mcd-k5": _Estimator(lambda d, c: recipes.mcd(5, d, context_dim=c)),
    "cmcd-k5": _Estimator(lambda d, c: recipes.cmcd(5, d, context_dim=c)),
    "dbs-k5": _Estimator(lambda d, c: recipes.dbs(5, d, context_dim=c)),
    "ldvi-k5": _Estimator(lambda d, c: recipes.ldvi(5, d, context_dim=c)),
    "cmcd-ud-k5": _Estimator(lambda d, c: recipes.cmcd_ud(5, d, context_dim=c)),
    "a-mcvae-k5-pathwise": _a_mcvae(5, 1, stopped)._replace(pathwise=True),
}
"""The estimators of the figures, some to compare them with, and a biased one that the check must reject."""


def cells(options: ReproductionOptions) -> list[Cell]:
    """A cell per seed: all estimators share the fitted q. Replicates, not seeds, are what the paper's boxes show."""
    size = SIZES[options.preset]
    return [Cell(f"ppca-s{seed}", f"{__name__}:run", {"seed": seed} | size) for seed in range(options.seeds or 1)]


def arrays(root: Path, cells: list[Cell]) -> dict[str, Any]:
    """What the figure shows: the replicates of the first seed."""
    path = root / cells[0].name / "replicates.npz"
    return dict(numpy.load(path)) if path.exists() else {}


def run(folder: Path, settings: dict[str, Any]) -> list[Record]:
    """Fit q by IWAE, freeze it, and replicate every estimator and its gradient."""
    seed, latent_dim = settings["seed"], settings["latent_dim"]
    ppca, x, dataset = _problem(latent_dim, settings["data_dim"], seed)
    torch.manual_seed(seed)
    model = LatentVariableModel(GaussianEncoder(nn.Linear(settings["data_dim"], 2 * latent_dim)), ppca)
    ppca.requires_grad_(False)
    updates = settings["num_updates"]
    fit(model, recipes.vae(), x, num_updates=4 * updates, seed=seed)
    fit(model, recipes.iwae(100), x, num_updates=updates // 4, learning_rate=3e-4, seed=seed)
    model.double().requires_grad_(False)
    x = x.double()
    frozen = {name: _frozen(each, model, x, latent_dim, updates, seed) for name, each in ESTIMATORS.items()}
    ppca.requires_grad_(True)
    records, arrays = list[Record](), dict[str, Any]()
    for name, objective in frozen.items():
        found = measure(model, objective, x, settings["replicates"], seed, pathwise=ESTIMATORS[name].pathwise)
        arrays |= {f"{name}/log_evidence_error": found.errors, f"{name}/derivative_error": found.derivative_errors}
        cost: Any = {"evaluations": evaluations_per_datum(objective), "seconds": round(found.seconds, 5)}
        records += [
            Record("ppca", dataset, name, metric, value, seed, standard_error=error, **cost)
            for metric, (value, error) in found.metrics.items()
        ]
    numpy.savez(folder / "replicates.npz", **arrays)
    return records


def _problem(latent_dim: int, data_dim: int, seed: int) -> tuple[PPCA, Tensor, str]:
    """A model with arbitrary θ, and a batch of 100: MNIST images where they fit and are present, else simulated."""
    ppca = PPCA.random(latent_dim, data_dim, generator=seeded_generator("theta", seed))
    if data_dim == 784:
        try:
            pixels = load_images("mnist", download=False).train[::500][:100].flatten(1) / 255
        except DataError:
            pass
        else:
            return PPCA(pixels.mean(0), ppca.theta_1.detach(), ppca.sigma), pixels, "mnist"
    return ppca, ppca.simulate(100, generator=seeded_generator("data", seed))[0], "simulated"


def _frozen(
    estimator: _Estimator, model: LatentVariableModel, x: Tensor, latent_dim: int, updates: int, seed: int
) -> AnnealedEstimator:
    """The estimator with step sizes adapted on a pilot, and networks learned where it has them, then frozen."""
    torch.manual_seed(seed)
    objective, noise = estimator.build(latent_dim, x.shape[1]).double(), seeded_generator("pilot", seed)
    if objective.schedule.num_steps:
        for _ in range(_PILOT):
            with torch.no_grad():
                objective.adapt(objective(model.bridge(x), generator=noise))
    if estimator.learned_backward:
        steps = objective.step_sizes()
        backward = [GaussianBackward(latent_dim, x.shape[1], scale=float((2 * s.mean()).sqrt())) for s in steps]
        objective = recipes.l_mcvae(
            len(steps), latent_dim, step_sizes=FixedStepSizes(len(steps), steps.detach()), backward=backward
        ).double()
    if any(parameter.requires_grad for parameter in objective.parameters()):
        fit(model, objective, x, num_updates=updates, seed=seed)
    return objective.requires_grad_(False)


class Measurement(NamedTuple):
    """Replicates of an estimator."""

    metrics: dict[str, tuple[float, float | None]]
    """Values with standard errors."""
    errors: Any
    """log p̂ − log p, mean over the batch, `[R]`."""
    derivative_errors: Any
    """The same of the derivative along the scale of θ₁, `[R]`."""
    seconds: float
    """Time that one estimate with its gradient takes."""


def measure(
    model: LatentVariableModel,
    objective: AnnealedEstimator,
    x: Tensor,
    replicates: int,
    seed: int,
    *,
    pathwise: bool = False,
) -> Measurement:
    """Replicate a bound and its gradient in θ, and compare with the exact ones.

    The gradient of a bound is not that of log p(x): `gradient_bias` says how far, in units of the exact one's norm.
    Whether an estimator is unbiased for its *own* bound is `derivative_z`: the mean derivative along the scale of θ₁,
    less that found by differences of bounds with common random numbers, in standard errors.
    """
    ppca = model.decoder
    assert isinstance(ppca, PPCA)
    theta = [ppca.theta_0, ppca.theta_1]
    evidence = ppca.log_evidence(x).mean()
    exact = _flat(torch.autograd.grad(evidence, theta))
    scale = _flat([torch.zeros_like(ppca.theta_0), ppca.theta_1.detach()])
    errors, derivatives = torch.empty(2, replicates, dtype=torch.float64)
    mean, squares = torch.zeros_like(exact), torch.zeros_like(exact)
    begin = time.perf_counter()
    for index in range(replicates):
        estimate = objective(model.bridge(x), generator=seeded_generator("replicate", seed, index))
        bound = elbo(estimate.trajectory.log_weight) if pathwise else -estimate.loss
        gradient = _flat(torch.autograd.grad(bound.mean(), theta))
        errors[index], derivatives[index] = estimate.bound.mean() - evidence.detach(), gradient @ scale
        mean += gradient / replicates
        squares += gradient.square() / replicates
    seconds = (time.perf_counter() - begin) / replicates
    differences = _differences(model, objective, x, replicates, seed)
    variance = float((squares - mean.square()).sum()) * replicates / (replicates - 1)
    own = mean.square().sum().item() - variance / replicates  # the squared norm of the mean, without its bias
    off = (mean - exact).square().sum().item() - variance / replicates
    root, norm, spread = math.sqrt(replicates), float(exact.norm()), float(errors.var())
    distance = (derivatives.mean() - differences.mean()) / (derivatives.var() + differences.var()).sqrt() * root
    metrics: dict[str, tuple[float, float | None]] = {
        "log_evidence_error": (float(errors.mean()), float(errors.std()) / root),
        "log_evidence_variance": (spread, spread * math.sqrt(2 / (replicates - 1))),
        "gradient_variance": (variance, None),
        "variance_times_cost": (variance * evaluations_per_datum(objective), None),
        "gradient_snr": (math.sqrt(max(own, 0.0) / variance), None),
        "gradient_bias": (math.sqrt(max(off, 0.0)) / norm, math.sqrt(variance) / root / norm),
        "derivative_z": (float(distance), 1.0),
    }
    derivative_errors = derivatives - float(exact @ scale)
    return Measurement(metrics, errors.numpy(), derivative_errors.numpy(), seconds)


def _differences(
    model: LatentVariableModel, objective: AnnealedEstimator, x: Tensor, replicates: int, seed: int
) -> Tensor:
    """Derivatives of the bound along the scale of θ₁, `[R]`, by central differences with common random numbers."""
    found = torch.empty(replicates, dtype=torch.float64)
    for index in range(replicates):
        plus, minus = (
            _bound_at_scale(model, objective, x, log_scale, seeded_generator("difference", seed, index))
            for log_scale in (_EPSILON, -_EPSILON)
        )
        found[index] = (plus - minus) / (2 * _EPSILON)
    return found


_EPSILON = 0.01
"""Half the change of log θ₁ between the bounds of a difference."""


@torch.no_grad()
def _bound_at_scale(
    model: LatentVariableModel, objective: AnnealedEstimator, x: Tensor, log_scale: float, generator: Generator
) -> Tensor:
    """The bound with θ₁ multiplied by exp(log_scale)."""
    ppca = model.decoder
    assert isinstance(ppca, PPCA)
    before = ppca.theta_1.detach().clone()
    try:
        ppca.theta_1.mul_(math.exp(log_scale))
        return objective(model.bridge(x), generator=generator).bound.mean()
    finally:
        ppca.theta_1.copy_(before)


def _flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
