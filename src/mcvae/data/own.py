"""Your own data: read from a file or folder, checked row by row, and split."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mcvae.data.conditions import Coding, code
from mcvae.data.raw import Array, Raw, first_row
from mcvae.data.splits import DataError, Kind, Splits, hold_out

__all__ = ["as_tensor", "cut", "split"]


def split(
    name: str,
    parts: dict[str, Raw],
    *,
    kind: Kind | Literal["auto"] = "auto",
    validation: int | None = None,
    test: int | None = None,
    seed: int = 0,
) -> Splits:
    """A data set from what a source has read, cut by seed into what the source does not cut itself.

    Args:
        name: where the data came from.
        parts: rows by split, or "all" of them.
        kind: what the values are; "auto" looks at them: see `as_tensor`.
        validation: rows to hold out for validation; a tenth if None.
        test: rows to hold out for testing; a tenth if None. Not used for a source that has its own.
        seed: of the split.
    """
    if kind == "auto":
        kinds = {_kind(raw) for raw in parts.values()}
        kind = kinds.pop() if len(kinds) == 1 else "real"  # counts in one split may be real numbers in another
    tensors = {key: as_tensor(raw, kind) for key, raw in parts.items()}
    first = next(iter(parts))
    for key, tensor in tensors.items():
        if tensor.shape[1:] != tensors[first].shape[1:]:
            raise DataError(
                f"all data must have one shape: in {name}, those of {first} have {list(tensors[first].shape[1:])}, "
                f"those of {key} {list(tensor.shape[1:])}."
            )
    if "train" not in tensors and "all" not in tensors:
        raise DataError(f"{name} has {' and '.join(tensors)}, but no train.")
    cuts = cut(tensors, validation, test, seed)
    if not parts[first].conditions:
        return Splits(name, *cuts, columns=list(parts[first].columns))
    learned = parts["all" if "all" in parts else "train"].conditions
    codings = [Coding.of(key, values) for key, values in learned.items()]
    coded = {key: code(codings, raw.conditions, raw.place) for key, raw in parts.items()}
    given = cut(coded, validation, test, seed)
    return Splits(name, *cuts, columns=list(parts[first].columns), given=given, codings=codings)


def cut(
    tensors: dict[str, Tensor], validation: int | None, test: int | None, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Train, validation and test from rows by split, or from "all" of them."""
    rest = tensors["all"] if "all" in tensors else tensors["train"]
    if len(rest) < 3:
        raise DataError(f"expected at least 3 rows to learn from, got {len(rest)}.")
    if "test" in tensors:
        tested = tensors["test"]
    else:
        rest, tested = hold_out(rest, _tenth(len(rest)) if test is None else test, seed)
    if "validation" in tensors:
        validated = tensors["validation"][:validation]
    else:
        rest, validated = hold_out(rest, _tenth(len(rest)) if validation is None else validation, seed + 1)
    return rest, validated, tested


def _tenth(number: int) -> int:
    return max(1, number // 10)


def as_tensor(raw: Raw, kind: Kind | Literal["auto"] = "auto") -> Tensor:
    """Checked rows: uint8 images `[N, C, H, W]`, int32 counts or float32 numbers `[N, ...]`.

    "auto": bytes of three or four dimensions are images; whole numbers from 0 are counts; anything else is real.
    """
    values = raw.values
    if values.dtype.kind not in "biuf":
        raise DataError(f"{_all_of(raw)}: expected numbers, got {values.dtype}.")
    if values.ndim < 2 or not len(values):
        raise DataError(
            f"{_all_of(raw)}: expected rows [N, ...], one for every datum, got an array of shape {list(values.shape)}."
        )
    kind = _kind(raw) if kind == "auto" else kind
    with np.errstate(over="ignore"):
        numbers = values.astype(np.float32)
    if not np.isfinite(numbers).all():
        row = first_row(~np.isfinite(numbers))
        raise DataError(
            f"{raw.place(row)}{_column(raw, ~np.isfinite(numbers), row)} is not a finite number of 32 bits. Fill it "
            "in, or remove the row."
        )
    if kind == "pixels":
        return _images(raw)
    if kind == "counts":
        wrong = (values < 0) | (values >= 2**31) | (values != np.floor(values))
        if wrong.any():
            row = first_row(wrong)
            raise DataError(
                f"{raw.place(row)}{_column(raw, wrong, row)}: expected a count (a whole number from 0, "
                "below 2³¹). Give --data.kind real for data that are not counts."
            )
        return torch.from_numpy(values.astype(np.int32))
    return torch.from_numpy(numbers)


def _kind(raw: Raw) -> Kind:
    values = raw.values
    if values.dtype == np.uint8 and values.ndim in (3, 4):
        return "pixels"
    if values.dtype.kind in "if" and not ((values >= 0) & (values == np.floor(values))).all():
        return "real"
    return "counts" if values.dtype.kind in "buif" else "real"


def _images(raw: Raw) -> Tensor:
    """Bytes as `[N, C, H, W]`, from grey `[N, H, W]` or from channels first or last."""
    values = raw.values
    if values.dtype != np.uint8:
        whole = (values >= 0) & (values <= 255) & (values == np.floor(values))
        if not whole.all():
            raise DataError(
                f"{raw.place(first_row(~whole))}: expected pixels, whole numbers from 0 to 255. Multiply grey levels "
                "between 0 and 1 by 255 and save them as uint8, or give --data.kind real."
            )
        values = values.astype(np.uint8)
    if values.ndim == 3:
        values = values[:, None]
    elif values.ndim == 4 and values.shape[1] not in (1, 3) and values.shape[3] in (1, 3):
        values = values.transpose(0, 3, 1, 2)
    if values.ndim != 4 or values.shape[1] not in (1, 3):
        raise DataError(
            f"{_all_of(raw)}: expected images [N, H, W], [N, C, H, W] or [N, H, W, C] with 1 or 3 channels, got "
            f"{list(values.shape)}."
        )
    return torch.from_numpy(np.ascontiguousarray(values))


def _all_of(raw: Raw) -> str:
    """What an error message calls all rows: an array has no row to blame for its shape."""
    return raw.place(0).removesuffix(", row 0 (counted from 0)")


def _column(raw: Raw, bad: Array, row: int) -> str:
    if bad.ndim != 2:
        return ""
    place = int(np.argmax(bad[row]))
    return f", column {raw.columns[place]!r}" if raw.columns else f", column {place}"
