"""The files of a run: written whole or not at all, and read without executing anything."""

import json
import os
from argparse import ArgumentError
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mcvae.core.estimator import AnnealedEstimator
from mcvae.models import LatentVariableModel, build_model
from mcvae.training.config import MethodConfig, ModelConfig, TrainConfig
from mcvae.training.methods import build_objective
from mcvae.training.storage import RunError, RunFolder, read_json, top_level

__all__ = [
    "RunError",
    "load",
    "load_run",
    "parse_config",
    "read_config",
    "read_json",
    "save_model",
    "snapshot_folder",
    "write_config",
    "write_json",
]

Shape = tuple[int, int, int]


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"could not write {path}: {error}. Nothing that was there before is lost. Make space, or make the folder "
            "writable, and go on."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    write_atomically(path, lambda p: p.write_text(json.dumps(content, indent=2, allow_nan=True) + "\n"))


def write_config(folder: Path, config: TrainConfig) -> None:
    """Write `config.yaml`, which `mcvae train --config` reads back."""
    write_atomically(folder / "config.yaml", lambda p: p.write_text(yaml.safe_dump(asdict(config), sort_keys=False)))


def read_config(folder: Path) -> TrainConfig:
    """Read `config.yaml` of a run."""
    path = folder / "config.yaml"
    try:
        return parse_config(yaml.safe_load(path.read_text()))
    except FileNotFoundError:
        raise RunError(f"{folder} is not a run folder: it has no config.yaml.") from None
    except (yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise RunError(f"{path} cannot be read as the configuration of a run: {reason}.") from None


def parse_config(content: Any) -> TrainConfig:
    """A configuration from plain data; a ValueError names what does not fit.

    >>> parse_config({"run": {"epochs": 3}}).run.epochs
    3
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(TrainConfig)
    try:
        return TrainConfig(**parser.instantiate(parser.parse_object(content)).as_dict())
    except (ArgumentError, AttributeError, TypeError) as error:
        raise ValueError(str(error)) from None


def save_model(
    folder: Path, model: LatentVariableModel, objective: AnnealedEstimator, config: TrainConfig, shape: Shape
) -> None:
    """Write `model.safetensors` (weights and step sizes) and `model.json` (what to build them into)."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"objective.{name}": tensor for name, tensor in objective.state_dict().items()}
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_atomically(folder / "model.safetensors", lambda p: save_file(tensors, p))
    content = {"shape": list(shape), "model": asdict(config.model), "method": asdict(config.method)}
    write_json(folder / "model.json", content)


def snapshot_folder(folder: Path, epoch: int) -> Path:
    """Where a run keeps its weights after an epoch; `load_run` reads them."""
    return folder / "epochs" / str(epoch)


def load_run(folder: str | Path) -> tuple[LatentVariableModel, AnnealedEstimator]:
    """The trained model and its estimator, from `model.json` and `model.safetensors`."""
    folder = RunFolder(folder, top_level).path
    content = read_json(folder / "model.json")
    try:
        shape, described = tuple(content["shape"]), ModelConfig(**content["model"])
        model, objective = build(described, MethodConfig(**content["method"]), shape)
        tensors = load_file(folder / "model.safetensors")
        for prefix, module in (("model.", model), ("objective.", objective)):
            module.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    except FileNotFoundError:
        raise RunError(f"{folder / 'model.safetensors'} does not exist; train the run to its end.") from None
    except Exception as error:
        raise RunError(f"the model in {folder} cannot be read: {error}. Restore it, or train again.") from error
    return model.eval(), objective.eval()


def load(folder: str | Path) -> LatentVariableModel:
    """The trained model of a run folder; executes nothing from its files.

    Args:
        folder: such as "runs/digits-vae-s0", or a URL.
    """
    return load_run(folder)[0]


def build(model: ModelConfig, method: MethodConfig, shape: Any) -> tuple[LatentVariableModel, AnnealedEstimator]:
    """Untrained model and estimator of a resolved configuration."""
    latent_dim = model.latent_dim or 0
    network = build_model(
        shape,
        latent_dim,
        network=model.network,
        likelihood=model.likelihood,
        sigma=model.sigma,
        flow=None if model.flow == "none" else model.flow,
    )
    return network, build_objective(method, latent_dim)
