"""A training run from configuration to result: one folder, resumable at any epoch."""

import logging
import math
import os
import platform
import shlex
import shutil
import signal
import sys
import tempfile
import warnings
from contextlib import nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import TensorBoardLogger

import mcvae
from mcvae._extras import needs_extra
from mcvae.allocator import keep_memory, return_memory
from mcvae.core.estimator import AnnealedEstimator
from mcvae.core.randomness import seeded_generator
from mcvae.data import Batches, DataError, Splits, load_data
from mcvae.data.registry import is_own
from mcvae.models import Datum, Decoder, LatentVariableModel, VampPrior
from mcvae.runs.config import TrainConfig, check, data_label, default_folder, read_config, resolve, write_config
from mcvae.runs.interruption import Interruption
from mcvae.runs.method import method_named
from mcvae.runs.plain import RunError
from mcvae.runs.results import RunResult, read_result, write_result
from mcvae.runs.storage import RunFolder, check_links, hold
from mcvae.training.callbacks import (
    AtomicCheckpoints,
    AveragedWeights,
    Checkpoints,
    HeldOutLikelihood,
    Metrics,
    Pictures,
    Snapshots,
    Upload,
    latest_checkpoint,
)
from mcvae.training.loading import build, load_run, save_model, snapshot_folder
from mcvae.training.module import DivergedError, VariationalTraining
from mcvae.training.options import check_trainer
from mcvae.training.threads import threads_for

__all__ = ["BatchedImages", "build_trainer", "prepare", "train"]


class BatchedImages(LightningDataModule):
    """Batches cut by index from images in memory; the epoch decides order and noise."""

    def __init__(self, images: Splits, config: TrainConfig):
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
    images: Splits, config: TrainConfig, split: str, *, epoch: int | None = None, rank: int = 0, ranks: int = 1
) -> Batches:
    """Transformed batches of a split as a configuration wants them."""
    pixels = images.split(split)[: config.data.limit]
    transform = images.transform(config.data.transform)
    size = config.data.batch_size
    given = images.given_of(split)
    return Batches(
        pixels,
        size,
        transform,
        seed=config.run.seed,
        epoch=epoch,
        rank=rank,
        world_size=ranks,
        given=None if given is None else given[: len(pixels)],
    )


def prepare(config: TrainConfig, *, trusted: bool = True) -> tuple[TrainConfig, Splits]:
    """Load the data and settle everything that "auto" left open.

    A configuration found in a run folder may be somebody else's: nothing is downloaded to the folder that it names.
    """
    check(config)
    check_trainer(config.trainer)
    download = trusted or config.data.root is None
    wanted = config.data
    if is_own(wanted.name):
        wanted.name = str(Path(wanted.name).expanduser().absolute())  # the run is used from elsewhere, too
    images = load_data(
        wanted.name,
        wanted.root,
        validation=wanted.validation,
        test=wanted.test,
        size=wanted.size,
        kind=wanted.kind,
        split_seed=wanted.split_seed,
        condition=wanted.condition,
        download=download,
    )
    found = images.fingerprint() if is_own(wanted.name) or images.note else None
    if wanted.fingerprint is not None and wanted.fingerprint != found:
        raise DataError(
            f"{wanted.name} has changed since the run was trained: its rows would be split otherwise, and the test set "
            "would hold what was trained on. Restore the data, or train again."
        )
    wanted.fingerprint = found
    return resolve(config, images.shape, images.kind, images.levels), images


def train(config: TrainConfig | None = None, *, resume: str | Path | None = None, trusted: bool = True) -> Path:
    """Train a model, or resume an interrupted run; return the run folder, or the local copy of one at a URL.

    A finished run is not trained again; weights that it has lost are restored. An interrupted one continues from its
    last complete epoch, bit for bit. Two processes cannot train in one folder.

    Args:
        config: what to train; ignored if `resume` is given.
        resume: folder of an interrupted run.
        trusted: whether networks that the configuration names may be imported, if MCVAE_NETWORKS does not list them;
            never for a run that is resumed.
    """
    if resume is None:
        assert config is not None, "give a configuration or a run to resume"
        config, images = prepare(config)
        if is_own(config.data.name):
            print(f"{images} (likelihood: {config.model.likelihood})", file=sys.stderr)
        if images.note:
            print(f"note: {images.note}.", file=sys.stderr)
        config.run.folder = config.run.folder or default_folder(config)
        if config.trainer.get("fast_dev_run"):
            return _try(config, images)
        home = RunFolder(config.run.folder)
    else:
        home = RunFolder(resume)
        check_links(home.path)
        config, images = prepare(read_config(home.path), trusted=False)
        if _finished(home.path):
            restored = _restore(home, config, images)
            more = "Its lost weights are restored." if restored else "Nothing to do."
            print(f"{home.place} is finished: {config.run.epochs} epochs. {more}")
            return home.path
    parts = _assemble(config, images, home, trusted=trusted and resume is None)
    with hold(home.path, "training", home.place) if parts.trainer.is_global_zero else nullcontext():
        if resume is None and parts.trainer.is_global_zero:  # other processes of a distributed run come here, too
            _create(home, config)
        checkpoint = latest_checkpoint(home.path) if resume is not None else None
        try:
            _fit(parts, BatchedImages(images, config), checkpoint, home)
        except DivergedError as error:
            _give_up(parts, config, home, str(error))
        except Exception:
            if resume is None and parts.trainer.is_global_zero:
                _discard(home)
            raise
        if parts.trainer.is_global_zero:
            _conclude(parts, config, images, home)
    return home.path


