"""The chains of one evaluation: a plan, frozen on pilot data, and what it finds for every datum."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Generator, Tensor

from mcvae.core.bounds import iwae
from mcvae.core.bridge import Bridge
from mcvae.core.diagnostics import jackknife_bias
from mcvae.core.estimator import AnnealedEstimator
from mcvae.core.evidence import Evidence, diagnose
from mcvae.core.kernels import Kernel
from mcvae.core.pilot import Pilot, affordable_climbs, pilot
from mcvae.core.randomness import draw, seeded_generator
from mcvae.core.starts import fit
from mcvae.core.tuning import Tuning
from mcvae.evaluation.portions import bytes_per_row
from mcvae.evaluation.protocol import WEIGHT_EDGES, Protocol
from mcvae.evaluation.resume import Finished
from mcvae.models import LatentVariableModel

__all__ = ["Runner", "plain"]

Row = dict[str, Any]


@dataclass
class Runner:
    """One evaluation: its settings, named as by `evaluate`, and what it has seen."""

    model: LatentVariableModel
    objective: AnnealedEstimator | None
    protocol: Protocol
    kernel: Kernel | None
    tuning: Tuning | None
    compare_iwae: bool
    memory: float
    seed: int
    resumed: Finished | None = None
    """A batch that was saved before an interruption: the pilot's number of temperatures is known from it."""
    first: Tensor = field(init=False)
    """Data for the pilot."""
    number: int = 0
    """How many data it has seen; `total` and `squares` are sums over the means of their q."""
    total: Tensor = field(default_factory=lambda: torch.zeros(()))
    squares: Tensor = field(default_factory=lambda: torch.zeros(()))

    @property
    def like(self) -> Tensor:
        """A tensor of the model's type, on its device."""
        return next(self.model.parameters(), torch.empty(0))

    def generator(self, *parts: int | str) -> Generator:
        """Random numbers for a purpose."""
        return seeded_generator("evaluation", self.seed, *parts, device=self.like.device)

    def see(self, x: Tensor) -> None:
        """Note the means of q, for active units, and the first data, for the pilot."""
        if not self.number:
            self.first = x[:_PILOT_DATA]
        initial = self.model.encoder(x)
        try:
            mean = initial.mean
        except NotImplementedError:  # a flow
            mean = draw(initial, (16,), self.generator("means", self.number)).mean(0)
        self.number += len(x)
        self.total, self.squares = self.total + mean.double().sum(0), self.squares + mean.double().square().sum(0)

    def bridge(self, x: Tensor) -> Bridge:
        """From the encoder, or from the prior, to the joint."""
        bridge = self.model.bridge(x)
        if self.protocol.start != "prior":
            return bridge
        prior = self.model.prior_like(self.like.new_empty(bridge.initial.event_shape)).expand((len(x),))
        return Bridge(prior, bridge.log_joint, context=bridge.context)

    @cached_property
    def pilot(self) -> Pilot:
        """The frozen plan, from pilot chains for the first data."""
        num_steps = self.protocol.num_steps if self.resumed is None else self.resumed.num_steps
        return self._piloted("pilot", num_steps, self.tuning, fitted=self.protocol.start == "fitted")

    @property
    def moved(self) -> list[float]:
        """By how much the estimates of the first data moved when the temperatures were last doubled."""
        return self.pilot.moved.double().tolist() if self.resumed is None else self.resumed.moved

    @cached_property
    def _unfitted(self) -> Pilot:
        """The plan for data that no Gaussian fits: from the encoder."""
        return self._piloted("plain", self.pilot.estimator.num_steps, None, fitted=False)

    def _piloted(self, name: str, num_steps: int | Literal["auto"], tuning: Tuning | None, *, fitted: bool) -> Pilot:
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
            generator=self.generator(name, 0),
        )

    @cached_property
    def max_rows(self) -> int:
        """Chains × data that the memory holds at once."""
        return max(1, int(self.memory / bytes_per_row(self.bridge(self.first), self.generator("memory"))))

    def plans(self, x: Tensor, generator: Generator) -> Iterator[tuple[Tensor, Pilot]]:
        """The plan of every datum, as indices of data and their plan: around its mode if it has one and no other."""
        everything = torch.arange(len(x), device=x.device)
        plan = self.pilot._replace(moved=_UNKNOWN)
        if plan.tuning is None or not plan.tuning.fitted:
            yield everything, plan
            return
        estimator, bridge = plan.estimator, self.bridge(x)
        cost = self.protocol.num_samples * (estimator.num_evaluations - 1) // max(1, estimator.num_steps)
        climbs = max(1, affordable_climbs(bridge.initial.event_shape[0], cost))
        found = fit(bridge, num_starts=climbs, max_rows=self.max_rows, generator=generator)
        if bool(found.alone.any()):
            yield everything[found.alone], plan.around(found.frame.of(found.alone))
        if not bool(found.alone.all()):
            yield everything[~found.alone], self._unfitted._replace(moved=_UNKNOWN)

    def longer(self, plan: Pilot, num_steps: int, num_samples: int) -> Pilot:
        """A frozen plan with more temperatures, or another number of chains."""
        if plan.tuning is None:
            return plan
        bridge, tuning = self.bridge(self.first), plan.tuning._replace(fitted=False, frame=None)  # nothing to fit here
        found = pilot(bridge, kernel=self.kernel, num_steps=num_steps, num_samples=num_samples, tuning=tuning)
        return found._replace(moved=plan.moved, tuning=plan.tuning)

    def rows(self, index: int, x: Tensor) -> list[Row]:
        """Rows of one batch, in portions that fit the memory."""
        found = list[Row]()
        for part, images in enumerate(torch.split(x, self.max_rows)):
            generator = self.generator("evaluate", index, part)
            rows = dict[int, Row]()
            for chosen, plan in self.plans(images, generator):
                rows |= zip(chosen.tolist(), self._portion(images[chosen], plan, generator), strict=True)
            found += [rows[row] for row in range(len(images))]
        return found

    def _portion(self, x: Tensor, plan: Pilot, generator: Generator) -> list[Row]:
        bridge = self.bridge(x)
        estimated = self._estimated(bridge, plan, generator)
        rate, distortion = self._rate_and_distortion(x, generator)
        bound = -rate - distortion
        if self.objective is not None:
            own = self.model.bridge(x)
            repeats = [self.objective(own, generator=generator).bound for _ in range(_BOUND_REPEATS)]
            bound = torch.stack(repeats).mean(0)
        others = {"bound": bound, "rate": rate, "distortion": distortion, **self.importance_sampling(bridge, generator)}
        self._refine(estimated, x, plan, generator)
        return [one | other for one, other in zip(estimated, _rows(others), strict=True)]

    def _estimated(self, bridge: Bridge, plan: Pilot, generator: Generator) -> list[Row]:
        """What the chains of a plan say about every datum."""
        found = diagnose(bridge, plan, tolerance=self.protocol.tolerance, max_rows=self.max_rows, generator=generator)
        rows = _rows(
            {
                "log_likelihood": found.log_evidence,
                "standard_error": found.standard_error,
                "bias": jackknife_bias(found.log_weights),
                "ess": found.ess,
                "pareto_k": found.pareto_k,
                "acceptance": found.acceptance,
                "nonfinite": found.num_nonfinite,
            }
        )
        for row, doubts, weights in zip(rows, found.doubts(), _histogram(found), strict=True):
            row |= {"doubts": " ".join(doubts), "weights": weights}
        return rows

    def _refine(self, estimated: list[Row], x: Tensor, plan: Pilot, generator: Generator) -> None:
        """Spend more temperatures on data that need them: fresh chains replace what is doubtful.

        Only if the protocol leaves the number of temperatures to us.
        """
        doubtful = [n for n, row in enumerate(estimated) if {"few", "tail", "noisy"} & set(row["doubts"].split())]
        number = min(4 * plan.estimator.num_steps, self.protocol.max_steps)
        if self.protocol.num_steps != "auto" or not doubtful or number <= plan.estimator.num_steps:
            return
        longer = self.longer(plan, number, self.protocol.num_samples)
        if plan.frame is not None:
            longer = longer.around(plan.frame.of(torch.tensor(doubtful, device=x.device)))
        again = self._estimated(self.bridge(x[doubtful]), longer, generator)
        for n, row in zip(doubtful, again, strict=True):
            estimated[n] = row

    def _rate_and_distortion(self, x: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """KL(q ‖ prior) and −E_q[log p(x | z)], by samples, `[B]` each."""
        bridge = self.model.bridge(x)
        point = bridge.sample(_BOUND_REPEATS, with_score=False, generator=generator)
        log_prior = self.model.prior_like(point.z).log_prob(point.z)
        return (point.log_q - log_prior).double().mean(0), (log_prior - point.log_p).double().mean(0)

    def importance_sampling(self, bridge: Bridge, generator: Generator) -> dict[str, Tensor]:
        """With as many passes through the model as the chains took: one estimate from all, and the bound of ten."""
        batch = bridge.initial.batch_shape[0]
        if not self.compare_iwae:
            return dict.fromkeys(("importance", "iwae_10"), torch.full((batch,), torch.nan))
        estimator = self.pilot.estimator
        passes = 2 if estimator.uses_score else 1  # a score is a pass backward
        number = estimator.num_samples * estimator.num_evaluations * passes
        groups = max(1, min(number, self.max_rows // batch) // 10)
        sums, tens, seen = list[Tensor](), list[Tensor](), 0
        while seen < number:
            point = bridge.sample(10 * groups, with_score=False, generator=generator)
            log_weight = point.log_p.double() - point.log_q.double()
            sums.append(log_weight.logsumexp(0))
            of_ten = iwae(log_weight.reshape(groups, 10, batch).transpose(0, 1).flatten(1))
            tens.append(of_ten.reshape(groups, batch).mean(0))
            seen += 10 * groups
        return {
            "importance": torch.stack(sums).logsumexp(0) - math.log(seen),
            "iwae_10": torch.stack(tens).mean(0),
        }


_PILOT_DATA = 16
_UNKNOWN = torch.full((), torch.nan)  # by how much an estimate moved is known for the data of the pilot only
_BOUND_REPEATS = 10  # so that the noise of the chains does not drown the differences between methods


def plain(value: float) -> float | None:
    """None for what is not known: JSON has no NaN."""
    return None if math.isnan(value) else value


def _rows(columns: dict[str, Tensor]) -> list[Row]:
    """A dictionary per datum, from columns `[B]`."""
    numbers = torch.stack([column.double().cpu() for column in columns.values()], 1).tolist()
    return [dict(zip(columns, map(plain, row), strict=True)) for row in numbers]


def _histogram(evidence: Evidence) -> list[list[int]]:
    """For every datum, how many of its chains have a log weight, relative to the mean weight, in each bin."""
    relative = (evidence.log_weights - evidence.log_evidence).nan_to_num(nan=-torch.inf)  # [S, B]
    inner = torch.tensor(WEIGHT_EDGES[1:-1], dtype=relative.dtype, device=relative.device)
    bins = torch.bucketize(relative, inner, right=True)
    return torch.nn.functional.one_hot(bins, len(WEIGHT_EDGES) - 1).sum(0).tolist()
