"""Data sets by name. Their loaders are imported when first called, so that the names are known without torch."""

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mcvae._extras import needs_extra
from mcvae.runs.naming import check_name

if TYPE_CHECKING:
    from mcvae.data.raw import Raw
    from mcvae.data.splits import Kind, Splits

__all__ = ["DATASETS", "SOURCES", "Dataset", "Source", "check_source", "data_root", "load_data", "load_images"]

Loader = Callable[[Path, int | None, bool], "Splits"]
"""`(root, validation, download) -> Splits`."""


class Dataset(NamedTuple):
    """How a data set is loaded, and what it is."""

    load: Loader
    description: str
    """One line of help."""


def _later(place: str) -> Callable[..., Any]:
    """The `module.function` of this package; the module is imported when the function is called."""

    def call(*arguments: Any) -> Any:
        module, _, function = place.partition(".")
        return getattr(import_module(f"mcvae.data.{module}"), function)(*arguments)

    return call


DATASETS: dict[str, Dataset] = {
    "digits": Dataset(_later("digits.load_digits"), "1,797 digits, 1×8×8, part of scikit-learn: no download"),
    "mnist": Dataset(_later("idx.load_mnist"), "70,000 handwritten digits, 1×28×28"),
    "fashion-mnist": Dataset(_later("idx.load_fashion_mnist"), "70,000 pieces of clothing, 1×28×28"),
    "omniglot": Dataset(_later("omniglot.load_omniglot"), "32,460 handwritten characters of 50 alphabets, 1×28×28"),
    "cifar10": Dataset(_later("cifar10.load_cifar10"), "60,000 photographs of ten kinds of things, 3×32×32"),
    "celeba": Dataset(_later("celeba.load_celeba"), "202,599 faces, 3×64×64; requires a manual download"),
}
"""Data sets by name."""


class Source(NamedTuple):
    """How a user's own file is read, and what it may hold."""

    read: Callable[..., dict[str, "Raw"]]
    """`(path, reading) -> {split: Raw}`: rows by split, or "all" of them, unchecked. Folders get a cache, too."""
    description: str
    """One line of help."""


SOURCES: dict[str, Source] = {
    ".npy": Source(_later("arrays.read_array"), "an array of images, counts or numbers"),
    ".npz": Source(_later("arrays.read_array"), "arrays called x, or train, validation and test"),
    ".pt": Source(_later("arrays.read_array"), "a tensor, or a dictionary of tensors called like those of an .npz"),
    ".csv": Source(_later("columnar.read_csv"), "a table of numbers"),
    ".tsv": Source(_later("columnar.read_csv"), "a table of numbers"),
    ".parquet": Source(_later("columnar.read_parquet"), "a table of numbers; needs the extra parquet"),
    ".h5ad": Source(_later("h5ad.read_h5ad"), "AnnData of counts; needs the extra h5ad"),
    "": Source(_later("folders.read_folder"), "a folder of PNG or JPEG images"),
}
"""Sources of users' own data by the suffix of the file; a folder has none."""


def is_own(name: str) -> bool:
    """Whether a name is that of a file or folder, and not of a known data set.

    >>> is_own("mnist"), is_own("counts.npy"), is_own("./photos")
    (False, True, True)
    """
    return name not in DATASETS and (
        os.sep in name or Path(name).suffix in SOURCES.keys() - {""} or Path(name).exists()
    )


def check_source(name: str) -> None:
    """Raise a ValueError or FileNotFoundError, with advice, if there can be no data of this name or path."""
    if not is_own(name):
        check_name("data set", name, [*DATASETS, "a path"])
        return
    path = Path(name).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"{name} does not exist. Give a file, a folder of images, or one of {', '.join(DATASETS)}."
        )
    if not path.is_dir() and path.suffix not in SOURCES:
        known = ", ".join(suffix for suffix in SOURCES if suffix)
        raise ValueError(f"{name} cannot be read: expected a folder of images, or a file that ends in {known}.")


def data_root(root: str | Path | None = None) -> Path:
    """The folder of all data sets: `root`, or the environment variable MCVAE_DATA, or the user's cache."""
    given = root or os.environ.get("MCVAE_DATA")
    if given:
        return Path(given).expanduser()
    import pooch

    return Path(pooch.os_cache("mcvae"))


def load_data(
    name: str,
    root: str | Path | None = None,
    *,
    validation: int | None = None,
    test: int | None = None,
    size: int | None = None,
    kind: "Kind | Literal['auto']" = "auto",
    split_seed: int = 0,
    condition: Sequence[str] = (),
    download: bool = True,
) -> "Splits":
    """Load a named data set, or your own from a file or a folder of images, into memory.

    Raises DataError, which names the file and the row, if that cannot be done.

    Args:
        name: one of `DATASETS`, or a path; see `SOURCES` for what it may lead to.
        root, download: for named data sets, see `load_images`.
        validation: rows held out for validation; None for a tenth, or a named set's own choice.
        test: rows of your own data held out for testing; None for a tenth.
        size: resize and crop a folder's images to this height and width.
        kind: what the values are: pixels, counts or real; "auto" looks at them.
        split_seed: of the split of your own data, where they are not split already.
        condition: columns, arrays or "folder" that the model is conditioned on, instead of being modelled.

    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/counts.npy", np.arange(40).reshape(20, 2))
    ...     load_data(f"{folder}/counts.npy")
    counts.npy: rows of 2 counts, 17 for training, 1 for validation, 2 for testing
    """
    if size is not None and not (is_own(name) and Path(name).expanduser().is_dir()):
        raise ValueError(f"--data.size is for a folder of images; {name} is none. Leave it out.")
    if not is_own(name):
        if condition:
            raise ValueError(f"{name} has nothing to condition on; give a file of your own with labels.")
        return load_images(name, root, validation=validation, download=download)
    from mcvae.data.own import split

    parts = read_source(name, size=size, root=root, condition=condition)
    return split(Path(name).name, parts, kind=kind, validation=validation, test=test, seed=split_seed)


def read_source(
    name: str,
    *,
    size: int | None = None,
    root: str | Path | None = None,
    condition: Sequence[str] = (),
    whole: bool = False,
) -> dict[str, "Raw"]:
    """The rows of a file or folder, unchecked, by split or "all" of them.

    Args:
        name: its path.
        size: of images.
        root: converted images are kept in its folder `converted`.
        condition: what to condition on.
        whole: see `Reading`.
    """
    from mcvae.data.raw import Reading
    from mcvae.data.splits import DataError

    check_source(name)
    path, reading = Path(name).expanduser(), Reading(size, condition, whole)
    try:
        with needs_extra(f"reading {path.suffix or 'images'}"):
            more = (data_root(root) / "converted",) if path.is_dir() else ()
            return SOURCES["" if path.is_dir() else path.suffix].read(path, reading, *more)
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error.strerror or error}.") from error


def load_images(
    name: str, root: str | Path | None = None, *, validation: int | None = None, download: bool = True
) -> "Splits":
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
    from mcvae.data.splits import DataError

    check_name("data set", name, DATASETS)
    folder = Path()
    try:
        with needs_extra(f"the data set {name}"):
            folder = data_root(root)
            return DATASETS[name].load(folder, validation, download)
    except OSError as error:
        raise DataError(
            f"{name} cannot be read from {folder}: {error}. Check the folder's permissions and space, or choose "
            "another with the environment variable MCVAE_DATA, root=... in Python, or --data.root."
        ) from error
