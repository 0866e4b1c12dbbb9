"""The 8×8 digits that come with scikit-learn: no files, no network, seconds to learn."""

from pathlib import Path

import numpy as np
import torch

from mcvae.data.splits import Splits, hold_out

__all__ = ["load_digits"]

_NUM_TEST = 300  # the set has no official split


def load_digits(root: Path, validation: int | None = None, download: bool = True) -> Splits:
    """1,797 digits of 8×8 pixels, whose 17 grey levels are spread over 0..255; 300 are for testing.

    Args:
        root: not used.
        validation: number of images held out for validation; 200 if None.
        download: not used.
    """
    from sklearn import datasets

    levels = np.asarray(datasets.load_digits().images)  # [N, 8, 8], 0..16
    pixels = torch.from_numpy(np.rint(levels * (255 / 16)).astype(np.uint8)).unsqueeze(1)
    rest, test = hold_out(pixels, _NUM_TEST)
    train, held_out = hold_out(rest, 200 if validation is None else validation)
    return Splits("digits", train, held_out, test)
