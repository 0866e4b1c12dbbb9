"""A compiled chain gives the numbers of `anneal`, and hands over where it cannot."""

import copy
import gc
import sys
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal
from torch.utils.checkpoint import checkpoint

import mcvae
from mcvae import AnnealedEstimator, Bridge, FixedStepSizes, LearnedSchedule, LearnedStepSizes, LinearSchedule
from mcvae.core.loops import CompiledLoop
from mcvae.core.native import NativeTurn
from mcvae.core.parts import Part, PythonTurn

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",  # torch's compiler imports what torch deprecates
    "ignore:Guards may run slower:RuntimeWarning",  # on Python 3.13.0
)
K, S, B, D = 3, 4, 2, 3


class Model(nn.Module):
    """A density with something to learn, and the distribution that chains start from."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.weight = nn.Parameter(torch.linspace(-1, 1, D)), nn.Parameter(torch.eye(D) + 0.1)
        self.loc, self.log_scale = nn.Parameter(torch.zeros(B, D)), nn.Parameter(torch.zeros(B, D))

    def log_joint(self, z: Tensor) -> Tensor:
        return -((z - self.mean) @ self.weight).square().sum(-1) - 0.1 * z.pow(4).sum(-1)

    def bridge(self) -> Bridge:
        return Bridge(Independent(Normal(self.loc, self.log_scale.exp()), 1), self.log_joint)


def compositions() -> dict[str, AnnealedEstimator]:
    torch.manual_seed(0)
    settings = {"step_sizes": LearnedStepSizes(K, 0.05), "num_samples": S}
    recipes = mcvae.recipes
    made = {
        "ula": recipes.l_mcvae(K, D, **settings),
        "mala": recipes.a_mcvae(K, D, **settings),
        "uha": recipes.uha(K, D, learned_damping=True, **settings),
        "mcd": recipes.mcd(K, D, hidden=4, **settings),
        "cmcd": recipes.cmcd(K, D, hidden=4, **settings),
        "ldvi": recipes.ldvi(K, D, hidden=4, **settings),
        "cmcd_ud": recipes.cmcd_ud(K, D, hidden=4, **settings),
    }
    for name, kernel in (("rwm", mcvae.rwm()), ("hmc", mcvae.hmc(2))):
        made[name] = AnnealedEstimator(
            kernel, LearnedSchedule(K, interior=True), LearnedStepSizes(K, 0.1), num_samples=S
        )
    for estimator in made.values():
        for parameter in estimator.parameters():  # networks start at 0, where much of a gradient vanishes
            parameter.data += 0.1 * torch.randn_like(parameter)
    return made


FEW = ["uha", "mala"]
"""Compiled on every change; the others when there is time."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FEW else pytest.mark.slow) for n in compositions()])
def test_values_and_gradients_are_those_of_anneal(name):
    plain = compositions()[name].double()
    compiled = copy.deepcopy(plain)
    compiled.compiled = mcvae.core.compiled.CompiledChain()
    found = []
    for estimator in (plain, compiled):
        model = Model().double()
        generator = torch.Generator().manual_seed(3)
        estimate = estimator(model.bridge(), generator=generator)
        estimate.loss.sum().backward()
        gradients = [parameter.grad for parameter in (*model.parameters(), *estimator.parameters())]
        assert all(gradient is not None for gradient in gradients)
        found.append((estimate, gradients, torch.rand((), generator=generator)))
    (expected, its_gradients, next_draw), (actual, gradients, its_draw) = found
    assert compiled.compiled.failure is None
    assert compiled.compiled.seconds > 0
    assert its_draw == next_draw
    for mine, theirs in zip(gradients, its_gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(actual.bound, expected.bound)
    trajectory, other = actual.trajectory, expected.trajectory
    torch.testing.assert_close(trajectory.state.point.z, other.state.point.z)
    torch.testing.assert_close(trajectory.acceptance, other.acceptance)
    torch.testing.assert_close(trajectory.steps, other.steps)
    torch.testing.assert_close(trajectory.score_std, other.score_std)


def test_one_compilation_serves_any_number_of_steps_and_new_parameters():
    chain = mcvae.core.compiled.CompiledChain()
    model, seconds = Model(), []
    with torch.no_grad():
        for number in (2, 5):
            estimator = AnnealedEstimator(
                mcvae.ula(), LinearSchedule(number), FixedStepSizes(number, 0.05), num_samples=S
            )
            expected = estimator.run(model.bridge(), generator=torch.Generator().manual_seed(0)).log_weight
            estimator.compiled = chain
            actual = estimator.run(model.bridge(), generator=torch.Generator().manual_seed(0)).log_weight
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
            seconds.append(chain.seconds)
            model.mean += 1.0
    assert seconds[0] == seconds[1] > 0


@pytest.mark.slow
def test_a_row_that_fails_is_run_again_by_anneal():
    def log_joint(z: Tensor) -> Tensor:
        return -z.square().sum(-1) + torch.where(z[..., 0] > 2.0, torch.nan, 0.0)

    losses = []
    for compiled in (False, True):
        loc = torch.ones(B, D, requires_grad=True)
        objective = AnnealedEstimator(
            mcvae.mala(), LinearSchedule(K, interior=True), FixedStepSizes(K, 1.0), num_samples=20, compile=compiled
        )
        bridge = Bridge(Independent(Normal(loc, torch.full((B, D), 0.2)), 1), log_joint)
        estimate = objective(bridge, generator=torch.Generator().manual_seed(0))
        estimate.loss.sum().backward()
        assert bool(estimate.trajectory.nonfinite.any())
        assert bool(loc.grad.isfinite().all())
        losses.append(estimate.loss)
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("reason", ["model", "resample", "kernels"])
def test_what_cannot_be_compiled_runs_with_a_warning(reason):
    def looks(z: Tensor) -> Tensor:
        return -z.square().sum(-1) * (2.0 if float(z.detach().sum()) > 1e9 else 1.0)

    kernel = [mcvae.ula(), mcvae.ula()] if reason == "kernels" else mcvae.ula()
    resample = mcvae.Resampling(0.5, islands=2) if reason == "resample" else None
    log_joint = looks if reason == "model" else lambda z: -z.square().sum(-1)
    bridge = Bridge(Independent(Normal(torch.zeros(B, D), torch.ones(B, D)), 1), log_joint)
    weights = []
    for compiled in (False, True):
        objective = AnnealedEstimator(
            kernel, LinearSchedule(2), FixedStepSizes(2, 0.1), num_samples=S, resample=resample, compile=compiled
        )
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            weights.append(objective.run(bridge, generator=torch.Generator().manual_seed(0)).log_weight)
        assert any("not compiled" in str(warning.message) for warning in caught) == compiled
    assert torch.equal(*weights)


class OwnTanh(torch.autograd.Function):
    """An operator with a gradient of its own, written with what the forward pass found."""

    @staticmethod
    def forward(ctx, x):
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y)


