"""A function compiled once and repeated: a scan with a gradient.

torch.compile unrolls a loop, so that compiling K moves takes K times as long; or it pays its own price at every call,
so that K calls of one compiled move are slow. Here torch captures one turn of the loop, with everything that it reads,
and checks once per loop that what it captured still holds. The turn and its gradient are compiled, and called K times
with nothing in between.
"""

import re
import time
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

__all__ = ["CompiledLoop", "Repeated"]

Values = tuple[Any, ...]
"""Tensors in a fixed order; None where one is absent."""
_Compiled = Callable[[list[Tensor]], Sequence[Tensor]]
Inputs = tuple[Tensor | Sequence[Tensor] | None, ...]
"""What turns read, in a fixed order: a tensor `[K, ...]`, or K tensors that need no gradient."""
Rows = Sequence[tuple[Tensor, ...]]
"""The inputs of every turn."""


class Repeated(NamedTuple):
    """What a loop of K turns leaves behind."""

    carry: Values
    """What the last turn hands on."""
    record: Values
    """What every turn reports, `[K, ...]` each."""


class CompiledLoop:
    """Repeats `turn(fixed, carry, inputs) -> (carry, record)`, compiled.

    A turn is a pure function that computes all it returns. `fixed` may hold anything; tensors in it, also those that
    its functions close over, receive gradients. What is carried keeps its shapes, unless
    there is one turn only. Cheap operators are
    computed again for the gradient, so that memory grows with what costly ones compute.

    Args:
        turn: a function without defaults and closures.

    >>> def turn(factor, carry, inputs):
    ...     (total,), (x,) = carry, inputs
    ...     return (total + factor * x,), (2 * total,)
    >>> loop = CompiledLoop(turn)
    >>> loop.seconds  # nothing is compiled before the first call
    0.0
    """

    def __init__(self, turn: Callable[[Any, Values, Values], tuple[Values, Values]]):
        self.turn = turn
        self.seconds = 0.0
        """Time that compiling has taken so far."""
        self._call: _Call | None = None
        # The code is copied because torch counts recompilations per code object, and gives up after a few.
        own = types.FunctionType(turn.__code__.replace(), turn.__globals__, turn.__name__)
        self._captured: Any = torch.compile(
            own, backend=self._capture, fullgraph=True, dynamic=False, options={"guard_filter_fn": _guards_of_users}
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledLoop, (self.turn,)  # a copy compiles for itself

    def __call__(self, fixed: Any, carry: Values, inputs: Inputs) -> Repeated:
        """Take as many turns as `inputs` have rows."""
        # Views of their own tell apart what is carried from the same tensor in `fixed`.
        carry = tuple(None if value is None else value.contiguous().view_as(value) for value in carry)
        call = self._call = _Call(carry, inputs)
        begin = time.perf_counter()
        try:
            with warnings.catch_warnings():  # capturing, torch looks at gradients that nobody asked for
                warnings.filterwarnings("ignore", "The .grad attribute")
                returned = self._captured(fixed, carry, call.first)
                if call.discovered is not None:
                    call.discovered.find_layout(call, returned)
                    self._captured(fixed, carry, call.first)
                    self.seconds += time.perf_counter() - begin
        finally:
            self._call = None
        assert call.result is not None
        return call.result

    def _capture(self, module: GraphModule, example: Sequence[Tensor]) -> Callable[..., Any]:
        """Called by torch for every turn that it captures: as often as shapes or types are new."""
        graph = _Graph(module)

        def run(*arguments: Tensor) -> Any:
            call = self._call
            assert call is not None
            if graph.layout is None:  # one turn as it is, to see which argument is what
                call.discovered, call.arguments, call.outputs = graph, arguments, tuple(module(*arguments))
                return call.outputs
            call.result = graph.repeat(arguments, call.inputs)
            return [None] * graph.num_outputs  # the result has more than the outputs of one turn

        return run


def _guards_of_users(guards: Sequence[Any]) -> list[bool]:
    """Leave out checks that the code of torch, and of this room, is still the same: there are hundreds."""
    return [not _CODE.match(guard.name) for guard in guards]


_CODE = re.compile(r"(dict\()?(G\['__(import_torch|import_mcvae_dot_core|builtins)|__import__\('torch'\))")


class _Call:
    """One call of a loop."""

    arguments: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    def __init__(self, carry: Values, inputs: Inputs):
        self.carry, self.inputs = carry, inputs
        self.first = tuple(None if value is None else value[0] for value in inputs)
        self.discovered: _Graph | None = None
        self.result: Repeated | None = None


class _Layout(NamedTuple):
    """How a turn is called: with what is carried, read and fixed; it returns what is handed on, then what is reported.

    A place is that of an argument or output in the graph that torch captured. What the graph does not use is left out.
    """

    taken: list[int]
    """Slots of `carry` that the turn uses; those that it hands on come first."""
    read: list[int]
    """Inputs that it uses."""
    arguments: list[int]
    """Places of all arguments: taken, read, fixed."""
    chained: int
    """The first so many arguments are the first so many outputs of the turn before."""
    handed: list[int]
    """Slots that the turn hands on."""
    reported: list[int]
    """Entries of the record that it reports."""
    outputs: list[int]
    """Places of all outputs: handed, reported."""
    num_slots: int
    num_reports: int


class _Gradient(NamedTuple):
    """A compiled gradient of a turn."""

    run: _Compiled
    """Takes what the turn saved, gradients of `outputs`, and sums so far for fixed arguments, to which it adds."""
    outputs: list[int]
    """Outputs that have a gradient."""
    zeros: list[Tensor]
    """Their gradients where nobody asked for them."""
    chained: int
    """The first so many gradients of arguments are those of the first so many `outputs` of the turn before."""
    carry: list[int]
    inputs: list[int]
    fixed: list[int]
    """Arguments that receive a gradient: those carried first, then the inputs, then the fixed ones."""


class _Graph:
    """One captured turn as a flat function of tensors, compiled when it is first repeated."""

    def __init__(self, module: GraphModule):
        self.module = module
        self.num_outputs = 0
        self.layout: _Layout | None = None
        self._forward: _Compiled | None = None
        self._gradient: _Gradient | None = None

    def find_layout(self, call: _Call, returned: tuple[Values, Values]) -> None:
        """Recognise what was passed to the turn, and what it returned, by identity."""

        def places(values: Values, among: Sequence[Tensor]) -> dict[int, int]:
            found = ((i, next((j for j, other in enumerate(among) if other is v), None)) for i, v in enumerate(values))
            return {i: place for i, place in found if place is not None}

        carry, inputs = places(call.carry, call.arguments), places(call.first, call.arguments)
        carried, record = (places(values, call.outputs) for values in returned)
        for values, known in zip(returned, (carried, record), strict=True):
            if len(known) < sum(value is not None for value in values):
                raise NotImplementedError("a turn returns something that it did not compute.")
        chained = [slot for slot in carry if slot in carried]
        taken = [*chained, *(slot for slot in carry if slot not in carried)]
        handed = [*chained, *(slot for slot in carried if slot not in carry)]
        fixed = [place for place in range(len(call.arguments)) if place not in {*carry.values(), *inputs.values()}]
        self.num_outputs = len(call.outputs)
        self.layout = _Layout(
            taken,
            list(inputs),
            [*(carry[slot] for slot in taken), *inputs.values(), *fixed],
            len(chained),
            handed,
            list(record),
            [*(carried[slot] for slot in handed), *record.values()],
            *map(len, returned),
        )

    def _turn(self, *flat: Tensor) -> list[Tensor]:
        """The captured graph, called as the layout says."""
        assert self.layout is not None
        arguments = dict(zip(self.layout.arguments, flat, strict=True))
        outputs = self.module(*(arguments[place] for place in range(len(arguments))))
        return [outputs[place] for place in self.layout.outputs]

    def repeat(self, captured: tuple[Tensor, ...], inputs: Inputs) -> Repeated:
        """Take all turns; differentiable if anything among the arguments needs a gradient."""
        layout = self.layout
        assert layout is not None
        arguments = [captured[place] for place in layout.arguments]
        if self._forward is None:
            with torch.random.fork_rng():  # inductor draws example values
                self._compile(arguments)
        read = [value for i in layout.read if (value := inputs[i]) is not None]
        columns = [value.detach().unbind() if isinstance(value, Tensor) else value for value in read]
        number = next(len(value) for value in inputs if value is not None)
        rows: Rows = list(zip(*columns, strict=True)) if columns else [()] * number
        state, fixed = arguments[: len(layout.taken)], arguments[len(layout.taken) + len(layout.read) :]
        if self._gradient is None:
            with torch.no_grad():
                flat: Sequence[Tensor] = self.run(state, rows, fixed)[0]
        else:
            stacked = [read[place - len(state)] for place in self._gradient.inputs]
            flat = _Repeat.apply(self, rows, len(state), len(fixed), *state, *fixed, *stacked)  # type: ignore[no-untyped-call]
        carried = dict(zip(layout.handed, flat, strict=False))
        reported = dict(zip(layout.reported, flat[len(carried) :], strict=True))
        return Repeated(
            tuple(carried.get(slot) for slot in range(layout.num_slots)),
            tuple(reported.get(entry) for entry in range(layout.num_reports)),
        )

    def run(
        self, state: Sequence[Tensor], rows: Rows, fixed: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Sequence[Tensor]]]:
        """What the last turn hands on and, stacked, what all turns report; and what every turn saved."""
        assert self.layout is not None
        assert self._forward is not None
        forward, chained = self._forward, self.layout.chained
        handed, size = len(self.layout.handed), len(self.layout.outputs)
        current = state
        outputs: Sequence[Tensor] = ()
        reports, saved = list[Sequence[Tensor]](), list[Sequence[Tensor]]()
        for row in rows:
            outputs = forward([*current, *row, *fixed])
            current = outputs[:chained]
            reports.append(outputs[handed:size])
            saved.append(outputs[size:])
        return [*outputs[:handed], *map(torch.stack, zip(*reports, strict=True))], saved

    def _compile(self, arguments: list[Tensor]) -> None:
        assert self.layout is not None
        layout, plain = self.layout, [argument.detach() for argument in arguments]
        if not torch.is_grad_enabled() or not any(argument.requires_grad for argument in arguments):
            traced, mode = _traced(self._turn, plain)
            self._forward = _compiled(traced, mode)
            return
        size = len(layout.taken)
        inputs = [i for i in range(size, size + len(layout.read)) if arguments[i].requires_grad]
        fixed = [i for i in range(size + len(layout.read), len(plain)) if arguments[i].requires_grad]
        floating = [i for i in range(size) if plain[i].is_floating_point()]

        def outputs_of(primals: Sequence[Tensor]) -> tuple[list[Tensor], Sequence[Tensor]]:
            wanted = {*floating, *inputs, *fixed}
            leaves = [value.detach().requires_grad_(place in wanted) for place, value in enumerate(primals)]
            return leaves, self._turn(*leaves)

        with torch.enable_grad():
            outputs = outputs_of(plain)[1]
        differentiable = [i for i, value in enumerate(outputs) if value.requires_grad]
        chained = [i for i in differentiable if i < layout.chained]
        carry = [*chained, *(i for i in floating if i not in chained)]
        own = len(carry) + len(inputs)  # gradients of every turn; the rest is summed over the turns

        def joint(*flat: Tensor) -> list[Tensor]:
            size = len(plain) + len(differentiable)
            of_outputs, sums = flat[len(plain) : size], flat[size:]
            with torch.enable_grad():
                leaves, outputs = outputs_of(flat[: len(plain)])
                found = torch.autograd.grad(
                    [outputs[i] for i in differentiable],
                    [leaves[place] for place in (*carry, *inputs, *fixed)],
                    of_outputs,
                    materialize_grads=True,
                )
            totals = [total + value for total, value in zip(sums, found[own:], strict=True)]
            return [*(value.detach() for value in outputs), *found[:own], *totals]

        zeros = [torch.zeros_like(outputs[i], memory_format=torch.contiguous_format) for i in differentiable]
        sums = [torch.zeros_like(plain[place]) for place in fixed]
        traced, mode = _traced(joint, [*plain, *(value.detach() for value in zeros), *sums])
        forward, backward = _partitioned(traced, len(plain), len(layout.outputs), mode)
        self._forward = _compiled(forward, mode)
        self._gradient = _Gradient(_compiled(backward, mode), differentiable, zeros, len(chained), carry, inputs, fixed)

    def backward(
        self, saved: list[Sequence[Tensor]], fixed: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> tuple[dict[int, Tensor], list[Tensor]]:
        """Gradients of what was carried into the first turn and of what is fixed, by argument; and of inputs."""
        assert self.layout is not None
        assert self._gradient is not None
        run, outputs, zeros, chained, carry, inputs, summed = self._gradient
        handed, first = len(self.layout.handed), len(self.layout.taken) + len(self.layout.read)
        last, columns = list[Tensor](), list[Sequence[Tensor]]()
        for place, zero in zip(outputs, zeros, strict=True):
            gradient = gradients[place]
            if place < handed:
                last.append(zero if gradient is None else gradient.contiguous())
            else:
                columns.append([zero] * len(saved) if gradient is None else gradient.contiguous().unbind())
        reports = list(zip(*columns, strict=True)) if columns else [()] * len(saved)
        idle = zeros[chained : len(last)]  # nothing after a turn but the last depends on these
        own = len(carry) + len(inputs)
        sums: Sequence[Tensor] = [torch.zeros_like(fixed[place - first]) for place in summed]
        tangents: Sequence[Tensor] = last
        found: Sequence[Tensor] = ()
        per_turn = list[Sequence[Tensor]]()
        for turn in reversed(range(len(saved))):
            found = run([*saved[turn], *tangents, *reports[turn], *sums])
            tangents = [*found[:chained], *idle]
            sums = found[own:]
            per_turn.append(found[len(carry) : own])
        by_argument = dict(zip((*carry, *summed), (*found[: len(carry)], *sums), strict=True))
        return by_argument, [torch.stack(turns[::-1]) for turns in zip(*per_turn, strict=True)]


class _Repeat(torch.autograd.Function):
    """All turns of a loop as one operator."""

    @staticmethod
    def forward(ctx: Any, graph: _Graph, rows: Rows, taken: int, number: int, *tensors: Tensor) -> Any:
        assert graph._gradient is not None
        flat, ctx.saved = graph.run(tensors[:taken], rows, tensors[taken : taken + number])
        ctx.graph, ctx.taken, ctx.number = graph, taken, number
        ctx.save_for_backward(*tensors[: taken + number])  # torch then notices if one is changed in place
        ctx.set_materialize_grads(False)
        known = set(graph._gradient.outputs)
        # What is returned will know `ctx`, so `ctx` must not know it: that circle would never be freed.
        flat = [value.detach() for value in flat]
        ctx.mark_non_differentiable(*(value for place, value in enumerate(flat) if place not in known))
        return tuple(flat)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():  # with create_graph=True
            raise RuntimeError("a compiled chain has no second derivatives. Build the objective without compile=True.")
        graph, taken = ctx.graph, ctx.taken
        found, of_inputs = graph.backward(ctx.saved, ctx.saved_tensors[taken:], gradients)
        skipped = len(graph.layout.read)
        of_fixed = [found.get(taken + skipped + i) for i in range(ctx.number)]
        return None, None, None, None, *(found.get(i) for i in range(taken)), *of_fixed, *of_inputs


def _traced(function: Callable[..., Sequence[Tensor]], example: list[Tensor]) -> tuple[GraphModule, Any]:
    """A function of tensors as a graph of pure operators, and the fake tensors' mode that it was traced in."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:  # and with gradients on or off as they were when torch captured the turn, which left that out
        fake = [mode.from_tensor(value) for value in example]
        traced = make_fx(function, decomposition_table=select_decomp_table())(*fake)
        if any(operator._schema.is_mutable for operator in _operators(traced)):  # inductor takes pure functions
            traced = make_fx(torch.func.functionalize(traced))(*fake)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    for operator in _operators(traced):
        if torch.Tag.nondeterministic_seeded in operator.tags:
            raise NotImplementedError(f"the model draws random numbers ({operator}), which a chain cannot repeat.")
        if operator._schema.is_mutable:
            raise NotImplementedError(f"the model changes one of its tensors in place ({operator}).")
    return traced, mode


def _partitioned(joint: GraphModule, num_inputs: int, num_outputs: int, mode: Any) -> tuple[GraphModule, GraphModule]:
    """Split a turn and its gradient: cheap operators are computed again, the results of others saved."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    for number, node in enumerate(joint.graph.find_nodes(op="placeholder")):  # it goes by these names
        node.target = f"{'primals' if number < num_inputs else 'tangents'}_{number}"
    with mode:
        return min_cut_rematerialization_partition(joint, None, num_fwd_outputs=num_outputs)


def _compiled(traced: GraphModule, mode: Any) -> _Compiled:
    """Let inductor compile a graph: a call costs what its kernels cost."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    fake = [node.meta["val"] for node in traced.graph.find_nodes(op="placeholder")]
    with V.set_fake_mode(mode), tracing(TracingContext(mode)), config.patch(size_asserts=False):
        compiled: Any = compile_fx_inner(traced, fake)
    # Its own call opens contexts for profiling and tuning, which costs as much as a small move.
    run: _Compiled = getattr(compiled, "current_callable", None) or compiled
    return run


def _operators(traced: GraphModule) -> list[torch._ops.OpOverload]:
    return [node.target for node in traced.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
