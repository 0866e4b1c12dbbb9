"""Capturing someone's model for a compiler: what it would get wrong is refused, and a failure leaves no trace."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.fx import GraphModule

__all__ = ["refuse_own_gradients", "without_trace"]


def refuse_own_gradients(module: GraphModule) -> None:
    """Raise an error if gradients are wanted of a model with a `torch.autograd.Function`.

    torch captures such an operator with its gradient, but leaves out a part of that gradient's own derivative.
    """
    graphs = [part.graph for part in module.modules() if isinstance(part, GraphModule)]
    if torch.is_grad_enabled() and any(str(n.target) == "autograd_function_apply" for g in graphs for n in g.nodes):
        raise NotImplementedError("the model has a torch.autograd.Function, whose second derivative torch misses.")


@contextmanager
def without_trace() -> Iterator[None]:
    """Allow hooks on saved tensors again after a capture that failed, which torch forgets: checkpoints need them."""
    forbidden = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    try:
        yield
    except Exception:
        if forbidden is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        raise
