"""Evaluate a run on held-out data, and write the results to its folder."""

import multiprocessing
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcvae.core.tuning import Tuning
from mcvae.data import Batches, Splits
from mcvae.evaluation import PROTOCOLS, Evaluation, Protocol, evaluate, evenly_spaced, remove_saved, write_table
from mcvae.runs.config import EvaluationSettings, TrainConfig, read_config
from mcvae.runs.likelihood import bits_of_cell
from mcvae.runs.plain import RunError, write_atomically
from mcvae.runs.results import (
    EvaluationSummary,
    SimulatedBounds,
    WeightCounts,
    read_result,
    read_snapshot,
    with_evaluation,
    write_result,
)
from mcvae.runs.storage import RunFolder, check_links, hold, top_level
from mcvae.training.loading import load_run, snapshot_folder
from mcvae.training.pictures import save_grid
from mcvae.training.run_data import batches, prepare
from mcvae.training.threads import threads_for

__all__ = ["evaluate_run"]

WHOLE = (0, 1)
"""The only shard of an evaluation that is not shared."""


def evaluate_run(
    folder: str | Path,
    settings: EvaluationSettings | None = None,
    *,
    shard: tuple[int, int] = WHOLE,
    progress: Any = None,
    **options: Any,
) -> EvaluationSummary:
    """Measure likelihood and bound per image; write a table, the tuning, a picture and the summary.

    Step sizes of the bound are those of training, frozen. An interrupted evaluation resumes where it left off when it
    is called again with the same settings.

    Args:
        folder: a finished run.
        settings: how to evaluate.
        shard: see `mcvae.evaluate`. A shard returns a summary of its own batches, and writes no table.
        progress: wraps the batches, given their number, such as `rich.progress.track`.
        options: fields of `EvaluationSettings`, instead of those of `settings`.
    """
    settings = replace(settings or EvaluationSettings(), **options)
    settings.check()
    try:
        torch.empty(0, device=settings.device)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"--device {settings.device} cannot be used here: {str(error).splitlines()[0]}.") from None
    snapshot = f"epochs/{settings.epoch}/"
    home = RunFolder(folder, lambda name: top_level(name) or name.startswith(snapshot))
    check_links(home.path)
    if not home.path.is_dir():
        raise RunError(f"{home.place} is not a run folder: it does not exist.")
    if shard != WHOLE:
        return _evaluate(home, settings, shard, progress)
    with hold(home.path, "evaluating", home.place), threads_for():
        if settings.processes > 1:
            _share(home.path, settings)
        return _evaluate(home, settings, shard, progress)


def _evaluate(
    home: RunFolder, settings: EvaluationSettings, shard: tuple[int, int], progress: Any
) -> EvaluationSummary:
    folder, epoch = home.path, settings.epoch
    target = folder if epoch is None else snapshot_folder(folder, epoch)
    result = read_result(folder) if epoch is None else replace(read_snapshot(target), epoch=epoch)
    model, objective = load_run(target)
    config, images = prepare(read_config(folder), trusted=False)
    work = _held_out(images, config, settings)
    if shard[0] >= len(work):  # more processes than batches
        return EvaluationSummary()

    def watched(numbered: Iterable[Any]) -> Iterator[Any]:
        for batch in numbered if progress is None else progress(numbered, total=len(work)):
            yield batch
            home.push()

    begin = time.perf_counter()
    evaluation = evaluate(
        model.to(settings.device),
        work,
        objective=objective.to(settings.device),
        protocol=_protocol(settings),
        tuning=_tuning(settings.tuning),
        simulated=settings.simulated if shard == WHOLE else 0,
        compare_iwae=settings.compare_iwae,
        memory=settings.bytes(),
        seed=config.run.seed if settings.seed is None else settings.seed,
        folder=target,
        shard=shard,
        keep=True,
        progress=watched,
    )
    seconds = round(time.perf_counter() - begin, 2)
    told = {"unit": images.unit, "split": settings.split, "seconds": seconds, "settings": settings.identity()}
    cell, bits = bits_of_cell(config.model.likelihood, config.data.transform), evaluation.summary["bits_per_dim"]
    told["bits_per_dim"] = None if cell is None else bits + cell
    summary = _summary(evaluation.summary | told)
    if shard == WHOLE:
        are_pictures = images.kind == "pixels" and images.given is None and config.data.transform != "keep"
        _write(target, evaluation, settings.split, _images(work, evaluation, 32) if are_pictures else None)
        write_result(target, with_evaluation(result, summary))
        remove_saved(target)
        home.push()
    return summary


