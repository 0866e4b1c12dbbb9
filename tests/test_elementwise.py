"""Activations with a fast second derivative: torch's numbers, whatever the setting and however they are called."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812

from mcvae.core.elementwise import ELU, Mish, SiLU, Softplus, TanhGELU, evaluate
from mcvae.core.operators import TwiceDifferentiable

positive = st.floats(0.05, 5)
CALLS = {
    "silu": st.just((F.silu, {})),
    "nn.SiLU": st.just((nn.SiLU(), {})),
    "gelu": st.sampled_from(["none", "tanh"]).map(lambda form: (F.gelu, {"approximate": form})),
    "nn.GELU": st.sampled_from(["none", "tanh"]).map(lambda form: (nn.GELU(form), {})),
    "elu": positive.map(lambda alpha: (F.elu, {"alpha": alpha})),
    "nn.ELU": positive.map(lambda alpha: (nn.ELU(alpha), {})),
    "celu": positive.map(lambda alpha: (F.celu, {"alpha": alpha})),
    "torch.celu": positive.map(lambda alpha: (torch.celu, {"alpha": alpha})),
    "selu": st.sampled_from([(F.selu, {}), (torch.selu, {}), (nn.SELU(), {})]),
    "softplus": st.tuples(positive, st.floats(0.5, 30)).map(
        lambda pair: (F.softplus, {"beta": pair[0], "threshold": pair[1]})
    ),
    "nn.Softplus": st.tuples(positive, st.floats(0.5, 30)).map(lambda pair: (nn.Softplus(*pair), {})),
    "mish": st.sampled_from([(F.mish, {}), (nn.Mish(), {})]),
    "tanh": st.sampled_from([(torch.tanh, {}), (torch.Tensor.tanh, {}), (F.tanh, {}), (nn.Tanh(), {})]),
    "sigmoid": st.sampled_from([(torch.sigmoid, {}), (torch.Tensor.sigmoid, {}), (F.sigmoid, {}), (nn.Sigmoid(), {})]),
    "leaky": positive.map(lambda slope: (F.leaky_relu, {"negative_slope": slope})),
    "others": st.sampled_from(
        [(F.relu, {}), (F.hardtanh, {}), (F.logsigmoid, {}), (F.hardswish, {}), (F.softsign, {})]
    ),
}
points = st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=12)


def derivatives(function, points, options, order):
    """Value and derivatives up to an order, each with random factors as a chain rule has them."""
    x = torch.tensor(points, dtype=torch.float64, requires_grad=True)
    noise = torch.Generator().manual_seed(0)
    factors = [torch.randn(x.shape, generator=noise, dtype=torch.float64).requires_grad_() for _ in range(order)]
    last = function(x, **options)
    found = [last]
    for factor in factors:
        last = last + 0 * x  # where a derivative is constant, torch records nothing
        last, *rest = torch.autograd.grad(last, [x, *factors], factor, create_graph=True, materialize_grads=True)
        found += [last, *rest]
    return [tensor.detach() for tensor in found]


@pytest.mark.parametrize("name", CALLS)
@given(data=st.data(), points=points)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_value_first_and_second_derivative_equal_torchs(name, data, points):
    function, options = data.draw(CALLS[name])

    def replaced(x, **options):
        with TwiceDifferentiable():
            return function(x, **options)

    for a, b in zip(derivatives(replaced, points, options, 2), derivatives(function, points, options, 2), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "is_replaced"),
    [
        (nn.SiLU(), True),
        (nn.GELU(), True),
        (nn.GELU("tanh"), True),
        (nn.ELU(), True),
        (nn.SELU(), True),
        (nn.Softplus(), True),
        (nn.Mish(), True),
        (nn.CELU(), False),
        (nn.Tanh(), False),
        (nn.LeakyReLU(), False),
    ],
    ids=str,
)
def test_which_activations_are_replaced(call, is_replaced):
    x = torch.randn(3, requires_grad=True)
    with TwiceDifferentiable():
        result, constant = call(x), call(x.detach())
    assert (type(result.grad_fn).__name__ == "_ValueBackward") == is_replaced
    assert constant.grad_fn is None


CURVES = [SiLU(), TanhGELU(), ELU(0.7), ELU(1.3, 1.05), Softplus(), Softplus(3.0, 2.0), Mish()]


@pytest.mark.parametrize("curve", CURVES, ids=str)
def test_third_derivatives_are_torchs(curve):
    points = torch.linspace(-3, 3, 13).tolist()
    ours = derivatives(lambda x: evaluate(curve, x), points, {}, 3)
    for a, b in zip(ours, derivatives(curve.value, points, {}, 3), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("curve", CURVES, ids=str)
def test_single_precision_is_as_good_as_torchs(curve):
    x = torch.linspace(-15, 15, 3001)

    def second(function, x):
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    exact = second(curve.value, x.double())
    ours = second(lambda x: evaluate(curve, x), x.float())
    assert (ours - exact).abs().max() < 4e-6


@pytest.mark.parametrize("curve", CURVES, ids=str)
def test_inputs_and_gradients_are_not_written_to(curve):
    x = torch.randn(4, 3, requires_grad=True)
    before = x.detach().clone()
    cotangent, direction = torch.ones(1, 1).expand(4, 3), torch.ones(3).expand(4, 3)  # in-place writing would fail
    (first,) = torch.autograd.grad(evaluate(curve, x), x, cotangent, create_graph=True)
    torch.autograd.grad(first, x, direction)
    assert torch.equal(x, before)
    assert torch.equal(cotangent, torch.ones(4, 3))


@pytest.mark.parametrize("curve", CURVES, ids=str)
def test_layouts_are_kept(curve):
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    (first,) = torch.autograd.grad(evaluate(curve, x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in (first, second))
