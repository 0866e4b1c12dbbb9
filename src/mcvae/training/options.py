"""Options of Lightning's Trainer, checked without importing Lightning, which takes seconds."""

import ast
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mcvae.runs.naming import check_name

__all__ = ["check_trainer"]

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
_LEAST = {"devices": -1, "num_nodes": 1, "accumulate_grad_batches": 1, "check_val_every_n_epoch": 1}
"""Least values that Lightning does not check itself; -1 devices are all there are."""


def check_trainer(options: Mapping[str, Any]) -> None:
    """Raise a ValueError that names the option, for options that Lightning does not have or that mcvae decides.

    >>> check_trainer({"device": 2})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: unknown trainer option 'device'; ... Did you mean 'devices'?
    """
    for name, value in options.items():
        if name in _RESERVED:
            raise ValueError(f"--trainer.{name} is decided by mcvae: {_RESERVED[name]}.")
        check_name("trainer option", name, sorted(_known() - _RESERVED.keys()))
        if name == "strategy" and any(word in str(value) for word in ("spawn", "fork", "notebook")):
            raise ValueError("runs need processes of their own: use --trainer.strategy ddp.")
        if name == "logger" and not isinstance(value, bool):
            raise ValueError(f"--trainer.logger is true (TensorBoard) or false, got {value!r}.")
        least = _LEAST.get(name)
        if least is not None and isinstance(value, int) and (value < least or (name == "devices" and value == 0)):
            raise ValueError(f"--trainer.{name} must be at least 1, got {value}.")


@cache
def _known() -> set[str]:
    """The arguments of Lightning's Trainer, from its source."""
    spec = find_spec("lightning")
    assert spec is not None, "Lightning is not installed"
    assert spec.origin is not None
    source = Path(spec.origin).parent / "pytorch" / "trainer" / "trainer.py"
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)} - {"self"}
    raise AssertionError(f"no Trainer in {source}")
