"""The end of a training: the weights that are kept, and the result; or why there are none."""

import math
import platform
import shlex
from contextlib import suppress
from typing import Any

import torch

import mcvae
from mcvae.runs.config import TrainConfig, data_label
from mcvae.runs.method import method_named
from mcvae.runs.plain import RunError
from mcvae.runs.results import RunResult, write_result
from mcvae.runs.storage import RunFolder
from mcvae.training.assembly import Parts
from mcvae.training.callbacks import AveragedWeights
from mcvae.training.checkpoints import load_checkpoint
from mcvae.training.loading import save_model
from mcvae.training.module import DivergedError, VariationalTraining

__all__ = ["conclude", "give_up", "load_kept"]


def conclude(parts: Parts) -> None:
    """Write the result, if training has reached its end."""
    config, images, home, module = parts.config, parts.images, parts.home, parts.module
    rows, place = parts.metrics.rows, home.place
    reached = rows[-1]["epoch"] if rows else 0
    stopped = parts.stopping is not None and parts.stopping.wait_count >= parts.stopping.patience
    if reached < config.run.epochs and not stopped:
        again = f"mcvae train --resume {shlex.quote(place)}"
        print(f"{place}: stopped after epoch {reached} of {config.run.epochs}. Continue: {again}")
        return
    if rows[-1]["train_bound"] == "":
        give_up(parts, f"no step of epoch {reached} had a finite loss and gradient: all were skipped.")
    if rows[-1]["val_bound"] != rows[-1]["val_bound"]:  # NaN: the weights are ruined; one bad chain would give -inf
        give_up(parts, f"the bound of validation {images.unit} cannot be evaluated any more.")
    validated = [row["val_bound"] for row in rows if row["val_bound"] != ""]
    if stopped and not any(map(math.isfinite, validated)):  # nothing was there to improve on
        give_up(parts, f"the bound of validation {images.unit} was finite in no epoch.")
    load_kept(module, config, home)
    module.model.float()  # whatever --trainer.precision was
    save_model(home.path, module.model, module.objective, config, images)
    pictures = [str(path.relative_to(home.path)) for path in parts.pictures.draw(module.model)]
    write_result(home.path, _result(parts, pictures=pictures))
    home.push()
    print(f"{place}: trained. Next: mcvae evaluate {shlex.quote(place)}")


def load_kept(module: VariationalTraining, config: TrainConfig, home: RunFolder) -> None:
    """Load the weights that a run keeps: those of the last epoch, or of the best; averaged, if so configured."""
    last, best = (home.path / "checkpoints" / f"{name}.ckpt" for name in ("last", "best"))
    keeps_best = bool(config.run.keep == "best" or config.run.patience) and best.exists()
    path = best if keeps_best or not last.exists() else last  # a run resumed from `best` may have no other
    checkpoint = load_checkpoint(module, path)
    if config.optimizer.average:
        average = AveragedWeights(config.optimizer.average)
        average.load_state_dict(checkpoint["callbacks"][average.state_key])
        average.put(module)
    if keeps_best:
        print(f"{home.place}: the weights are those after epoch {checkpoint['epoch'] + 1}, the best.")


def give_up(parts: Parts, reason: str) -> None:
    """Say in the folder that the run diverged, and raise the error."""
    if parts.trainer.is_global_zero:
        write_result(parts.home.path, _result(parts, status="diverged", reason=reason))
        with suppress(RunError):
            parts.home.push()
    advice = "" if "try --" in reason else " Try --method.step_size 0.001 or --optimizer.learning_rate 0.0003."
    raise DivergedError(f"{parts.home.place} diverged: {reason}{advice}")


def _result(parts: Parts, **more: Any) -> RunResult:
    config, rows = parts.config, parts.metrics.rows
    return RunResult(
        data=data_label(config.data.name),
        transform=config.data.transform,
        likelihood=config.model.likelihood,
        batch_size=config.data.batch_size,
        method=config.method.name,
        num_steps=config.method.num_steps,
        schedule=config.method.schedule or "linear",
        num_samples=parts.module.objective.num_samples,
        evaluations=method_named(config.method.name).cost(config.method),
        seed=config.run.seed,
        epochs=config.run.epochs,
        seconds=round(parts.metrics.seconds, 2),
        last=rows[-1] if rows else {},
        versions={"mcvae": mcvae.__version__, "torch": torch.__version__, "python": platform.python_version()},
        **more,
    )
