"""The weights of a run: saved with a checksum, and read without executing anything."""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

from safetensors.torch import load as load_tensors, save as save_tensors
from torch import Tensor, nn

from mcvae.core.estimator import AnnealedEstimator
from mcvae.data import TRANSFORMS, Splits, Standardization, Transform
from mcvae.data.conditions import Coding, read_codings
from mcvae.models import Datum, LatentVariableModel
from mcvae.runs.config import ModelConfig, TrainConfig
from mcvae.runs.likelihood import transform_for
from mcvae.runs.method import MethodConfig
from mcvae.runs.plain import RunError, checked, read_json, write_atomically, write_json
from mcvae.runs.storage import RunFolder, top_level
from mcvae.training.building import UntrustedError, build

__all__ = [
    "Described",
    "load",
    "load_run",
    "read_described",
    "save",
    "save_model",
    "snapshot_folder",
]

Module = TypeVar("Module", bound=nn.Module)


def save_model(
    folder: Path, model: LatentVariableModel, objective: AnnealedEstimator, config: TrainConfig, data: Splits
) -> None:
    """Write `model.safetensors` (weights and step sizes) and `model.json` (what to build them into, and a checksum)."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"objective.{name}": tensor for name, tensor in objective.state_dict().items()}
    transform = data.transform(config.data.transform)
    if isinstance(transform, Standardization):
        tensors |= {"data.mean": transform.mean, "data.scale": transform.scale}
    described = {
        "shape": list(data.shape),
        "kind": data.kind,
        "levels": data.levels,
        "columns": data.columns,
        "conditions": [asdict(coding) for coding in data.codings],
        "transform": config.data.transform,
        "size": config.data.size,
        "model": asdict(config.model),
        "method": asdict(config.method),
    }
    _write(folder, tensors, described)


@dataclass(frozen=True, eq=False)
class Described:
    """What `model.json` and the weights say about the data of a run.

    Args:
        datum: what one datum is.
        columns: names of the columns of a table, if they have any.
        size: that images of a folder were resized to.
        transform: what is done to data before the model sees them.
        likelihood: its name.
        codings: of what the model is conditioned on.
    """

    datum: Datum
    columns: list[str]
    size: int | None
    transform: Transform
    likelihood: str
    codings: list[Coding]

    @property
    def white(self) -> float:
        """The largest value of a pixel, as the model sees it."""
        return 255.0 if self.transform is TRANSFORMS["keep"] else 1.0

    @property
    def bounded(self) -> bool:
        """Whether the likelihood gives no probability to whole numbers above those of the training data."""
        return self.likelihood in ("bernoulli", "categorical")


def read_described(folder: Path) -> Described:
    """Read what a trained run says about its data."""
    content = read_json(folder / "model.json")
    try:
        likelihood = str(content["model"]["likelihood"])
        datum = _datum(content)
        name = str(content.get("transform") or transform_for(likelihood, datum.kind))
        columns = [str(column) for column in content.get("columns", [])]
        transform: Transform
        if name == "standardize":
            tensors = load_tensors((folder / "model.safetensors").read_bytes())
            transform = Standardization(tensors["data.mean"], tensors["data.scale"], columns)
        else:
            transform = TRANSFORMS[name]
        codings = read_codings(content.get("conditions", []))
        return Described(datum, columns, content.get("size"), transform, likelihood, codings)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise RunError(f"{folder / 'model.json'} does not say what the data were: {error}. Train again.") from error


def snapshot_folder(folder: Path, epoch: int) -> Path:
    """Where a run keeps its weights after an epoch, for `load_run`."""
    return folder / "epochs" / str(epoch)


def load_run(folder: str | Path) -> tuple[LatentVariableModel, AnnealedEstimator]:
    """Read the trained model and its estimator from `model.json` and `model.safetensors`."""
    folder = _opened(folder).path
    described, path = read_json(folder / "model.json"), folder / "model.safetensors"
    if not path.is_file():
        raise RunError(f"{path} does not exist; train the run to its end, or restore it by: mcvae train --resume.")
    try:
        tensors = _tensors(folder, described)
        model_config = checked(ModelConfig, described["model"], "model.json")
        method = checked(MethodConfig, described["method"], "model.json")
        model, objective = build(model_config, method, _datum(described))
        model.load_state_dict(_below("model.", tensors))
        objective.load_state_dict(_below("objective.", tensors))
    except UntrustedError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise RunError(f"the model in {folder} cannot be read: {reason}. Restore it, or train again.") from error
    return model.eval(), objective.eval()


def _opened(folder: str | Path) -> RunFolder:
    home = RunFolder(folder, top_level)
    if home.path.is_file():
        raise RunError(f"{home.place} is a file; give the run folder that it is in.")
    return home


def _tensors(folder: Path, described: dict[str, Any]) -> dict[str, Tensor]:
    """Read `model.safetensors`, and compare its checksum with that of `model.json`, if it has one."""
    content = (folder / "model.safetensors").read_bytes()
    if described.get("sha256", digest := hashlib.sha256(content).hexdigest()) != digest:
        raise ValueError("the checksum of model.safetensors is wrong")
    return load_tensors(content)


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


@overload
def load(folder: str | Path) -> LatentVariableModel: ...
@overload
def load(folder: str | Path, into: Module) -> Module: ...
def load(folder: str | Path, into: nn.Module | None = None) -> nn.Module:
    """The trained model of a run folder, or weights that `save` has written; executes nothing from the files.

    Args:
        folder: such as "runs/digits-vae-s0", or a URL.
        into: a module of your own, built as when it was saved; its weights are replaced, and it is returned.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(nn.Linear(2, 3), folder)
    ...     load(folder, nn.Linear(2, 3))
    Linear(in_features=2, out_features=3, bias=True)
    """
    home = _opened(folder)
    described = read_json(home.path / "model.json")
    own = described.get("own")
    if into is None:
        if own is not None:
            raise RunError(
                f"{home.place} holds the weights of a module of your own, {own}, whose code is not saved. Build it, "
                "and load them with mcvae.load(folder, into=module)."
            )
        return load_run(home.path)[0]
    try:
        tensors = _tensors(home.path, {"sha256": None} | described)  # without a checksum nothing is loaded
        into.load_state_dict(_below("" if own is not None else "model.", tensors))
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise RunError(f"the weights in {home.place} do not fit {type(into).__name__}: {reason}.") from error
    return into


def save(model: nn.Module, folder: str | Path) -> None:
    """Write the weights of a module of your own as `model.safetensors`, with a checksum; its code stays yours.

    Args:
        model: any module.
        folder: an empty or new one, or one that `save` has written to before; a URL will do.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"save needs an nn.Module, got {type(model).__name__}. Put functions into a module.")
    home = RunFolder(folder, top_level)
    described = home.path / "model.json"
    if (home.path / "config.yaml").exists() or (described.exists() and read_json(described).get("own") is None):
        raise RunError(f"{home.place} holds a run of mcvae train; choose another folder.")
    _write(home.path, model.state_dict(), {"own": type(model).__qualname__})
    home.push()


def _write(folder: Path, tensors: dict[str, Tensor], described: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = save_tensors({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
    write_atomically(folder / "model.safetensors", lambda p: p.write_bytes(content))
    write_json(folder / "model.json", described | {"sha256": hashlib.sha256(content).hexdigest()})


def _datum(described: dict[str, Any]) -> Datum:
    """What `model.json` says about the data. Early releases knew pixels only, and did not say so."""
    conditions = sum(coding.size for coding in read_codings(described.get("conditions", [])))
    return Datum(tuple(described["shape"]), described.get("kind", "pixels"), described.get("levels", 256), conditions)
