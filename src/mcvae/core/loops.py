"""A function compiled once and repeated: a scan with a gradient.

torch.compile unrolls a loop, so that compiling K moves takes K times as long; or it pays its own price at every call,
so that K calls of one compiled move are slow. Here torch captures one turn of the loop, with everything that it reads,
and checks once per loop that what it captured still holds. The turn and its gradient are compiled, and called K times
with nothing in between.
"""

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
        self._captured: Any = torch.compile(own, backend=self._capture, fullgraph=True, dynamic=False)

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
    """Where the parts of a turn are among a graph's arguments and outputs; None where the graph has no need of one."""

    carry: list[int | None]
    inputs: list[int | None]
    fixed: list[int]
    carried: list[int | None]
    record: list[int | None]

    @property
    def handed_on(self) -> list[int]:
        """Outputs that the next turn takes, each once."""
        return sorted({place for place in self.carried if place is not None})

    @property
    def reported(self) -> list[int]:
        """Outputs that are kept of every turn, each once."""
        return sorted({place for place in self.record if place is not None})

    def source(self, argument: int) -> int | None:
        """The output that becomes this argument of the next turn."""
        return self.carried[self.carry.index(argument)]


class _Gradient(NamedTuple):
    """A compiled gradient of a turn."""

    run: _Compiled
    """Takes what the turn saved, gradients of `outputs`, and sums so far for fixed arguments, to which it adds."""
    outputs: list[int]
    """Outputs that have a gradient."""
    arguments: list[int]
    """Arguments that receive one: those carried first, then the inputs, then the fixed ones."""


