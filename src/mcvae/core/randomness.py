"""Random numbers from an explicit `torch.Generator`, leaving the global stream untouched."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Generator, Tensor
from torch.distributions import Distribution

__all__ = ["SharedGenerator", "draw", "rewinder", "seeded_generator", "standard_normal", "uniform"]


class SharedGenerator(Generator):
    """One stream for a batch that processes share in equal parts: each draws for all and keeps what is its own.

    So the noise of a row depends on its place in the whole batch, not on how many processes there are. Everything
    drawn from it is `[S, B, ...]`, with the rows of this process in the second dimension.

    >>> whole = standard_normal(torch.empty(3, 4, 2), seeded_generator("noise"))
    >>> second = seeded_generator("noise", rank=1, world_size=2)
    >>> torch.equal(standard_normal(torch.empty(3, 2, 2), second), whole[:, 2:])
    True
    """

    rank: int
    """Which part of the batch this process has."""
    world_size: int
    """Number of parts."""


def seeded_generator(
    *parts: int | str | None, device: torch.device | str = "cpu", rank: int = 0, world_size: int = 1
) -> Generator:
    """A generator whose seed is a stable function of `parts`: a random stream that can be entered anywhere.

    With several processes it is a `SharedGenerator`.

    >>> seeded_generator("noise", 3, 14).initial_seed() == seeded_generator("noise", 3, 14).initial_seed()
    True
    """
    digest = hashlib.sha256(repr(parts).encode()).digest()
    generator = Generator(device)
    if world_size > 1:
        generator = shared = SharedGenerator(device)
        shared.rank, shared.world_size = rank, world_size
    return generator.manual_seed(int.from_bytes(digest[:7], "big"))


def rewinder(generator: Generator | None, device: torch.device) -> Callable[[], None]:
    """A function that takes a generator, or the global stream of a device, back to where it is now.

    >>> back = rewinder(None, torch.device("cpu"))
    >>> first = torch.randn(2)
    >>> back()
    >>> torch.equal(torch.randn(2), first)
    True
    """
    if generator is not None:
        return partial(generator.set_state, generator.get_state())  # type: ignore[return-value]
    if device.type == "cpu":
        return partial(torch.set_rng_state, torch.get_rng_state())
    module = torch.get_device_module(device)
    return partial(module.set_rng_state, module.get_rng_state(device), device)


def standard_normal(like: Tensor, generator: Generator | None) -> Tensor:
    """Innovation noise $u \\sim N(0, I)$ with the shape, type and device of `like`."""
    return _noise(torch.randn, like, generator)


def uniform(like: Tensor, generator: Generator | None) -> Tensor:
    """Uniform noise in [0, 1) with the shape, type and device of `like`."""
    return _noise(torch.rand, like, generator)


def _noise(sampler: Callable[..., Tensor], like: Tensor, generator: Generator | None) -> Tensor:
    options = {"generator": generator, "dtype": like.dtype, "device": like.device}
    if not isinstance(generator, SharedGenerator):
        return sampler(like.shape, **options)
    return sampler((like.shape[0], generator.world_size, *like.shape[1:]), **options)[:, generator.rank]


def draw(distribution: Distribution, shape: tuple[int, ...], generator: Generator | None) -> Tensor:
    """Sample `distribution`, reparameterised where it can be.

    The samplers of `torch.distributions` read the global stream only, so a given `generator` seeds that
    stream for this one draw and the stream is put back afterwards.
    """
    size = torch.Size(shape)
    if isinstance(generator, SharedGenerator):  # as many rows as all processes have together
        distribution = distribution.expand((generator.world_size, *distribution.batch_shape))
    with _seeded_by(generator):
        z = distribution.rsample(size) if distribution.has_rsample else distribution.sample(size)
    return z.select(len(size), generator.rank) if isinstance(generator, SharedGenerator) else z


@contextmanager
def _seeded_by(generator: Generator | None) -> Iterator[None]:
    if generator is None:
        yield
        return
    device = generator.device
    seed = int(torch.randint(2**62, (), generator=generator, device=device))
    accelerated = device.type != "cpu"
    with torch.random.fork_rng([device] if accelerated else [], device_type=device.type if accelerated else "cuda"):
        torch.default_generator.manual_seed(seed)
        if accelerated:
            module = torch.get_device_module(device)
            with nullcontext() if device.index is None else module.device(device):
                module.manual_seed(seed)
        yield
