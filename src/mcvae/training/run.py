"""A training run from configuration to result: one folder, resumable at any epoch."""

import math
import platform
import shlex
import shutil
import signal
import sys
import tempfile
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping

import mcvae
from mcvae.allocator import keep_memory, return_memory
from mcvae.core.randomness import seeded_generator
from mcvae.data import Batches, Splits
from mcvae.data.registry import is_own
from mcvae.models import Datum, Decoder, LatentVariableModel, VampPrior
from mcvae.runs.config import TrainConfig, data_label, default_folder, read_config, write_config
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
from mcvae.training.run_data import batches, prepare
from mcvae.training.threads import threads_for
from mcvae.training.trainer import build_trainer

__all__ = ["BatchedImages", "build_trainer", "prepare", "train"]


class BatchedImages(LightningDataModule):
    """Batches cut by index from images in memory; the epoch decides order and noise."""

    def __init__(self, images: Splits, config: TrainConfig):
        super().__init__()
        self.images, self.config = images, config

    def train_dataloader(self) -> Batches:
        """Batches of the current epoch; Lightning asks again for every epoch."""
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
        if (home.path / "result.json").exists() and read_result(home.path).status == "finished":
            restored = _restore(home, config, images)
            more = "Its lost weights are restored." if restored else "Nothing to do."
            print(f"{home.place} is finished: {config.run.epochs} epochs. {more}")
            return home.path
    parts = _assemble(config, images, home, trusted=trusted and resume is None)
    first = parts.trainer.is_global_zero  # of the processes of a distributed run, which all come here
    with hold(home.path, "training", home.place) if first else nullcontext():
        if resume is None and first:
            _create(home, config)
        checkpoint = latest_checkpoint(home.path) if resume is not None else None
        try:
            _fit(parts, checkpoint)
        except DivergedError as error:
            _give_up(parts, str(error))
        except Exception:
            if resume is None and first:
                _discard(home)
            raise
        if first:
            _conclude(parts)
    return home.path


class _Parts(NamedTuple):
    """What a training consists of."""

    config: TrainConfig
    images: Splits
    home: RunFolder
    trainer: Trainer
    module: VariationalTraining
    metrics: Metrics
    pictures: Pictures


_STARTING_ROWS = 10_000
"""Most training data that likelihood and prior are initialised from."""


def _datum(data: Splits) -> Datum:
    return Datum(data.shape, data.kind, data.levels, sum(coding.size for coding in data.codings))


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
    return _Parts(config, images, home, trainer, module, metrics, pictures)


def _try(config: TrainConfig, images: Splits) -> Path:
    """Run a few batches (Lightning's fast_dev_run) to see that everything works, and keep nothing of it."""
    with tempfile.TemporaryDirectory(prefix="mcvae-trial-") as folder:
        _fit(_assemble(config, images, RunFolder(folder), trusted=True), None)
    print("The trial succeeded, and nothing of it is kept. To train, leave out --trainer.fast_dev_run.")
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
    """Remove the files of a run that failed in its first epoch, so that the corrected command can be run."""
    if (home.path / "checkpoints").exists():
        return
    for name in ("config.yaml", ".training.lock"):
        (home.path / name).unlink(missing_ok=True)
    shutil.rmtree(home.path / "tensorboard", ignore_errors=True)
    with suppress(OSError, RunError):
        home.path.rmdir()  # only if nothing else is in it
    with suppress(RunError):
        home.push()


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
        shown = shown[:0]  # it cannot be shown as a picture
    return Pictures(folder, shown, config.run.pictures_every, config.run.seed)


def _fit(parts: _Parts, checkpoint: Path | None) -> None:
    """Fit; a Ctrl-C or SIGTERM leaves a run that can be resumed, and says how."""
    config, images, home, trainer, interrupted = parts.config, parts.images, parts.home, parts.trainer, False
    if checkpoint is not None:
        state = AtomicCheckpoints().load_checkpoint(checkpoint, map_location="cpu")["state_dict"]
        _load(parts.module, state, checkpoint)  # before Lightning does, whose error would not help
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
        with threads_for(config.data.batch_size * images.train[:1].numel()):
            data = BatchedImages(images, config)
            trainer.fit(parts.module, data, ckpt_path=str(checkpoint) if checkpoint else None)
    except (KeyboardInterrupt, SystemExit):
        interrupted = True
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if interrupted or trainer.state.status == "interrupted":
        print(f"\nInterrupted. Continue with: mcvae train --resume {shlex.quote(home.place)}", file=sys.stderr)
        raise SystemExit(130)


def _conclude(parts: _Parts) -> None:
    """Write the result, if training has reached its end."""
    config, images, home, model = parts.config, parts.images, parts.home, parts.module.model
    rows, place = parts.metrics.rows, home.place
    reached = rows[-1]["epoch"] if rows else 0
    stopped = any(isinstance(c, EarlyStopping) and c.wait_count >= c.patience for c in _callbacks(parts.trainer))
    if reached < config.run.epochs and not stopped:
        again = f"mcvae train --resume {shlex.quote(place)}"
        print(f"{place}: stopped after epoch {reached} of {config.run.epochs}. Continue: {again}")
        return
    if rows[-1]["train_bound"] == "":
        _give_up(parts, f"no step of epoch {reached} had a finite loss and gradient: all were skipped.")
    if rows[-1]["val_bound"] != rows[-1]["val_bound"]:  # NaN: the weights are ruined; one bad chain would give -inf
        _give_up(parts, f"the bound of validation {images.unit} cannot be evaluated any more.")
    validated = [row["val_bound"] for row in rows if row["val_bound"] != ""]
    if stopped and not any(map(math.isfinite, validated)):  # nothing was there to improve on
        _give_up(parts, f"the bound of validation {images.unit} was finite in no epoch.")
    _choose_weights(parts)
    model.float()  # whatever --trainer.precision was
    save_model(home.path, model, parts.module.objective, config, images)
    pictures = [str(path.relative_to(home.path)) for path in parts.pictures.draw(model)]
    write_result(home.path, _result(parts, pictures=pictures))
    home.push()
    print(f"{place}: trained. Next: mcvae evaluate {shlex.quote(place)}")


def _callbacks(trainer: Trainer) -> list[Any]:
    return list(trainer.callbacks)  # type: ignore[attr-defined]


def _choose_weights(parts: _Parts) -> None:
    """Take the weights of the best epoch, or averaged ones, if the configuration says so."""
    run, path = parts.config.run, parts.home.path / "checkpoints" / "best.ckpt"
    averages = [c for c in _callbacks(parts.trainer) if isinstance(c, AveragedWeights)]
    if (run.keep == "best" or run.patience) and path.exists():
        checkpoint = AtomicCheckpoints().load_checkpoint(path, map_location="cpu")
        _load(parts.module, checkpoint["state_dict"], path)
        for average in averages:
            average.load_state_dict(checkpoint["callbacks"][average.state_key])
        print(f"{parts.home.place}: the weights are those after epoch {checkpoint['epoch'] + 1}, the best.")
    for average in averages:
        average.put(parts.module)


def _give_up(parts: _Parts, reason: str) -> None:
    """Say in the folder that the run diverged, and raise the error."""
    if parts.trainer.is_global_zero:
        write_result(parts.home.path, _result(parts, status="diverged", reason=reason))
        with suppress(RunError):
            parts.home.push()
    advice = "" if "try --" in reason else " Try --method.step_size 0.001 or --optimizer.learning_rate 0.0003."
    raise DivergedError(f"{parts.home.place} diverged: {reason}{advice}")


def _result(parts: _Parts, **more: Any) -> RunResult:
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
