"""Checkpoint files: written atomically, and read back only if they are sound."""

import io
import os
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn

from mcvae.runs.plain import RunError, write_atomically

__all__ = ["AtomicCheckpoints", "latest_checkpoint", "load_checkpoint", "read_checkpoint"]


class AtomicCheckpoints(TorchCheckpointIO):
    """Checkpoints appear whole or not at all, and are read back as tensors and plain containers only.

    The file is a zip archive with a checksum for every tensor. torch does not verify them; we do.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write to a temporary file and rename it."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, lambda temporary: _save(checkpoint, temporary))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """See `read_checkpoint`."""
        return read_checkpoint(path, map_location)


def read_checkpoint(path: Any, map_location: Any = "cpu") -> Any:
    """Verify the checksums and read, without executing anything. A RunError says what is wrong with the file."""
    try:
        with zipfile.ZipFile(path) as records:
            damaged = records.testzip()
        if damaged is not None:
            raise ValueError(f"the checksum of {damaged} is wrong")
        return torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:
        reason = str(error).split("\n")[0][:200]
        raise RunError(f"the checkpoint {path} cannot be read ({type(error).__name__}: {reason}).") from error


def load_checkpoint(module: nn.Module, path: Path) -> Any:
    """Load the weights of a checkpoint into a module, and return all that the checkpoint holds."""
    checkpoint = read_checkpoint(path)
    try:
        module.load_state_dict(checkpoint["state_dict"])
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise RunError(
            f"{path} does not fit config.yaml, which may have been changed ({reason}...). Restore config.yaml, or "
            "train again in another folder."
        ) from None
    return checkpoint


def _save(checkpoint: dict[str, Any], path: Path) -> None:
    buffer = io.BytesIO()  # torch's own writer does not report a full disk
    torch.save(checkpoint, buffer)
    path.write_bytes(buffer.getbuffer())


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that can be read; None if the run has none yet. Damaged ones are reported and renamed."""
    names = [folder / "checkpoints" / f"{name}.ckpt" for name in ("last", "previous", "best")]
    found = [path for path in names if path.exists()]
    for path in found:
        try:
            read_checkpoint(path)
            return path
        except RunError as error:
            print(f"warning: {error} It is kept as {path.stem}.damaged; trying an earlier one.", file=sys.stderr)
            with suppress(FileNotFoundError):  # another process of the same run has moved it
                os.replace(path, path.with_suffix(".damaged"))
    if found:
        raise RunError(
            f"no checkpoint in {folder / 'checkpoints'} can be read. Restore one from a copy, or train again with "
            f"mcvae train --config {folder / 'config.yaml'} --run.folder ANOTHER."
        )
    return None
