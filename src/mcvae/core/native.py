"""A compiled turn repeated without Python between the kernels: for small densities, where Python is most of the time.

Inductor turns a graph into C++ kernels and a Python function that allocates buffers and calls them. That function is
called once with stand-ins instead of tensors, which write down what it would do: which kernel reads and writes which
buffer. From the list a loop in C++ is made that does the same for all turns, in memory that is allocated once.
"""

import ctypes
import math
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Kinds", "NativeTurn", "Result", "UnsupportedTurnError"]


class Kinds(NamedTuple):
    """How many arguments and results of each kind a turn has, in this order."""

    saved: int
    """Arguments that the turn in the other direction saved."""
    carried: int
    """Arguments that are the first results of the turn before."""
    rows: int
    """Arguments that every turn has its own of; what is left is fixed."""
    handed: int
    """Results of which the last turn's are returned, those carried to the next turn first."""
    reported: int
    """Results of which every turn's are returned; what is left is saved for the other direction."""
    backwards: bool = False
    """Whether turns are taken from the last row to the first."""


class Result(NamedTuple):
    """What all turns leave behind."""

    handed: list[Tensor]
    reported: list[Tensor]
    saved: Any


class UnsupportedTurnError(Exception):
    """The turn does something that the loop in C++ cannot do."""


class _Buffer(NamedTuple):
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

    def is_like(self, other: "_Buffer") -> bool:
        """Whether both lay their elements out in the same way."""
        mine, theirs = ([(n, s) for n, s in zip(b.size, b.stride, strict=True) if n != 1] for b in (self, other))
        return mine == theirs and self.dtype == other.dtype


class _Place(NamedTuple):
    """Where a block is: in which piece of memory, and how many bytes from the beginning of a turn's slot."""

    memory: int
    start: int = 0


_Call = tuple[str, list[_Buffer], tuple[float, ...]]
"""A kernel by its number, or a product of matrices by its name; its buffers; and factors."""

_PRODUCTS = {"mm": 3, "bmm": 3, "addmm": 4, "baddbmm": 4}
"""Operators that inductor leaves to torch, with the number of tensors that they take, the result included."""


