"""Arrays in a file: .npy, .npz and .pt, read without executing anything that a pickle may contain."""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from mcvae.data.raw import Array, Raw, Reading, at_index
from mcvae.data.splits import SPLITS, DataError

__all__ = ["read_array"]

_WHOLE = ("x", "X", "data", "images", "counts", "arr_0")


def read_array(path: Path, reading: Reading) -> dict[str, Raw]:
    """An array of data `[N, ...]`; or, in an .npz or a dictionary in a .pt, one for each split.

    Arrays may be called train, validation and test, or x (also data, images, counts). What the model is conditioned on
    is in arrays of the same names with _NAME behind, such as train_label for `condition=["label"]`, or label beside x.
    """
    arrays = _arrays(path)
    names = [name for name in SPLITS if name in arrays] or [name for name in _WHOLE if name in arrays][:1]
    if not names and len(arrays) == 1:
        names = list(arrays)
    if not names:
        raise DataError(
            f"{path} holds the arrays {', '.join(arrays) or '(none)'}; expected one of them to be called x, or train, "
            "validation and test. Save it again under such names."
        )
    whole = not set(names) & set(SPLITS)
    found = dict[str, Raw]()
    for name in names:
        names_of = {key: key if whole else f"{name}_{key}" for key in reading.condition}
        conditions = {key: _condition(path, arrays, each, len(arrays[name])) for key, each in names_of.items()}
        found["all" if whole else name] = Raw(arrays[name], at_index(path, name), conditions=conditions)
    return found


def _condition(path: Path, arrays: dict[str, Array], name: str, rows: int) -> Array:
    if name not in arrays:
        held = ", ".join(filter(None, arrays)) or "one array without a name: save both as .npz"
        raise DataError(
            f"{path} has no array {name!r} to condition on; it holds {held}. Save one with a value for every row, or "
            "choose another --data.condition."
        )
    if arrays[name].shape != (rows,):
        raise DataError(
            f"{path}: {name!r} must have one value for each of {rows} rows, got an array of shape "
            f"{list(arrays[name].shape)}."
        )
    return arrays[name]


def _arrays(path: Path) -> dict[str, Array]:
    """The arrays of a file by name; "" for one without a name."""
    if not path.stat().st_size:
        raise DataError(f"{path} is empty. Save the array again.")
    try:
        if path.suffix == ".pt":
            return _tensors(torch.load(path, map_location="cpu", weights_only=True))
        with open(path, "rb") as file:
            content = np.load(file, allow_pickle=False)
            return dict(content) if isinstance(content, np.lib.npyio.NpzFile) else {"": content}
    except (ValueError, TypeError, EOFError, OSError, RuntimeError, BadZipFile, UnpicklingError) as error:
        reason = " ".join(str(error).split())[:200].removesuffix(".")
        if isinstance(error, UnpicklingError):  # torch would advise to trust the file
            reason = "it is damaged, or holds Python objects"
        raise DataError(
            f"{path} cannot be read as an array of numbers: {reason}. Save it with numpy.save, numpy.savez or "
            "torch.save; Python objects are never read."
        ) from error


def _tensors(content: Any) -> dict[str, Array]:
    named = content if isinstance(content, dict) else {"": content}
    if not all(isinstance(value, Tensor) for value in named.values()):
        raise ValueError("expected a tensor, or a dictionary of tensors")
    return {str(name): value.detach().numpy() for name, value in named.items()}