class _Graph:
    """One captured turn as a flat function of tensors."""

    def __init__(self, module: GraphModule):
        self.module = module
        self.layout: _Layout | None = None
        self.num_outputs = 0
        self._forward: _Compiled | None = None
        self._gradient: _Gradient | None = None

    def find_layout(self, call: _Call, returned: tuple[Values, Values]) -> None:
        """Recognise what was passed to the turn, and what it returned, by identity."""

        def places(values: Values, among: Sequence[Tensor]) -> list[int | None]:
            return [next((i for i, other in enumerate(among) if other is value), None) for value in values]

        carry, inputs = places(call.carry, call.arguments), places(call.first, call.arguments)
        carried, record = (places(values, call.outputs) for values in returned)
        for values, found in zip(returned, (carried, record), strict=True):
            if any(value is not None and place is None for value, place in zip(values, found, strict=True)):
                raise NotImplementedError("a turn returns something that it did not compute.")
        fixed = [i for i in range(len(call.arguments)) if i not in (*carry, *inputs)]
        self.layout = _Layout(carry, inputs, fixed, carried, record)
        self.num_outputs = len(call.outputs)

    def repeat(self, arguments: tuple[Tensor, ...], inputs: Inputs) -> Repeated:
        """Take all turns; differentiable if anything among the arguments needs a gradient."""
        assert self.layout is not None
        layout = self.layout
        read = [
            value for value, place in zip(inputs, layout.inputs, strict=True) if value is not None and place is not None
        ]
        rows = [value.unbind() if isinstance(value, Tensor) else tuple(value) for value in read]
        number = next(len(value) for value in inputs if value is not None)
        if self._forward is None:
            with torch.random.fork_rng():  # inductor draws example values
                self._compile(arguments)
        if self._gradient is None:
            last, record, _ = self.run([argument.detach() for argument in arguments], rows, number)
            flat = [*last, *record]
        else:
            stacked = [value for value in read if isinstance(value, Tensor) and value.requires_grad]
            flat = _Repeat.apply(  # type: ignore[no-untyped-call]
                self, rows, number, len(arguments), *arguments, *stacked
            )
        carried = dict(zip(layout.handed_on, flat, strict=False))
        reported = dict(zip(layout.reported, flat[len(carried) :], strict=True))
        return Repeated(
            tuple(None if place is None else carried[place] for place in layout.carried),
            tuple(None if place is None else reported[place] for place in layout.record),
        )

    def run(
        self, arguments: list[Tensor], rows: list[tuple[Tensor, ...]], number: int
    ) -> tuple[list[Tensor], list[Tensor], list[Sequence[Tensor]]]:
        """What the last turn hands on, what all turns report, and what every turn saved for its gradient."""
        assert self.layout is not None
        assert self._forward is not None
        layout, forward, size = self.layout, self._forward, self.num_outputs
        read = list(zip((place for place in layout.inputs if place is not None), rows, strict=True))
        onward = [
            (place, source)
            for place, source in zip(layout.carry, layout.carried, strict=False)
            if place is not None and source is not None
        ]
        reports: list[list[Tensor]] = [[] for _ in layout.reported]
        reported = list(zip(reports, layout.reported, strict=True))
        saved, outputs = list[Sequence[Tensor]](), list[Tensor]()
        for turn in range(number):
            for place, row in read:
                arguments[place] = row[turn]
            outputs = list(forward(arguments.copy()))
            for place, source in onward:
                arguments[place] = outputs[source]
            for report, source in reported:
                report.append(outputs[source])
            if len(outputs) > size:
                saved.append(outputs[size:])
        return [outputs[place] for place in layout.handed_on], [torch.stack(report) for report in reports], saved

    def _compile(self, arguments: tuple[Tensor, ...]) -> None:
        assert self.layout is not None
        plain = [argument.detach() for argument in arguments]
        if not torch.is_grad_enabled() or not any(argument.requires_grad for argument in arguments):
            traced, mode = _traced(self.module, plain)
            self._forward = _compiled(traced, mode)
            return
        carry = [place for place in self.layout.carry if place is not None and plain[place].is_floating_point()]
        others = [*(place for place in self.layout.inputs if place is not None), *self.layout.fixed]
        wanted = carry + [place for place in others if arguments[place].requires_grad]
        own = sum(place not in self.layout.fixed for place in wanted)  # the rest is summed over the turns

        def outputs_of(primals: Sequence[Tensor]) -> tuple[list[Tensor], Sequence[Tensor]]:
            leaves = [value.detach().requires_grad_(place in wanted) for place, value in enumerate(primals)]
            return leaves, self.module(*leaves)

        with torch.enable_grad():
            outputs = outputs_of(plain)[1]
        differentiable = [i for i, value in enumerate(outputs) if value.requires_grad]

        def joint(*flat: Tensor) -> list[Tensor]:
            size = len(plain) + len(differentiable)
            of_outputs, sums = flat[len(plain) : size], flat[size:]
            with torch.enable_grad():
                leaves, outputs = outputs_of(flat[: len(plain)])
                found = torch.autograd.grad(
                    [outputs[i] for i in differentiable],
                    [leaves[place] for place in wanted],
                    of_outputs,
                    materialize_grads=True,
                )
            totals = [total + value for total, value in zip(sums, found[own:], strict=True)]
            return [*(value.detach() for value in outputs), *found[:own], *totals]

        tangents = [outputs[i].detach().contiguous() for i in differentiable]
        tangents += [torch.zeros_like(plain[place]) for place in wanted[own:]]
        traced, mode = _traced(joint, [*plain, *tangents])
        forward, backward = _partitioned(traced, len(plain), self.num_outputs, mode)
        self._forward = _compiled(forward, mode)
        self._gradient = _Gradient(_compiled(backward, mode), differentiable, wanted)

    def backward(
        self, saved: list[Sequence[Tensor]], arguments: Sequence[Tensor], last: Sequence[Any], record: Sequence[Any]
    ) -> dict[int, Tensor | list[Tensor]]:
        """Gradients by argument, given those of what was handed on and reported; a list of K for inputs."""
        assert self.layout is not None
        assert self._gradient is not None
        layout, (run, outputs, wanted) = self.layout, self._gradient
        handed = {place: value.contiguous() for place, value in zip(layout.handed_on, last, strict=True)}
        reports = {place: value.contiguous().unbind() for place, value in zip(layout.reported, record, strict=True)}
        zeros = {place: torch.zeros_like(value) for place, value in handed.items() if place in outputs}
        number = sum(place in layout.carry for place in wanted)
        own = sum(place not in layout.fixed for place in wanted)
        # Which gradients of arguments belong to an output of the turn before.
        onward = [
            (source, [i for i, place in enumerate(wanted[:number]) if layout.source(place) == source])
            for source in zeros
        ]
        sums = [torch.zeros_like(arguments[place]) for place in wanted[own:]]
        per_turn = list[Sequence[Tensor]]()
        found: Sequence[Tensor] = ()
        for turn in reversed(range(len(saved))):
            tangents = list[Tensor]()
            for place in outputs:
                both = place in handed and place in reports
                tangent = handed[place] if place in handed else reports[place][turn]
                tangents.append(tangent + reports[place][turn] if both else tangent)
            found = run([*saved[turn], *tangents, *sums])
            for source, places in onward:
                total = found[places[0]] if places else zeros[source]
                for i in places[1:]:
                    total = total + found[i]
                handed[source] = total
            sums = list(found[own:])
            per_turn.append(found[number:own])
        gradients: dict[int, Tensor | list[Tensor]] = dict(zip(wanted[:number], found, strict=False))
        inputs = zip(*reversed(per_turn), strict=True)
        gradients.update(zip(wanted[number:own], map(list, inputs), strict=True))
        gradients.update(zip(wanted[own:], sums, strict=True))
        return gradients


class _Repeat(torch.autograd.Function):
    """All turns of a loop as one operator."""

    @staticmethod
    def forward(
        ctx: Any, graph: _Graph, rows: list[tuple[Tensor, ...]], turns: int, number: int, *tensors: Tensor
    ) -> Any:
        assert graph._gradient is not None
        assert graph.layout is not None
        # Within an operator, a row must not be a view of what needs a gradient.
        plain = [tuple(value.detach() for value in row) for row in rows]
        last, record, ctx.saved = graph.run([value.detach() for value in tensors[:number]], plain, turns)
        ctx.graph, ctx.number = graph, number
        ctx.save_for_backward(*tensors[:number])  # torch then notices if one is changed in place
        flat, places = [*last, *record], [*graph.layout.handed_on, *graph.layout.reported]
        known = set(graph._gradient.outputs)
        ctx.mark_non_differentiable(*(v for v, place in zip(flat, places, strict=True) if place not in known))
        return tuple(flat)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        graph, split = ctx.graph, len(ctx.graph.layout.handed_on)
        found = graph.backward(ctx.saved, ctx.saved_tensors, gradients[:split], gradients[split:])
        of_arguments = [value if isinstance(value := found.get(i), Tensor) else None for i in range(ctx.number)]
        of_inputs = [torch.stack(value) for value in found.values() if isinstance(value, list)]
        return None, None, None, None, *of_arguments, *of_inputs


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