@pytest.mark.parametrize("what", ["chain", "bridge"])
def test_gradients_of_an_operator_of_ones_own_are_not_compiled_wrong(what):
    """torch leaves out a part of the second derivative; compiled, the gradient was off by a fifth."""
    torch.manual_seed(0)
    layer, loc = nn.Linear(D, 5), nn.Parameter(torch.randn(B, D))
    encoder = lambda x: Independent(Normal(loc, 1.0), 1)
    decoder = lambda z: Independent(Normal(OwnTanh.apply(layer(z)), 0.7), 1)
    model, x = mcvae.LatentVariableModel(encoder, decoder), torch.randn(B, 5)
    found = []
    for compiled in (False, True):
        own = compiled and what == "chain"
        objective = mcvae.recipes.l_mcvae(2, D, step_sizes=FixedStepSizes(2, 0.05), compile=own)
        with pytest.warns(UserWarning, match="autograd.Function") if compiled else nullcontext():
            bridge = model.bridge(x, compile=compiled and what == "bridge")
            loss = objective(bridge, generator=torch.Generator().manual_seed(1)).loss.sum()
        found.append(torch.autograd.grad(loss, [layer.weight, loc]))
    torch.testing.assert_close(*found)


def test_a_decoder_with_checkpoints_runs_step_by_step_and_leaves_others_alone():
    torch.manual_seed(0)
    layer = nn.Linear(D, 5)
    encoder = lambda x: Independent(Normal(torch.zeros(B, D), 1.0), 1)
    decoder = lambda z: Independent(Normal(checkpoint(layer, z, use_reentrant=False).tanh(), 0.7), 1)
    model, x, found = mcvae.LatentVariableModel(encoder, decoder), torch.randn(B, 5), []
    for compiled in (False, True):
        objective = mcvae.recipes.l_mcvae(2, D, step_sizes=FixedStepSizes(2, 0.05), compile=compiled)
        with pytest.warns(UserWarning, match="not compiled") if compiled else nullcontext():
            loss = objective(model.bridge(x), generator=torch.Generator().manual_seed(1)).loss.sum()
        found.append(torch.autograd.grad(loss, layer.weight)[0])
    assert torch.equal(*found)
    checkpoint(layer, torch.randn(1, D, requires_grad=True), use_reentrant=False).sum().backward()


