"""Grids of images as PNG files."""

import math
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from mcvae.runs.plain import write_atomically

__all__ = ["save_grid"]


def save_grid(images: Tensor, path: Path, columns: int | None = None, *, scale: int | None = None) -> None:
    """Write images `[N, C, H, W]` in [0, 1] as one PNG, with a thin gap between them.

    Args:
        images: grey (C = 1) or colour (C = 3).
        path: of the PNG.
        columns: images per row; nearly square if None.
        scale: enlargement by repetition; by default small images are enlarged to about 56 pixels.
    """
    number, channels, height, width = images.shape
    columns = columns or math.ceil(math.sqrt(number))
    rows = math.ceil(number / columns)
    scale = scale or max(1, 56 // max(height, width))
    pixels = (images.detach().cpu().clamp(0, 1) * 255).round().to(torch.uint8)
    pixels = pixels.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    gap, height, width = 2, height * scale, width * scale
    sheet = torch.full((channels, rows * (height + gap) + gap, columns * (width + gap) + gap), 128, dtype=torch.uint8)
    for index, image in enumerate(pixels):
        top, left = gap + (index // columns) * (height + gap), gap + (index % columns) * (width + gap)
        sheet[:, top : top + height, left : left + width] = image
    array = sheet[0].numpy() if channels == 1 else sheet.permute(1, 2, 0).numpy()
    write_atomically(path, lambda temporary: Image.fromarray(array).save(temporary, format="PNG"))
