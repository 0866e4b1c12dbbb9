"""Evaluate a latent variable model on data: its likelihood, its bound, and how far to believe them."""

import csv
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path as File
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor
from torch.autograd.graph import saved_tensors_hooks

from mcvae.core.bounds import iwae
from mcvae.core.bridge import Bridge
from mcvae.core.estimator import AnnealedEstimator
from mcvae.core.evidence import Evidence, diagnose, diagnose_sandwich
from mcvae.core.kernels import Kernel
from mcvae.core.pilot import Pilot, pilot
from mcvae.core.randomness import draw, seeded_generator
from mcvae.core.tuning import Spacing, Tuning
from mcvae.core.verdict import verdict
from mcvae.models import LatentVariableModel

__all__ = ["PROTOCOLS", "Evaluation", "Protocol", "evaluate"]


@dataclass(frozen=True)
class Protocol:
    """How log p(x) is estimated.

    Args:
        num_steps: temperatures K, or "auto": doubled on pilot data until the estimate moves by less than `tolerance`.
        num_samples: chains per datum.
        start: "encoder", q(z | x), or "prior", which a bad encoder cannot spoil but which needs more temperatures.
        spacing: of the temperatures.
        tolerance: in nats, for "auto" and for verdicts.
        max_steps: budget of "auto".
    """

    num_steps: int | Literal["auto"] = "auto"
    num_samples: int = 64
    start: Literal["encoder", "prior"] = "encoder"
    spacing: Spacing = "adaptive"
    tolerance: float = 0.1
    max_steps: int = 1024


PROTOCOLS = {"serious": Protocol(), "paper": Protocol(num_steps=5, num_samples=10, spacing="linear")}
"""The default, and what the paper reports: five HMC moves of three leapfrogs from the encoder (Section 4.3)."""

COLUMNS = (
    "image",
    "log_likelihood",
    "standard_error",
    "ess",
    "pareto_k",
    "acceptance",
    "nonfinite",
    "bound",
    "importance",
    "iwae_10",
    "rate",
    "distortion",
    "doubts",
)
"""Of the table: the keys of `Evaluation.table`, a row per datum."""


WEIGHT_EDGES = [-6.0 + 0.5 * edge for edge in range(21)]
"""Of the histogram of log w − log mean w over all chains and data, in nats; the outer bins also hold what is beyond."""


class Evaluation(NamedTuple):
    """What was found, per datum and for the set."""

    table: list[dict[str, Any]]
    """A row per datum; see `COLUMNS`. `doubts` names what speaks against its estimate."""
    summary: dict[str, Any]
    """The set: figures with errors, settings, verdict."""
    tuning: Tuning | None
    """The frozen tuning; hand it to `evaluate(tuning=...)` to use it again."""

    def column(self, name: str) -> Tensor:
        """A numeric column of the table, `[N]`."""
        return _column(self.table, name)

    def worst(self, number: int) -> list[int]:
        """Indices of the data that the model explains worst."""
        return self.column("log_likelihood").argsort()[:number].tolist()


