"""A data set of images in memory, and the error that loading it may raise."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["DataError", "Images", "hold_out"]

_SPLIT_SEED = 20210630  # arbitrary, but it must never change: results are comparable only on the same split


class DataError(Exception):
    """Data are missing, damaged or could not be downloaded; the message names the file and says what to do."""


@dataclass(frozen=True, eq=False)
class Images:
    """A whole data set in memory, with pixels as the bytes they were published as.

    Args:
        name: its name in `DATASETS`.
        train: images to learn from, uint8 `[N, C, H, W]`.
        validation: images to choose settings by, uint8, possibly none: `[0, C, H, W]`.
        test: the official test images, uint8; never mixed with the others.

    >>> blank = torch.zeros(5, 1, 2, 3, dtype=torch.uint8)
    >>> Images("blank", train=blank[:3], validation=blank[3:3], test=blank[3:]).shape
    (1, 2, 3)
    """

    name: str
    train: Tensor
    validation: Tensor
    test: Tensor

    def __post_init__(self) -> None:
        for split in ("train", "validation", "test"):
            pixels = self.split(split)
            if pixels.dtype != torch.uint8 or pixels.dim() != 4 or pixels.shape[1:] != self.train.shape[1:]:
                raise ValueError(
                    "expected uint8 images [N, C, H, W] of the same size in all splits, got "
                    f"{pixels.dtype} {list(pixels.shape)} as {split} of {self.name!r}, whose training images are "
                    f"{list(self.train.shape)}."
                )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one image."""
        channels, height, width = self.train.shape[1:]
        return channels, height, width

    def split(self, name: str) -> Tensor:
        """The images of the split "train", "validation" or "test"."""
        splits = {"train": self.train, "validation": self.validation, "test": self.test}
        if name not in splits:
            raise ValueError(f"expected one of the splits {', '.join(splits)}; got {name!r}.")
        return splits[name]


def hold_out(pixels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Split images into those kept, in their order, and `count` held out, always the same ones.

    A smaller count holds out a subset of what a larger one does.

    >>> kept, held_out = hold_out(torch.arange(6), 2)
    >>> sorted(torch.cat([kept, held_out]).tolist())
    [0, 1, 2, 3, 4, 5]
    """
    if not 0 <= count < len(pixels):
        raise ValueError(
            f"expected to hold out between 0 and {len(pixels) - 1} of {len(pixels)} images, got {count}. "
            "Choose another number of validation images."
        )
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    return pixels[order[count:].sort().values], pixels[order[:count]]