class _Recorder:
    """Calls a function made by inductor with stand-ins, and writes down what it does."""

    def __init__(self, run: Any, example: Sequence[Tensor]):
        if not isinstance(run, types.MethodType):
            raise UnsupportedTurnError("inductor made no plain function.")
        self.blocks, self.calls = list[int](), list[_Call]()
        """Bytes of every block of memory, those of the arguments first; and what is done with them."""
        self.kernels, self.constants = list[Any](), dict[int, Tensor]()
        self.inputs = [self._new(tuple(value.shape), value.stride(), value.dtype) for value in example]
        code, names = run.__func__.__code__, run.__func__.__globals__
        known: dict[str, Any] = {
            **names,
            "empty_strided_cpu": self._new,
            "reinterpret_tensor": self._reinterpret,
            "assert_size_stride": lambda *values: None,  # `_check` compares all layouts
            "extern_kernels": types.SimpleNamespace(**{name: self._product(name) for name in _PRODUCTS}),
        }
        for name in code.co_names:
            if isinstance(kernel := names.get(name), types.BuiltinFunctionType) and kernel.__name__ == "kernel":
                known[name] = self._kernel(kernel)
        try:
            outputs = types.FunctionType(code, known)(run.__self__, list(self.inputs))
        except Exception as error:  # whatever refuses a stand-in cannot be written down
            raise UnsupportedTurnError(str(error)) from error
        self.outputs = [self._buffer(value) for value in outputs]

    def _new(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> _Buffer:
        buffer = _Buffer(len(self.blocks), size, stride, 0, dtype)
        self.blocks.append(buffer.num_bytes)
        return buffer

    def _reinterpret(self, value: Any, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> _Buffer:
        buffer = self._buffer(value)
        return buffer._replace(size=size, stride=stride, offset=buffer.offset + offset)

    def _buffer(self, value: Any) -> _Buffer:
        if isinstance(value, Tensor):  # a constant of the graph
            buffer = self._new(tuple(value.shape), value.stride(), value.dtype)
            self.constants[buffer.block] = value
            return buffer
        if not isinstance(value, _Buffer):
            raise UnsupportedTurnError(f"a kernel takes {type(value).__name__}.")
        return value

    def _kernel(self, kernel: Any) -> Callable[..., None]:
        number = str(len(self.kernels))
        self.kernels.append(kernel)
        return lambda *buffers: self.calls.append((number, [self._buffer(value) for value in buffers], ()))

    def _product(self, name: str) -> Callable[..., None]:
        def product(*values: Any, out: Any, alpha: float = 1, beta: float = 1) -> None:
            buffers = [self._buffer(value) for value in (out, *values)]
            if len(buffers) != _PRODUCTS[name]:
                raise UnsupportedTurnError(f"{name} with {len(values)} tensors.")
            self.calls.append((name, buffers, (beta, alpha) if len(buffers) == 4 else ()))

        return product


class NativeTurn:
    """Repeats a turn that inductor compiled, on the CPU.

    Args:
        run: the function that inductor made.
        example: tensors like its arguments.
        kinds: what its arguments and results are.
        other: the turn in the other direction, which saved the first arguments.

    Raises:
        UnsupportedTurnError: if the turn cannot be repeated like this.
    """

    def __init__(self, run: Any, example: Sequence[Tensor], kinds: Kinds, other: "NativeTurn | None" = None):
        if any(value.device.type != "cpu" for value in example):
            raise UnsupportedTurnError("it does not run on the CPU.")
        recorder = _Recorder(run, example)
        inputs, outputs = len(example), recorder.outputs
        first_saved = kinds.handed + kinds.reported
        handed, reported = outputs[: kinds.handed], outputs[kinds.handed : first_saved]
        before = range(kinds.saved, kinds.saved + kinds.carried)
        _check(recorder, handed, reported, recorder.inputs[before.start : before.stop])
        if other is not None and not all(map(_Buffer.is_like, recorder.inputs, other.left)):
            raise UnsupportedTurnError("it takes what was saved in another layout.")

        # Pieces of memory: 0 is scratch, 1 what turns take of each other, 2 what they leave; then reports, arguments.
        single = [*(buffer.block for buffer in reported), *range(before.stop, inputs), *recorder.constants]
        places = {block: _Place(3 + i) for i, block in enumerate(single)}
        self._borrowed = list[int]()
        if other is not None:  # what it saved lies in its pieces of memory
            self._borrowed = sorted({place.memory for place in other.saved})
            own = {memory: 3 + len(single) + i for i, memory in enumerate(self._borrowed)}
            places |= {block: _Place(own[p.memory], p.start) for block, p in enumerate(other.saved)}
        left = {buffer.block for buffer in outputs if buffer.block >= inputs} - places.keys()
        self._scratch = self._slot = 0
        for block in range(inputs, len(recorder.blocks)):
            size = -(-recorder.blocks[block] // 64) * 64
            if block in left:
                places[block], self._slot = _Place(2, self._slot), self._slot + size
            elif block not in places:
                places[block], self._scratch = _Place(0, self._scratch), self._scratch + size
        for block, buffer in zip(before, handed, strict=False):
            places[block] = _Place(1, places[buffer.block].start + buffer.start)

        def place_of(buffer: _Buffer) -> _Place:
            return places[buffer.block]._replace(start=places[buffer.block].start + buffer.start)

        self.kinds = kinds
        self.left: list[_Buffer] = outputs[first_saved:]
        self.saved: list[_Place] = [place_of(buffer) for buffer in self.left]
        self._handed = [(b.size, b.stride, b.dtype) for b in handed]
        self._reported = [(b.size, (math.prod(b.size), *b.stride), b.dtype) for b in reported]
        self._constants = list(recorder.constants.values())
        self._pairs = len(single) + len(self._borrowed)
        still = {0} | {places[b].memory for b in (*range(before.stop + kinds.rows, inputs), *recorder.constants)}
        copies = [(place_of(buffer).start, buffer.num_bytes) for buffer in handed]
        source = _source(recorder.calls, places, still, copies, kinds.carried, self)

        from torch._inductor.codecache import CppCodeCache

        self._repeat: Any = CppCodeCache.load(source).repeat
        self._repeat.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        self._libraries = [ctypes.CDLL(kernel.__self__.__file__) for kernel in recorder.kernels]
        addresses = [ctypes.cast(library.kernel, ctypes.c_void_p) for library in self._libraries]
        self._kernels = (ctypes.c_void_p * max(1, len(addresses)))(*addresses)
        self._table = ctypes.c_int64 * (kinds.carried + kinds.handed + 2 * self._pairs)

    def __call__(
        self,
        number: int,
        saved: "_Saved | None",
        carried: Sequence[Tensor],
        rows: Sequence[Tensor],
        fixed: Sequence[Tensor],
    ) -> Result:
        """Take `number` turns. `rows` are `[number, ...]`; `saved` is what the turns in the other direction left."""
        slots = number + 1 if self.saved else 2  # without a gradient the last two are enough
        memory = _empty((self._scratch + slots * self._slot,), (1,), torch.uint8)
        kept, slot = memory.data_ptr() + self._scratch, self._slot
        handed = [_empty(*layout) for layout in self._handed]
        reported = [_empty((number, *size), stride, dtype) for size, stride, dtype in self._reported]
        at = [(value.data_ptr(), value.stride(0) * value.itemsize) for value in (*reported, *rows)]
        if self.kinds.backwards:
            at = [(base + (number - 1) * step, -step) for base, step in at]
        at += [(value.data_ptr(), 0) for value in (*fixed, *self._constants)]
        if saved is not None:
            at += [(base + (number - 1) * step, -step) for base, step in map(saved.at.__getitem__, self._borrowed)]
        bases, steps = zip(*at, strict=True) if at else ((), ())
        table = self._table(*map(Tensor.data_ptr, carried), *map(Tensor.data_ptr, handed), *bases, *steps)
        if self._repeat(number, slots, memory.data_ptr(), table, self._kernels):
            raise RuntimeError("a product of matrices failed in a compiled chain.")
        if not self.saved:
            return Result(handed, reported, None)
        # Others may be given other memory, as by `parameter.data = ...`, before the gradient is taken.
        owners = (memory, *(value.detach() for value in (*reported, *rows, *fixed)))
        return Result(handed, reported, _Saved([(0, 0), (kept, slot), (kept + slot, slot), *at], owners))


_empty = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]


class _Saved(NamedTuple):
    """What turns saved."""

    at: list[tuple[int, int]]
    """Where every piece of memory is in the first turn, and how far it moves from turn to turn."""
    owners: tuple[Tensor, ...]
    """Tensors to which the memory belongs."""


def _check(recorder: _Recorder, handed: list[_Buffer], reported: list[_Buffer], carried: list[_Buffer]) -> None:
    """Refuse turns whose results cannot be written where the next turn, or the caller, looks for them."""
    inputs = len(recorder.inputs)
    if any(buffer.block < inputs or buffer.block in recorder.constants for buffer in (*handed, *reported)):
        raise UnsupportedTurnError("it returns what it did not compute.")
    if not all(mine.is_like(theirs) for mine, theirs in zip(handed, carried, strict=False)):
        raise UnsupportedTurnError("what it hands on is laid out in another way than what it takes.")
    blocks = [buffer.block for buffer in reported]
    if len({*blocks, *(buffer.block for buffer in handed)}) < len(blocks) + len({b.block for b in handed}):
        raise UnsupportedTurnError("it reports something twice.")
    if any(recorder.blocks[b.block] != math.prod(b.size) * b.dtype.itemsize or b.offset for b in reported):
        raise UnsupportedTurnError("it reports a part of something.")


def _source(
    calls: Sequence[_Call],
    places: dict[int, _Place],
    still: set[int],
    copies: list[tuple[int, int]],
    carried: int,
    turn: NativeTurn,
) -> str:
    """C++ that repeats the calls; tensors in memory that stays where it is are made once."""
    once, every, clean, after = list[str](), list[str](), list[str](), list[str]()
    made = dict[Any, str]()

    def address(buffer: _Buffer) -> str:
        place = places[buffer.block]
        return f"at[{place.memory}] + {place.start + buffer.start}"

    def tensor(buffer: _Buffer) -> str:
        stays = places[buffer.block].memory in still
        key = (address(buffer), buffer.size, buffer.stride, buffer.dtype)
        if stays and key in made:
            return made[key]
        name = made[key] = f"tensor_{len(once) + len(every)}"
        shape = ", ".join(map(str, (*buffer.size, *buffer.stride)))
        dtype = str(buffer.dtype).removeprefix("torch.")
        (once if stays else every).append(
            f"static const int64_t shape_{name}[] = {{{shape}}};\n"
            f"AtenTensorHandle {name} = make({address(buffer)}, {len(buffer.size)}, shape_{name}, "
            f"aoti_torch_dtype_{dtype}());"
        )
        (after if stays else clean).append(f"aoti_torch_delete_tensor_object({name});")
        return name

    for name, buffers, factors in calls:
        if name in _PRODUCTS:
            arguments = [*map(tensor, buffers), *map(str, map(float, factors))]
            every.append(f"failed |= aoti_torch_cpu_{name}_out({', '.join(arguments)});")
        else:
            kind = ", ".join(["void*"] * len(buffers))
            every.append(f"((void (*)({kind}))kernels[{name}])({', '.join(map(address, buffers))});")
    taken = [f"memcpy(kept + {at}, table[{i}], {size});" for i, (at, size) in enumerate(copies[:carried])]
    returned = [f"memcpy(table[{carried + i}], end + {at}, {size});" for i, (at, size) in enumerate(copies)]
    return _LOOP.format(
        number=turn._pairs,
        first=carried + len(copies),
        scratch=turn._scratch,
        slot=turn._slot,
        taken="\n  ".join(taken),
        once="\n  ".join(once),
        every="\n    ".join((*every, *clean)),
        after="\n  ".join((*after, *returned)),
    )


_LOOP = """
#include <cstring>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

static AtenTensorHandle make(void* data, int64_t dims, const int64_t* shape, int32_t dtype) {{
  AtenTensorHandle made = nullptr;
  aoti_torch_create_tensor_from_blob(data, dims, shape, shape + dims, 0, dtype, aoti_torch_device_type_cpu(), 0, &made);
  return made;
}}

// The table has what is carried, where to write what is handed on, where other memory begins, and how it moves.
extern "C" int repeat(int64_t turns, int64_t slots, char* memory, char** table, void** kernels) {{
  int failed = 0;
  char *at[3 + {number}], *kept = memory + {scratch}, **base = table + {first};
  const int64_t* step = (const int64_t*)(base + {number});
  at[0] = memory;
  for (int i = 0; i < {number}; ++i) at[3 + i] = base[i];
  {taken}
  {once}
  for (int64_t t = 0; t < turns; ++t) {{
    at[1] = kept + t % slots * {slot};
    at[2] = kept + (t + 1) % slots * {slot};
    {every}
    for (int i = 0; i < {number}; ++i) at[3 + i] += step[i];
  }}
  const char* end = kept + turns % slots * {slot};
  {after}
  return failed;
}}
"""
