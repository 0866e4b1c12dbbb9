"""Results of training and evaluation as typed records: `result.json` of a run and of its snapshots."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from mcvae.runs.plain import checked, read_json, write_json

__all__ = [
    "EvaluationSummary",
    "RunResult",
    "SimulatedBounds",
    "SnapshotResult",
    "WeightCounts",
    "read_result",
    "read_snapshot",
    "with_evaluation",
    "write_result",
]


@dataclass(frozen=True)
class SimulatedBounds:
    """Bounds on log p from both sides, on images that the model itself made."""

    num_images: int
    lower: float
    upper: float
    gap: float
    gap_se: float
    importance: float | None = None
    iwae_10: float | None = None


@dataclass(frozen=True)
class WeightCounts:
    """A histogram of log weights, relative to the mean weight, over all chains and images."""

    edges: list[float]
    counts: list[int]


@dataclass(frozen=True)
class EvaluationSummary:
    """What `mcvae evaluate` found on held-out data; see `mcvae.evaluate`. Unknown numbers are None."""

    num_images: int | None = None
    unit: str = "images"
    """What `num_images` counts: "images", or "rows" of other data."""
    split: str = "test"
    verdict: str = "not converged: it has no verdict"
    nll: float | None = None
    nll_se: float | None = None
    nll_interval: list[float] | None = None
    nll_se_chains: float | None = None
    bound: float | None = None
    bound_se: float | None = None
    gap: float | None = None
    gap_se: float | None = None
    rate: float | None = None
    rate_se: float | None = None
    distortion: float | None = None
    distortion_se: float | None = None
    importance: float | None = None
    importance_se: float | None = None
    iwae_10: float | None = None
    iwae_10_se: float | None = None
    ess: float | None = None
    pareto_k: float | None = None
    acceptance: float | None = None
    nonfinite: int | None = None
    moved: float | None = None
    bias: float | None = None
    bias_se: float | None = None
    remaining: float | None = None
    bits_per_dim: float | None = None
    """Of whole numbers, such as 8-bit pixels; None for real data."""
    unconverged: int | None = None
    active_units: int | None = None
    latent_dim: int | None = None
    num_steps: int | None = None
    num_samples: int | None = None
    start: str | None = None
    spacing: str | None = None
    tolerance: float | None = None
    max_steps: int | None = None
    seconds: float | None = None
    sandwich: SimulatedBounds | None = None
    weights: WeightCounts | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """What was asked for: the fields of `EvaluationSettings` that decide the numbers."""


@dataclass(frozen=True)
class SnapshotResult:
    """`result.json` of the weights after an epoch: what was measured on each split."""

    epoch: int | None = None
    evaluation: EvaluationSummary | None = None
    evaluation_validation: EvaluationSummary | None = None


@dataclass(frozen=True, kw_only=True)
class RunResult(SnapshotResult):
    """`result.json` of a run: what was trained, how it ended, and what was measured."""

    status: Literal["finished", "diverged"] = "finished"
    reason: str = ""
    """Why a run diverged."""
    data: str
    transform: str | None = None
    likelihood: str | None = None
    batch_size: int | None = None
    method: str
    num_steps: int
    schedule: str = "linear"
    num_samples: int
    evaluations: int | None = None
    """Model evaluations per image and optimiser step."""
    seed: int = 0
    epochs: int = 0
    seconds: float = 0.0
    last: dict[str, Any] = field(default_factory=dict)
    """The last row of `metrics.csv`."""
    pictures: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


def read_result(folder: Path) -> RunResult:
    """Read `result.json` of a run; a RunError names the file and what is wrong with it."""
    path = folder / "result.json"
    return checked(RunResult, _plain_keys(read_json(path)), str(path))


def read_snapshot(folder: Path) -> SnapshotResult:
    """Read `result.json` of a snapshot; an empty one if nothing has been measured."""
    path = folder / "result.json"
    return checked(SnapshotResult, _plain_keys(read_json(path)), str(path)) if path.exists() else SnapshotResult()


def write_result(folder: Path, result: SnapshotResult) -> None:
    """Write `result.json`; what is not known is left out."""
    content = {name.replace("_validation", "-validation"): value for name, value in asdict(result).items()}
    known = {name: value for name, value in content.items() if value is not None and value != ""}
    write_json(folder / "result.json", known)


def with_evaluation(result: SnapshotResult, found: EvaluationSummary) -> SnapshotResult:
    """The result with the evaluation of a split replaced."""
    name = "evaluation" if found.split == "test" else "evaluation_validation"
    return replace(result, **{name: found})  # type: ignore[arg-type]


def _plain_keys(content: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("evaluation-", "evaluation_"): value for name, value in content.items()}