class _Parts(NamedTuple):
    """What a training consists of."""

    trainer: Trainer
    module: VariationalTraining
    metrics: Metrics
    pictures: Pictures

    @property
    def model(self) -> LatentVariableModel:
        return self.module.model

    @property
    def objective(self) -> AnnealedEstimator:
        return self.module.objective


_STARTING_ROWS = 10_000
"""Training data that a likelihood may look at to see where to start."""


def _datum(data: Splits) -> Datum:
    return Datum(data.shape, data.kind, data.levels, sum(coding.size for coding in data.codings))


def _start(model: LatentVariableModel, images: Splits, config: TrainConfig) -> None:
    """Let likelihood, prior and conditions take from training data where to start."""
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


def _assemble(config: TrainConfig, images: Splits, home: RunFolder, *, trusted: bool) -> _Parts:
    return_memory() if config.run.memory == "low" else keep_memory()
    seed_everything(config.run.seed, verbose=False)
    model, objective = build(config.model, config.method, _datum(images), trusted=trusted)
    _start(model, images, config)
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
    folder = home.path
    metrics, pictures = Metrics(folder, config.run.likelihood_every, images.unit), _pictures(folder, images, config)
    snapshots = Snapshots(
        config.run.snapshots,
        lambda epoch: save_model(snapshot_folder(folder, epoch), model, objective, config, images),
    )
    # a checkpoint remembers the row of its epoch
    callbacks: list[Any] = [pictures, snapshots, metrics, Checkpoints(folder), Upload(home)]
    if len(images.validation):
        held_out = next(iter(batches(images, config, "validation")))
        callbacks.insert(0, HeldOutLikelihood(held_out, config.run.likelihood_every, config.run.seed))
        if config.run.patience:
            callbacks.insert(
                0, EarlyStopping("val_bound", patience=config.run.patience, mode="max", check_finite=False)
            )
    elif config.run.patience or config.run.keep == "best":
        raise ValueError("--run.patience and --run.keep best need validation data; give --data.validation.")
    if config.optimizer.average:
        callbacks.insert(0, AveragedWeights(config.optimizer.average))
    trainer = build_trainer(config, folder, callbacks)
    if config.data.batch_size % trainer.world_size:
        raise ValueError(
            f"--data.batch_size counts the {images.unit} of all processes and must be a multiple of their number, "
            f"{trainer.world_size}; got {config.data.batch_size}."
        )
    return _Parts(trainer, module, metrics, pictures)


def _try(config: TrainConfig, images: Splits) -> Path:
    """Lightning's fast_dev_run: a few batches to see that everything works, of which nothing is kept."""
    with tempfile.TemporaryDirectory(prefix="mcvae-trial-") as folder:
        home = RunFolder(folder)
        _fit(_assemble(config, images, home, trusted=True), BatchedImages(images, config), None, home)
    print("The trial ran to its end; nothing of it is kept. Train without --trainer.fast_dev_run.")
    return Path(config.run.folder or folder)


def _create(home: RunFolder, config: TrainConfig) -> None:
    folder, place = home.path, shlex.quote(home.place)
    if (folder / "config.yaml").exists() or (folder / "checkpoints").exists():
        raise RunError(
            f"{home.place} holds a run already. Continue it with --resume {place}, choose another --run.folder, or "
            "remove it."
        )
    write_config(folder, config)
    home.push()


def _discard(home: RunFolder) -> None:
    """Remove what a run has left that failed in its first epoch, so that the corrected command can be given."""
    if (home.path / "checkpoints").exists():
        return
    for name in ("config.yaml", ".training.lock"):
        (home.path / name).unlink(missing_ok=True)
    shutil.rmtree(home.path / "tensorboard", ignore_errors=True)
    with suppress(OSError, RunError):
        home.path.rmdir()  # only if nothing else is in it
    with suppress(RunError):
        home.push()


