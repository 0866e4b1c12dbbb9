"""What a training consists of: model, estimator, callbacks and Lightning's Trainer, built from the configuration."""

from pathlib import Path
from typing import NamedTuple

import torch
from lightning import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch import Tensor

from mcvae.allocator import keep_memory, return_memory
from mcvae.core.randomness import seeded_generator
from mcvae.data import Splits
from mcvae.models import Datum, Decoder, LatentVariableModel, VampPrior
from mcvae.runs.config import TrainConfig
from mcvae.runs.storage import RunFolder
from mcvae.training.building import build
from mcvae.training.callbacks import (
    AveragedWeights,
    Checkpoints,
    HeldOutLikelihood,
    Metrics,
    Pictures,
    Snapshots,
    Upload,
)
from mcvae.training.loading import save_model, snapshot_folder
from mcvae.training.module import VariationalTraining
from mcvae.training.run_data import batches
from mcvae.training.trainer import build_trainer

__all__ = ["Parts", "assemble", "untrained"]


class Parts(NamedTuple):
    """What a training consists of."""

    config: TrainConfig
    images: Splits
    home: RunFolder
    trainer: Trainer
    module: VariationalTraining
    metrics: Metrics
    pictures: Pictures
    stopping: EarlyStopping | None


def assemble(config: TrainConfig, images: Splits, home: RunFolder, *, trusted: bool) -> Parts:
    """Build the parts of a training; see `train` for `trusted`."""
    run, folder, validated = config.run, home.path, len(images.validation) > 0
    if (run.patience or run.keep == "best") and not validated:
        raise ValueError("--run.patience and --run.keep best need validation data; give --data.validation.")
    return_memory() if run.memory == "low" else keep_memory()
    seed_everything(run.seed, verbose=False)
    module = untrained(config, images, trusted=trusted)
    _start(module.model, images, config)
    metrics, pictures = Metrics(folder, run.likelihood_every, images.unit), _pictures(folder, images, config)

    def save_snapshot(epoch: int) -> None:
        save_model(snapshot_folder(folder, epoch), module.model, module.objective, config, images)

    stopping, callbacks = None, list[Callback]()
    if config.optimizer.average:
        callbacks.append(AveragedWeights(config.optimizer.average))
    if run.patience:
        stopping = EarlyStopping("val_bound", patience=run.patience, mode="max", check_finite=False)
        callbacks.append(stopping)
    if run.likelihood_every and validated:
        held_out = _first_batch(images, config, "validation")
        callbacks.append(HeldOutLikelihood(held_out, run.likelihood_every, run.seed))
    # metrics before checkpoints, which remember the row of their epoch
    callbacks += [pictures, Snapshots(run.snapshots, save_snapshot), metrics, Checkpoints(folder), Upload(home)]
    trainer = build_trainer(config, folder, callbacks)
    if config.data.batch_size % trainer.world_size:
        raise ValueError(
            f"--data.batch_size counts the {images.unit} of all processes and must be a multiple of their number, "
            f"{trainer.world_size}; got {config.data.batch_size}."
        )
    return Parts(config, images, home, trainer, module, metrics, pictures, stopping)


def untrained(config: TrainConfig, images: Splits, *, trusted: bool = False) -> VariationalTraining:
    """Model, estimator and optimiser as the configuration describes them."""
    run, conditions = config.run, sum(coding.size for coding in images.codings)
    datum = Datum(images.shape, images.kind, images.levels, conditions)
    model, objective = build(config.model, config.method, datum, trusted=trusted)
    return VariationalTraining(
        model,
        objective,
        config.optimizer,
        seed=run.seed,
        epochs=run.epochs,
        log_every=run.log_every,
        memory=run.memory,
        compile=run.compile,
    )


_STARTING_ROWS = 10_000
"""Most training data that likelihood and prior are initialised from."""


def _start(model: LatentVariableModel, images: Splits, config: TrainConfig) -> None:
    """Initialise likelihood, prior and conditions from training data."""
    rows = images.train[:_STARTING_ROWS]
    data = images.transform(config.data.transform)(rows, seeded_generator("start", config.run.seed))
    if isinstance(model.decoder, Decoder):
        model.decoder.likelihood.start(data)
    given = images.given_of("train")
    if given is not None and model.examples is not None:
        model.examples.copy_(given[torch.linspace(0, len(given) - 1, len(model.examples)).long()])
        data = torch.cat([data.flatten(1), given[:_STARTING_ROWS]], 1)
    if isinstance(model.prior, VampPrior):
        model.prior.start(data)


def _pictures(folder: Path, images: Splits, config: TrainConfig) -> Pictures:
    source = "validation" if len(images.validation) else "train"
    shown = _first_batch(images, config, source)
    if images.kind != "pixels" or config.data.transform == "keep" or images.given is not None:
        shown = shown[:0]  # it cannot be shown as a picture
    return Pictures(folder, shown, config.run.pictures_every, config.run.seed)


def _first_batch(images: Splits, config: TrainConfig, split: str) -> Tensor:
    return next(iter(batches(images, config, split)))