def evaluate(
    model: LatentVariableModel,
    data: Tensor | Iterable[Tensor],
    *,
    objective: AnnealedEstimator | None = None,
    protocol: Protocol | Literal["serious", "paper"] = "serious",
    kernel: Kernel | None = None,
    tuning: Tuning | None = None,
    compare_iwae: bool = True,
    simulated: int = 32,
    memory: float = 1e9,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    shard: tuple[int, int] = (0, 1),
    keep: bool = False,
    progress: Callable[[Iterable[Any]], Iterable[Any]] | None = None,
) -> Evaluation:
    """Estimate log p(x) of every datum by annealed importance sampling, with what is needed to believe it.

    Step sizes, temperatures and their number are tuned on pilot chains for the first 16 data, frozen, and then used for
    fresh chains on all of them, batch by batch.

    Args:
        model: any encoder and decoder. It is evaluated on the device of its parameters.
        data: `[N, ...]`, or batches of it, such as a DataLoader of tensors; never more than one batch is held.
        objective: whose bound to report; the ELBO if None.
        protocol: "serious", "paper", or a `Protocol`.
        kernel: `hmc(3)` by default.
        tuning: that of an earlier evaluation, instead of a pilot.
        compare_iwae: estimate by importance sampling, too, with as many passes through the model as the chains take.
        simulated: data to simulate from the model for the two-sided bounds; 0 for none.
        memory: bytes that the model's activations may take: chains × data held at once follow from it.
        seed: of everything random. The noise of a datum depends on the batch it is in.
        folder: where to save finished batches, so that an interrupted evaluation goes on when it is called again with
            the same data and settings.
        shard: (k, n) for batches k, k + n, k + 2n, … only, so that n processes can share the work. They leave them in
            `folder`, where a call without `shard` finds them: it computes what is missing and sums up.
        keep: leave the saved batches in `folder`, to be removed by `remove_saved` when the results are safe.
        progress: wraps the batches, such as a progress bar.

    >>> from mcvae.core.verdict import verdict
from mcvae.models import PPCA
    >>> ppca = PPCA.random(2, 5, generator=torch.Generator().manual_seed(0))
    >>> model = LatentVariableModel(lambda x: ppca.posterior(x), ppca)
    >>> x, _ = ppca.simulate(10, generator=torch.Generator().manual_seed(1))
    >>> result = evaluate(model, x, protocol=Protocol(num_steps=4), simulated=0)
    >>> bool((result.column("log_likelihood") - ppca.log_evidence(x)).abs().max() < 1e-4), result.summary["verdict"]
    (True, 'converged')
    """
    settings = PROTOCOLS[protocol] if isinstance(protocol, str) else protocol
    like = next(model.parameters(), torch.empty(0))
    runner = _Runner(model, objective, settings, kernel, tuning, compare_iwae, memory, seed, like)
    part, parts = shard
    if not 0 <= part < parts:
        raise ValueError(f"a shard is (k, n) with 0 <= k < n, got {shard}.")
    saved = None
    if folder is not None:
        described: dict[str, str | bool] = {"kernel": str(kernel), "tuning": str(tuning), "compare_iwae": compare_iwae}
        saved = _Saved(folder, shard, settings, seed, **described, model=_fingerprint(*model.state_dict().values()))
    with torch.no_grad():
        work = enumerate(_batches(data, like))
        for index, x in progress(work) if progress is not None else work:
            runner.see(x)
            if index % parts != part:
                continue
            done = saved.read(index, x, runner) if saved is not None else None
            if done is None:
                runner.prepare()
                done = runner.rows(index, x)
                if saved is not None:
                    saved.write(index, x, done, runner)
            runner.table += done
        if not runner.table:
            raise ValueError("there are no data to evaluate on.")
        runner.prepare()
        summary = runner.summary(simulated)
    for number, row in enumerate(runner.table):
        row["image"] = number
    if folder is not None and parts == 1 and not keep:
        remove_saved(folder)
    return Evaluation(runner.table, summary, runner.pilot.tuning)


def _batches(data: Tensor | Iterable[Tensor], like: Tensor) -> Iterator[Tensor]:
    source = torch.split(data, 100) if isinstance(data, Tensor) else data
    for batch in source:
        x = batch[0] if isinstance(batch, list | tuple) else batch
        if len(x):
            yield x.to(like.device, like.dtype if x.is_floating_point() else None)


