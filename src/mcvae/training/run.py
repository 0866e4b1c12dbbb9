"""A training run from configuration to result: one folder, resumable at any epoch."""

import inspect
import logging
import platform
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

import mcvae
from mcvae.allocator import keep_memory
from mcvae.core.estimator import AnnealedEstimator
from mcvae.data import TRANSFORMS, Batches, Images, load_images
from mcvae.training.callbacks import (
    AtomicCheckpoints,
    Checkpoints,
    HeldOutLikelihood,
    Metrics,
    Pictures,
    Snapshots,
    Upload,
    latest_checkpoint,
)
from mcvae.training.config import TrainConfig, check, default_folder, resolve
from mcvae.training.files import (
    RunError,
    build,
    read_config,
    read_json,
    save_model,
    snapshot_folder,
    write_config,
    write_json,
)
from mcvae.training.methods import METHODS
from mcvae.training.module import VariationalTraining
from mcvae.training.storage import RunFolder, check_links

__all__ = ["BatchedImages", "build_trainer", "prepare", "train"]


class BatchedImages(LightningDataModule):
    """Batches cut by index from images in memory; the epoch decides order and noise."""

    def __init__(self, images: Images, config: TrainConfig):
        super().__init__()
        self.images, self.config = images, config

    def train_dataloader(self) -> Batches:
        """Batches of the current epoch; Lightning asks anew for every epoch."""
        assert self.trainer is not None
        return self._batches("train", self.trainer.current_epoch)

    def val_dataloader(self) -> Batches | list[Any]:
        """Validation batches, the same every time."""
        return self._batches("validation", None) if len(self.images.validation) else []

    def _batches(self, split: str, epoch: int | None) -> Batches:
        assert self.trainer is not None
        return batches(
            self.images, self.config, split, epoch=epoch, rank=self.trainer.global_rank, ranks=self.trainer.world_size
        )


def batches(
    images: Images, config: TrainConfig, split: str, *, epoch: int | None = None, rank: int = 0, ranks: int = 1
) -> Batches:
    """Transformed batches of a split as a configuration wants them."""
    pixels = images.split(split)[: config.data.limit]
    transform = TRANSFORMS[config.data.transform]
    size = config.data.batch_size
    return Batches(pixels, size, transform, seed=config.run.seed, epoch=epoch, rank=rank, world_size=ranks)


def prepare(config: TrainConfig, *, trusted: bool = True) -> tuple[TrainConfig, Images]:
    """Load the images and settle everything that "auto" left open.

    A configuration found in a run folder may be somebody else's: nothing is downloaded to the folder that it names.
    """
    check(config)
    if config.method.name not in METHODS:
        raise ValueError(f"unknown method {config.method.name!r}; known are {', '.join(METHODS)}.")
    download = trusted or config.data.root is None
    images = load_images(config.data.name, config.data.root, validation=config.data.validation, download=download)
    return resolve(config, images.shape, METHODS[config.method.name].flow), images


def train(config: TrainConfig | None = None, *, resume: str | Path | None = None) -> Path:
    """Train a model, or go on with an interrupted run; return the run folder, or the local copy of one at a URL.

    A finished run is not trained again. An interrupted one continues from its last complete epoch, bit for bit.

    Args:
        config: what to train; ignored if `resume` is given.
        resume: folder of an interrupted run.
    """
    if resume is not None:
        home = RunFolder(resume)
        check_links(home.path)
        config = read_config(home.path)
        if _finished(home.path):
            print(f"{home.place} is finished: {config.run.epochs} epochs. Nothing to do.")
            return home.path
    assert config is not None, "give a configuration or a run to resume"
    config, images = prepare(config, trusted=resume is None)
    if resume is None:
        config.run.folder = config.run.folder or default_folder(config)
        home = RunFolder(config.run.folder)
    folder = home.path
    keep_memory()
    seed_everything(config.run.seed, verbose=False)
    model, objective = build(config.model, config.method, images.shape)
    module = VariationalTraining(
        model,
        objective,
        config.optimizer,
        seed=config.run.seed,
        epochs=config.run.epochs,
        log_every=config.run.log_every,
        memory=config.run.memory,
        compile=config.run.compile,
    )
    metrics, pictures = Metrics(folder, config.run.likelihood_every), _pictures(folder, images, config)
    held_out = next(iter(batches(images, config, "validation")), torch.empty(0)) if len(images.validation) else None
    snapshots = Snapshots(
        config.run.snapshots,
        lambda epoch: save_model(snapshot_folder(folder, epoch), model, objective, config, images.shape),
    )
    callbacks = [
        pictures,
        snapshots,
        metrics,
        Checkpoints(folder),
        Upload(home),
    ]  # a checkpoint remembers the row of its epoch
    if held_out is not None:
        callbacks.insert(0, HeldOutLikelihood(held_out, config.run.likelihood_every, config.run.seed))
    trainer = build_trainer(config, folder, callbacks)
    if config.data.batch_size % trainer.world_size:
        raise ValueError(
            f"--data.batch_size counts the images of all processes and must be a multiple of their number, "
            f"{trainer.world_size}; got {config.data.batch_size}."
        )
    if resume is None:
        rank_zero_only(_create)(home, config)  # other processes of a distributed run come here, too
    checkpoint = latest_checkpoint(folder) if resume is not None else None
    _fit(trainer, module, BatchedImages(images, config), checkpoint, home.place)
    if not trainer.is_global_zero:
        return folder
    reached, place = metrics.rows[-1]["epoch"] if metrics.rows else 0, home.place
    if reached < config.run.epochs:
        print(f"{place}: stopped after epoch {reached} of {config.run.epochs}. Continue: mcvae train --resume {place}")
    else:
        model.float()  # whatever --trainer.precision was
        save_model(folder, model, objective, config, images.shape)
        paths = pictures.draw(model)
        write_json(folder / "result.json", _result(config, objective, metrics, paths, folder))
        home.push()
        print(f"{place}: trained. Next: mcvae evaluate {place}")
    return folder


