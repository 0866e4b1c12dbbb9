"""The public benchmark of posteriors: bounds and evidence of single densities, by every method of the package."""

import math
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal

from mcvae.core import recipes
from mcvae.core.bounds import iwae
from mcvae.core.bridge import Bridge
from mcvae.core.diagnostics import standard_error
from mcvae.core.estimator import AnnealedEstimator
from mcvae.core.evidence import estimate_log_evidence
from mcvae.core.kernels import Kernel, mala, ula, underdamped
from mcvae.core.randomness import seeded_generator
from mcvae.core.schedules import LearnedSchedule
from mcvae.core.step_sizes import LearnedStepSizes, RelativeStepSizes
from mcvae.experiments.cell import Cell
from mcvae.experiments.densities import TARGETS, Target, load_target
from mcvae.experiments.fitting import evaluations_per_datum, maximise
from mcvae.experiments.paper import POSTERIOR_METHODS, POSTERIOR_STEPS, ReproductionOptions
from mcvae.runs.plain import read_rows
from mcvae.runs.records import Record

__all__ = ["LEARNED", "cells", "published_elbo", "run"]

_TUNED = ("ais-mala", "smc")
"""Methods that a pilot tunes, from the q of VI."""
LEARNED = tuple(method for method in POSTERIOR_METHODS if method not in ("vi", *_TUNED))
"""Methods that are trained: step sizes, temperatures, networks and q together."""
SIZES: dict[str, dict[str, Any]] = {
    "quick": {"num_updates": 1000, "num_chains": 1000, "compile": False},
    "paper": {"num_updates": 15000, "num_chains": 4000, "compile": True},
}
"""The published numbers took 150,000 updates; ours a tenth."""


def cells(options: ReproductionOptions) -> list[Cell]:
    """A cell per density, method, K and seed; K = 0 for VI."""
    quick, wanted = options.preset == "quick", options.methods or POSTERIOR_METHODS
    return [
        Cell(
            f"posterior-{density}-{method}-k{number}-s{seed}",
            f"{__name__}:run",
            {"density": density, "method": method, "num_steps": number, "seed": seed} | SIZES[options.preset],
        )
        for density in options.densities or (_QUICK if quick else TARGETS)
        for method in POSTERIOR_METHODS
        for number in ((0,) if method == "vi" else POSTERIOR_STEPS)
        if f"{method}-k{number}" in wanted or (method in wanted and (not quick or number in (0, 8)))
        for seed in range(options.seeds or 1)
    ]


_QUICK = ("funnel", "banana", "many-well", "mixture-40")


@cache
def _published() -> dict[tuple[str, str, int], float]:
    rows = read_rows(Path(__file__).with_name("posteriors.csv"))
    return {(row["dataset"], row["method"], int(row["num_steps"])): float(row["elbo"]) for row in rows}


def published_elbo(density: str, method: str, num_steps: int) -> float | None:
    """The ELBO that the CMCD repository publishes, after 150,000 updates; None if there is none.

    >>> published_elbo("sonar", "cmcd", 8)
    -112.27
    """
    return _published().get((density, method, num_steps))


class MeanField(nn.Module):
    """A Gaussian with independent dimensions."""

    def __init__(self, latent_dim: int):
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(1, latent_dim))
        self.log_scale = nn.Parameter(torch.zeros(1, latent_dim))

    def forward(self, target: Target) -> Bridge:
        """The bridge from here to a target."""
        normal = Normal(self.loc, self.log_scale.exp(), validate_args=False)
        return Bridge(Independent(normal, 1, validate_args=False), target.log_joint)


