"""A compiled turn repeated without Python between the kernels: for small densities, where Python is most of the time.

Inductor turns a graph into C++ kernels and a Python function that allocates buffers and calls them. That function is
called once with stand-ins instead of tensors, which write down what it would do: which kernel reads and writes which
buffer. From the list a loop in C++ is made that does the same for all turns, in memory that is allocated once.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcvae.core.recording import PRODUCTS, Buffer, Call, Recorder, UnsupportedTurnError

__all__ = ["Kinds", "NativeTurn", "Result"]


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


class _Place(NamedTuple):
    """Where a block is: in which piece of memory, and how many bytes from the beginning of a turn's slot."""

    memory: int
    start: int = 0


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
        recorder = Recorder(run, example)
        inputs, outputs = len(example), recorder.outputs
        first_saved = kinds.handed + kinds.reported
        handed, reported = outputs[: kinds.handed], outputs[kinds.handed : first_saved]
        before = range(kinds.saved, kinds.saved + kinds.carried)
        _check(recorder, handed, reported, recorder.inputs[before.start : before.stop])
        if other is not None and not all(map(Buffer.is_like, recorder.inputs, other.left)):
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

        def place_of(buffer: Buffer) -> _Place:
            return places[buffer.block]._replace(start=places[buffer.block].start + buffer.start)

        self.kinds = kinds
        self.left: list[Buffer] = outputs[first_saved:]
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


def _check(recorder: Recorder, handed: list[Buffer], reported: list[Buffer], carried: list[Buffer]) -> None:
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
    calls: Sequence[Call],
    places: dict[int, _Place],
    still: set[int],
    copies: list[tuple[int, int]],
    carried: int,
    turn: NativeTurn,
) -> str:
    """C++ that repeats the calls; tensors in memory that stays where it is are made once."""
    once, every, clean, after = list[str](), list[str](), list[str](), list[str]()
    made = dict[Any, str]()

    def address(buffer: Buffer) -> str:
        place = places[buffer.block]
        return f"at[{place.memory}] + {place.start + buffer.start}"

    def tensor(buffer: Buffer) -> str:
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
        if name in PRODUCTS:
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
