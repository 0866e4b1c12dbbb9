"""MNIST and Fashion-MNIST: IDX files in torchvision's layout."""

import gzip
import struct
import zlib
from io import BufferedIOBase
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mcvae.data.files import check_md5, fetch
from mcvae.data.splits import DataError, Splits, hold_out

__all__ = ["load_fashion_mnist", "load_mnist"]


class _Source(NamedTuple):
    """Where a data set lies below the root, where it comes from, and the md5 of its compressed files."""

    folder: str
    url: str
    md5: dict[str, str]


_MNIST = _Source(
    "MNIST/raw",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    {
        "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    },
)
_FASHION_MNIST = _Source(
    "FashionMNIST/raw",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    {
        "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    },
)
_COUNTS = {"train-images-idx3-ubyte": 60_000, "t10k-images-idx3-ubyte": 10_000}
_UNPACKED = {
    "MNIST/raw/train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "MNIST/raw/t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
}
"""md5 of the decompressed files, where known; others are checked by header and size."""
_MAGIC = 0x00000803  # unsigned bytes, three dimensions


def load_mnist(root: Path, validation: int | None = None, download: bool = True) -> Splits:
    """Handwritten digits, 1×28×28: `<root>/MNIST/raw/{train,t10k}-images-idx3-ubyte`, or the same with `.gz`.

    Args:
        root: folder of all data sets.
        validation: number of the 60,000 training images held out for validation; 5,000 if None.
        download: fetch missing files.
    """
    return _load("mnist", _MNIST, root, validation, download)


def load_fashion_mnist(root: Path, validation: int | None = None, download: bool = True) -> Splits:
    """Pieces of clothing, 1×28×28: like `load_mnist`, in `<root>/FashionMNIST/raw`."""
    return _load("fashion-mnist", _FASHION_MNIST, root, validation, download)


def _load(name: str, source: _Source, root: Path, validation: int | None, download: bool) -> Splits:
    pixels, test = (_images(root / source.folder / file, source, download) for file in _COUNTS)
    train, held_out = hold_out(pixels, 5000 if validation is None else validation)
    return Splits(name, train, held_out, test)


def _images(path: Path, source: _Source, download: bool) -> Tensor:
    """Images `[N, 1, 28, 28]` of an IDX file, or else of its compressed form."""
    count = _COUNTS[path.name]
    if path.is_file():
        with path.open("rb") as file:
            pixels = _read(file, path, count)
        if md5 := _UNPACKED.get(f"{source.folder}/{path.name}"):
            check_md5(path, md5)
        return pixels
    packed, md5 = path.with_name(path.name + ".gz"), source.md5[path.name]
    if not packed.is_file():  # an existing one may have been compressed by another program: check its content instead
        fetch(packed, source.url + packed.name, md5, download)
    try:
        with gzip.open(packed) as unpacked:
            return _read(unpacked, packed, count)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"{packed} cannot be decompressed: {error}. Expected md5 {md5}. Delete it and run again to download it, or "
            "replace it with the right file."
        ) from error


def _read(file: BufferedIOBase, path: Path, count: int) -> Tensor:
    expected, size = (_MAGIC, count, 28, 28), 16 + count * 28 * 28
    content = file.read(size + 1)
    header = struct.unpack(">4I", content[:16]) if len(content) >= 16 else None
    if header != expected or len(content) != size:
        found = f"more than {size}" if len(content) > size else f"{len(content)}"
        raise DataError(
            f"{path} is damaged or not the expected file: expected the header (magic number, images, rows, columns) "
            f"{expected} and {size} bytes, got {header} and {found} bytes. Delete it and run again to download it, or "
            "replace it with the right file."
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=16).reshape(count, 1, 28, 28)
