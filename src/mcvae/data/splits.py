"""A data set in memory, split into train, validation and test; and the error that loading it may raise."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from mcvae.data.transforms import TRANSFORMS, Standardization, Transform

if TYPE_CHECKING:
    from mcvae.data.conditions import Coding

__all__ = ["SPLITS", "DataError", "Images", "Kind", "Splits", "hold_out"]

_SPLIT_SEED = 20210630  # arbitrary, but it must never change: results are comparable only on the same split

SPLITS = ("train", "validation", "test")
Kind = Literal["pixels", "counts", "real"]
"""What a value is: a byte of an image, a whole number from 0, or any number."""


class DataError(Exception):
    """Data are missing, damaged or could not be downloaded; the message names the file and says what to do."""


@dataclass(frozen=True, eq=False)
class Splits:
    """A whole data set in memory. Its type says what it holds: bytes are pixels, other whole numbers are counts.

    Args:
        name: its name in `DATASETS`, or where it came from.
        train: data to learn from: uint8 images `[N, C, H, W]`, whole numbers or floating-point numbers `[N, ...]`.
        validation: data to choose settings by, possibly none: `[0, ...]`.
        test: data for the final figures; never mixed with the others.
        columns: names of the columns of a table, if they have any.
        note: why results on these data are not comparable with others'; empty if they are.
        given: numbers that the model is conditioned on, `[N, C]` for each of the three; None if on nothing.
        codings: how those numbers came about.

    >>> blank = torch.zeros(5, 1, 2, 3, dtype=torch.uint8)
    >>> Splits("blank", train=blank[:3], validation=blank[3:3], test=blank[3:])
    blank: images of 1×2×3 pixels, 3 for training, 0 for validation, 2 for testing
    """

    name: str
    train: Tensor
    validation: Tensor
    test: Tensor
    columns: list[str] = field(default_factory=list)
    note: str = ""
    given: tuple[Tensor, Tensor, Tensor] | None = None
    codings: Sequence["Coding"] = ()

    def __post_init__(self) -> None:
        for split in SPLITS:
            data = self.split(split)
            if data.dim() < 2 or data.dtype != self.train.dtype or data.shape[1:] != self.train.shape[1:]:
                raise ValueError(
                    "expected data [N, ...] of the same size and type in all splits, got "
                    f"{data.dtype} {list(data.shape)} as {split} of {self.name!r}, whose training data are "
                    f"{self.train.dtype} {list(self.train.shape)}."
                )
        if self.train.dtype == torch.uint8 and self.train.dim() != 4:
            raise ValueError(
                f"expected uint8 images [N, C, H, W], got {list(self.train.shape)} in {self.name!r}. Whole numbers "
                "that are not pixels need another type, such as torch.int32."
            )

    def __repr__(self) -> str:
        sizes = "×".join(map(str, self.shape))
        what = {
            "pixels": f"images of {sizes} pixels",
            "counts": f"rows of {sizes} counts",
            "real": f"rows of {sizes} numbers",
        }[self.kind]
        return (
            f"{self.name}: {what}, {len(self.train):,} for training, {len(self.validation):,} for validation, "
            f"{len(self.test):,} for testing"
        )

    @property
    def kind(self) -> Kind:
        """What the values are."""
        if self.train.dtype == torch.uint8:
            return "pixels"
        return "real" if self.train.is_floating_point() else "counts"

    @property
    def unit(self) -> str:
        """What messages call the data: "images" or "rows"."""
        return "images" if self.kind == "pixels" else "rows"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one datum: channels, height and width of an image, the number of columns of a table."""
        return tuple(self.train.shape[1:])

    @property
    def levels(self) -> int:
        """One more than the largest whole number in any split; 0 for real data."""
        if self.kind == "real":
            return 0
        return 256 if self.kind == "pixels" else 1 + max(int(s.max()) for s in map(self.split, SPLITS) if len(s))

    def split(self, name: str) -> Tensor:
        """The data of the split "train", "validation" or "test"."""
        if name not in SPLITS:
            raise ValueError(f"expected one of the splits {', '.join(SPLITS)}; got {name!r}.")
        data: Tensor = getattr(self, name)
        return data

    def given_of(self, name: str) -> Tensor | None:
        """What the data of a split are conditioned on."""
        return None if self.given is None else self.given[SPLITS.index(name)]

    def thinned(self, name: str, rows: Tensor) -> "Splits":
        """A copy that keeps only the given rows of one split."""
        given = self.given and tuple(
            part[rows] if split == name else part for split, part in zip(SPLITS, self.given, strict=True)
        )
        return replace(self, **{name: self.split(name)[rows], "given": given})  # type: ignore[arg-type]

    def transform(self, name: str) -> Transform:
        """The transform of this name; that which standardises takes means and scales from the training data."""
        return Standardization.of(self.train, self.columns) if name == "standardize" else TRANSFORMS[name]

    def fingerprint(self) -> str:
        """Of the contents of all splits: a run that is evaluated must find the data it was trained on."""
        digest = hashlib.sha256()
        for data in (*map(self.split, SPLITS), *(self.given or ())):
            digest.update(str(list(data.shape)).encode())
            digest.update(data.contiguous().view(-1).view(torch.uint8).numpy().data if len(data) else b"")
        return digest.hexdigest()[:16]


Images = Splits
"""The name of an earlier release, when all data were images."""


def hold_out(data: Tensor, count: int, seed: int = _SPLIT_SEED) -> tuple[Tensor, Tensor]:
    """Split data into those kept, in their order, and `count` held out, always the same ones for a seed.

    A smaller count holds out a subset of what a larger one does.

    >>> kept, held_out = hold_out(torch.arange(6), 2)
    >>> sorted(torch.cat([kept, held_out]).tolist())
    [0, 1, 2, 3, 4, 5]
    """
    if not 0 <= count < len(data):
        raise ValueError(
            f"expected to hold out between 0 and {len(data) - 1} of {len(data)} data, got {count}. "
            "Choose another --data.validation or --data.test."
        )
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    return data[order[count:].sort().values], data[order[:count]]
