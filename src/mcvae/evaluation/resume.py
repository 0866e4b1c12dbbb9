"""Finished batches on disk, so that an interrupted evaluation resumes where it left off."""

import hashlib
import json
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path as File
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mcvae.evaluation.protocol import WEIGHT_EDGES, Protocol

__all__ = ["Finished", "Saved", "fingerprint", "remove_saved"]


def fingerprint(*parts: Any) -> str:
    """A digest of contents, by which saved batches are used again only for the same model, objective, prior and data.

    Tensors count by value, modules by their layout and tensors, functions by their code and by what they refer to.

    >>> twice = fingerprint(lambda z: 2 * z)
    >>> twice == fingerprint(lambda z: 2 * z), twice == fingerprint(lambda z: 3 * z)
    (True, False)
    """
    digest = hashlib.sha256()
    seen = set[int]()
    for part in parts:
        _feed(digest, part, seen)
    return digest.hexdigest()


def _feed(digest: Any, part: Any, seen: set[int]) -> None:
    if isinstance(part, Tensor):
        digest.update(str((part.dtype, tuple(part.shape))).encode())
        flat = part.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
        return
    if id(part) in seen:
        return
    if isinstance(part, nn.Module):
        seen.add(id(part))
        digest.update(repr(part).encode())
        _feed(digest, part.state_dict(), seen)
        for module in part.modules():  # not all that a module computes with is in its state
            own = {name: value for name, value in vars(module).items() if name[0] != "_" and name != "training"}
            _feed(digest, [own, dict(module.named_buffers(recurse=False)), type(module).forward], seen)
    elif isinstance(part, FunctionType):
        seen.add(id(part))
        _feed_code(digest, part.__code__)
        closure = [cell.cell_contents for cell in part.__closure__ or ()]
        used = {name: part.__globals__[name] for name in part.__code__.co_names if name in part.__globals__}
        _feed(digest, [closure, part.__defaults__, used], seen)
    elif isinstance(part, partial):
        _feed(digest, [part.func, part.args, part.keywords], seen)
    elif isinstance(part, MethodType):
        _feed(digest, [part.__func__, part.__self__], seen)
    elif isinstance(part, dict):
        for key, value in part.items():
            digest.update(str(key).encode())
            _feed(digest, value, seen)
    elif isinstance(part, list | tuple):
        for value in part:
            _feed(digest, value, seen)
    elif isinstance(part, str | bytes | int | float | bool | complex | torch.dtype | None):
        digest.update(repr(part).encode())
    else:
        seen.add(id(part))
        digest.update(f"{type(part).__module__}.{type(part).__qualname__}".encode())
        if not isinstance(part, ModuleType | type) and hasattr(part, "__dict__"):
            _feed(digest, vars(part), seen)


def _feed_code(digest: Any, code: CodeType) -> None:
    digest.update(code.co_code)
    digest.update(repr(code.co_names).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _feed_code(digest, constant)
        else:
            digest.update(repr(constant).encode())


class Finished(NamedTuple):
    """A finished batch."""

    num_steps: int
    """Temperatures that the pilot chose."""
    moved: list[float]
    """By how much the estimates of the pilot's data moved when those were last doubled."""
    rows: list[dict[str, Any]]
    """Of the table."""


class Saved:
    """Finished batches on disk: one line of JSON with the settings, then one per batch. Each shard has its own file."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        shard: tuple[int, int],
        protocol: Protocol,
        seed: int,
        **described: str | bool,
    ):
        part, parts = shard
        self.path = File(folder) / ("evaluation.partial" if parts == 1 else f"evaluation-{part}-of-{parts}.partial")
        self.settings = json.loads(json.dumps(asdict(protocol) | {"seed": seed, "edges": WEIGHT_EDGES} | described))
        self.done = dict[tuple[int, str], dict[str, Any]]()
        for path in _saved_files(folder):
            entries = self._load(path)
            self.done |= {(entry["batch"], entry["data"]): entry for entry in entries}
            if path == self.path:  # drop a torn line, and batches of other settings
                scratch = path.with_name(f".{path.name}")
                scratch.write_text("".join(json.dumps(line) + "\n" for line in [self.settings, *entries]))
                os.replace(scratch, path)

    def _load(self, path: File) -> list[dict[str, Any]]:
        lines = []
        for line in path.read_text().splitlines():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:  # the line that was being written when it was interrupted
                break
        return lines[1:] if lines and lines[0] == self.settings else []

    def read(self, index: int, x: Tensor) -> Finished | None:
        """What was found for a batch; None for other data, such as another split or another limit."""
        entry = self.done.get((index, fingerprint(x)))
        return None if entry is None else Finished(entry["num_steps"], entry["moved"], entry["rows"])

    def write(self, index: int, x: Tensor, found: Finished) -> None:
        """Append a batch, and make sure that it is on the disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not self.path.exists()
        try:
            with open(self.path, "a") as file:
                if fresh:
                    file.write(json.dumps(self.settings) + "\n")
                entry = {"batch": index, "data": fingerprint(x), **found._asdict()}
                file.write(json.dumps(entry) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            reason = f"finished batches are kept, but no more can be: {error.strerror}"
            raise OSError(error.errno, reason, str(self.path)) from error


def _saved_files(folder: str | os.PathLike[str]) -> list[File]:
    return sorted(path for path in File(folder).glob("evaluation*.partial") if path.is_file())


def remove_saved(folder: str | os.PathLike[str]) -> None:
    """Remove finished batches, those of all shards."""
    for path in _saved_files(folder):
        path.unlink(missing_ok=True)
