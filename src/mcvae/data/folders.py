"""A folder of PNG and JPEG images, of one size or resized."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from mcvae.data.cache import Pixels, cached_pixels
from mcvae.data.raw import Raw, Reading
from mcvae.data.splits import DataError

__all__ = ["read_folder"]

_SUFFIXES = (".png", ".jpg", ".jpeg")
_DEEP = ("I;16", "I;16B", "I")
"""Modes in which Pillow opens grey images of 16 bits. Its own conversion to 8 would make all above 255 white."""
_ORIENTATION = 0x0112  # how the camera was held: a tag of EXIF
_SPLITS = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation", "test": "test"}


def read_folder(path: Path, reading: Reading, cache: Path) -> dict[str, Raw]:
    """Images below a folder, sorted by name, with those of the sub-folders train, validation and test apart.

    Images become grey only if all of them are. With `reading.size` the shorter side of each is resized to it (Pillow's
    bilinear filter, which averages when it shrinks) and the centre is cropped; without, all must be of one size.
    `condition=["folder"]` is the name of the folder that an image is in.

    Args:
        path: the folder.
        reading: how to read it.
        cache: folder for the converted images: the first load is slow. One that no longer fits is rebuilt.
    """
    parts = {split: path / name for name, split in _SPLITS.items() if (path / name).is_dir()} or {"all": path}
    if "train" not in parts and "all" not in parts:
        raise DataError(f"{path} has the folders {', '.join(p.name for p in parts.values())}, but none called train.")
    names = {split: _names(path, part) for split, part in parts.items()}
    every = [name for part in names.values() for name in part]
    shape = _shape(path, every, reading.size)
    pixels = cached_pixels(
        cache / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}-{'x'.join(map(str, shape))}.npz",
        path,
        every,
        shape,
        lambda image: _convert(image, shape),
        stamps=[f"{(status := (path / name).stat()).st_size} {status.st_mtime_ns}" for name in every],
        advice="Remove it, or replace it by a PNG or JPEG image.",
    ).numpy()
    found, start = dict[str, Raw](), 0
    for split, part in names.items():
        labels = {key: _labels(part, key) for key in reading.condition}
        places = [str(path / name) for name in part]
        found[split] = Raw(pixels[start : start + len(part)], places.__getitem__, conditions=labels)
        start += len(part)
    return found


def _names(home: Path, folder: Path) -> list[str]:
    """Paths of the images below a folder, from home."""
    found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in _SUFFIXES and not p.name.startswith("."))
    if not found:
        raise DataError(f"{folder} has no images (.png, .jpg, .jpeg), also not in its sub-folders.")
    return [p.relative_to(home).as_posix() for p in found]


def _labels(names: list[str], key: str) -> Any:
    if key != "folder":
        raise DataError(f"images can be conditioned on the folder they are in: --data.condition [folder], got {key!r}.")
    return np.array([Path(name).parent.name for name in names])


def _shape(folder: Path, names: list[str], size: int | None) -> tuple[int, int, int]:
    """Channels, height and width of the converted images, from the headers of the files."""
    from PIL import Image

    first, grey = None, True
    for name in names:
        try:
            with Image.open(folder / name) as image:
                grey = grey and image.mode in ("1", "L", "LA", *_DEEP)
                width, height = image.size
                if image.getexif().get(_ORIENTATION, 1) > 4:  # lies on its side
                    width, height = height, width
        except (OSError, ValueError, SyntaxError) as error:  # Pillow raises a SyntaxError for a broken PNG
            raise DataError(
                f"{folder / name} is not an image that can be read: {error}. Remove it, or replace it."
            ) from error
        first = first or (height, width)
        if size is None and (height, width) != first:
            raise DataError(
                f"images must be of one size: {folder / names[0]} has {first[1]}×{first[0]} pixels, {folder / name} "
                f"has {width}×{height}. Give --data.size 64 to resize and crop all of them to 64×64."
            )
    assert first is not None
    height, width = (size, size) if size is not None else first
    return 1 if grey else 3, height, width


def _convert(image: Any, shape: tuple[int, int, int]) -> Pixels:
    from PIL import Image, ImageOps

    channels, height, width = shape
    image = ImageOps.exif_transpose(image)  # turned upright, as the camera was held
    if image.mode in _DEEP:
        image = Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "P"):  # what is transparent is white, as on a page
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("L" if channels == 1 else "RGB")
    if image.size != (width, height):
        factor = max(width / image.size[0], height / image.size[1])
        size = (max(width, round(image.size[0] * factor)), max(height, round(image.size[1] * factor)))
        left, top = (size[0] - width) // 2, (size[1] - height) // 2
        image = image.resize(size, Image.Resampling.BILINEAR).crop((left, top, left + width, top + height))
    pixels = np.asarray(image, np.uint8)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)