def _held_out(images: Splits, config: TrainConfig, settings: EvaluationSettings) -> Batches:
    """The data to evaluate on: a limited number is evenly spaced, since files tend to be sorted in some way."""
    split = settings.split
    if settings.limit is not None:
        config.data.limit, number = settings.limit, len(images.split(split))
        images = images.thinned(split, evenly_spaced(number, settings.limit))
    work = batches(images, config, split)
    if not len(work):
        raise ValueError(f"there are no {split} {images.unit} to evaluate on.")
    return work


def _write(folder: Path, evaluation: Evaluation, split: str, worst: Tensor | None) -> None:
    """Write the table, the tuning, and the images that are explained worst, if the data are images."""
    suffix = "" if split == "test" else f"-{split}"
    write_atomically(folder / f"evaluation{suffix}.csv", lambda path: write_table(evaluation, path))
    if evaluation.tuning is not None:
        write_atomically(folder / "tuning.json", evaluation.tuning.save)
    if worst is not None:
        (folder / "pictures").mkdir(exist_ok=True)
        save_grid(worst, folder / "pictures" / f"worst{suffix}.png", columns=8)


def _protocol(settings: EvaluationSettings) -> Protocol:
    """The protocol, with what the settings replace."""
    named = {field.name: getattr(settings, field.name, None) for field in fields(Protocol)}
    return replace(PROTOCOLS[settings.protocol], **{name: value for name, value in named.items() if value is not None})


def _tuning(path: str | None) -> Tuning | None:
    try:
        return None if path is None else Tuning.load(path)
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise RunError(f"{path} is not the tuning.json of an evaluation ({type(error).__name__}: {error}).") from None


def _summary(found: dict[str, Any]) -> EvaluationSummary:
    """The summary of `mcvae.evaluate` as a record. It fails if the record lacks a key: that would be a bug of ours."""
    parts = {name: kind(**found[name]) for name, kind in _PARTS.items() if found[name] is not None}
    return EvaluationSummary(**found | parts)


_PARTS: dict[str, Any] = {"sandwich": SimulatedBounds, "weights": WeightCounts}


def _share(folder: Path, settings: EvaluationSettings) -> None:
    """Share the batches among processes, which leave their results in the folder."""
    number = settings.processes
    threads = max(1, torch.get_num_threads() // number)
    with ProcessPoolExecutor(number, multiprocessing.get_context("spawn")) as pool:
        for share in [pool.submit(_shard, folder, (k, number), threads, settings) for k in range(number)]:
            share.result()


def _shard(folder: Path, shard: tuple[int, int], threads: int, settings: EvaluationSettings) -> None:
    torch.set_num_threads(threads)
    device = f"cuda:{shard[0]}" if settings.device == "cuda" else settings.device
    evaluate_run(folder, replace(settings, device=device, processes=1), shard=shard)


def _images(work: Batches, evaluation: Evaluation, number: int) -> Tensor:
    """The images that are explained worst, the worst first."""
    wanted = evaluation.worst(number)
    found, seen = dict[int, Tensor](), 0
    for batch in work:
        found |= {index: batch[index - seen] for index in wanted if seen <= index < seen + len(batch)}
        seen += len(batch)
    return torch.stack([found[index] for index in wanted])
