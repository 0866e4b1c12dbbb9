"""Evaluate a run on images it was not trained on, and write down what was found."""

import multiprocessing
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mcvae.core.tuning import Spacing, Tuning
from mcvae.data import Batches
from mcvae.evaluation import PROTOCOLS, Evaluation, evaluate, remove_saved, write_table
from mcvae.training.files import load_run, read_config, read_json, snapshot_folder, write_atomically, write_json
from mcvae.training.pictures import save_grid
from mcvae.training.run import batches, prepare
from mcvae.training.storage import RunFolder, check_links, top_level

__all__ = ["evaluate_run"]


def evaluate_run(
    folder: str | Path,
    *,
    split: str = "test",
    protocol: Literal["serious", "paper"] = "serious",
    num_steps: int | Literal["auto"] | None = None,
    num_samples: int | None = None,
    start: Literal["encoder", "prior"] | None = None,
    spacing: Spacing | None = None,
    tolerance: float | None = None,
    max_steps: int | None = None,
    limit: int | None = None,
    simulated: int = 32,
    compare_iwae: bool = True,
    tuning: str | None = None,
    memory: float = 1e9,
    device: str = "cpu",
    seed: int | None = None,
    epoch: int | None = None,
    processes: int = 1,
    shard: tuple[int, int] = (0, 1),
    progress: Any = None,
) -> dict[str, Any]:
    """Measure likelihood and bound per image; write a table, the tuning, a picture and the summary.

    Step sizes of the bound are those of training, frozen. An interrupted evaluation goes on where it was when it is
    called again with the same settings.

    Args:
        folder: a finished run.
        split: "test" or "validation".
        protocol: what the settings below replace parts of.
        num_steps, num_samples, start, spacing, tolerance, max_steps: see `mcvae.evaluation.Protocol`.
        limit: evaluate only so many images, evenly spaced in the split.
        simulated: images to simulate for the two-sided bounds; 0 for none.
        compare_iwae: see `mcvae.evaluate`.
        tuning: `tuning.json` of another evaluation, instead of a pilot.
        memory: bytes for activations.
        device: such as "cpu" or "cuda".
        seed: that of the run if None.
        epoch: evaluate the weights after this epoch, one of `run.snapshots`, and write to its folder.
        processes: share the batches among so many processes of this machine; of "cuda", each takes one GPU.
        shard: see `mcvae.evaluate`; of a shard nothing is reported but its own summary.
        progress: wraps the batches, given their number, such as `rich.progress.track`.
    """
    options = {
        name: value for name, value in locals().items() if name not in ("folder", "processes", "shard", "progress")
    }
    if limit is not None and limit < 2:
        raise ValueError(f"--limit must be at least 2, got {limit}: a standard error needs two images.")
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"--device {device} cannot be used here: {str(error).splitlines()[0]}.") from None
    chosen = {
        "num_steps": num_steps,
        "num_samples": num_samples,
        "start": start,
        "spacing": spacing,
        "tolerance": tolerance,
        "max_steps": max_steps,
    }
    settings = replace(PROTOCOLS[protocol], **{name: value for name, value in chosen.items() if value is not None})  # type: ignore[arg-type]
    snapshot = f"epochs/{epoch}/"
    home = RunFolder(folder, lambda name: top_level(name) or name.startswith(snapshot))
    folder = home.path
    check_links(folder)
    if processes > 1:
        _share(folder, processes, options)
    target = folder if epoch is None else snapshot_folder(folder, epoch)
    fresh = epoch is not None and not (target / "result.json").exists()
    result = {"epoch": epoch} if fresh else read_json(target / "result.json")
    model, objective = load_run(target)
    config, images = prepare(read_config(folder), trusted=False)
    config.data.limit = limit if limit is not None else config.data.limit
    if limit is not None:  # evenly spaced, since files tend to be sorted in some way
        pixels = images.split(split)
        images = replace(images, **{split: pixels[:: max(1, len(pixels) // limit)]})  # type: ignore[arg-type]
    work = batches(images, config, split)
    if not len(work):
        raise ValueError(f"there are no {split} images to evaluate on (limit {limit}).")
    if shard[0] >= len(work):  # more processes than batches
        return {}

    def watched(numbered: Iterable[Any]) -> Iterator[Any]:
        for batch in numbered if progress is None else progress(numbered, total=len(work)):
            yield batch
            home.push()

    begin = time.perf_counter()
    evaluation = evaluate(
        model.to(device),
        work,
        objective=objective.to(device),
        protocol=settings,
        tuning=None if tuning is None else Tuning.load(tuning),
        simulated=simulated if shard[1] == 1 else 0,
        compare_iwae=compare_iwae,
        memory=memory,
        seed=config.run.seed if seed is None else seed,
        folder=target,
        shard=shard,
        keep=True,
        progress=watched,
    )
    if shard[1] > 1:
        return evaluation.summary
    suffix = "" if split == "test" else f"-{split}"
    write_atomically(target / f"evaluation{suffix}.csv", lambda path: write_table(evaluation, path))
    if evaluation.tuning is not None:
        write_atomically(target / "tuning.json", evaluation.tuning.save)
    (target / "pictures").mkdir(exist_ok=True)
    save_grid(_images(work, evaluation, 32), target / "pictures" / f"worst{suffix}.png", columns=8)
    summary = evaluation.summary | {"split": split, "seconds": round(time.perf_counter() - begin, 2)}
    write_json(target / "result.json", result | {f"evaluation{suffix}": summary})
    remove_saved(target)
    home.push()
    return summary


def _share(folder: Path, processes: int, options: dict[str, Any]) -> None:
    """Evaluate every batch in one of several processes; what they find is in the folder afterwards."""
    threads = max(1, torch.get_num_threads() // processes)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for share in [pool.submit(_shard, folder, (k, processes), threads, options) for k in range(processes)]:
            share.result()


def _shard(folder: Path, shard: tuple[int, int], threads: int, options: dict[str, Any]) -> None:
    torch.set_num_threads(threads)
    device = {"device": f"cuda:{shard[0]}"} if options["device"] == "cuda" else {}
    evaluate_run(folder, **options | device, shard=shard)


def _images(work: Batches, evaluation: Evaluation, number: int) -> Tensor:
    """The images that are explained worst, the worst first."""
    wanted = evaluation.worst(number)
    found, seen = dict[int, Tensor](), 0
    for batch in work:
        found |= {index: batch[index - seen] for index in wanted if seen <= index < seen + len(batch)}
        seen += len(batch)
    return torch.stack([found[index] for index in wanted])