def _create(home: RunFolder, config: TrainConfig) -> None:
    folder, place = home.path, home.place
    if (folder / "config.yaml").exists() or (folder / "checkpoints").exists():
        raise RunError(
            f"{place} holds a run already. Continue it with --resume {place}, choose another --run.folder, or "
            "remove it."
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, config)
    home.push()


def _finished(folder: Path) -> bool:
    return (folder / "result.json").exists() and read_json(folder / "result.json").get("status") == "finished"


def _pictures(folder: Path, images: Images, config: TrainConfig) -> Pictures:
    source = "validation" if len(images.validation) else "train"
    shown = next(iter(batches(images, config, source)))
    return Pictures(folder, shown, config.run.pictures_every, config.model.latent_dim or 0, config.run.seed)


def build_trainer(config: TrainConfig, folder: Path, callbacks: list[Any]) -> Trainer:
    """Lightning's Trainer with our defaults and the user's options."""
    known = set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    for name in set(config.trainer) & set(_RESERVED):
        raise ValueError(f"--trainer.{name} is decided by mcvae: {_RESERVED[name]}.")
    if any(word in str(config.trainer.get("strategy")) for word in ("spawn", "fork", "notebook")):
        raise ValueError("runs need processes of their own: use --trainer.strategy ddp.")
    unknown = set(config.trainer) - known
    if unknown:
        raise ValueError(
            f"unknown trainer option {', '.join(sorted(unknown))}; Lightning knows {', '.join(sorted(known))}."
        )
    options: dict[str, Any] = {
        "max_epochs": config.run.epochs,
        "log_every_n_steps": config.run.log_every,
        "logger": TensorBoardLogger(folder, name="", version="tensorboard"),
        "enable_model_summary": False,
        "enable_progress_bar": sys.stderr.isatty(),
        "num_sanity_val_steps": 0,
        "inference_mode": False,  # chains need scores in validation, too
        "reload_dataloaders_every_n_epochs": 1,
        "use_distributed_sampler": False,
        "default_root_dir": folder,
    }
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    known_noise = (".*does not have many workers.*", ".*LeafSpec.*", ".*smaller than the logging interval.*")
    for noise in (*known_noise, ".*sync_dist=True.*"):  # what is logged has been pooled over processes
        warnings.filterwarnings("ignore", message=noise)
    return Trainer(**options | config.trainer, callbacks=callbacks, plugins=[AtomicCheckpoints()])


_RESERVED = {
    "max_epochs": "use --run.epochs",
    "gradient_clip_val": "use --optimizer.clip",
    "gradient_clip_algorithm": "use --optimizer.clip, which clips the norm",
    "log_every_n_steps": "use --run.log_every",
    "default_root_dir": "use --run.folder",
    "callbacks": "in Python, use mcvae.training.module.VariationalTraining with a Trainer of your own",
    "plugins": "in Python, use mcvae.training.module.VariationalTraining with a Trainer of your own",
    "enable_checkpointing": "checkpoints are what --resume reads",
    "barebones": "checkpoints are what --resume reads",
    "model_registry": "a run is kept at --run.folder only",
    "inference_mode": "validation needs scores",
    "reload_dataloaders_every_n_epochs": "the epoch decides the order of the data",
    "use_distributed_sampler": "batches are shared among processes already",
}


def _fit(
    trainer: Trainer, module: VariationalTraining, data: BatchedImages, checkpoint: Path | None, place: str
) -> None:
    """Fit; a Ctrl-C or SIGTERM leaves a run that can be resumed, and says how."""
    interrupted = False

    def interrupt(*_: Any) -> None:
        nonlocal interrupted
        interrupted = trainer.should_stop = True  # Python drops an exception that is raised while it tidies up
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        trainer.fit(module, data, ckpt_path=str(checkpoint) if checkpoint else None)
    except (KeyboardInterrupt, SystemExit):
        interrupted = True
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if interrupted or trainer.state.status == "interrupted":
        print(f"\nInterrupted. Continue with: mcvae train --resume {place}", file=sys.stderr)
        raise SystemExit(130)


def _result(
    config: TrainConfig, objective: AnnealedEstimator, metrics: Metrics, pictures: list[Path], folder: Path
) -> dict[str, Any]:
    return {
        "status": "finished",
        "data": config.data.name,
        "transform": config.data.transform,
        "likelihood": config.model.likelihood,
        "batch_size": config.data.batch_size,
        "method": config.method.name,
        "num_steps": config.method.num_steps,
        "schedule": config.method.schedule,
        "num_samples": objective.num_samples,
        "evaluations": objective.num_samples * (objective.schedule.num_steps + 1),  # per image and optimiser step
        "seed": config.run.seed,
        "epochs": config.run.epochs,
        "seconds": round(metrics.seconds, 2),
        "last": metrics.rows[-1],
        "pictures": [str(path.relative_to(folder)) for path in pictures],
        "versions": {"mcvae": mcvae.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }
