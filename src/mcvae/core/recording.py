"""Write down what a function made by inductor does: called with stand-ins instead of tensors, it computes nothing."""

import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["PRODUCTS", "Buffer", "Call", "Recorder", "UnsupportedTurnError"]


class UnsupportedTurnError(Exception):
    """The turn does something that the loop in C++ cannot do."""


class Buffer(NamedTuple):
    """Stands in for a tensor: a view of a block of memory."""

    block: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """In elements."""
    dtype: torch.dtype

    @property
    def start(self) -> int:
        """Bytes from the beginning of the block."""
        return self.offset * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes from its first element to its last."""
        if 0 in self.size:
            return self.dtype.itemsize
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def is_like(self, other: "Buffer") -> bool:
        """Whether both lay their elements out in the same way."""
        mine, theirs = ([(n, s) for n, s in zip(b.size, b.stride, strict=True) if n != 1] for b in (self, other))
        return mine == theirs and self.dtype == other.dtype


Call = tuple[str, list[Buffer], tuple[float, ...]]
"""A kernel by its number, or a product of matrices by its name; its buffers; and factors."""

PRODUCTS = {"mm": 3, "bmm": 3, "addmm": 4, "baddbmm": 4}
"""Operators that inductor leaves to torch, with the number of tensors that they take, the result included."""


class Recorder:
    """Calls a function made by inductor with stand-ins, and writes down what it does."""

    def __init__(self, run: Any, example: Sequence[Tensor]):
        if not isinstance(run, types.MethodType):
            raise UnsupportedTurnError("inductor made no plain function.")
        self.blocks, self.calls = list[int](), list[Call]()
        """Bytes of every block of memory, those of the arguments first; and what is done with them."""
        self.kernels, self.constants = list[Any](), dict[int, Tensor]()
        self.inputs = [self._new(tuple(value.shape), value.stride(), value.dtype) for value in example]
        code, names = run.__func__.__code__, run.__func__.__globals__
        known: dict[str, Any] = {
            **names,
            "empty_strided_cpu": self._new,
            "reinterpret_tensor": self._reinterpret,
            "assert_size_stride": lambda *values: None,  # `_check` compares all layouts
            "extern_kernels": types.SimpleNamespace(**{name: self._product(name) for name in PRODUCTS}),
        }
        for name in code.co_names:
            if isinstance(kernel := names.get(name), types.BuiltinFunctionType) and kernel.__name__ == "kernel":
                known[name] = self._kernel(kernel)
        try:
            outputs = types.FunctionType(code, known)(run.__self__, list(self.inputs))
        except Exception as error:  # whatever refuses a stand-in cannot be written down
            raise UnsupportedTurnError(str(error)) from error
        self.outputs = [self._buffer(value) for value in outputs]

    def _new(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        buffer = Buffer(len(self.blocks), size, stride, 0, dtype)
        self.blocks.append(buffer.num_bytes)
        return buffer

    def _reinterpret(self, value: Any, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Buffer:
        buffer = self._buffer(value)
        return buffer._replace(size=size, stride=stride, offset=buffer.offset + offset)

    def _buffer(self, value: Any) -> Buffer:
        if isinstance(value, Tensor):  # a constant of the graph
            buffer = self._new(tuple(value.shape), value.stride(), value.dtype)
            self.constants[buffer.block] = value
            return buffer
        if not isinstance(value, Buffer):
            raise UnsupportedTurnError(f"a kernel takes {type(value).__name__}.")
        return value

    def _kernel(self, kernel: Any) -> Callable[..., None]:
        number = str(len(self.kernels))
        self.kernels.append(kernel)
        return lambda *buffers: self.calls.append((number, [self._buffer(value) for value in buffers], ()))

    def _product(self, name: str) -> Callable[..., None]:
        def product(*values: Any, out: Any, alpha: float = 1, beta: float = 1) -> None:
            buffers = [self._buffer(value) for value in (out, *values)]
            if len(buffers) != PRODUCTS[name]:
                raise UnsupportedTurnError(f"{name} with {len(values)} tensors.")
            self.calls.append((name, buffers, (beta, alpha) if len(buffers) == 4 else ()))

        return product
