"""Evaluate a latent variable model on data: likelihood and bound of every datum, and a verdict on the set."""

import csv
import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mcvae.core.estimator import AnnealedEstimator
from mcvae.core.kernels import Kernel
from mcvae.core.tuning import Tuning
from mcvae.evaluation.portions import Data, batches_of, number_of_batches, with_time_left
from mcvae.evaluation.protocol import COLUMNS, PROTOCOLS, Protocol
from mcvae.evaluation.resume import Finished, Saved, fingerprint, remove_saved
from mcvae.evaluation.runner import Runner
from mcvae.evaluation.summary import column, summarised
from mcvae.models import LatentVariableModel
from mcvae.models.mode import eval_mode

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
        return column(self.table, name)

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
        compare_iwae: also estimate by importance sampling, with as many passes through the model as the chains take.
        simulated: data to simulate from the model for the two-sided bounds; 0 for none.
        memory: bytes that the model's activations may take: chains × data held at once follow from it.
        seed: of everything random. The noise of a datum depends on the batch it is in.
        folder: where to save finished batches, so that an interrupted evaluation resumes when it is called again with
            the same data and settings.
        shard: (k, n) evaluates only the batches k, k + n, k + 2n, …, so that n processes can share the work. They save
            them in `folder`; a call without `shard` reads them, evaluates what is missing, and summarises all.
        keep: leave the saved batches in `folder`; remove them with `remove_saved` when the results are safe.
        progress: wraps the batches, such as a progress bar; by default the time left is written to stderr every ten
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
    part, parts = shard
    if not 0 <= part < parts:
        raise ValueError(f"a shard is (k, n) with 0 <= k < n, got {shard}.")
    runner = Runner(model, objective, settings, kernel, tuning, compare_iwae, memory, seed)
    saved = None
    if folder is not None:
        identity = fingerprint(model, objective, kernel, tuning)
        saved = Saved(folder, shard, settings, seed, compare_iwae=compare_iwae, identity=identity)
    table = list[dict[str, Any]]()
    with torch.no_grad(), eval_mode(*([model] if objective is None else [model, objective])):
        work = enumerate(batches_of(data, runner.like))
        for index, x in with_time_left(work, number_of_batches(data)) if progress is None else progress(work):
            runner.see(x)
            if index % parts != part:
                continue
            done = saved.read(index, x) if saved is not None else None
            if done is not None:
                runner.resumed = done
            else:
                done = Finished(runner.pilot.estimator.num_steps, runner.moved, runner.rows(index, x))
                if saved is not None:
                    saved.write(index, x, done)
            table += done.rows
        if not table:
            raise ValueError("there are no data to evaluate on.")
        summary = summarised(runner, table, simulated)
    for number, row in enumerate(table):
        row["image"] = number
        del row["weights"]  # the summary has them
    if folder is not None and parts == 1 and not keep:
        remove_saved(folder)
    return Evaluation(table, summary, runner.pilot.tuning)


def write_table(evaluation: Evaluation, path: str | os.PathLike[str]) -> None:
    """Write the table as CSV."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(evaluation.table)
