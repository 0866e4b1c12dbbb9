"""What a run writes while it trains: checkpoints, `metrics.csv`, pictures."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint
from torch import Tensor

from mcvae.core.randomness import draw, seeded_generator
from mcvae.evaluation import Protocol, evaluate
from mcvae.models import LatentVariableModel
from mcvae.runs.plain import RunError, write_rows
from mcvae.runs.storage import RunFolder
from mcvae.training.module import VariationalTraining
from mcvae.training.pictures import save_grid

__all__ = [
    "AveragedWeights",
    "Checkpoints",
    "HeldOutLikelihood",
    "Metrics",
    "Pictures",
    "Snapshots",
    "Upload",
]


def whole_epoch(trainer: Trainer) -> bool:
    """Whether the epoch that ends has seen all of its batches; --trainer.max_steps can cut it short."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready >= trainer.num_training_batches


class _Remembering:
    """A callback that keeps some of its attributes in checkpoints, so that a resumed run has them."""

    remembered: ClassVar[tuple[str, ...]]

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {name: getattr(self, name) for name in self.remembered}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it; a checkpoint of an earlier release may lack some."""
        for name in self.remembered:
            setattr(self, name, state_dict.get(name, getattr(self, name)))


class Checkpoints(_Remembering, Checkpoint):
    """`last.ckpt` and `previous.ckpt` of the last two epochs, `best.ckpt` at the best validation bound."""

    remembered = ("best_bound",)

    def __init__(self, folder: Path):
        super().__init__()
        self.last, self.previous, self.best = (
            folder / "checkpoints" / f"{name}.ckpt" for name in ("last", "previous", "best")
        )
        self.best_bound = -float("inf")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, unless the epoch was cut short: a run continues from whole ones."""
        if not whole_epoch(trainer):
            return
        bound = trainer.callback_metrics.get("val_bound")
        if bound is not None and float(bound) > self.best_bound:
            self.best_bound = float(bound)
            trainer.save_checkpoint(self.best)
        if trainer.is_global_zero and self.last.exists():
            os.replace(self.last, self.previous)
        trainer.save_checkpoint(self.last)


