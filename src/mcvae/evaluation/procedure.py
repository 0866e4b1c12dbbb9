"""Evaluate a latent variable model on data: its likelihood, its bound, and how far to believe them."""

import csv
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor, nn

from mcvae.core.bounds import iwae
from mcvae.core.bridge import Bridge
from mcvae.core.diagnostics import jackknife_bias
from mcvae.core.estimator import AnnealedEstimator
from mcvae.core.evidence import Evidence, diagnose, diagnose_sandwich
from mcvae.core.kernels import Kernel
from mcvae.core.pilot import Pilot, affordable_climbs, pilot
from mcvae.core.randomness import draw, seeded_generator
from mcvae.core.starts import fit
from mcvae.core.tuning import Tuning
from mcvae.evaluation.certificate import Certificate
from mcvae.evaluation.portions import Data, batches_of, bytes_per_row, with_time_left
from mcvae.evaluation.protocol import COLUMNS, PROTOCOLS, WEIGHT_EDGES, Protocol
from mcvae.evaluation.resume import Finished, Saved, fingerprint, remove_saved
from mcvae.models import LatentVariableModel

__all__ = ["Evaluation", "evaluate", "write_table"]


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
    data: Data,
    *,
    objective: AnnealedEstimator | None = None,
    protocol: Protocol | Literal["thorough", "paper"] = "thorough",
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
    fresh chains on all of them, batch by batch. Data whose weights are doubtful get four times the temperatures, and
    fresh chains. The model is evaluated in eval mode, and left in the mode it was in.

    Args:
        model: any encoder and decoder. It is evaluated on the device of its parameters.
        data: a tensor or NumPy array `[N, ...]`, or batches of those, such as a DataLoader; of pairs (x, y), x is
            taken. Never more than one batch is held.
        objective: whose bound to report; the ELBO if None.
        protocol: "thorough", "paper", or a `Protocol`.
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
        progress: wraps the batches, such as a progress bar; by default the time left is written to stderr, every ten
            seconds.

    >>> from mcvae.models import PPCA
    >>> ppca = PPCA.random(2, 5, generator=torch.Generator().manual_seed(0))
    >>> model = LatentVariableModel(lambda x: ppca.posterior(x), ppca)
    >>> x, _ = ppca.simulate(10, generator=torch.Generator().manual_seed(1))
    >>> result = evaluate(model, x, protocol=Protocol(num_steps=4), simulated=16)
    >>> bool((result.column("log_likelihood") - ppca.log_evidence(x)).abs().max() < 1e-4), result.summary["verdict"]
    (True, 'converged, certified within 0.1 nat')
    """
    if protocol == "serious":  # type: ignore[comparison-overlap] # its name until 0.2
        warnings.warn(
            'the protocol "serious" is now "thorough"; the old name will go.', DeprecationWarning, stacklevel=2
        )
        protocol = "thorough"
    if isinstance(protocol, str) and protocol not in PROTOCOLS:
        raise ValueError(f'protocol must be "thorough", "paper" or a Protocol, got {protocol!r}.')
    settings = PROTOCOLS[protocol] if isinstance(protocol, str) else protocol
    like = next(model.parameters(), torch.empty(0))
    runner = _Runner(model, objective, settings, kernel, tuning, compare_iwae, memory, seed, like)
    part, parts = shard
    if not 0 <= part < parts:
        raise ValueError(f"a shard is (k, n) with 0 <= k < n, got {shard}.")
    saved = None
    if folder is not None:
        identity = fingerprint(model, objective, kernel, tuning)
        saved = Saved(folder, shard, settings, seed, compare_iwae=compare_iwae, identity=identity)
    with torch.no_grad(), _eval_mode(model, *([] if objective is None else [objective])):
        work = enumerate(batches_of(data, like))
        number = math.ceil(len(data) / 100) if isinstance(data, Tensor) else _length(data)
        for index, x in progress(work) if progress is not None else with_time_left(work, number):
            runner.see(x)
            if index % parts != part:
                continue
            done = saved.read(index, x) if saved is not None else None
            if done is not None:
                runner.chosen = done.num_steps, done.moved
            else:
                runner.prepare()
                done = Finished(runner.pilot.estimator.num_steps, runner.moved, runner.rows(index, x))
                if saved is not None:
                    saved.write(index, x, done)
            runner.table += done.rows
        if not runner.table:
            raise ValueError("there are no data to evaluate on.")
        runner.prepare()
        summary = runner.summary(simulated)
    for number, row in enumerate(runner.table):
        row["image"] = number
    if folder is not None and parts == 1 and not keep:
        remove_saved(folder)
    return Evaluation(runner.table, summary, runner.pilot.tuning)


def _length(data: Any) -> int | None:
    try:
        return math.ceil(len(data) / 100) if hasattr(data, "shape") else len(data)
    except TypeError:  # a generator
        return None


@contextmanager
def _eval_mode(*modules: nn.Module) -> Iterator[None]:
    """Modules in eval mode, every part of them back in its own mode afterwards."""
    modes = {part: part.training for module in modules for part in module.modules()}
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


class _Runner:
    """One evaluation: its frozen plan, and what it has seen."""

    pilot: Pilot
    moved: list[float]

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
        self.chosen: tuple[int, list[float]] | None = None
        self.max_rows: int | None = None
        self.first: Tensor | None = None
        self.data_dim = 0
        self.number, self.total, self.squares = 0, torch.zeros(()), torch.zeros(())

    def see(self, x: Tensor) -> None:
        """Note the means of q, for active units, and the first data, for the pilot."""
        if self.first is None:
            self.first, self.data_dim = x[:_PILOT_DATA], x[0].numel()
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
        if self.protocol.start != "prior":
            return bridge
        prior = self.model.prior_like(self.like.new_empty(bridge.initial.event_shape)).expand((len(x),))
        return Bridge(prior, bridge.log_joint, context=bridge.context)

    def prepare(self) -> None:
        """Pilot and freeze, once."""
        if hasattr(self, "pilot"):
            return
        assert self.first is not None
        num_steps = self.protocol.num_steps if self.chosen is None else self.chosen[0]
        found = self._piloted("pilot", num_steps, self.tuning, self.protocol.start == "fitted")
        bridge = self.bridge(self.first)
        self.max_rows = max(1, int(self.memory / bytes_per_row(bridge, self._generator("memory"))))
        if self.chosen is None:
            self.chosen = found.estimator.num_steps, found.moved.double().tolist()
        self.moved = self.chosen[1]
        self.pilot = found._replace(moved=_UNKNOWN)

    @cached_property
    def plain(self) -> Pilot:
        """The plan for data that no Gaussian fits: from the encoder."""
        found = self._piloted("plain", self.pilot.estimator.num_steps, None, False)
        return found._replace(moved=_UNKNOWN)

    def _piloted(self, name: str, num_steps: int | Literal["auto"], tuning: Tuning | None, fitted: bool) -> Pilot:
        assert self.first is not None
        return pilot(
            self.bridge(self.first),
            kernel=self.kernel,
            num_steps=num_steps,
            num_samples=self.protocol.num_samples,
            schedule=self.protocol.spacing,
            tuning=tuning,
            tolerance=self.protocol.tolerance,
            max_steps=self.protocol.max_steps,
            shared=True,
            fit=fitted,
            generator=self._generator(name, 0),
        )

    def rows(self, index: int, x: Tensor) -> list[dict[str, Any]]:
        """Rows of one batch, in portions that fit the memory."""
        assert self.max_rows is not None
        found = list[dict[str, Any]]()
        for part, images in enumerate(torch.split(x, self.max_rows)):
            generator = self._generator("evaluate", index, part)
            rows = dict[int, dict[str, Any]]()
            for chosen, plan in self._plans(images, generator):
                rows |= zip(chosen.tolist(), self._portion(images[chosen], plan, generator), strict=True)
            found += [rows[row] for row in range(len(images))]
        return found

    def _plans(self, x: Tensor, generator: Generator) -> Iterator[tuple[Tensor, Pilot]]:
        """The plan of every datum, as indices of data and their plan: around its mode if it has one and no other."""
        everything = torch.arange(len(x), device=x.device)
        if self.pilot.tuning is None or not self.pilot.tuning.fitted:
            yield everything, self.pilot
            return
        assert self.max_rows is not None
        estimator, bridge = self.pilot.estimator, self.bridge(x)
        cost = self.protocol.num_samples * (estimator.num_evaluations - 1) // max(1, estimator.num_steps)
        climbs = max(1, affordable_climbs(bridge.initial.event_shape[0], cost))
        found = fit(bridge, num_starts=climbs, max_rows=self.max_rows, generator=generator)
        if bool(found.alone.any()):
            yield everything[found.alone], self.pilot.around(found.frame.of(found.alone))
        if not bool(found.alone.all()):
            yield everything[~found.alone], self.plain

    def _portion(self, x: Tensor, plan: Pilot, generator: Generator) -> list[dict[str, Any]]:
        bridge = self.bridge(x)
        evidence = self._diagnosed(bridge, plan, generator)
        rate, distortion = self._rate_and_distortion(x, generator)
        bound = -rate - distortion
        if self.objective is not None:
            own = self.model.bridge(x)
            repeats = [self.objective(own, generator=generator).bound for _ in range(_BOUND_REPEATS)]
            bound = torch.stack(repeats).mean(0)
        columns = {
            "log_likelihood": evidence.log_evidence,
            "standard_error": evidence.standard_error,
            "bias": jackknife_bias(evidence.log_weights),
            "ess": evidence.ess,
            "pareto_k": evidence.pareto_k,
            "acceptance": evidence.acceptance,
            "nonfinite": evidence.num_nonfinite,
            "bound": bound,
            **self._importance_sampling(bridge, generator),
            "rate": rate,
            "distortion": distortion,
        }
        doubts, weights = evidence.doubts(), _histogram(evidence)
        self._refine(x, plan, columns, doubts, weights, generator)
        numbers = torch.stack([column.double().cpu() for column in columns.values()], 1).tolist()
        return [
            dict(zip(columns, map(_plain, row), strict=True)) | {"doubts": " ".join(found), "weights": counts}
            for row, found, counts in zip(numbers, doubts, weights, strict=True)
        ]

    def _diagnosed(self, bridge: Bridge, found: Pilot, generator: Generator) -> Evidence:
        return diagnose(bridge, found, tolerance=self.protocol.tolerance, max_rows=self.max_rows, generator=generator)

    def _refine(
        self,
        x: Tensor,
        plan: Pilot,
        columns: dict[str, Tensor],
        doubts: list[tuple[str, ...]],
        weights: list[list[int]],
        generator: Generator,
    ) -> None:
        """Spend more temperatures on data that need them: fresh chains replace what is doubtful.

        Only where the number of temperatures is ours to choose.
        """
        rows = [row for row, found in enumerate(doubts) if set(found) & {"few", "tail", "noisy"}]
        number = min(4 * plan.estimator.num_steps, self.protocol.max_steps)
        if self.protocol.num_steps != "auto" or not rows or number <= plan.estimator.num_steps:
            return
        longer = self._with(plan, number, self.protocol.num_samples)
        if plan.frame is not None:
            longer = longer.around(plan.frame.of(torch.tensor(rows, device=x.device)))
        again = self._diagnosed(self.bridge(x[rows]), longer, generator)
        better = {
            "log_likelihood": again.log_evidence,
            "standard_error": again.standard_error,
            "bias": jackknife_bias(again.log_weights),
            "ess": again.ess,
            "pareto_k": again.pareto_k,
            "acceptance": again.acceptance,
            "nonfinite": again.num_nonfinite,
        }
        for name, values in better.items():
            columns[name] = columns[name].clone()
            columns[name][rows] = values.to(columns[name])
        for row, found, counts in zip(rows, again.doubts(), _histogram(again), strict=True):
            doubts[row], weights[row] = found, counts

    def _with(self, plan: Pilot, num_steps: int, num_samples: int) -> Pilot:
        """A frozen plan with more temperatures, or other chains."""
        if plan.tuning is None:
            return plan
        assert self.first is not None
        bridge, tuning = self.bridge(self.first), plan.tuning._replace(fitted=False, frame=None)  # nothing to fit here
        found = pilot(bridge, kernel=self.kernel, num_steps=num_steps, num_samples=num_samples, tuning=tuning)
        return found._replace(moved=plan.moved, tuning=plan.tuning)

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
        if self.protocol.start == "fitted" and not (self.pilot.tuning and self.pilot.tuning.fitted):
            summary["start"] = "encoder"  # from there, pilot chains were shorter
        for name in ("bound", "rate", "distortion", "importance", "iwae_10"):
            summary[name], summary[f"{name}_se"] = map(_plain, _mean(columns[name]))
        summary["nll"], summary["nll_se"] = _mean(-likelihood)
        both = self._sandwich(simulated) if simulated else None
        certificate = Certificate.of(columns["bias"], torch.tensor(self.moved), both)
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
            "bias": _plain(certificate.bias[0]),
            "bias_se": _plain(certificate.bias[1]),
            "bits_per_dim": summary["nll"] / (math.log(2) * self.data_dim),
            "moved": _plain(certificate.moved[0]),
            "active_units": int((spread > 0.01).sum()),
            "latent_dim": spread.numel(),
            "unconverged": sum(bool(found) for found in doubts),
            "verdict": certificate.verdict(doubts, self.protocol.tolerance),
            "remaining": _plain(certificate.remaining),
            "sandwich": both,
            "weights": {
                "edges": WEIGHT_EDGES,
                "counts": torch.tensor([row.pop("weights") for row in self.table]).sum(0).tolist(),
            },
        }

    def _sandwich(self, number: int) -> dict[str, Any]:
        """Bounds from both sides on data that the model itself made, and importance sampling beside them.

        The lower one is what this evaluation estimates. The upper one is there to measure it, and shall add little: of
        few long chains it is tighter than of many short ones.
        """
        assert self.first is not None
        own = self.pilot.estimator
        latent_dim = self.model.encoder(self.first).event_shape[0]
        generator = self._generator("simulate", 0)
        lower, upper, others = list[Tensor](), list[Tensor](), list[dict[str, Tensor]]()
        x, z = self.model.simulate(number, latent_dim, generator=generator)
        for data, latents in zip(torch.split(x, 16), torch.split(z, 16), strict=True):
            for chosen, plan in self._plans(data, generator):
                bridge = self.bridge(data[chosen])
                longer = self._with(plan, _LONGER * own.num_steps, max(1, own.num_samples // _LONGER))
                sandwich = diagnose_sandwich(
                    bridge, plan, latents[chosen], reverse=longer, max_rows=self.max_rows, generator=generator
                )
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
_UNKNOWN = torch.full((), torch.nan)  # how far an estimate moved is known for the pilot's data only
_LONGER = 8  # times the temperatures, for chains that run in reverse
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


def write_table(evaluation: Evaluation, path: str | os.PathLike[str]) -> None:
    """Write the table as CSV."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(evaluation.table)
