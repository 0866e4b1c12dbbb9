"""CIFAR-10: Python pickles in torchvision's layout, read without executing code that a pickle may contain."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcvae.data.files import check_md5, fetch_folder
from mcvae.data.splits import DataError, Splits, hold_out

__all__ = ["load_cifar10"]

_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
_ARCHIVE_MD5 = "c58f30108f718f92721af3b95e74349a"
_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
_GLOBALS = {  # all that these files refer to; numpy 2 has moved the first, so we take it from where numpy itself does
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


def load_cifar10(root: Path, validation: int | None = None, download: bool = True) -> Splits:
    """Photographs of ten kinds of things, 3×32×32: `<root>/cifar-10-batches-py/{data_batch_1..5,test_batch}`.

    Args:
        root: folder of all data sets.
        validation: number of the 50,000 training images held out for validation; 5,000 if None.
        download: fetch and unpack the archive if the folder is not there.
    """
    folder = fetch_folder(root / "cifar-10-batches-py", _URL, _ARCHIVE_MD5, download)
    *batches, test = (_images(folder / name) for name in _MD5)
    train, held_out = hold_out(torch.cat(batches), 5000 if validation is None else validation)
    return Splits("cifar10", train, held_out, test)


def _images(path: Path) -> Tensor:
    if not path.is_file():
        raise DataError(
            f"expected the file {path}, which does not exist although its folder does. Delete the folder and run again "
            f"to download it, or unpack {_URL} there."
        )
    check_md5(path, _MD5[path.name])
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise DataError(f"{path} is not a batch of CIFAR-10: {error}. Delete its folder and run again.") from error
    data = content.get(b"data") if isinstance(content, dict) else None
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (3072,):
        raise DataError(f"{path} has no uint8 images [N, 3072] under the key data. Delete its folder and run again.")
    return torch.from_numpy(data).reshape(-1, 3, 32, 32)


class _Unpickler(pickle.Unpickler):
    """Builds arrays and nothing else, since an ordinary unpickler calls any function that the file names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _GLOBALS:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, and only arrays are allowed")
        return _GLOBALS[module, name]