class _Runner:
    """One evaluation: its frozen plan, and what it has seen."""

    pilot: Pilot
    moved: float

    def __init__(
        self,
        model: LatentVariableModel,
        objective: AnnealedEstimator | None,
        protocol: Protocol,
        kernel: Kernel | None,
        tuning: Tuning | None,
        compare_iwae: bool,
        memory: float,
        seed: int,
        like: Tensor,
    ):
        self.model, self.objective, self.protocol, self.kernel = model, objective, protocol, kernel
        self.tuning, self.compare_iwae, self.memory, self.seed, self.like = tuning, compare_iwae, memory, seed, like
        self.table = list[dict[str, Any]]()
        self.chosen: tuple[int, float] | None = None
        self.max_rows: int | None = None
        self.first: Tensor | None = None
        self.number, self.total, self.squares = 0, torch.zeros(()), torch.zeros(())

    def see(self, x: Tensor) -> None:
        """Note the means of q, for active units, and the first data, for the pilot."""
        if self.first is None:
            self.first = x[:_PILOT_DATA]
        initial = self.model.encoder(x)
        try:
            mean = initial.mean
        except NotImplementedError:  # a flow
            mean = draw(initial, (16,), self._generator("means", self.number)).mean(0)
        self.number += len(x)
        self.total, self.squares = self.total + mean.double().sum(0), self.squares + mean.double().square().sum(0)

    def bridge(self, x: Tensor) -> Bridge:
        """From the encoder, or from the prior, to the joint."""
        bridge = self.model.bridge(x)
        if self.protocol.start == "encoder":
            return bridge
        prior = self.model.prior_like(self.like.new_empty(bridge.initial.event_shape)).expand((len(x),))
        return Bridge(prior, bridge.log_joint, context=bridge.context)

    def prepare(self) -> None:
        """Pilot and freeze, once."""
        if hasattr(self, "pilot"):
            return
        assert self.first is not None
        bridge, generator, protocol = self.bridge(self.first), self._generator("pilot", 0), self.protocol
        self.pilot = pilot(
            bridge,
            kernel=self.kernel,
            num_steps=protocol.num_steps if self.chosen is None else self.chosen[0],
            num_samples=protocol.num_samples,
            schedule=protocol.spacing,
            tuning=self.tuning,
            tolerance=protocol.tolerance,
            max_steps=protocol.max_steps,
            shared=True,
            generator=generator,
        )
        self.max_rows = max(1, int(self.memory / bytes_per_row(bridge, self._generator("memory"))))
        if self.chosen is None:
            self.chosen = self.pilot.estimator.num_steps, self.pilot.moved.abs().mean().item()
        self.moved = self.chosen[1]
        self.pilot = self.pilot._replace(moved=torch.full((), torch.nan))  # it is known for the pilot's data only

    def rows(self, index: int, x: Tensor) -> list[dict[str, Any]]:
        """Rows of one batch, in portions that fit the memory."""
        assert self.max_rows is not None
        found = []
        for part, images in enumerate(torch.split(x, self.max_rows)):
            found += self._portion(images, self._generator("evaluate", index, part))
        return found

    def _portion(self, x: Tensor, generator: Generator) -> list[dict[str, Any]]:
        bridge = self.bridge(x)
        evidence = diagnose(
            bridge, self.pilot, tolerance=self.protocol.tolerance, max_rows=self.max_rows, generator=generator
        )
        rate, distortion = self._rate_and_distortion(x, generator)
        bound = -rate - distortion
        if self.objective is not None:
            own = self.model.bridge(x)
            repeats = [self.objective(own, generator=generator).bound for _ in range(_BOUND_REPEATS)]
            bound = torch.stack(repeats).mean(0)
        columns = {
            "log_likelihood": evidence.log_evidence,
            "standard_error": evidence.standard_error,
            "ess": evidence.ess,
            "pareto_k": evidence.pareto_k,
            "acceptance": evidence.acceptance,
            "nonfinite": evidence.num_nonfinite,
            "bound": bound,
            **self._importance_sampling(bridge, generator),
            "rate": rate,
            "distortion": distortion,
        }
        numbers = torch.stack([column.double().cpu() for column in columns.values()], 1).tolist()
        return [
            dict(zip(columns, map(_plain, row), strict=True)) | {"doubts": " ".join(found), "weights": counts}
            for row, found, counts in zip(numbers, evidence.doubts(), _histogram(evidence), strict=True)
        ]

    def _rate_and_distortion(self, x: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """KL(q ‖ prior) and −E_q[log p(x | z)], by samples, `[B]` each."""
        bridge = self.model.bridge(x)
        point = bridge.sample(_BOUND_REPEATS, with_score=False, generator=generator)
        log_prior = self.model.prior_like(point.z).log_prob(point.z)
        return (point.log_q - log_prior).double().mean(0), (log_prior - point.log_p).double().mean(0)

    def _importance_sampling(self, bridge: Bridge, generator: Generator) -> dict[str, Tensor]:
        """With as many passes through the model as the chains took: one estimate from all, and the bound of ten."""
        batch = bridge.initial.batch_shape[0]
        if not self.compare_iwae:
            return dict.fromkeys(("importance", "iwae_10"), torch.full((batch,), torch.nan))
        assert self.max_rows is not None
        estimator = self.pilot.estimator
        passes = 2 if estimator.uses_score else 1  # a score is a pass backward
        number = estimator.num_samples * estimator.num_evaluations * passes
        groups = max(1, min(number, self.max_rows // batch) // 10)
        sums, tens, seen = list[Tensor](), list[Tensor](), 0
        while seen < number:
            point = bridge.sample(10 * groups, with_score=False, generator=generator)
            log_weight = point.log_p.double() - point.log_q.double()
            sums.append(log_weight.logsumexp(0))
            tens.append(
                iwae(log_weight.reshape(groups, 10, batch).transpose(0, 1).flatten(1)).reshape(groups, batch).mean(0)
            )
            seen += 10 * groups
        return {
            "importance": torch.stack(sums).logsumexp(0) - math.log(seen),
            "iwae_10": torch.stack(tens).mean(0),
        }

    def summary(self, simulated: int) -> dict[str, Any]:
        """Figures of the set."""
        columns = {name: _column(self.table, name) for name in _NUMERIC}
        likelihood, number = columns["log_likelihood"], len(self.table)
        spread = (self.squares / self.number - (self.total / self.number).square()).clamp(min=0)
        doubts = [tuple(row["doubts"].split()) for row in self.table]
        summary: dict[str, Any] = {
            "num_images": number,
            **asdict(self.protocol),
            "num_steps": self.pilot.estimator.num_steps,
        }
        for name in ("bound", "rate", "distortion", "importance", "iwae_10"):
            summary[name], summary[f"{name}_se"] = map(_plain, _mean(columns[name]))
        summary["nll"], summary["nll_se"] = _mean(-likelihood)
        chains = columns["standard_error"].square().sum().sqrt().item() / number
        half = 1.96 * summary["nll_se"]
        gap, gap_se = _mean(likelihood - columns["bound"])
        return summary | {
            "nll_interval": [summary["nll"] - half, summary["nll"] + half],
            "nll_se_chains": chains,
            "gap": gap,
            "gap_se": gap_se,
            "ess": columns["ess"].median().item(),
            "pareto_k": _plain(columns["pareto_k"].median().item()),
            "acceptance": columns["acceptance"].mean().item(),
            "nonfinite": int(columns["nonfinite"].sum()),
            "moved": _plain(self.moved),
            "active_units": int((spread > 0.01).sum()),
            "latent_dim": spread.numel(),
            "unconverged": sum(bool(found) for found in doubts),
            "verdict": self._verdict(doubts),
            "sandwich": self._sandwich(simulated) if simulated else None,
            "weights": {
                "edges": WEIGHT_EDGES,
                "counts": torch.tensor([row.pop("weights") for row in self.table]).sum(0).tolist(),
            },
        }

    def _verdict(self, doubts: list[tuple[str, ...]]) -> str:
        """Of the set: a few doubtful data in a hundred do not spoil a mean."""
        if self.moved >= self.protocol.tolerance:
            return (
                f"not converged, because estimates of the pilot's data still moved by {self.moved:.2f} nats when their "
                f"temperatures were doubled to {self.pilot.estimator.num_steps}: raise max_steps"
            )
        unsure = sum(bool(found) for found in doubts)
        found = verdict(doubts)
        return (
            found if not unsure or unsure > 0.05 * len(doubts) else f"converged, except {unsure} of {len(doubts)} data"
        )

    def _sandwich(self, number: int) -> dict[str, Any]:
        """Bounds from both sides on data that the model itself made, and importance sampling beside them."""
        assert self.first is not None
        latent_dim = self.model.encoder(self.first).event_shape[0]
        generator = self._generator("simulate", 0)
        lower, upper, others = list[Tensor](), list[Tensor](), list[dict[str, Tensor]]()
        x, z = self.model.simulate(number, latent_dim, generator=generator)
        for data, latents in zip(torch.split(x, 16), torch.split(z, 16), strict=True):
            bridge = self.bridge(data)
            sandwich = diagnose_sandwich(bridge, self.pilot, latents, max_rows=self.max_rows, generator=generator)
            lower.append(sandwich.lower)
            upper.append(sandwich.upper)
            others.append(self._importance_sampling(bridge, generator))
        low, high = torch.cat(lower), torch.cat(upper)
        gap, gap_se = _mean(high - low)
        return {
            "num_images": number,
            "lower": low.mean().item(),
            "upper": high.mean().item(),
            "gap": gap,
            "gap_se": gap_se,
            **{name: _plain(torch.cat([other[name] for other in others]).mean().item()) for name in others[0]},
        }

    def _generator(self, *parts: int | str) -> Generator:
        return seeded_generator("evaluation", self.seed, *parts, device=self.like.device)


_PILOT_DATA = 16
_BOUND_REPEATS = 10  # so that the noise of the chains does not drown the differences between methods
_NUMERIC = COLUMNS[1:-1]


def _mean(values: Tensor) -> tuple[float, float]:
    """Mean and its standard error over data."""
    return values.mean().item(), (values.std() / len(values) ** 0.5).item() if len(values) > 1 else math.inf


def _plain(value: float) -> float | None:
    """None for what is not known: JSON has no NaN."""
    return None if math.isnan(value) else value


def _histogram(evidence: Evidence) -> list[list[int]]:
    """For every datum, how many of its chains have a log weight, relative to the mean weight, in each bin."""
    relative = (evidence.log_weights - evidence.log_evidence).nan_to_num(nan=-torch.inf)  # [S, B]
    inner = torch.tensor(WEIGHT_EDGES[1:-1], dtype=relative.dtype, device=relative.device)
    bins = torch.bucketize(relative, inner, right=True)
    return torch.nn.functional.one_hot(bins, len(WEIGHT_EDGES) - 1).sum(0).tolist()


def _column(table: list[dict[str, Any]], name: str) -> Tensor:
    return torch.tensor([math.nan if row[name] is None else row[name] for row in table], dtype=torch.float64)


def bytes_per_row(bridge: Bridge, generator: Generator | None = None) -> float:
    """Bytes that the model keeps for the score of one latent, and as many again for its backward pass."""
    held = 0

    def note(tensor: Tensor) -> Tensor:
        nonlocal held
        held += 0 if isinstance(tensor, torch.nn.Parameter) else tensor.numel() * tensor.element_size()
        return tensor

    z = draw(bridge.initial, (1,), generator).detach()
    with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
        bridge.log_joint(z.requires_grad_())
    return max(2 * held / z.shape[1], 1.0)


def _fingerprint(*tensors: Tensor) -> str:
    """Of the contents: finished batches are used again for the same model and the same data only."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class _Saved:
    """Finished batches on disk: a line of JSON each, after one with the settings. Each shard has a file of its own."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        shard: tuple[int, int],
        protocol: Protocol,
        seed: int,
        **described: str | bool,
    ):
        part, parts = shard
        self.path = File(folder) / ("evaluation.partial" if parts == 1 else f"evaluation-{part}-of-{parts}.partial")
        self.settings = json.loads(json.dumps(asdict(protocol) | {"seed": seed, "edges": WEIGHT_EDGES} | described))
        self.done = dict[tuple[int, str], dict[str, Any]]()
        for path in _saved_files(folder):
            entries = self._load(path)
            self.done |= {(entry["batch"], entry["data"]): entry for entry in entries}
            if path == self.path:  # without a torn line, and without what is of no use
                scratch = path.with_name(f".{path.name}")
                scratch.write_text("".join(json.dumps(line) + "\n" for line in [self.settings, *entries]))
                os.replace(scratch, path)

    def _load(self, path: File) -> list[dict[str, Any]]:
        lines = []
        for line in path.read_text().splitlines():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:  # the line at which it was interrupted
                break
        return lines[1:] if lines and lines[0] == self.settings else []

    def read(self, index: int, x: Tensor, runner: _Runner) -> list[dict[str, Any]] | None:
        entry = self.done.get((index, _fingerprint(x)))  # not that of another split, or another limit
        if entry is None:
            return None
        runner.chosen = entry["num_steps"], entry["moved"]
        rows: list[dict[str, Any]] = entry["rows"]
        return rows

    def write(self, index: int, x: Tensor, rows: list[dict[str, Any]], runner: _Runner) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not self.path.exists()
        try:
            with open(self.path, "a") as file:
                if fresh:
                    file.write(json.dumps(self.settings) + "\n")
                entry = {
                    "batch": index,
                    "data": _fingerprint(x),
                    "num_steps": runner.pilot.estimator.num_steps,
                    "moved": runner.moved,
                }
                file.write(json.dumps(entry | {"rows": rows}) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            reason = f"finished batches are kept, but no more can be: {error.strerror}"
            raise OSError(error.errno, reason, str(self.path)) from error


def _saved_files(folder: str | os.PathLike[str]) -> list[File]:
    return sorted(path for path in File(folder).glob("evaluation*.partial") if path.is_file())


def remove_saved(folder: str | os.PathLike[str]) -> None:
    """Remove finished batches, those of all shards."""
    for path in _saved_files(folder):
        path.unlink(missing_ok=True)


def write_table(evaluation: Evaluation, path: str | os.PathLike[str]) -> None:
    """Write the table as CSV."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(evaluation.table)