def _finished(folder: Path) -> bool:
    return (folder / "result.json").exists() and read_result(folder).status == "finished"


def _restore(home: RunFolder, config: TrainConfig, images: Splits) -> bool:
    """Write lost or damaged weights of a finished run again, from its last checkpoint; False if they are sound."""
    try:
        load_run(home.path)
        return False
    except RunError as lost:
        path = home.path / "checkpoints" / "last.ckpt"
        if not path.exists():
            raise RunError(f"{lost} There is no {path} to restore it from.") from None
    checkpoint = AtomicCheckpoints().load_checkpoint(path, map_location="cpu")
    if checkpoint["epoch"] + 1 < config.run.epochs:
        raise RunError(f"{path} is of an earlier epoch; the weights of {home.place} cannot be restored.")
    model, objective = build(config.model, config.method, _datum(images))
    module = VariationalTraining(model, objective, config.optimizer)
    with hold(home.path, "training", home.place):
        _load(module, checkpoint["state_dict"], path)
        save_model(home.path, model, objective, config, images)
        home.push()
    return True


def _load(module: VariationalTraining, state: dict[str, Any], path: Path) -> None:
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise RunError(
            f"{path} does not fit config.yaml, which may have been changed ({reason}...). Restore config.yaml, or "
            "train again in another folder."
        ) from None


def _pictures(folder: Path, images: Splits, config: TrainConfig) -> Pictures:
    source = "validation" if len(images.validation) else "train"
    shown = next(iter(batches(images, config, source)))
    if images.kind != "pixels" or config.data.transform == "keep" or images.given is not None:
        shown = shown[:0]  # not to be seen as a picture
    return Pictures(folder, shown, config.run.pictures_every, config.run.seed)


def build_trainer(config: TrainConfig, folder: Path, callbacks: list[Any]) -> Trainer:
    """Lightning's Trainer with our defaults and the user's options."""
    check_trainer(config.trainer)
    logs = config.trainer.get("logger", True)
    options: dict[str, Any] = {
        "max_epochs": config.run.epochs,
        "log_every_n_steps": config.run.log_every,
        "enable_model_summary": False,
        "enable_progress_bar": sys.stderr.isatty(),
        "num_sanity_val_steps": 0,
        "inference_mode": False,  # chains need scores in validation, too
        "reload_dataloaders_every_n_epochs": 1,
        "use_distributed_sampler": False,
        "default_root_dir": folder,
        **config.trainer,
        "logger": _logger(config, folder) if logs else False,
    }
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    known_noise = (".*does not have many workers.*", ".*LeafSpec.*", ".*smaller than the logging interval.*")
    for noise in (*known_noise, ".*sync_dist=True.*"):  # what is logged has been pooled over processes
        warnings.filterwarnings("ignore", message=noise)
    try:
        return Trainer(**options, callbacks=callbacks, plugins=[AtomicCheckpoints()])
    except (TypeError, RuntimeError, AssertionError) as error:
        raise ValueError(f"Lightning refuses these --trainer options: {' '.join(str(error).split())}") from error


def _logger(config: TrainConfig, folder: Path) -> Any:
    """Where curves are written."""
    from lightning.pytorch import loggers

    with needs_extra(f"--run.logger {config.run.logger}"):
        if config.run.logger in ("wandb", "mlflow"):
            import_module(config.run.logger)  # Lightning's own error names no package
        if config.run.logger == "wandb":
            return loggers.WandbLogger(name=folder.name, save_dir=folder, project="mcvae")
        if config.run.logger == "mlflow":
            place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.absolute() / 'mlflow.db'}"
            return loggers.MLFlowLogger(
                "mcvae", run_name=folder.name, tracking_uri=place, artifact_location=str(folder.absolute() / "mlflow")
            )
    if config.run.logger == "csv":
        return loggers.CSVLogger(folder, name="", version="curves")
    return TensorBoardLogger(folder, name="", version="tensorboard")


