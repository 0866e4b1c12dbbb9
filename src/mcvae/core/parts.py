"""A pure function of tensors and its gradient, compiled by inductor, to be called once or as the turn of a loop."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from mcvae.core.native import Kinds, NativeTurn, Result
from mcvae.core.recording import UnsupportedTurnError

__all__ = ["Part", "PythonTurn"]

_Compiled = Callable[[list[Tensor]], Sequence[Tensor]]


class _Gradient(NamedTuple):
    """A compiled gradient of a part, and what it takes and finds."""

    run: Any
    zeros: list[Tensor]
    """Gradients of the outputs that have one, where nobody asked for them."""
    chained: list[int]
    """Carried outputs that have a gradient."""
    ends: list[int]
    """Other outputs of the last turn that have one."""
    reports: list[int]
    """Reported outputs that have one."""
    carry: list[int]
    """Carried arguments that get a gradient, those of `chained` first."""
    rows: list[int]
    fixed: list[int]
    """Rows and places of fixed arguments that get one."""


class Part:
    """A part of what torch captured, as a turn: it takes what is carried, rows, and what is fixed."""

    def __init__(self, module: GraphModule, outputs: list[int], handed: int, carried: list[int], rows: list[int]):
        used = _used(module, outputs)
        self._module, self._outputs = module, outputs
        self._fixed = [place for place in used if place not in {*carried, *rows}]
        self._arguments = [*carried, *rows, *self._fixed]
        self._kinds = Kinds(0, len(carried), len(rows), handed, len(outputs) - handed)
        self.forward: Any = None
        self._gradient: _Gradient | None = None

    def run(
        self, number: int, carried: Sequence[Tensor], rows: Sequence[Tensor], by_place: dict[int, Tensor]
    ) -> Result:
        """Take turns."""
        result: Result = self.forward(number, None, carried, rows, [by_place[place] for place in self._fixed])
        return result

    @property
    def differentiable(self) -> set[int]:
        """Outputs that have a gradient."""
        return set() if self._gradient is None else {*self._gradient[2], *self._gradient[3], *self._gradient[4]}

    def compile(self, arguments: Sequence[Tensor], differentiable: bool) -> None:
        """Compile the turn and, if wanted, its gradient, for arguments like these."""
        kinds, plain = self._kinds, [arguments[place].detach() for place in self._arguments]
        needed = [arguments[place].requires_grad for place in self._arguments]
        first_row, first_fixed = kinds.carried, kinds.carried + kinds.rows
        floating = [i for i in range(kinds.carried) if plain[i].is_floating_point()]
        rows = [i for i in range(first_row, first_fixed) if needed[i]]
        fixed = [i for i in range(first_fixed, len(plain)) if needed[i]]

        def turn(*flat: Tensor) -> list[Tensor]:  # other arguments are for the other part
            by_place = dict(zip(self._arguments, flat, strict=True))
            outputs = self._module(*(by_place.get(place, other) for place, other in enumerate(arguments)))
            return [outputs[place] for place in self._outputs]

        def outputs_of(primals: Sequence[Tensor]) -> tuple[list[Tensor], Sequence[Tensor]]:
            wanted = {*floating, *rows, *fixed}
            leaves = [value.detach().requires_grad_(place in wanted) for place, value in enumerate(primals)]
            return leaves, turn(*leaves)

        known = list[int]()
        if differentiable:
            with torch.enable_grad():
                outputs = outputs_of(plain)[1]
            known = [i for i, value in enumerate(outputs) if value.requires_grad]
        if not known:
            traced, mode = _traced(turn, plain)
            self.forward = _turns([(traced, kinds)], mode)[0]
            return
        chained = [i for i in known if i < kinds.carried]
        ends = [i for i in known if kinds.carried <= i < kinds.handed]
        reports = [i for i in known if i >= kinds.handed]
        carry = [*chained, *(i for i in floating if i not in chained)]

        def joint(*flat: Tensor) -> list[Tensor]:
            size = len(plain) + len(chained)
            of_chained, sums = flat[len(plain) : size], flat[size : size + len(fixed)]
            others = flat[size + len(fixed) :]
            with torch.enable_grad():
                leaves, outputs = outputs_of(flat[: len(plain)])
                found = torch.autograd.grad(
                    [outputs[i] for i in (*chained, *reports, *ends)],
                    [leaves[place] for place in (*carry, *fixed, *rows)],
                    [*of_chained, *others],
                    materialize_grads=True,
                )
            of_carry, of_fixed = found[: len(carry)], found[len(carry) : len(carry) + len(fixed)]
            totals = [total + value for total, value in zip(sums, of_fixed, strict=True)]
            of_rows = found[len(carry) + len(fixed) :]
            gradients = *of_carry[: len(chained)], *totals, *of_carry[len(chained) :], *of_rows
            return [*(value.detach() for value in outputs), *gradients]

        zeros = {i: torch.zeros_like(outputs[i], memory_format=torch.contiguous_format).detach() for i in known}
        tangents = [zeros[i] for i in chained], [torch.zeros_like(plain[i]) for i in fixed]
        traced, mode = _traced(joint, [*plain, *tangents[0], *tangents[1], *(zeros[i] for i in (*reports, *ends))])
        forward, backward = _partitioned(traced, len(plain), len(outputs), mode)
        saved = len(backward.graph.find_nodes(op="placeholder")) - len(known) - len(fixed)
        size = len(chained) + len(fixed)
        back = Kinds(saved, size, len(reports) + len(ends), len(carry) + len(fixed), len(rows), backwards=True)
        self.forward, run = _turns([(forward, kinds), (backward, back)], mode)
        self._gradient = _Gradient(
            run,
            [zeros[i] for i in known],
            chained,
            ends,
            reports,
            carry,
            [i - first_row for i in rows],
            [self._arguments[i] for i in fixed],
        )

    def differentiate(
        self,
        number: int,
        saved: Any,
        gradients: Sequence[Tensor | None],
        by_place: dict[int, Tensor],
        sums: dict[int, Tensor],
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients of what was carried into the first turn, and of the rows; those of what is fixed go into `sums`."""
        if self._gradient is None:
            return [None] * self._kinds.carried, [None] * self._kinds.rows
        run, zeros, chained, ends, reports, carry, rows, fixed = self._gradient
        zero = dict(zip(sorted((*chained, *ends, *reports)), zeros, strict=True))

        def of(place: int) -> Tensor:
            gradient = gradients[place]
            return zero[place] if gradient is None else gradient.contiguous()

        tangents = [of(i) for i in chained]
        totals = [sums[place] if place in sums else torch.zeros_like(by_place[place]) for place in fixed]
        others = [zero[i].expand(number, *zero[i].shape) if gradients[i] is None else of(i) for i in reports]
        for i in ends:  # only those of the last turn have been seen
            others.append(torch.cat([zero[i].expand(number - 1, *zero[i].shape), of(i).unsqueeze(0)]))
        found, of_rows, _ = run(number, saved, [*tangents, *totals], others, [])
        size = len(chained) + len(fixed)
        sums |= dict(zip(fixed, found[len(chained) : size], strict=True))
        of_carry = dict(zip(carry, (*found[: len(chained)], *found[size:]), strict=True))
        of_row = dict(zip(rows, of_rows, strict=True))
        return [of_carry.get(i) for i in range(self._kinds.carried)], [of_row.get(i) for i in range(self._kinds.rows)]


