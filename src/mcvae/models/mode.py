"""Networks as they are evaluated: without dropout, and with the statistics that batch norm has learned."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["eval_mode"]


@contextmanager
def eval_mode(*modules: nn.Module) -> Iterator[None]:
    """Put modules in eval mode; afterwards every part of them is in the mode it was in.

    >>> network = nn.Sequential(nn.Dropout())
    >>> with eval_mode(network):
    ...     network[0].training
    False
    >>> network[0].training
    True
    """
    modes = {part: part.training for module in modules for part in module.modules()}
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
