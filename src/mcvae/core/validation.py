"""Evaluate a model whose distributions would refuse their parameters."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Unvalidated", "is_refusal"]


class Unvalidated(TorchFunctionMode):
    """Inside, torch's distributions accept any parameter, and NaN comes out where the parameters are invalid.

    A decoder that overflows where one proposal landed is one rejection, but torch's validation raises for the whole
    batch. The mode belongs to the thread that entered it, unlike `Distribution.set_default_validate_args`.

    >>> with Unvalidated():
    ...     torch.distributions.Normal(0.0, torch.tensor([1.0, -1.0])).log_prob(torch.tensor(0.0))
    tensor([-0.9189,     nan])
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer the question "are all parameters valid?" with yes."""
        if func is getattr(torch, "_is_all_true", None) or (func is Tensor.all and _asked_by_a_distribution()):
            return torch.tensor(True)
        return func(*args, **kwargs or {})


def is_refusal(error: ValueError) -> bool:
    """Whether an error is that of a distribution of torch about its parameters or its argument."""
    return str(error).startswith(("Expected parameter", "Expected value argument"))


def _asked_by_a_distribution() -> bool:
    """Earlier versions of torch ask with `Tensor.all`, as others do."""
    module: str = sys._getframe(2).f_globals.get("__name__", "")
    return module == "torch.distributions.distribution"
