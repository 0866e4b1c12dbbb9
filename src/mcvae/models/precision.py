"""Parts of a model that stay in single precision where the model is in half."""

from typing import Any, Self

import torch
from torch import nn

__all__ = ["InSinglePrecision"]


class InSinglePrecision(nn.Module):
    """A module for densities: in half precision their constants have no digits, and they are not normalised.

    >>> class Scale(InSinglePrecision):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.log_scale = nn.Parameter(torch.zeros(2))
    >>> Scale().to(torch.bfloat16).log_scale.dtype
    torch.float32
    """

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if any(values.dtype in (torch.float16, torch.bfloat16) for values in (*self.parameters(), *self.buffers())):
            self.float()
        return self
