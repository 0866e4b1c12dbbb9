"""Omniglot: handwritten characters of fifty alphabets, as PNG files in torchvision's layout."""

from pathlib import Path
from typing import Any

import numpy as np

from mcvae.data.cache import Pixels, cached_pixels
from mcvae.data.files import fetch_folder
from mcvae.data.splits import DataError, Splits, hold_out

__all__ = ["load_omniglot"]

_URL = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/"
_MD5 = {
    "images_background": "68d2efa1b9178cc56df9314c21c6e718",
    "images_evaluation": "6b91aef0f799c5bb55b94e3f2daec811",
}
_COUNTS = {"images_background": 19_280, "images_evaluation": 13_180}


def load_omniglot(root: Path, validation: int | None = None, download: bool = True) -> Splits:
    """Characters of 1×28×28 pixels, ink bright: `<root>/omniglot-py/images_{background,evaluation}/*/*/*.png`.

    The 105×105 drawings are averaged over areas (Pillow's box filter) and inverted. Train is the background set of 30
    alphabets and test the evaluation set of 20 others, as published; the IWAE literature shuffles all alphabets into
    24,345 and 8,070 images instead, so likelihoods are not comparable with it.

    Args:
        root: folder of all data sets.
        validation: number of the 19,280 training images held out for validation; 1,345, as with IWAE, if None.
        download: fetch and unpack the archives of missing folders.
    """
    home = root / "omniglot-py"
    names = []
    for part, md5 in _MD5.items():
        folder = fetch_folder(home / part, f"{_URL}{part}.zip", md5, download)
        found = sorted(path.relative_to(home).as_posix() for path in folder.glob("*/*/*.png"))
        if len(found) != _COUNTS[part]:
            raise DataError(
                f"expected {_COUNTS[part]} images in {folder} as <alphabet>/<character>/*.png, got {len(found)}. "
                f"Delete the folder and run again to download it, or unpack {_URL}{part}.zip into it."
            )
        names += found
    pixels = cached_pixels(home / "omniglot-28x28.npz", home, names, (1, 28, 28), _convert)
    num_train = _COUNTS["images_background"]
    train, held_out = hold_out(pixels[:num_train], 1345 if validation is None else validation)
    return Splits("omniglot", train, held_out, pixels[num_train:])


def _convert(image: Any) -> Pixels:
    from PIL import Image

    if image.size != (105, 105):
        raise ValueError(f"expected 105×105 pixels, got {image.size[0]}×{image.size[1]}")
    small = image.convert("L").resize((28, 28), Image.Resampling.BOX)
    return 255 - np.asarray(small, np.uint8)[None]
