"""The configuration of a run: checked, completed, written to `config.yaml` and read back. Imports no torch."""

import math
import os
import re
from argparse import ArgumentError
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from mcvae.runs.likelihood import LIKELIHOODS, likelihood_for, transform_for
from mcvae.runs.method import MethodConfig, key_of, method_named, settled
from mcvae.runs.naming import check_name, check_range
from mcvae.runs.plain import RunError, read_yaml, write_atomically
from mcvae.runs.settings import (
    MOST_STEPS,
    DataConfig,
    EvaluationSettings,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "DataConfig",
    "EvaluationSettings",
    "MethodConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "TrainConfig",
    "check",
    "check_range",
    "data_label",
    "default_folder",
    "parse_config",
    "read_config",
    "resolve",
    "trusted_networks",
    "write_config",
]


def trusted_networks() -> set[str]:
    """Networks that a file may name: `linear`, which is ours, and what MCVAE_NETWORKS lists, separated by commas."""
    return {"linear", *os.environ.get("MCVAE_NETWORKS", "").split(",")} - {""}


def default_folder(config: TrainConfig) -> str:
    """The default name of a run folder: data, method, seed.

    >>> default_folder(TrainConfig(method=MethodConfig("iwae", num_samples=50)))
    'runs/digits-iwae-50-s0'
    """
    return f"runs/{data_label(config.data.name)}-{key_of(config.method)}-s{config.run.seed}"


def data_label(name: str) -> str:
    """A data set in tables and folder names: its name, or that of the file without its suffix.

    >>> data_label("mnist"), data_label("/data/my counts.npy")
    ('mnist', 'my-counts')
    """
    return re.sub(r"[^\w.-]+", "-", Path(name).stem) or "data"


_RANGES: dict[str, tuple[float, float | None]] = {
    "data.batch_size": (1, 10**6),
    "data.validation": (0, None),
    "data.test": (1, None),
    "data.split_seed": (0, 2**32 - 1),
    "data.size": (4, 4096),
    "data.limit": (1, None),
    "model.latent_dim": (1, 10**5),
    "model.prior_components": (1, 10**4),
    "method.num_steps": (0, MOST_STEPS),
    "method.num_samples": (1, 10**5),
    "method.alpha": (0, 1),
    "optimizer.clip": (0, None),
    "optimizer.decay": (0, 1e6),
    "optimizer.patience": (1, None),
    "optimizer.warmup": (0, 10**6),
    "optimizer.kl_warmup": (0, 10**6),
    "optimizer.average": (0, 0.999999),
    "run.patience": (0, None),
    "run.epochs": (1, 10**7),
    "run.seed": (0, 2**32 - 1),
    "run.likelihood_every": (0, None),
    "run.pictures_every": (0, None),
    "run.log_every": (1, None),
}
_POSITIVE = ("model.sigma", "method.step_size", "method.damping", "optimizer.learning_rate")


def _option(config: TrainConfig, name: str) -> Any:
    part, _, field = name.partition(".")
    return getattr(getattr(config, part), field)


def check(config: TrainConfig) -> None:
    """Raise a ValueError that names an option with a bad value. Expand a method that is given by its key."""
    config.method = settled(config.method)
    if config.model.likelihood != "auto":
        check_name("likelihood", config.model.likelihood, LIKELIHOODS)
    for name, (least, most) in _RANGES.items():
        check_range(name, _option(config, name), least, most)
    if any(not 1 <= epoch <= config.run.epochs for epoch in config.run.snapshots):
        raise ValueError(
            f"--run.snapshots must lie between 1 and --run.epochs {config.run.epochs}, got {config.run.snapshots}."
        )
    for name in _POSITIVE:
        number = _option(config, name)
        if number is not None and not 0 < number <= 1e9:
            raise ValueError(f"--{name} must be positive and at most 1e9, got {number}.")


def resolve(config: TrainConfig, shape: tuple[int, ...], kind: str = "pixels", levels: int = 256) -> TrainConfig:
    """Replace every "auto" and None that depends on the data or the method: `config.yaml` says what was done.

    Args:
        config: the configuration, which is changed.
        shape: of one datum.
        kind: pixels, counts or real.
        levels: one more than the largest whole number.
    """
    vector = len(shape) != 3
    grey, tiny = shape[0] == 1, vector or max(shape[1:]) <= 16
    model, data, method = config.model, config.data, method_named(config.method.name)
    if model.network == "auto":
        model.network = "mlp" if tiny else "conv"
    if model.latent_dim is None:
        model.latent_dim = max(2, min(16, math.prod(shape) // 2)) if vector else 16 if tiny else 64 if grey else 128
    if model.likelihood == "auto":
        model.likelihood = likelihood_for(kind, shape, levels)
    if model.flow == "auto":
        model.flow = method.flow or "none"
    if model.prior == "vamp" and model.flow != "none":
        raise ValueError("--model.prior vamp needs a Gaussian q; leave out --model.flow, or choose another prior.")
    needed = transform_for(model.likelihood, kind)
    if data.transform == "auto":
        data.transform = needed  # type: ignore[assignment]
    if kind != "pixels" and data.transform not in ("keep", "standardize"):
        raise ValueError(f"--data.transform {data.transform} is for pixels; {kind} data take keep or standardize.")
    config.method = method.whole(config.method)
    return config


def write_config(folder: Path, config: TrainConfig) -> None:
    """Write `config.yaml`, which `mcvae train --config` reads back."""
    content = yaml.safe_dump(asdict(config), sort_keys=False)
    write_atomically(folder / "config.yaml", lambda path: path.write_text(content))


def read_config(folder: Path) -> TrainConfig:
    """Read `config.yaml` of a run."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise RunError(f"{folder} is not a run folder: it has no config.yaml.")
    try:
        return parse_config(read_yaml(path))
    except (ValueError, RunError) as error:
        reason = " ".join(str(error).split()).removesuffix(".")
        raise RunError(f"{path} cannot be read as the configuration of a run: {reason}.") from None


def parse_config(content: Any) -> TrainConfig:
    """A configuration from plain data; a ValueError names what does not fit.

    >>> parse_config({"run": {"epochs": 3}}).run.epochs
    3
    """
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(TrainConfig)
    try:
        return TrainConfig(**parser.instantiate(parser.parse_object(content)).as_dict())
    except (ArgumentError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(" ".join(str(error).split()).replace("Parser key ", "")) from None