def _fit(parts: _Parts, data: BatchedImages, checkpoint: Path | None, home: RunFolder) -> None:
    """Fit; a Ctrl-C or SIGTERM leaves a run that can be resumed, and says how."""
    trainer, interrupted = parts.trainer, False
    if checkpoint is not None:
        state = AtomicCheckpoints().load_checkpoint(checkpoint, map_location="cpu")["state_dict"]
        _load(parts.module, state, checkpoint)  # before Lightning does, which has no words for a wrong one
        if trainer.is_global_zero:
            (home.path / "result.json").unlink(missing_ok=True)  # of a run that diverged

    def interrupt(*_: Any) -> None:
        nonlocal interrupted
        interrupted = trainer.should_stop = True  # Python drops an exception that is raised while it tidies up
        raise KeyboardInterrupt

    earlier = signal.getsignal(signal.SIGINT)
    if isinstance(earlier, Interruption):
        earlier.check()
    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with threads_for(data.config.data.batch_size * data.images.train[:1].numel()):
            trainer.fit(parts.module, data, ckpt_path=str(checkpoint) if checkpoint else None)
    except (KeyboardInterrupt, SystemExit):
        interrupted = True
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if interrupted or trainer.state.status == "interrupted":
        print(f"\nInterrupted. Continue with: mcvae train --resume {shlex.quote(home.place)}", file=sys.stderr)
        raise SystemExit(130)


def _conclude(parts: _Parts, config: TrainConfig, images: Splits, home: RunFolder) -> None:
    """Write the result, if training has reached its end."""
    rows, place = parts.metrics.rows, home.place
    reached = rows[-1]["epoch"] if rows else 0
    stopped = any(isinstance(c, EarlyStopping) and c.wait_count >= c.patience for c in _callbacks(parts.trainer))
    if reached < config.run.epochs and not stopped:
        again = f"mcvae train --resume {shlex.quote(place)}"
        print(f"{place}: stopped after epoch {reached} of {config.run.epochs}. Continue: {again}")
        return
    if rows[-1]["train_bound"] == "":
        _give_up(parts, config, home, f"no step of epoch {reached} had a finite loss and gradient: all were skipped.")
    if rows[-1]["val_bound"] != rows[-1]["val_bound"]:  # NaN: the weights are ruined; one bad chain would give -inf
        _give_up(parts, config, home, f"the bound of validation {images.unit} cannot be evaluated any more.")
    validated = [row["val_bound"] for row in rows if row["val_bound"] != ""]
    if stopped and not any(map(math.isfinite, validated)):  # nothing was there to improve on
        _give_up(parts, config, home, f"the bound of validation {images.unit} was finite in no epoch.")
    _choose_weights(parts, config, home)
    parts.model.float()  # whatever --trainer.precision was
    save_model(home.path, parts.model, parts.objective, config, images)
    paths = parts.pictures.draw(parts.model)
    write_result(home.path, _result(parts, config, pictures=[str(path.relative_to(home.path)) for path in paths]))
    home.push()
    print(f"{place}: trained. Next: mcvae evaluate {shlex.quote(place)}")


def _callbacks(trainer: Trainer) -> list[Any]:
    return list(trainer.callbacks)  # type: ignore[attr-defined]


def _choose_weights(parts: _Parts, config: TrainConfig, home: RunFolder) -> None:
    """Those of the best epoch, or averaged ones, if the configuration says so."""
    path = home.path / "checkpoints" / "best.ckpt"
    averages = [c for c in _callbacks(parts.trainer) if isinstance(c, AveragedWeights)]
    if (config.run.keep == "best" or config.run.patience) and path.exists():
        checkpoint = AtomicCheckpoints().load_checkpoint(path, map_location="cpu")
        _load(parts.module, checkpoint["state_dict"], path)
        for average in averages:
            average.load_state_dict(checkpoint["callbacks"][average.state_key])
        print(f"{home.place}: the weights are those after epoch {checkpoint['epoch'] + 1}, the best.")
    for average in averages:
        average.put(parts.module)


def _give_up(parts: _Parts, config: TrainConfig, home: RunFolder, reason: str) -> None:
    """Say in the folder that the run diverged, and raise the error."""
    if parts.trainer.is_global_zero:
        write_result(home.path, _result(parts, config, status="diverged", reason=reason))
        with suppress(RunError):
            home.push()
    advice = "" if "try --" in reason else " Try --method.step_size 0.001 or --optimizer.learning_rate 0.0003."
    raise DivergedError(f"{home.place} diverged: {reason}{advice}")


def _result(parts: _Parts, config: TrainConfig, **more: Any) -> RunResult:
    rows = parts.metrics.rows
    return RunResult(
        data=data_label(config.data.name),
        transform=config.data.transform,
        likelihood=config.model.likelihood,
        batch_size=config.data.batch_size,
        method=config.method.name,
        num_steps=config.method.num_steps,
        schedule=config.method.schedule or "linear",
        num_samples=parts.objective.num_samples,
        evaluations=method_named(config.method.name).cost(config.method),
        seed=config.run.seed,
        epochs=config.run.epochs,
        seconds=round(parts.metrics.seconds, 2),
        last=rows[-1] if rows else {},
        versions={"mcvae": mcvae.__version__, "torch": torch.__version__, "python": platform.python_version()},
        **more,
    )