def _used(module: GraphModule, outputs: list[int]) -> list[int]:
    """Places of the arguments that these outputs depend on."""
    results: Any = module.graph.output_node().args[0]
    found, todo = set[torch.fx.Node](), [results[place] for place in outputs]
    while todo:
        if (node := todo.pop()) not in found:
            found.add(node)
            todo.extend(node.all_input_nodes)
    return [place for place, node in enumerate(module.graph.find_nodes(op="placeholder")) if node in found]


class PythonTurn:
    """Repeats a compiled turn by calling it: on any device, and for all that `NativeTurn` cannot do."""

    def __init__(self, run: _Compiled, kinds: Kinds):
        self.run, self.kinds = run, kinds

    def __call__(
        self, number: int, saved: Any, carried: Sequence[Tensor], rows: Sequence[Tensor], fixed: Sequence[Tensor]
    ) -> Result:
        """See `NativeTurn`."""
        kinds, columns = self.kinds, [row.detach().unbind() for row in rows]
        reports, left = list[Sequence[Tensor]]([()] * number), list[Any]([()] * number)
        outputs: Sequence[Tensor] = ()
        for turn in reversed(range(number)) if kinds.backwards else range(number):
            before = saved[turn] if kinds.saved else ()
            outputs = self.run([*before, *carried, *(column[turn] for column in columns), *fixed])
            carried = outputs[: kinds.carried]
            reports[turn] = outputs[kinds.handed : kinds.handed + kinds.reported]
            # What is returned will know what is saved for its gradient; a circle would never be freed.
            left[turn] = [value.detach() for value in outputs[kinds.handed + kinds.reported :]]
        return Result(list(outputs[: kinds.handed]), [torch.stack(each) for each in zip(*reports, strict=True)], left)


def _turns(graphs: Sequence[tuple[GraphModule, Kinds]], mode: Any) -> list[Any]:
    """Compile graphs, and repeat them without Python in between where that is possible for all of them."""
    compiled = [(_compiled(graph, mode), graph, kinds) for graph, kinds in graphs]
    try:
        turns = list[NativeTurn]()
        for run, graph, kinds in compiled:
            turns.append(NativeTurn(run, _fakes(graph), kinds, turns[0] if turns else None))
        return turns
    except UnsupportedTurnError:
        return [PythonTurn(run, kinds) for run, _, kinds in compiled]


def _fakes(graph: GraphModule) -> list[Tensor]:
    """Tensors like the arguments of a graph."""
    return [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]


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
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    # Other turns, and gradients, are compiled for results laid out as in the graph.
    results = traced.graph.output_node()
    results.meta["user_visible_output_idxs"] = list(range(len(results.args[0])))  # type: ignore[arg-type]
    with V.set_fake_mode(mode), tracing(TracingContext(mode)):
        compiled: Any = compile_fx_inner(traced, _fakes(traced))
    # Its own call opens contexts for profiling and tuning, which costs as much as a small move.
    run: _Compiled = getattr(compiled, "current_callable", None) or compiled
    return run


def _operators(traced: GraphModule) -> list[torch._ops.OpOverload]:
    return [node.target for node in traced.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