def test_a_model_that_draws_is_not_compiled():
    def turn(fixed, carry, inputs):
        return (carry[0] + torch.rand_like(carry[0]) * inputs[0],), ()

    with pytest.raises(NotImplementedError, match="draws random numbers"), torch.no_grad():
        CompiledLoop(turn)(None, (torch.zeros(2),), (torch.ones(3),))


@pytest.mark.slow
def test_evidence_is_the_same_compiled():
    model = Model()
    initial = model.bridge().initial
    found = [
        mcvae.estimate_log_evidence(
            model.log_joint, initial, num_samples=16, compile=compiled, generator=torch.Generator().manual_seed(0)
        )
        for compiled in (False, True)
    ]
    assert found[1].estimator.compiled.failure is None
    assert found[1].estimator.compiled.seconds > 0
    torch.testing.assert_close(found[1].log_evidence, found[0].log_evidence, rtol=0, atol=0.05)


def test_second_derivatives_of_a_compiled_chain_are_refused():
    """They would silently lack what happens inside the chain."""
    objective = mcvae.recipes.l_mcvae(2, 2, step_sizes=mcvae.FixedStepSizes(2, 0.1), compile=True)
    loc = torch.zeros(1, 2, requires_grad=True)
    initial = Independent(Normal(loc, torch.ones(1, 2)), 1)
    loss = objective(mcvae.Bridge(initial, lambda z: -(z**4).sum(-1))).loss.sum()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(loss, loc, create_graph=True)


def test_a_compiled_step_leaves_nothing_behind():
    def turn(fixed, carry, inputs):
        return ((carry[0] * fixed + inputs[0]).exp(),), ()  # its gradient needs what it returns

    weight, loop, freed = torch.ones(2, requires_grad=True), CompiledLoop(turn), list[bool]()
    loop(weight, (torch.zeros(2),), (torch.zeros(3),))
    gc.disable()  # memory must not wait for it
    try:
        state = loop(weight, (torch.zeros(2),), (torch.zeros(3),)).carry[0]
        weakref.finalize(state.grad_fn, freed.append, True)
        state.sum().backward()
        del state
    finally:
        gc.enable()
    assert freed