def run(folder: Path, settings: dict[str, Any]) -> list[Record]:
    """Fit q by VI, then train or tune the method, and weigh fresh chains."""
    density, method, number = settings["density"], settings["method"], settings["num_steps"]
    seed, updates = settings["seed"], settings["num_updates"]
    target = load_target(density)
    torch.manual_seed(seed)
    begin = time.process_time()
    initial = MeanField(target.latent_dim)
    objective = recipes.vae(_CHAINS)
    evaluations = _fit(objective, initial, target, min(updates, 3000), seed, rate=1e-2)
    if method in LEARNED:
        objective = _objective(method, number, target.latent_dim, compiled=settings["compile"])
        evaluations += _fit(objective, initial, target, updates, seed, rate=1e-3 * math.sqrt(64 / number))
    if method in _TUNED:
        evaluations += settings["num_chains"] * (number + 1)
    with torch.no_grad():
        log_weight, log_evidence, error = _weigh(objective, initial(target), settings)
    seconds = round(time.process_time() - begin, 2)  # of the processor: others may use it, too

    def record(metric: str, value: Tensor, error: Tensor, published: float | None = None) -> Record:
        return Record(
            "posteriors",
            density,
            method if method == "vi" else f"{method}-k{number}",
            metric,
            float(value),
            seed,
            standard_error=float(error),
            paper=published,
            evaluations=evaluations,
            seconds=seconds,
        )

    found = [record("log_evidence", log_evidence, error)]
    if method != "smc":  # whose chains share their past: their mean log-weight bounds nothing
        spread = log_weight.std() / math.sqrt(len(log_weight))
        found.insert(0, record("elbo", log_weight.mean(), spread, published_elbo(density, method, number)))
    return found


def _weigh(objective: AnnealedEstimator, bridge: Bridge, settings: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Log-weights of fresh chains, log Ẑ and its standard error; methods that are not trained are tuned first."""
    method, number, chains = settings["method"], settings["num_steps"], settings["num_chains"]
    generator = seeded_generator("weights", settings["density"], method, number, settings["seed"])
    if method in _TUNED:
        evidence = estimate_log_evidence(
            bridge.log_joint,
            bridge.initial,
            kernel=mala(),
            num_steps=number,
            num_samples=chains,
            resample=0.5 if method == "smc" else None,
            generator=generator,
        )
        return evidence.log_weights, evidence.log_evidence, evidence.standard_error
    portions = range(0, chains, _PORTION)
    log_weight = torch.cat([objective.run(bridge, _PORTION, generator=generator).log_weight for _ in portions])
    return log_weight, iwae(log_weight), standard_error(log_weight)


_CHAINS = 5
"""Chains per update, as in the published experiments."""
_PORTION = 500
"""Chains that are weighed at once."""


def _objective(method: str, num_steps: int, latent_dim: int, *, compiled: bool) -> AnnealedEstimator:
    """A recipe whose step sizes, in units of q's scales, and temperatures are learned."""
    overdamped = method in ("ula", "mcd", "cmcd")
    kernel: Kernel = ula() if overdamped else underdamped()
    start = 0.02 if overdamped else 0.2
    common: dict[str, Any] = {
        "step_sizes": RelativeStepSizes(LearnedStepSizes(num_steps, start), kernel.step_unit),
        "schedule": LearnedSchedule,
        "num_samples": _CHAINS,
        "compile": compiled,
    }
    if method == "uha":
        return recipes.uha(num_steps, latent_dim, learned_damping=True, **common)
    maker = recipes.l_mcvae if method == "ula" else getattr(recipes, method.replace("-", "_"))
    made: AnnealedEstimator = maker(num_steps, latent_dim, **common)
    return made


def _fit(
    objective: AnnealedEstimator, initial: MeanField, target: Target, num_updates: int, seed: int, *, rate: float
) -> int:
    """Maximise the bound, with one learning rate for networks and q, another for the rest; return model evaluations.

    Gradients of long chains are noisier, so networks learn more slowly there. Step sizes, temperatures and frictions
    have a higher rate: they are few, and far from where they should be.
    """
    networks = [parameter for name, parameter in objective.named_parameters() if ".control." in name]
    known = {id(p) for p in networks}
    scalars = [p for p in objective.parameters() if p.requires_grad and id(p) not in known]
    groups: list[dict[str, Any]] = [{"params": [*initial.parameters(), *networks], "lr": rate}]
    if scalars:
        groups.append({"params": scalars, "lr": 1e-2})
    maximise(objective, lambda: initial(target), groups, num_updates, seed)
    return num_updates * evaluations_per_datum(objective)
