"""A training run from configuration to result: one folder, resumable at any epoch."""

import shlex
import shutil
import signal
import sys
import tempfile
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from lightning import LightningDataModule

from mcvae.data import Batches, Splits
from mcvae.data.registry import is_own
from mcvae.runs.config import TrainConfig, default_folder, read_config, write_config
from mcvae.runs.interruption import Interruption
from mcvae.runs.plain import RunError
from mcvae.runs.results import RunResult, read_result
from mcvae.runs.storage import RunFolder, check_links, hold
from mcvae.training.assembly import Parts, assemble, untrained
from mcvae.training.checkpoints import latest_checkpoint, load_checkpoint, read_checkpoint
from mcvae.training.ending import conclude, give_up, load_kept
from mcvae.training.loading import load_run, save_model
from mcvae.training.module import DivergedError
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
            return _try(config, images, trusted=trusted)
        home = RunFolder(config.run.folder)
    else:
        home = RunFolder(resume)
        check_links(home.path)
        config, images = prepare(read_config(home.path), trusted=False)
        result = read_result(home.path) if (home.path / "result.json").exists() else None
        if result is not None and result.status == "finished":
            restored = _restore(home, config, images, result)
            more = "Its lost weights are restored." if restored else "Nothing to do."
            print(f"{home.place} is finished: {_epochs(result)} epochs. {more}")
            return home.path
    _run(assemble(config, images, home, trusted=trusted and resume is None), resumed=resume is not None)
    return home.path


def _run(parts: Parts, *, resumed: bool) -> None:
    """Fit and write the result, while no other process may train in the folder."""
    home = parts.home
    first = parts.trainer.is_global_zero  # of the processes of a distributed run, which all come here
    with hold(home.path, "training", home.place) if first else nullcontext():
        if first and not resumed:
            _create(home, parts.config)
        checkpoint = latest_checkpoint(home.path) if resumed else None
        try:
            _fit(parts, checkpoint)
        except DivergedError as error:
            give_up(parts, str(error))
        except Exception:
            if first and not resumed:
                _discard(home)
            raise
        if first:
            conclude(parts)


def _try(config: TrainConfig, images: Splits, *, trusted: bool) -> Path:
    """Run a few batches (Lightning's fast_dev_run) to see that everything works, and keep nothing of it."""
    with tempfile.TemporaryDirectory(prefix="mcvae-trial-") as folder:
        _fit(assemble(config, images, RunFolder(folder), trusted=trusted), None)
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


def _restore(home: RunFolder, config: TrainConfig, images: Splits, result: RunResult) -> bool:
    """Write lost or damaged weights of a finished run again, from its last checkpoint; False if they are sound."""
    try:
        load_run(home.path)
        return False
    except RunError as lost:
        path = home.path / "checkpoints" / "last.ckpt"
        if not path.exists():
            raise RunError(f"{lost} There is no {path} to restore it from.") from None
    if read_checkpoint(path)["epoch"] + 1 < _epochs(result):
        raise RunError(f"{path} is of an earlier epoch; the weights of {home.place} cannot be restored.")
    module = untrained(config, images)
    with hold(home.path, "training", home.place):
        load_kept(module, config, home)
        module.model.float()
        save_model(home.path, module.model, module.objective, config, images)
        home.push()
    return True


def _epochs(result: RunResult) -> int:
    """How many epochs a finished run has trained: fewer than planned if it has stopped early."""
    return int(result.last.get("epoch", result.epochs))


def _fit(parts: Parts, checkpoint: Path | None) -> None:
    """Fit; a Ctrl-C or SIGTERM leaves a run that can be resumed, and says how."""
    config, images, home, trainer, interrupted = parts.config, parts.images, parts.home, parts.trainer, False
    if checkpoint is not None:
        load_checkpoint(parts.module, checkpoint)  # before Lightning does, whose error would not help
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