def product(total: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    new = (total @ weight + x).tanh()
    return new, new.square().sum(-1)


def solved(total: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    new = torch.linalg.solve(weight, (total + x).T).T.tanh()
    return new, new.square().sum(-1)


def convolved(total: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Inductor likes to lay images out in another way, in which nobody then reads them."""
    images = torch.conv2d((total + x).view(2, 1, 1, D), weight.view(D, 1, 1, D), padding=(0, 1))
    new = torch.nn.functional.silu(images).square().mean(1).view(2, D)
    return new, new.square().sum(-1)


@pytest.mark.parametrize(
    ("turn", "repeated_by"), [(product, NativeTurn), (solved, PythonTurn), (convolved, PythonTurn)]
)
def test_turns_are_repeated_in_cpp_where_that_is_possible_and_in_python_elsewhere(turn, repeated_by):
    torch.manual_seed(0)
    start, rows = torch.randn(2, D, dtype=torch.float64), torch.randn(5, 2, D, dtype=torch.float64)
    weight = torch.eye(D, dtype=torch.float64) + 0.3 * torch.randn(D, D, dtype=torch.float64)
    leaves = [value.requires_grad_() for value in (start, rows, weight)]

    total, reports = start, []
    for x in rows:
        total, report = turn(total, x, weight)
        reports.append(report)
    loss = total.sum() + (torch.arange(5.0).unsqueeze(1) * torch.stack(reports)).sum()
    expected = torch.autograd.grad(loss, leaves)

    part = Part(torch.fx.symbolic_trace(turn), [0, 1], 1, [0], [1])
    part.compile([start, rows[0], weight], differentiable=True)
    assert type(part.forward) is repeated_by
    with torch.no_grad():
        result = part.run(5, [start], [rows], {2: weight})
        torch.testing.assert_close(result.handed, [total])
        torch.testing.assert_close(result.reported, [torch.stack(reports)])
        gradients = [torch.ones_like(total), torch.arange(5.0, dtype=torch.float64).unsqueeze(1).expand(5, 2)]
        sums = dict[int, Tensor]()
        (of_start,), (of_rows,) = part.differentiate(5, result.saved, gradients, {2: weight}, sums)
    torch.testing.assert_close((of_start, of_rows, sums[2]), expected)


def weighed(weight, carry, inputs):
    new = (carry[0] @ weight + inputs[0]).tanh()
    return (new,), (new.square().sum(-1),)


def of_weight(loop, weight: Tensor, rows: Tensor) -> Tensor:
    """The gradient with respect to the weight of what a loop, or Python if there is none, makes of some rows."""
    total = torch.zeros(2, D)
    if loop is not None:
        total = loop(weight, (total,), (rows,)).carry[0]
    else:
        for x in rows:
            ((total,), _) = weighed(weight, (total,), (x,))
    return torch.autograd.grad(total.sum(), weight)[0]


def test_memory_of_a_parameter_is_kept_until_the_gradient_is_taken():
    """Averages of parameters are often written back by `parameter.data = ...`, which frees what it held."""
    loop, rows = CompiledLoop(weighed), torch.randn(5, 2, D)
    weight = nn.Parameter(torch.eye(D))
    expected = of_weight(None, weight, rows)
    of_weight(loop, weight, rows)
    total = loop(weight, (torch.zeros(2, D),), (rows,)).carry[0]
    weight.data = torch.full_like(weight, torch.nan)
    others = [torch.full_like(weight, torch.nan) for _ in range(100)]  # written where the weight was, if it is gone
    torch.testing.assert_close(torch.autograd.grad(total.sum(), weight)[0], expected)
    assert len(others) == 100


@pytest.mark.parametrize("waits", [True, False])
def test_threads_may_share_a_loop(waits):
    """Without a lock, the wrong version, one takes the noise of another, or finds none."""
    loop, rows = CompiledLoop(weighed), torch.randn(5, 2, D)
    of_weight(loop, torch.eye(D, requires_grad=True), rows)
    if not waits:
        loop._lock = nullcontext()

    def right(seed: int) -> bool:
        weight = torch.randn(D, D, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        try:
            return torch.allclose(of_weight(loop, weight, seed * rows), of_weight(None, weight, seed * rows), atol=1e-4)
        except (AssertionError, RuntimeError):
            return False

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as threads:
            assert all(threads.map(right, range(1, 500))) == waits
    finally:
        sys.setswitchinterval(interval)
