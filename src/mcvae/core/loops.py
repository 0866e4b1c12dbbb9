"""A function compiled once and repeated: a scan with a gradient.

torch.compile unrolls a loop, so that compiling K moves takes K times as long; or it pays its own price at every call,
so that K calls of one compiled move are slow. Here torch captures one turn of the loop, with everything that it reads,
and checks once per loop that what it captured still holds. The turn and its gradient are compiled, and called K times
with nothing in between.
"""

import re
import threading
import time
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from mcvae.core.capturing import refuse_own_gradients, without_trace
from mcvae.core.parts import Part

__all__ = ["CompiledLoop", "Repeated"]

Values = tuple[Any, ...]
"""Tensors in a fixed order; None where one is absent."""
Function = Callable[..., tuple[Values, Values]]


class Repeated(NamedTuple):
    """What a loop of K turns leaves behind."""

    carry: Values
    """What the last turn hands on."""
    record: Values
    """What every turn reports, `[K, ...]` each."""
    begun: Values = ()
    """What was reported before the first turn."""


class CompiledLoop:
    """Repeats `turn(fixed, carry, inputs) -> (carry, record)`, compiled.

    A turn is a pure function that computes all it returns. `fixed` may hold anything; tensors in it, also those that
    its functions close over, receive gradients. What a turn takes of the one before it hands on, in the same shape.
    Cheap operators are computed again for the gradient, so that memory grows with what costly ones compute.

    Args:
        turn: a function of the module, not of a class or another function.
        begin: `begin(fixed, start) -> (carry, record)`, what happens before the first turn; by default what the loop
            starts from is what the first turn takes.

    >>> def turn(factor, carry, inputs):
    ...     (total,), (x,) = carry, inputs
    ...     return (total + factor * x,), (2 * total,)
    >>> loop = CompiledLoop(turn)
    >>> loop.seconds  # nothing is compiled before the first call
    0.0
    """

    def __init__(self, turn: Function, begin: Function | None = None):
        self.turn, self.begin = turn, begin
        self.seconds = 0.0
        """Time that compiling has taken so far."""
        self._call: _Call | None = None
        self._lock = threading.Lock()
        self._examples = dict[Any, Values]()
        # The code is copied because torch counts recompilations per code object, and gives up after a few.
        own = types.FunctionType(_both.__code__.replace(), _both.__globals__, _both.__name__)
        self._captured: Any = torch.compile(
            own, backend=self._capture, fullgraph=True, dynamic=False, options={"guard_filter_fn": _guards_of_users}
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledLoop, (self.turn, self.begin)  # a copy compiles for itself

    def __call__(self, fixed: Any, start: Values, inputs: Values) -> Repeated:
        """Take as many turns as `inputs`, `[K, ...]` each, have rows. Threads wait for each other."""
        with self._lock:
            return self._called(fixed, start, inputs)

    def _called(self, fixed: Any, start: Values, inputs: Values) -> Repeated:
        # Views of their own tell apart what is passed from the same tensor in `fixed`.
        start = tuple(None if value is None else value.contiguous().view_as(value) for value in start)
        call = self._call = _Call(start, self._example(fixed, start), inputs)
        arguments = (self.begin, self.turn, fixed, start, call.carry, call.first)
        begin = time.perf_counter()
        try:
            with without_trace(), warnings.catch_warnings():
                # capturing, torch looks at gradients that nobody asked for
                warnings.filterwarnings("ignore", "The .grad attribute")
                returned = self._captured(*arguments)
                if call.discovered is not None:
                    call.discovered.find_layout(call, returned)
                    self._captured(*arguments)
                    self.seconds += time.perf_counter() - begin
        finally:
            self._call = None
        assert call.result is not None
        return call.result

    def _example(self, fixed: Any, start: Values) -> Values:
        """Tensors like those that the first turn takes, to capture it with."""
        if self.begin is None:
            return start
        key = (torch.is_grad_enabled(), *(v if v is None else (v.shape, v.dtype, v.device) for v in start))
        if key not in self._examples:
            carry, _ = self.begin(fixed, start)
            self._examples[key] = tuple(
                None if value is None else value.detach().clone().requires_grad_(value.requires_grad) for value in carry
            )
        return self._examples[key]

    def _capture(self, module: GraphModule, example: Sequence[Tensor]) -> Callable[..., Any]:
        """Called by torch for every turn that it captures: as often as shapes or types are new."""
        graph = _Graph(module)

        def run(*arguments: Tensor) -> Any:
            call = self._call
            assert call is not None
            if graph.turn is None:  # one turn as it is, to see which argument is what
                call.discovered, call.arguments, call.outputs = graph, arguments, tuple(module(*arguments))
                return call.outputs
            call.result = graph.repeat(arguments, call)
            return [None] * graph.num_outputs  # the result has more than the outputs of one turn

        return run


def _both(begin: Any, turn: Any, fixed: Any, start: Values, carry: Values, inputs: Values) -> tuple[Any, Any]:
    """What torch captures at once, so that it checks once whether all of it still holds."""
    return ((), ()) if begin is None else begin(fixed, start), turn(fixed, carry, inputs)


def _guards_of_users(guards: Sequence[Any]) -> list[bool]:
    """Leave out checks that the code of torch, and of this room, is still the same: there are hundreds."""
    return [not _CODE.match(guard.name) for guard in guards]


_CODE = re.compile(r"(dict\()?(G\['__(import_torch|import_mcvae_dot_core|builtins)|__import__\('torch'\))")


class _Call:
    """One call of a loop."""

    arguments: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    def __init__(self, start: Values, carry: Values, inputs: Values):
        self.start, self.carry, self.inputs = start, carry, inputs
        self.first = tuple(None if value is None else value[0] for value in inputs)
        self.discovered: _Graph | None = None
        self.result: Repeated | None = None


class _Graph:
    """What torch captured, in two parts: what happens before the first turn, and a turn."""

    def __init__(self, module: GraphModule):
        self.module = module
        self.num_outputs = 0
        self.turn: Part | None = None
        self.begin: Part | None = None
        self._compiled = False

    @property
    def differentiable(self) -> set[int]:
        """Places of the results that have a gradient."""
        assert self.turn is not None
        size = len(self._handed) + len(self._record)
        first = set() if self.begin is None else self.begin.differentiable
        return self.turn.differentiable | {size + i - len(self._begun) for i in first if i >= len(self._begun)}

    def find_layout(self, call: _Call, returned: tuple[tuple[Values, Values], tuple[Values, Values]]) -> None:
        """Recognise what was passed and what was returned by identity."""
        refuse_own_gradients(self.module)

        def places(values: Values, among: Sequence[Tensor]) -> dict[int, int]:
            found = ((i, next((j for j, other in enumerate(among) if other is v), None)) for i, v in enumerate(values))
            return {i: place for i, place in found if place is not None}

        (begun, first_record), (handed, record) = (
            [places(values, call.outputs) for values in pair] for pair in returned
        )
        for values, known in zip((*returned[0], *returned[1]), (begun, first_record, handed, record), strict=True):
            if len(known) < sum(value is not None for value in values):
                raise NotImplementedError("a turn returns something that it did not compute.")
        carry, inputs = places(call.carry, call.arguments), places(call.first, call.arguments)
        if not carry.keys() <= handed.keys():
            raise NotImplementedError("a turn takes something that it does not hand on.")
        self.num_outputs, self._sizes = len(call.outputs), [len(values) for pair in returned for values in pair]
        self._carry, self._read = carry, list(inputs)
        self._handed, self._record = [*carry, *(slot for slot in handed if slot not in carry)], list(record)
        outputs = [*(handed[slot] for slot in self._handed), *record.values()]
        self.turn = Part(self.module, outputs, len(handed), list(carry.values()), list(inputs.values()))
        self._begun, self._first_record = list(begun), list(first_record)
        outputs = [*begun.values(), *first_record.values()]
        self.begin = Part(self.module, outputs, len(outputs), [], []) if outputs else None
        inside = {*carry.values(), *inputs.values()} if outputs else {*inputs.values()}
        self._outside = [place for place in range(len(call.arguments)) if place not in inside]

    def repeat(self, arguments: tuple[Tensor, ...], call: _Call) -> Repeated:
        """Take all turns; differentiable if anything among the arguments needs a gradient."""
        assert self.turn is not None
        differentiable = torch.is_grad_enabled() and any(argument.requires_grad for argument in arguments)
        if not self._compiled:
            with torch.random.fork_rng():  # inductor draws example values
                for part in (self.begin, self.turn):
                    if part is not None:
                        part.compile(arguments, differentiable)
            self._compiled = True
        rows = [call.inputs[i] for i in self._read]
        number = len(next(value for value in call.inputs if value is not None))
        outside = [arguments[place] for place in self._outside]
        if differentiable:
            flat = _Repeat.apply(self, number, len(rows), *rows, *outside)  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                flat = self.run(number, rows, outside)[0]
        entries = iter(flat)

        def values(size: int, known: Sequence[int]) -> Values:
            found = dict(zip(known, entries, strict=False)) if known else {}
            return tuple(found.get(i) for i in range(size))

        sizes = self._sizes
        carry, record = values(sizes[2], self._handed), values(sizes[3], self._record)
        return Repeated(carry, record, values(sizes[1], self._first_record))

    def run(self, number: int, rows: Sequence[Tensor], outside: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """What is handed on and reported, and what the gradient needs."""
        assert self.turn is not None
        by_place = dict(zip(self._outside, outside, strict=True))
        first, saved_first = list[Tensor](), None
        carried = [by_place[place] for place in self._carry.values()] if self.begin is None else []
        if self.begin is not None:
            begun, _, saved_first = self.begin.run(1, [], [], by_place)
            carry = dict(zip(self._begun, begun, strict=False))
            carried, first = [carry[slot] for slot in self._carry], begun[len(self._begun) :]
        handed, reported, saved = self.turn.run(number, carried, rows, by_place)
        return [*handed, *reported, *first], (saved_first, saved)

    def differentiate(
        self, number: int, saved: Any, outside: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients of rows, and of what was passed from outside."""
        assert self.turn is not None
        by_place, found = dict(zip(self._outside, outside, strict=True)), dict[int, Tensor]()
        size = len(self._handed) + len(self._record)
        of_carry, of_rows = self.turn.differentiate(number, saved[1], gradients[:size], by_place, found)
        if self.begin is None:
            pairs = zip(self._carry.values(), of_carry, strict=True)
            found |= {place: gradient for place, gradient in pairs if gradient is not None}
        else:
            known = dict(zip(self._carry, of_carry, strict=True))
            of_first = [*(known.get(slot) for slot in self._begun), *gradients[size:]]
            self.begin.differentiate(1, saved[0], of_first, by_place, found)
        return of_rows, [found.get(place) for place in self._outside]


class _Repeat(torch.autograd.Function):
    """All turns of a loop as one operator."""

    @staticmethod
    def forward(ctx: Any, graph: _Graph, number: int, num_rows: int, *tensors: Tensor) -> Any:
        flat, ctx.saved = graph.run(number, tensors[:num_rows], tensors[num_rows:])
        ctx.graph, ctx.number, ctx.num_rows = graph, number, num_rows
        ctx.save_for_backward(*tensors)  # torch then notices if one is changed in place
        ctx.set_materialize_grads(False)
        known = graph.differentiable
        ctx.mark_non_differentiable(*(value for place, value in enumerate(flat) if place not in known))
        return tuple(flat)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():  # with create_graph=True
            raise RuntimeError("a compiled chain has no second derivatives. Build the objective without compile=True.")
        of_rows, of_outside = ctx.graph.differentiate(
            ctx.number, ctx.saved, ctx.saved_tensors[ctx.num_rows :], gradients
        )
        return None, None, None, *of_rows, *of_outside
