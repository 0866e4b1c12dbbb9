"""The weights of a run: built, saved with a checksum, and read without executing anything."""

import hashlib
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load as load_tensors, save as save_tensors

from mcvae.core.estimator import AnnealedEstimator
from mcvae.data import Splits, Standardization
from mcvae.models import Datum, LatentVariableModel, build_model
from mcvae.runs.config import ModelConfig, TrainConfig, parse_config, read_config
from mcvae.runs.method import MethodConfig, method_named
from mcvae.runs.plain import RunError, checked, read_json, write_atomically, write_json
from mcvae.runs.storage import RunFolder, top_level

__all__ = ["RunError", "build", "load", "load_run", "parse_config", "read_config", "save_model", "snapshot_folder"]


def save_model(
    folder: Path, model: LatentVariableModel, objective: AnnealedEstimator, config: TrainConfig, data: Splits
) -> None:
    """Write `model.safetensors` (weights and step sizes) and `model.json` (what to build them into, and a checksum)."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"objective.{name}": tensor for name, tensor in objective.state_dict().items()}
    transform = data.transform(config.data.transform)
    if isinstance(transform, Standardization):
        tensors |= {"data.mean": transform.mean, "data.scale": transform.scale}
    content = save_tensors({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
    write_atomically(folder / "model.safetensors", lambda p: p.write_bytes(content))
    described: dict[str, Any] = {
        "shape": list(data.shape),
        "kind": data.kind,
        "levels": data.levels,
        "columns": data.columns,
    }
    described |= {"transform": config.data.transform, "size": config.data.size}
    described |= {"model": asdict(config.model), "method": asdict(config.method)}
    write_json(folder / "model.json", described | {"sha256": hashlib.sha256(content).hexdigest()})


def snapshot_folder(folder: Path, epoch: int) -> Path:
    """Where a run keeps its weights after an epoch; `load_run` reads them."""
    return folder / "epochs" / str(epoch)


def load_run(folder: str | Path) -> tuple[LatentVariableModel, AnnealedEstimator]:
    """The trained model and its estimator, from `model.json` and `model.safetensors`."""
    home = RunFolder(folder, top_level)
    folder = home.path
    if folder.is_file():
        raise RunError(f"{home.place} is a file; give the run folder that it is in.")
    described, path = read_json(folder / "model.json"), folder / "model.safetensors"
    if not path.is_file():
        raise RunError(f"{path} does not exist; train the run to its end, or restore it by: mcvae train --resume.")
    try:
        content = path.read_bytes()
        if described.get("sha256", digest := hashlib.sha256(content).hexdigest()) != digest:
            raise ValueError("the checksum of model.safetensors is wrong")
        model_config = checked(ModelConfig, described["model"], "model.json")
        method = checked(MethodConfig, described["method"], "model.json")
        model, objective = build(model_config, method, _datum(described))
        tensors = load_tensors(content)
        for prefix, module in (("model.", model), ("objective.", objective)):
            module.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise RunError(f"the model in {folder} cannot be read: {reason}. Restore it, or train again.") from error
    return model.eval(), objective.eval()


def load(folder: str | Path) -> LatentVariableModel:
    """The trained model of a run folder; executes nothing from its files.

    Args:
        folder: such as "runs/digits-vae-s0", or a URL.
    """
    return load_run(folder)[0]


def _datum(described: dict[str, Any]) -> Datum:
    """What `model.json` says about the data; before there were others, all were pixels."""
    return Datum(tuple(described["shape"]), described.get("kind", "pixels"), described.get("levels", 256))


def build(model: ModelConfig, method: MethodConfig, datum: Datum) -> tuple[LatentVariableModel, AnnealedEstimator]:
    """Untrained model and estimator of a resolved configuration."""
    latent_dim = model.latent_dim or 0
    network = build_model(
        datum.shape,
        latent_dim,
        kind=datum.kind,
        levels=datum.levels,
        network=model.network,
        likelihood=model.likelihood,
        sigma=model.sigma,
        flow=None if model.flow == "none" else model.flow,
    )
    return network, method_named(method.name).build(method, latent_dim, math.prod(datum.shape))
