"""Data sets by name. Their loaders are imported when first called, so that the names are known without torch."""

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mcvae._extras import needs_extra
from mcvae.runs.naming import check_name

if TYPE_CHECKING:
    from mcvae.data.images import Images

__all__ = ["DATASETS", "Dataset", "data_root", "load_images"]

Loader = Callable[[Path, int | None, bool], "Images"]
"""`(root, validation, download) -> Images`."""


class Dataset(NamedTuple):
    """How a data set is loaded, and what it is."""

    load: Loader
    description: str
    """One line for a person."""


def _later(module: str, function: str) -> Loader:
    """The function of a module that is imported when it is called."""

    def load(root: Path, validation: int | None, download: bool) -> "Images":
        images: Images = getattr(import_module(f"mcvae.data.{module}"), function)(root, validation, download)
        return images

    return load


DATASETS: dict[str, Dataset] = {
    "digits": Dataset(_later("digits", "load_digits"), "1,797 digits, 1×8×8, part of scikit-learn: no download"),
    "mnist": Dataset(_later("idx", "load_mnist"), "70,000 handwritten digits, 1×28×28"),
    "fashion-mnist": Dataset(_later("idx", "load_fashion_mnist"), "70,000 pieces of clothing, 1×28×28"),
    "omniglot": Dataset(_later("omniglot", "load_omniglot"), "32,460 handwritten characters of 50 alphabets, 1×28×28"),
    "cifar10": Dataset(_later("cifar10", "load_cifar10"), "60,000 photographs of ten kinds of things, 3×32×32"),
    "celeba": Dataset(_later("celeba", "load_celeba"), "202,599 faces, 3×64×64; requires a manual download"),
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
) -> "Images":
    """Load a data set into memory, from `root` in torchvision's layout; download it if it is not there.

    Raises DataError, with advice, if that cannot be done.

    Args:
        name: one of `DATASETS`.
        root: folder of all data sets; the environment variable MCVAE_DATA, or else ~/.cache/mcvae, if None.
        validation: number of training images held out, always the same ones, as validation images; 0 for none, and
            None for the usual number. Test images are the official ones in any case. See `load_celeba` for what
            differs there.
        download: False to use only what is in place.

    >>> digits = load_images("digits", validation=100)
    >>> len(digits.train), len(digits.validation), len(digits.test), digits.shape
    (1397, 100, 300, (1, 8, 8))
    """
    from mcvae.data.images import DataError

    check_name("data set", name, DATASETS)
    with needs_extra(f"the data set {name}"):
        folder = data_root(root)
    try:
        with needs_extra(f"the data set {name}"):
            return DATASETS[name].load(folder, validation, download)
    except OSError as error:
        raise DataError(
            f"{name} cannot be read from {folder}: {error}. Check the folder's permissions and space, or choose "
            "another with the environment variable MCVAE_DATA, root=... in Python, or --data.root."
        ) from error
