"""Many small image files as one array on disk, so that only the first load is slow."""

import hashlib
import warnings
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcvae.data.splits import DataError
from mcvae.runs.plain import RunError, write_atomically

__all__ = ["cached_pixels"]

Pixels = NDArray[np.uint8]


def cached_pixels(
    cache: Path,
    folder: Path,
    names: Sequence[str],
    shape: tuple[int, int, int],
    convert: Callable[[Any], Pixels],
    *,
    stamps: Sequence[str] = (),
    advice: str | None = None,
) -> Tensor:
    """Images `[N, C, H, W]` of the files `names` below `folder`, in this order; from `cache` if it has them.

    A cache of other names or stamps, or a damaged one, is rebuilt. Without stamps, changes of the image files are not
    noticed: delete the cache after changing them.

    Args:
        cache: an .npz file, written atomically.
        folder: where the image files are.
        names: their paths below the folder.
        shape: channels, height and width after conversion.
        convert: from a PIL image to pixels of this shape; raises ValueError if the image is not of the expected kind.
        stamps: what changes with a file, such as its size and time.
        advice: what to do about a file that cannot be read; to unpack the folder again if None.
    """
    advice = f"Unpack {folder.name} again." if advice is None else advice
    fingerprint = hashlib.sha256("\n".join([str(shape), *names, *stamps]).encode()).hexdigest()
    pixels = _read(cache, fingerprint, (len(names), *shape))
    if pixels is None:
        pixels = _convert_all(folder, names, shape, convert, advice)
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(cache, partial(_write, fingerprint, pixels))
        except (OSError, RunError) as error:  # a read-only folder, a full disk: the next load is slow again
            warnings.warn(f"converted images are not cached, so the next load will be slow, too: {error}", stacklevel=2)
    return torch.from_numpy(pixels)


def _read(cache: Path, fingerprint: str, shape: tuple[int, ...]) -> Pixels | None:
    if not zipfile.is_zipfile(cache):  # not there, or cut off: a zip file has its table of contents at the end
        return None
    try:
        with np.load(cache) as content:
            if content["fingerprint"] != fingerprint:
                return None
            pixels: Pixels = content["pixels"]  # its checksum is verified on reading
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError, OSError):
        return None
    return pixels if pixels.dtype == np.uint8 and pixels.shape == shape else None


def _write(fingerprint: str, pixels: Pixels, path: Path) -> None:
    with open(path, "wb") as file:
        np.savez(file, fingerprint=np.array(fingerprint), pixels=pixels)


def _convert_all(
    folder: Path, names: Sequence[str], shape: tuple[int, int, int], convert: Callable[[Any], Pixels], advice: str
) -> Pixels:
    from PIL import Image
    from rich.console import Console
    from rich.progress import track

    def read(name: str) -> Pixels:
        try:
            with Image.open(folder / name) as image:
                return convert(image)
        except (OSError, ValueError, SyntaxError) as error:  # Pillow raises a SyntaxError for a broken PNG
            raise DataError(
                f"{folder / name} is missing, damaged or not the expected image: {error}. {advice}"
            ) from error

    pixels = np.empty((len(names), *shape), np.uint8)
    with ThreadPoolExecutor() as pool:  # decoding runs outside of Python's lock
        console = Console(stderr=True)
        images = track(
            pool.map(read, names),
            f"converting {folder.name}",
            total=len(names),
            console=console,
            disable=not console.is_terminal,
        )
        for index, image in enumerate(images):
            pixels[index] = image
    return pixels
