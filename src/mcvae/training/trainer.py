"""Lightning's Trainer for a run: our defaults, the user's options, and where curves are written."""

import logging
import os
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch import loggers

from mcvae._extras import needs_extra
from mcvae.runs.config import TrainConfig
from mcvae.training.checkpoints import AtomicCheckpoints
from mcvae.training.options import check_trainer

__all__ = ["build_trainer"]


def build_trainer(config: TrainConfig, folder: Path, callbacks: list[Any]) -> Trainer:
    """Lightning's Trainer with our defaults and the user's options."""
    check_trainer(config.trainer)
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
        "logger": _logger(config, folder) if config.trainer.get("logger", True) else False,
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
    return loggers.TensorBoardLogger(folder, name="", version="tensorboard")
