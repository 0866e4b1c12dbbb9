"""The figures of a whole set: means with their errors, bounds from both sides, and the verdict."""

import math
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from mcvae.core.evidence import diagnose_sandwich
from mcvae.evaluation.certificate import Certificate
from mcvae.evaluation.protocol import COLUMNS, WEIGHT_EDGES
from mcvae.evaluation.runner import Runner, plain

__all__ = ["column", "summarised"]


def summarised(runner: Runner, table: list[dict[str, Any]], simulated: int) -> dict[str, Any]:
    """Figures of the set, from the rows of its data and from `simulated` data of the model."""
    columns = {name: column(table, name) for name in _NUMERIC}
    likelihood, tuning = columns["log_likelihood"], runner.pilot.tuning
    doubts = [tuple(row["doubts"].split()) for row in table]
    spread = (runner.squares / runner.number - (runner.total / runner.number).square()).clamp(min=0)
    sandwich = _sandwich(runner, simulated) if simulated else None
    certificate = Certificate.of(columns["bias"], torch.tensor(runner.moved), sandwich)
    nll, nll_se = _mean(-likelihood)
    gap, gap_se = _mean(likelihood - columns["bound"])
    summary: dict[str, Any] = asdict(runner.protocol) | {
        "num_images": len(table),
        "num_steps": runner.pilot.estimator.num_steps,
        "nll": nll,
        "nll_se": nll_se,
        "nll_interval": [nll - 1.96 * nll_se, nll + 1.96 * nll_se],
        "nll_se_chains": columns["standard_error"].square().sum().sqrt().item() / len(table),
        "gap": gap,
        "gap_se": gap_se,
        "ess": columns["ess"].median().item(),
        "pareto_k": plain(columns["pareto_k"].median().item()),
        "acceptance": columns["acceptance"].mean().item(),
        "nonfinite": int(columns["nonfinite"].sum()),
        "bias": plain(certificate.bias[0]),
        "bias_se": plain(certificate.bias[1]),
        "bits_per_dim": nll / (math.log(2) * runner.model.apart(runner.first)[0][0].numel()),  # conditions are no data
        "moved": plain(certificate.moved[0]),
        "active_units": int((spread > 0.01).sum()),
        "latent_dim": spread.numel(),
        "unconverged": sum(bool(found) for found in doubts),
        "verdict": certificate.verdict(doubts, runner.protocol.tolerance),
        "remaining": plain(certificate.remaining),
        "sandwich": sandwich,
        "weights": {"edges": WEIGHT_EDGES, "counts": torch.tensor([row["weights"] for row in table]).sum(0).tolist()},
    }
    if runner.protocol.start == "fitted" and not (tuning and tuning.fitted):
        summary["start"] = "encoder"  # from there, pilot chains were shorter
    for name in ("bound", "rate", "distortion", "importance", "iwae_10"):
        summary[name], summary[f"{name}_se"] = map(plain, _mean(columns[name]))
    return summary


def _sandwich(runner: Runner, number: int) -> dict[str, Any]:
    """Bounds from both sides on data that the model itself made, and importance sampling beside them.

    The lower bound is what this evaluation estimates. The upper one only measures it, and should add little: with few
    long chains it is tighter than with many short ones.
    """
    own, generator = runner.pilot.estimator, runner.generator("simulate", 0)
    latent_dim = runner.model.encoder(runner.first).event_shape[0]
    lower, upper, others = list[Tensor](), list[Tensor](), list[dict[str, Tensor]]()
    x, z = runner.model.simulate(number, latent_dim, generator=generator)
    for data, latents in zip(torch.split(x, 16), torch.split(z, 16), strict=True):
        for chosen, plan in runner.plans(data, generator):
            bridge = runner.bridge(data[chosen])
            longer = runner.longer(plan, _LONGER * own.num_steps, max(1, own.num_samples // _LONGER))
            sandwich = diagnose_sandwich(
                bridge, plan, latents[chosen], reverse=longer, max_rows=runner.max_rows, generator=generator
            )
            lower.append(sandwich.lower)
            upper.append(sandwich.upper)
            others.append(runner.importance_sampling(bridge, generator))
    low, high = torch.cat(lower), torch.cat(upper)
    gap, gap_se = _mean(high - low)
    return {
        "num_images": number,
        "lower": low.mean().item(),
        "upper": high.mean().item(),
        "gap": gap,
        "gap_se": gap_se,
        **{name: plain(torch.cat([other[name] for other in others]).mean().item()) for name in others[0]},
    }


_LONGER = 8  # times the temperatures, for chains that run in reverse
_NUMERIC = [name for name in COLUMNS if name not in ("image", "doubts")]


def _mean(values: Tensor) -> tuple[float, float]:
    """Mean and its standard error over data."""
    return values.mean().item(), (values.std() / len(values) ** 0.5).item() if len(values) > 1 else math.inf


def column(table: list[dict[str, Any]], name: str) -> Tensor:
    """A numeric column of a table, `[N]`; NaN for what is not known."""
    return torch.tensor([math.nan if row[name] is None else row[name] for row in table], dtype=torch.float64)