class AveragedWeights(_Remembering, Callback):
    """An exponential average of the learned weights, which stands in for them in validation and at the end."""

    remembered = ("average", "updates")

    def __init__(self, decay: float):
        self.decay, self.average, self.updates = decay, list[Tensor](), 0
        self._own = list[Tensor]()

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Update the average. Early steps count for more, so that it forgets the initial weights."""
        weights = _learned(pl_module)
        self.updates += 1
        share = max(1 - self.decay, 1 / self.updates)
        if not self.average:
            self.average = [p.detach().clone() for p in weights]
        for average, weight in zip(self.average, weights, strict=True):
            average.copy_(average.to(weight.device).lerp(weight, share))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate the average."""
        self.put(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the weights."""
        for weight, own in zip(_learned(pl_module), self._own, strict=False):
            weight.data.copy_(own)
        self._own = []

    def put(self, module: LightningModule) -> None:
        """Replace the weights by their average."""
        if self.average:
            self._own = [p.detach().clone() for p in _learned(module)]
            for weight, average in zip(_learned(module), self.average, strict=True):
                weight.data.copy_(average)


def _learned(module: LightningModule) -> list[Tensor]:
    return [p for p in module.parameters() if p.requires_grad]


class Snapshots(Callback):
    """Call `save` after the given epochs."""

    def __init__(self, epochs: list[int], save: Callable[[int], None]):
        self.epochs, self.save = epochs, save

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, if this is one of the epochs."""
        epoch = trainer.current_epoch + 1
        if epoch in self.epochs and trainer.is_global_zero:
            self.save(epoch)


class Upload(Checkpoint):
    """Copies the run to its URL after every epoch. A copy that fails is retried after the next epoch."""

    def __init__(self, home: RunFolder):
        super().__init__()
        self.home = home

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy what has changed."""
        if trainer.is_global_zero:
            try:
                self.home.push()
            except RunError as error:
                print(f"warning: {error}", file=sys.stderr)


class HeldOutLikelihood(Callback):
    """AIS-HMC likelihood of the first 50 validation images every few epochs, as `val_nll`."""

    protocol = Protocol(num_steps=20, num_samples=16)

    def __init__(self, images: Tensor, every: int, seed: int):
        self.images, self.every, self.seed = images[:50], every, seed

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Estimate and log."""
        if (trainer.current_epoch + 1) % self.every == 0:
            model = cast(VariationalTraining, pl_module).model
            found = evaluate(
                model, self.images, protocol=self.protocol, simulated=0, compare_iwae=False, seed=self.seed
            )
            pl_module.log("val_nll", found.summary["nll"], rank_zero_only=True)


class Metrics(_Remembering, Checkpoint):
    """One row of `metrics.csv` per whole epoch; outside a terminal, one line on the screen, too."""

    remembered = ("rows", "seconds", "images")
    columns = (  # acceptances and step_sizes: of every transition, separated by spaces
        "epoch",
        "train_bound",
        "val_bound",
        "val_nll",
        "acceptance",
        "step_size",
        "acceptances",
        "step_sizes",
        "learning_rate",
        "skipped",
        "images",
        "seconds",
    )

    def __init__(self, folder: Path, likelihood_every: int, unit: str = "images"):
        super().__init__()
        self.path, self.rows, self.unit = folder / "metrics.csv", list[dict[str, Any]](), unit
        self.likelihood_every, self.seconds, self.images = likelihood_every, 0.0, 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._start, self._validated = time.perf_counter(), False
        self._learning_rate = trainer.optimizers[0].param_groups[0]["lr"]  # the scheduler changes it before the end

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the images of all processes."""
        self.images += len(batch) * trainer.world_size

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that there is a new validation bound: Lightning also reports old ones."""
        self._validated = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the row, unless the epoch was cut short."""
        if not whole_epoch(trainer):
            return
        self.seconds += time.perf_counter() - self._start
        measured: dict[str, Any] = {name: float(value) for name, value in trainer.callback_metrics.items()}
        measured |= {
            "acceptances": _per_transition(measured, "acceptance"),
            "step_sizes": _per_transition(measured, "step_size"),
            "epoch": trainer.current_epoch + 1,
            "learning_rate": self._learning_rate,
            "skipped": int(cast(VariationalTraining, pl_module).skipped),
            "seconds": round(self.seconds, 3),
            "images": self.images,
        }
        if not self._validated:
            measured.pop("val_bound", None)
        if not self.likelihood_every or measured["epoch"] % self.likelihood_every:
            measured.pop("val_nll", None)  # it is that of an earlier epoch
        row = {name: measured.get(name, "") for name in self.columns}
        self.rows.append(row)
        if trainer.is_global_zero:
            write_rows(self.path, self.columns, self.rows)
            if not sys.stderr.isatty():
                named = {self.unit if name == "images" else name: value for name, value in row.items()}
                shown = ", ".join(f"{k} {v:.4g}" for k, v in named.items() if not isinstance(v, str) and k != "epoch")
                print(f"epoch {row['epoch']}/{trainer.max_epochs}: {shown}", file=sys.stderr, flush=True)


def _per_transition(measured: dict[str, Any], name: str) -> str:
    """What was logged as NAME/1, NAME/2, … in one string."""
    values = list[str]()
    while (value := measured.get(f"{name}/{len(values) + 1}")) is not None:
        values.append(f"{value:.6g}")
    return " ".join(values)


class Pictures(Callback):
    """Grids of samples and of reconstructions, as PNG."""

    def __init__(self, folder: Path, images: Tensor, every: int, seed: int):
        self.folder, self.images, self.every, self.seed = folder / "pictures", images, every, seed

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw after every `every`-th epoch."""
        epoch = trainer.current_epoch + 1
        if self.every and epoch % self.every == 0 and trainer.is_global_zero:
            self.draw(cast(VariationalTraining, pl_module).model, f"-{epoch:04d}")

    def draw(self, model: LatentVariableModel, suffix: str = "") -> list[Path]:
        """Write both grids and return their paths; draw nothing if the data are not images."""
        if not len(self.images):
            return []
        os.makedirs(self.folder, exist_ok=True)
        device = next(model.parameters()).device
        samples, reconstructions = self.folder / f"samples{suffix}.png", self.folder / f"reconstructions{suffix}.png"
        with torch.no_grad():
            _, z = model.simulate(64, generator=seeded_generator("sample", self.seed, device=device))
            save_grid(model.decoder(z).mean, samples)
            originals = self.images[:32].to(next(model.parameters()))
            z = draw(model.encoder(originals), (), seeded_generator("reconstruct", self.seed, device=device))
            pairs = torch.stack([originals, model.decoder(z).mean], 1).flatten(0, 1)
        save_grid(pairs, reconstructions, columns=8)
        return [samples, reconstructions]
