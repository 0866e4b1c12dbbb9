"""Data sets of images in memory, and batches of them in the form that a likelihood needs."""

import difflib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mcvae._extras import needs_extra
from mcvae.data.batches import Batches
from mcvae.data.celeba import load_celeba
from mcvae.data.cifar10 import load_cifar10
from mcvae.data.digits import load_digits
from mcvae.data.idx import load_fashion_mnist, load_mnist
from mcvae.data.images import DataError, Images
from mcvae.data.omniglot import load_omniglot
from mcvae.data.transforms import TRANSFORMS, Transform, binarize, dequantize, scale

__all__ = [
    "DATASETS",
    "TRANSFORMS",
    "Batches",
    "DataError",
    "Dataset",
    "Images",
    "Transform",
    "binarize",
    "data_root",
    "dequantize",
    "load_images",
    "scale",
]


class Dataset(NamedTuple):
    """How a data set is loaded, and a line about it."""

    load: Callable[[Path, int | None, bool], Images]
    """`(root, validation, download) -> Images`."""
    description: str
    """The line that `mcvae methods` shows."""


DATASETS: dict[str, Dataset] = {
    "digits": Dataset(load_digits, "1,797 digits, 1×8×8, part of scikit-learn: no download"),
    "mnist": Dataset(load_mnist, "70,000 handwritten digits, 1×28×28"),
    "fashion-mnist": Dataset(load_fashion_mnist, "70,000 pieces of clothing, 1×28×28"),
    "omniglot": Dataset(load_omniglot, "32,460 handwritten characters of 50 alphabets, 1×28×28"),
    "cifar10": Dataset(load_cifar10, "60,000 photographs of ten kinds of things, 3×32×32"),
    "celeba": Dataset(load_celeba, "202,599 faces, 3×64×64; requires a manual download"),
}
"""Data sets by name."""


def data_root(root: str | Path | None = None) -> Path:
    """The folder of all data sets: `root`, or the environment variable MCVAE_DATA, or the user's cache."""
    given = root or os.environ.get("MCVAE_DATA")
    if given:
        return Path(given).expanduser()
    import pooch

    return Path(pooch.os_cache("mcvae"))


def load_images(
    name: str, root: str | Path | None = None, *, validation: int | None = None, download: bool = True
) -> Images:
    """Load a data set into memory, from `root` in torchvision's layout; download it if it is missing.

    Raises DataError, with advice, if that fails.

    Args:
        name: one of `DATASETS`.
        root: folder of all data sets; the environment variable MCVAE_DATA, or else ~/.cache/mcvae, if None.
        validation: number of training images held out, always the same ones, as validation images; 0 for none, and
            None for the usual number. Test images are the official ones in any case. See `load_celeba` for what
            differs there.
        download: False to use only files that exist already.

    >>> digits = load_images("digits", validation=100)
    >>> len(digits.train), len(digits.validation), len(digits.test), digits.shape
    (1397, 100, 300, (1, 8, 8))
    """
    if name not in DATASETS:
        close = difflib.get_close_matches(name.lower(), DATASETS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown data set {name!r}; known data sets: {', '.join(DATASETS)}.{hint}")
    with needs_extra(f"the data set {name}"):
        folder = data_root(root)
        try:
            return DATASETS[name].load(folder, validation, download)
        except OSError as error:
            raise DataError(
                f"{name} cannot be read from {folder}: {error}. Check the folder's permissions and space, or choose "
                "another with the environment variable MCVAE_DATA, root=... in Python, or --data.root."
            ) from error
