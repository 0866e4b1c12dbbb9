"""Batches as a function of (seed, epoch): the same on every machine, however many processes share them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mcvae.core.randomness import seeded_generator
from mcvae.data.transforms import Transform

__all__ = ["Batches"]


class Batches:
    """An iterable of transformed batches of images in memory. It needs no worker processes.

    With an `epoch`, for training: images are shuffled by (seed, epoch), the noise of batch i depends on
    (seed, epoch, i), and a last incomplete batch is dropped, unless it is the only one. With `epoch=None`, for
    evaluation: all images come in their order, with noise that depends on (seed, i) and is the same every time.

    Processes share a training batch: its noise is drawn as a whole, then it is cut into `world_size` consecutive parts
    of the same size. Evaluation batches are not cut: batch i goes to rank i mod `world_size`, and the others get
    an empty batch. All ranks together yield exactly what one process does, in the same number of batches.

    Args:
        pixels: uint8 images `[N, C, H, W]`.
        batch_size: images per batch, counted over all processes.
        transform: from pixels and a generator to a batch, such as `binarize`.
        seed: of the order and the noise.
        epoch: number of the pass over the training images; None for evaluation.
        rank: number of this process.
        world_size: number of processes; divides `batch_size`.
        given: what the data are conditioned on, `[N, C]`; a batch is then `[B, size + C]`: flattened data, conditions.

    >>> from mcvae.data.transforms import scale
    >>> pixels = torch.zeros(10, 1, 2, 2, dtype=torch.uint8)
    >>> [len(batch) for batch in Batches(pixels, 4, scale, seed=0, epoch=None)]
    [4, 4, 2]
    >>> [len(batch) for batch in Batches(pixels, 4, scale, seed=0, epoch=0, rank=1, world_size=2)]
    [2, 2]
    """

    def __init__(
        self,
        pixels: Tensor,
        batch_size: int,
        transform: Transform,
        *,
        seed: int,
        epoch: int | None,
        rank: int = 0,
        world_size: int = 1,
        given: Tensor | None = None,
    ):
        if not 0 <= rank < world_size:
            raise ValueError(f"expected a rank from 0 to world_size - 1 = {world_size - 1}, got {rank}.")
        if batch_size < 1 or batch_size % world_size:
            raise ValueError(
                f"expected a positive batch_size that {world_size} processes can share evenly, got {batch_size}. It "
                f"counts the images of all processes: choose a multiple of {world_size}."
            )
        self.pixels, self.batch_size, self.transform, self.given = pixels, batch_size, transform, given
        self.seed, self.epoch = int(seed), None if epoch is None else int(epoch)  # plain numbers, since they are hashed
        self.rank, self.world_size = rank, world_size
        if epoch is not None and 0 < len(pixels) < batch_size and len(pixels) % world_size:
            raise ValueError(
                f"the only batch has {len(pixels)} images, which {world_size} processes cannot share evenly. Choose a "
                "batch_size that is not larger, or another number of images."
            )

    def __len__(self) -> int:
        whole, rest = divmod(len(self.pixels), self.batch_size)
        return whole + (rest > 0 and (self.epoch is None or whole == 0))

    def __iter__(self) -> Iterator[Tensor]:
        order = None
        if self.epoch is not None:
            order = torch.randperm(len(self.pixels), generator=seeded_generator("order", self.seed, self.epoch))
        for index in range(len(self)):
            rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
            chosen = rows if order is None else order[rows]
            batch = self.transform(self.pixels[chosen], seeded_generator("noise", self.seed, self.epoch, index))
            if self.given is not None:
                batch = torch.cat([batch.flatten(1), self.given[chosen]], 1)
            if self.epoch is not None:
                yield batch.tensor_split(self.world_size)[self.rank]
            else:
                yield batch if index % self.world_size == self.rank else batch[:0]
