"""CelebA: aligned faces as JPEG files in torchvision's layout."""

from pathlib import Path
from typing import Any

import numpy as np

from mcvae.data.cache import Pixels, cached_pixels
from mcvae.data.splits import DataError, Splits

__all__ = ["load_celeba"]

_PAGE = "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html"
_COUNTS = {"train": 162_770, "validation": 19_867, "test": 19_962}  # coded 0, 1, 2 in the partition file


def load_celeba(root: Path, validation: int | None = None, download: bool = True) -> Splits:
    """Faces of 3×64×64 pixels: `<root>/celeba/img_align_celeba/*.jpg` and `<root>/celeba/list_eval_partition.txt`.

    Of the 178×218 photographs the central 148×148 pixels are kept, and resized to 64×64 (Pillow's bilinear filter,
    which averages when it shrinks). The result, 2.5 GB, is cached beside the folder, since the first load is
    slow.

    Part of the images is enough: those of the official list that are there, or all in folders train, validation and
    test below `<root>/celeba/`, `<root>/celeba-*/` or the root itself. Results are then not comparable: see `note`.

    Args:
        root: folder of all data sets.
        validation: how many images of the official validation split to use, from the first; all if None. The others
            are left out: they never become training images.
        download: not used; Google Drive, where the files are, requires a manual download.
    """
    home = _home(root)
    folder, splits = home / "img_align_celeba", _folders(home)
    if splits is None:
        splits = _partition(home / "list_eval_partition.txt")
        if folder.is_dir():
            present = {path.name for path in folder.glob("*.jpg")}
            splits = {split: [name for name in names if name in present] for split, names in splits.items()}
    else:
        folder = home
    found = {split: len(names) for split, names in splits.items()}
    if not all(found.values()):
        raise DataError(f"expected images of every split in {folder}, got {found}.")
    count = found["validation"] if validation is None else validation
    if not 0 <= count <= found["validation"]:
        raise ValueError(
            f"the official validation split has {found['validation']} images, got validation={validation}. "
            "Choose fewer, or None for all of them."
        )
    names = [name for split in splits.values() for name in split]
    cache = home / "celeba-64x64.npz"
    if not folder.is_dir() and not cache.is_file():
        raise _missing(folder)
    pixels = cached_pixels(cache, folder, names, (3, 64, 64), _convert)
    start, end = found["train"], found["train"] + found["validation"]
    note = ""
    if found != _COUNTS:
        note = (
            f"these are {len(names):,} of the {sum(_COUNTS.values()):,} images of CelebA: results are not comparable "
            "with those on all of them"
        )
    return Splits("celeba", pixels[:start], pixels[start : start + count], pixels[end:], note=note)


def _home(root: Path) -> Path:
    """Where the images are: the official place, or else a folder that holds a part of them."""
    official = root / "celeba"
    parts = [part for part in (root, *sorted(root.glob("celeba-*"))) if (part / "train").is_dir()]
    return official if official.exists() or not parts else parts[0]


def _folders(home: Path) -> dict[str, list[str]] | None:
    """Names of the images of each split from folders of these names; None if there are none."""
    if not (home / "train").is_dir():
        return None
    return {split: sorted(f"{split}/{path.name}" for path in (home / split).glob("*.jpg")) for split in _COUNTS}


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
