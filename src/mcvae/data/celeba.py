"""CelebA: aligned faces as JPEG files in torchvision's layout."""

from pathlib import Path
from typing import Any

import numpy as np

from mcvae.data.cache import Pixels, cached_pixels
from mcvae.data.images import DataError, Images

__all__ = ["load_celeba"]

_PAGE = "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html"
_COUNTS = {"train": 162_770, "validation": 19_867, "test": 19_962}  # coded 0, 1, 2 in the partition file


def load_celeba(root: Path, validation: int | None = None, download: bool = True) -> Images:
    """Faces of 3×64×64 pixels: `<root>/celeba/img_align_celeba/*.jpg` and `<root>/celeba/list_eval_partition.txt`.

    Of the 178×218 photographs the central 148×148 pixels are kept, and resized to 64×64 (Pillow's bilinear filter,
    which averages when it shrinks). The result, 2.5 GB, is cached beside the folder, since the first load is
    slow.

    Args:
        root: folder of all data sets.
        validation: use the first images of the official validation split, this many; all if None. The others are
            left out: they never become training images.
        download: not used; Google Drive, where the files are, requires a manual download.
    """
    home = root / "celeba"
    splits = _partition(home / "list_eval_partition.txt")
    count = len(splits["validation"]) if validation is None else validation
    if not 0 <= count <= len(splits["validation"]):
        raise ValueError(
            f"the official validation split has {len(splits['validation'])} images, got validation={validation}. "
            "Choose fewer, or None for all of them."
        )
    names = [name for split in splits.values() for name in split]
    cache = home / "celeba-64x64.npz"
    folder = home / "img_align_celeba"
    if not folder.is_dir() and not cache.is_file():
        raise _missing(folder)
    pixels = cached_pixels(cache, folder, names, (3, 64, 64), _convert)
    start, end = len(splits["train"]), len(splits["train"]) + len(splits["validation"])
    return Images("celeba", pixels[:start], pixels[start : start + count], pixels[end:])


def _partition(path: Path) -> dict[str, list[str]]:
    """Names of the images of each split, in the order of the file."""
    if not path.is_file():
        raise _missing(path)
    splits: dict[str, list[str]] = {split: [] for split in _COUNTS}
    codes = dict(zip("012", splits.values(), strict=True))
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        match line.split():
            case [name, code] if code in codes and Path(name).name == name:
                codes[code].append(name)
            case _:
                raise DataError(
                    f"{path}, line {number}: expected the name of an image and 0, 1 or 2, such as '000001.jpg 0', got "
                    f"{line[:80]!r}. Get the file again from {_PAGE}."
                )
    found = {split: len(names) for split, names in splits.items()}
    if found != _COUNTS:
        raise DataError(f"expected {path} to list {_COUNTS} images, got {found}. Get the file again from {_PAGE}.")
    return splits


def _missing(path: Path) -> DataError:
    return DataError(
        f"expected {path}, which does not exist and requires a manual download. Get img_align_celeba.zip and "
        f"list_eval_partition.txt from {_PAGE} (Google Drive), unpack the first, and put both into {path.parent}; or "
        "name the folder that has celeba/ with the environment variable MCVAE_DATA, root=... in Python, or --data.root."
    )


def _convert(image: Any) -> Pixels:
    from PIL import Image

    if image.size != (178, 218):
        raise ValueError(f"expected 178×218 pixels, got {image.size[0]}×{image.size[1]}")
    face = image.convert("RGB").crop((15, 35, 15 + 148, 35 + 148)).resize((64, 64), Image.Resampling.BILINEAR)
    return np.asarray(face, np.uint8).transpose(2, 0, 1)
