"""Replaced operators and recomputed evaluations: the same numbers, by another way."""

import copy
import gc
import io
import pickle
import weakref
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.distributions import AffineTransform, Independent, Normal, TanhTransform, TransformedDistribution

import mcvae
from mcvae.core.operators import TwiceDifferentiable, narrow_convolution
from mcvae.core.scores import recomputed, value_and_score
from mcvae.models import build_model
from support import generator

RECIPES = {
    "vae": mcvae.recipes.vae,
    "iwae": lambda: mcvae.recipes.iwae(3),
    "l-mcvae": lambda: mcvae.recipes.l_mcvae(3, 4, schedule=mcvae.SigmoidSchedule),
    "a-mcvae": lambda: mcvae.recipes.a_mcvae(3, 4, num_samples=2),
    "uha": lambda: mcvae.recipes.uha(3, 4),
}


def double_gradients(function, inputs, *, replaced):
    """Value f, score ∇<c, f²> with respect to the first input, and gradients of both with respect to all inputs."""
    z, *others = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
    with TwiceDifferentiable() if replaced else nullcontext():
        output = function(z, *others)
    noise = torch.Generator().manual_seed(1)
    cotangent = torch.randn(output.shape, generator=noise, dtype=output.dtype)
    direction = torch.randn(z.shape, generator=noise, dtype=z.dtype)
    value = (cotangent * output.square()).sum()
    (score,) = torch.autograd.grad(value, z, create_graph=True)
    learned = [tensor for tensor in (z, *others) if tensor.requires_grad]
    total = value + (direction * score).sum()
    return [output.detach(), score.detach(), *torch.autograd.grad(total, learned, materialize_grads=True)]


def assert_equal_torchs(function, *inputs):
    ours, torchs = (double_gradients(function, inputs, replaced=replaced) for replaced in (True, False))
    for a, b in zip(ours, torchs, strict=True):
        torch.testing.assert_close(a, b)


def learned(*shape):
    return torch.randn(shape).requires_grad_()


@st.composite
def convolutions(draw):
    """A convolution that torch accepts, of any dimension, transposed or not: operator, settings and inputs."""
    dimensions, transposed = draw(st.integers(1, 3)), draw(st.booleans())
    each = lambda low, high: draw(st.lists(st.integers(low, high), min_size=dimensions, max_size=dimensions))
    kernel, stride, dilation, groups = each(1, 3), each(1, 3), each(1, 2), draw(st.integers(1, 2))
    settings = {"stride": stride, "dilation": dilation, "groups": groups}
    settings["padding"] = [draw(st.integers(0, d * (k - 1))) for k, d in zip(kernel, dilation, strict=True)]
    if transposed:
        largest = [max(s, d) - 1 for s, d in zip(stride, dilation, strict=True)]
        settings["output_padding"] = [draw(st.integers(0, number)) for number in largest]
    elif draw(st.booleans()):
        settings |= {"padding": draw(st.sampled_from(["same", "valid"])), "stride": 1}
    size = [draw(st.integers(d * (k - 1) + 1, 7)) for k, d in zip(kernel, dilation, strict=True)]
    fan_in, fan_out = 2 * groups, groups * draw(st.integers(1, 2))
    channels = (fan_in, fan_out // groups) if transposed else (fan_out, fan_in // groups)
    bias = learned(fan_out) if draw(st.booleans()) else None
    operator = getattr(torch, f"conv_transpose{dimensions}d" if transposed else f"conv{dimensions}d")
    return operator, settings, learned(2, fan_in, *size), learned(*channels, *kernel), bias


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch's, about its own way
@given(convolutions())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_convolutions_equal_torchs(case):
    operator, options, x, weight, bias = case
    function = lambda x, weight, *bias: operator(x.sin(), weight, *bias, **options)
    assert_equal_torchs(function, x, weight, *([] if bias is None else [bias]))


def test_complex_convolutions_are_left_to_torch():
    torch.manual_seed(0)
    x, weight = learned(2, 1, 4), learned(2, 1, 2)
    function = lambda x, weight: torch.conv1d(torch.complex(x, 2 * x), torch.complex(weight, -weight)).abs()
    assert_equal_torchs(function, x, weight)


def test_the_score_of_a_sample_that_its_distribution_remembers():
    """Its transform keeps the last sample beside what it was made of, from which no score can be taken."""
    found = []
    for cache_size in (0, 1):
        loc = torch.tensor([[0.5, -1.0]], requires_grad=True)
        base = Independent(Normal(torch.zeros(1, 2), torch.ones(1, 2)), 1)
        q = TransformedDistribution(base, [AffineTransform(loc, 2.0, event_dim=1), TanhTransform(cache_size)])
        torch.manual_seed(0)
        z = q.rsample((3,))
        value, score = value_and_score(q.log_prob, z)
        found.append((value, score, *torch.autograd.grad((value + score.sum(-1)).sum(), loc)))
    torch.testing.assert_close(*found)


@st.composite
def narrow_convolutions(draw):
    """Convolutions with hardly any output channels, and their transposes, with pixels that form blocks or do not."""
    kernel, size = (draw(st.lists(st.integers(low, high), min_size=2, max_size=2)) for low, high in ((1, 4), (4, 9)))
    padding = [draw(st.integers(0, k)) for k in kernel]  # at most half of it makes sense; torch allows more
    weight = learned(draw(st.integers(1, 5)), draw(st.integers(7, 9)), *kernel)
    transposed = draw(st.booleans())
    fan_in, fan_out = weight.shape[:2] if transposed else weight.shape[1::-1]
    bias = learned(fan_out) if draw(st.booleans()) else None
    size = [max(n, k, 2 * p + 1) for n, k, p in zip(size, kernel, padding, strict=True)]
    operator = torch.conv_transpose2d if transposed else torch.conv2d
    return operator, {"padding": padding}, learned(2, fan_in, *size), weight, bias


@given(narrow_convolutions())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_convolutions_to_few_channels_equal_torchs(case):
    operator, options, x, weight, bias = case
    function = lambda x, weight, *bias: operator(x.sin(), weight, *bias, **options)
    assert_equal_torchs(function, x, weight, *([] if bias is None else [bias]))


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("last", [True, False])
def test_a_convolution_to_few_channels_by_itself_equals_torchs(outputs, last):
    x, weight, bias = learned(2, 8, 12, 8), learned(outputs, 8, 3, 3), learned(outputs)
    if last:
        x, weight = (tensor.detach().contiguous(memory_format=torch.channels_last) for tensor in (x, weight))
        x.requires_grad_()
        weight.requires_grad_()
    found = []
    for function in (narrow_convolution, torch.conv2d):
        result = function(x, weight, bias, 1, 1, 1, 1)
        gradients = torch.autograd.grad(result.sin().sum(), [x, weight, bias])
        found.append([result.detach(), *gradients])
    torch.testing.assert_close(*found)
    assert narrow_convolution(x, learned(8, 8, 3, 3), bias, 1, 1, 1, 1) is None  # enough outputs
    assert narrow_convolution(x, weight, bias, 2, 1, 1, 1) is None


def test_output_padding_beyond_the_stride():
    """torch allows it up to the dilation; the windows that it adds have no input."""
    layer = nn.ConvTranspose1d(1, 1, 2, stride=1, dilation=3, output_padding=2)
    density = lambda z: -layer(z.flatten(0, 1)[:, None]).square().sum((1, 2)).reshape(z.shape[:2])
    z = learned(2, 3, 4)
    with torch.no_grad():
        expected = value_and_score(density, z)
    value, score = value_and_score(density, z)
    torch.testing.assert_close((value.detach(), score.detach()), expected)
    score.square().sum().backward()
    assert layer.weight.grad.abs().max() > 0


def operators_used(function, *inputs):
    """Names of the operators in a graph."""
    with TwiceDifferentiable():
        nodes = [function(*inputs).grad_fn]
    names = set()
    while nodes:
        node = nodes.pop()
        names.add(type(node).__name__)
        nodes += [above for above, _ in node.next_functions if above is not None]
    return names


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layer", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d])
def test_layers_are_replaced(layer, bias):
    network = layer(2, 3, 3, padding=1, bias=bias)
    image = learned(2, 2, *[5] * (network.weight.dim() - 2))
    assert "_ConvolveBackward" in operators_used(network, image)
    assert "_ConvolveBackward" not in operators_used(network, image[0])  # a single image is left to torch
    assert_equal_torchs(lambda z: network(z), image[0])


def modulated(z, weight):
    """StyleGAN2: every row has its own weights, scaled by the row's latents."""
    rows = weight * z[:, None, :, None, None]
    image = torch.ones(1, z.shape[0] * z.shape[1], 4, 4, dtype=z.dtype)
    return nn.functional.conv2d(image, rows.flatten(0, 1), padding=1, groups=z.shape[0])


WEIGHTS_THAT_FOLLOW_LATENTS = {
    "modulated": (modulated, (3, 2), (4, 2, 3, 3)),
    "image too": (lambda z, w: torch.conv1d(z[:, None], (w @ z.sum(0))[:, None, None]), (3, 4), (2, 4)),
    "bias": (lambda z, w: torch.conv1d(z[:, None], w[:, :1, None], w @ z.sum(0)[:2]), (3, 4), (2, 2)),
    "bias alone": (lambda z, w: torch.conv1d(torch.ones(3, 1, 4), w[:, None, None], z.sum(0)), (3, 2), (2,)),
    "the latents themselves": (lambda z, w: torch.conv1d(w[:, None], z[:, None]), (3, 2), (4, 5)),
    "transposed": (lambda z, w: torch.conv_transpose1d(w[:, None], z[:, None] * w.sum(), stride=2), (1, 3), (4, 5)),
}


@pytest.mark.parametrize("name", WEIGHTS_THAT_FOLLOW_LATENTS)
def test_weights_that_follow_the_latents_are_in_the_score(name):
    function, latents, weights = WEIGHTS_THAT_FOLLOW_LATENTS[name]
    assert_equal_torchs(function, learned(*latents), learned(*weights))


def test_the_bound_of_a_modulated_decoder_does_not_depend_on_whether_gradients_are_wanted():
    weight = learned(4, 2, 3, 3)
    log_joint = lambda z: -0.5 * (z.square().sum(-1) + modulated(z.flatten(0, 1), weight).square().sum().expand(1, 1))
    initial = Independent(Normal(torch.full((1, 2), 0.3), torch.ones(1, 2)), 1)
    bound = lambda: mcvae.recipes.l_mcvae(3, 2)(mcvae.Bridge(initial, log_joint), generator=generator()).bound
    with torch.no_grad():
        expected = bound()
    torch.testing.assert_close(bound().detach(), expected)


def test_parametrised_weights_cost_the_score_nothing(monkeypatch):
    """They have a graph, but not one that leads to the latents; so the score needs no gradient of weights."""
    masks = []
    backward = torch.ops.aten.convolution_backward
    monkeypatch.setattr(torch.ops.aten, "convolution_backward", lambda *a: masks.append(a[-1]) or backward(*a))
    layer = nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 3, 3))
    z = learned(2, 2, 5, 5)
    with TwiceDifferentiable():
        value = layer(z).square().sum()
    (score,) = torch.autograd.grad(value, z, create_graph=True)
    assert not masks
    torch.autograd.grad(score.sum(), list(layer.parameters()))
    assert_equal_torchs(lambda z: layer(z), z)


def test_in_place_activations_keep_their_meaning():
    """What reads the tensor afterwards reads the overwritten one: a residual connection, as many networks have it."""
    layer = nn.Linear(3, 3)
    for activation in (nn.SiLU(True), nn.ELU(inplace=True), nn.CELU(inplace=True), nn.SELU(True), nn.Mish(True)):

        def residual(z, activation=activation):
            hidden = layer(z)
            return activation(hidden) + hidden

        z = learned(4, 3)
        with torch.no_grad():
            evaluated = residual(z)
        with TwiceDifferentiable():
            trained = residual(z)
        torch.testing.assert_close(trained.detach(), evaluated)
        assert_equal_torchs(residual, z)


ATTENTION = {
    "function": lambda: lambda z: nn.functional.scaled_dot_product_attention(z, z.sin(), z.cos(), is_causal=True),
    "module": lambda: (lambda layer: lambda z: layer(z, z, z, need_weights=False)[0])(
        nn.MultiheadAttention(8, 2, batch_first=True)
    ),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_twice_differentiable(name):
    network, z = ATTENTION[name](), learned(3, 5, 8)
    value, score, gradient = double_gradients(network, [z], replaced=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = double_gradients(network, [z], replaced=False)
    for a, b in zip((value, score, gradient), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_attention_stays_fused_where_no_second_derivative_is_needed():
    used = []

    def density(z):
        rows = z[..., None, :].expand(*z.shape[:-1], 4, 8)
        output = nn.functional.scaled_dot_product_attention(rows, rows, rows)
        used.append(type(output.grad_fn).__name__)
        return output.sum((-1, -2))

    z = torch.randn(2, 3, 8)
    with torch.no_grad():
        value_and_score(density, z)
    value_and_score(density, z)
    fused = ["Fused" in name or "Flash" in name for name in used]
    assert fused == [True, False]
    assert torch.backends.cuda.flash_sdp_enabled()  # the choice left no trace


class Reduced(nn.Module):
    """Networks with something of every kind that is replaced."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, 18), nn.SiLU(), nn.Unflatten(1, (2, 3, 3)), nn.Conv2d(2, 4, 3, padding=1), nn.ELU(),
            nn.ConvTranspose2d(4, 2, 4, 2, 1, bias=False), nn.Softplus(), nn.Upsample(scale_factor=2),
            nn.Conv2d(2, 1, 3), nn.GELU("tanh"), nn.Flatten(),
        )  # fmt: skip

    def forward(self, z):
        return self.layers(z)


def assert_as_good_as_torchs(ours, torchs, exact):
    for a, b, c in zip(ours, torchs, exact, strict=True):
        assert a.dtype == b.dtype
        assert (a - c).norm() < 1.5 * (b - c).norm() + 0.01 * c.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_rounds_as_it_does_with_torchs_operators(dtype):
    network, z = Reduced().float(), torch.randn(4, 3, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        ours, torchs = (double_gradients(network, [z], replaced=replaced) for replaced in (True, False))
    assert_as_good_as_torchs(ours, torchs, double_gradients(network.double(), [z.double()], replaced=False))


def test_half_precision_weights():
    network, z = Reduced().to(torch.bfloat16), torch.randn(4, 3, dtype=torch.bfloat16).requires_grad_()
    ours, torchs = (double_gradients(network, [z], replaced=replaced) for replaced in (True, False))
    assert_as_good_as_torchs(ours, torchs, double_gradients(network.double(), [z.double()], replaced=False))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("network", ["small", "mlp"])
@pytest.mark.parametrize("half", ["mixed", "true"])
def test_every_method_trains_in_half_precision(half, network, name):
    torch.manual_seed(0)
    model, objective = build_model((1, 8, 8), 4, network=network).float(), RECIPES[name]().float()
    x = (torch.rand(6, 1, 8, 8, generator=generator()) < 0.3).float()
    with torch.no_grad():
        expected = objective(model.bridge(x), generator=generator()).bound
    if half == "true":
        model, objective, x = model.to(torch.bfloat16), objective.to(torch.bfloat16), x.to(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half == "mixed"):
        estimate = objective(model.bridge(x), generator=generator())
    estimate.loss.mean().backward()
    torch.testing.assert_close(estimate.bound.detach(), expected, rtol=0.03, atol=0)
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_models_that_use_torch_func_themselves_are_left_alone():
    layer = nn.Conv1d(1, 1, 3, padding=1)
    energy = lambda z: nn.functional.silu(layer(z[None, None])).square().sum()

    def log_joint(z):
        flat = z.flatten(0, 1)
        return (-torch.vmap(energy)(flat) - torch.vmap(torch.func.grad(energy))(flat).square().sum(-1)).reshape(
            z.shape[:2]
        )

    initial = Independent(Normal(torch.zeros(2, 4), torch.ones(2, 4)), 1)
    estimate = mcvae.recipes.l_mcvae(2, 4)(mcvae.Bridge(initial, log_joint), generator=generator())
    estimate.loss.mean().backward()
    assert layer.weight.grad.isfinite().all()


def gradients_of(recipe, memory, dtype=torch.float64):
    torch.manual_seed(0)
    model = build_model((1, 8, 8), 4, network="small").to(dtype)
    x = (torch.rand(6, 1, 8, 8, generator=generator()) < 0.3).to(dtype)
    objective = recipe()
    loss = objective(model.bridge(x, memory=memory), generator=generator()).loss.mean()
    loss.backward()
    gradients = [p.grad for p in [*model.parameters(), *objective.parameters()] if p.grad is not None]
    return loss.detach(), gradients


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gaussian_with_parameters_in_half_precision_is_normalised(dtype):
    """As an encoder under autocast returns it. A sum of logarithms in bfloat16 is off by 0.14 nats."""
    loc, scale = (torch.full((1, 64), value, dtype=dtype) for value in (0.3, 0.55))
    exact = Independent(Normal(loc.double(), scale.double()), 1)
    bridge = mcvae.Bridge(Independent(Normal(loc, scale), 1), lambda z: exact.log_prob(z.double()))
    point = bridge.sample(10, generator=generator())
    torch.testing.assert_close(point.log_q, point.log_p, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", RECIPES)
def test_low_memory_gives_the_same_loss_and_gradients(name):
    normal, low = (gradients_of(RECIPES[name], memory) for memory in ("normal", "low"))
    torch.testing.assert_close(low[0], normal[0], rtol=0, atol=0)
    assert len(low[1]) == len(normal[1]) > 8
    for a, b in zip(low[1], normal[1], strict=True):
        torch.testing.assert_close(a, b)


def numbers_saved(memory, num_steps):
    """Numbers that a graph holds while it waits for its backward pass, outside of and inside Python."""
    model = build_model((1, 8, 8), 4, network="small")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t.detach(), lambda t: t):
        loss = mcvae.recipes.l_mcvae(num_steps, 4)(model.bridge(torch.zeros(6, 1, 8, 8), memory=memory)).loss.mean()
    gc.collect()
    in_python = sum(t.numel() for t in gc.get_objects() if type(t) is torch.Tensor)
    assert loss.requires_grad
    return sum(saved) + in_python


def test_low_memory_keeps_latents_and_not_activations():
    low, normal = ((numbers_saved(memory, 10) - numbers_saved(memory, 5)) / 5 for memory in ("low", "normal"))
    activations = 6 * 8 * 8 * 16  # of one layer at full resolution
    assert normal > 5 * activations
    assert low < activations / 5


def test_backward_can_be_called_twice():
    weight = torch.tensor(2.0, requires_grad=True)
    value = recomputed(lambda: (weight * 3).sin() * weight, torch.device("cpu"))
    first = torch.autograd.grad(value, weight, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(value, weight), first)


class Noisy(nn.Module):
    """A decoder with dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, z):
        return Independent(Normal(self.layers(z), 1.0), 1)


def test_low_memory_repeats_dropout():
    torch.manual_seed(0)
    decoder = Noisy()
    model = mcvae.models.LatentVariableModel(lambda x: Independent(Normal(x[:, :2], 1.0), 1), decoder)
    results = []
    for memory in ("normal", "low"):
        torch.manual_seed(1)
        loss = mcvae.recipes.l_mcvae(3, 2)(model.bridge(torch.randn(5, 3), memory=memory)).loss.mean()
        after = torch.rand(1)
        results.append([loss.detach(), after, *torch.autograd.grad(loss, list(decoder.parameters()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_recomputing_leaves_the_random_stream_where_it_was():
    weight = torch.ones(4, requires_grad=True)
    value = recomputed(lambda: nn.functional.dropout(weight.sin() * weight, 0.5).sum(), torch.device("cpu"))
    torch.manual_seed(5)
    value.backward()
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


def test_what_was_recomputed_is_freed():
    weight, seen = torch.ones(3, requires_grad=True), []

    def function():
        output = (weight * 2).tanh()  # an operator that saves its own output
        seen.append(weakref.ref(output))
        return output.sum()

    recomputed(function, torch.device("cpu")).backward()
    assert len(seen) == 2
    assert all(reference() is None for reference in seen)


def test_a_model_that_changes_between_the_passes_is_noticed():
    weight, calls = torch.tensor(2.0, requires_grad=True), []

    def fickle():
        calls.append(None)
        return weight.sin() if len(calls) == 1 else weight.sin().sin()

    value = recomputed(fickle, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="not deterministic"):
        value.backward()


@pytest.mark.parametrize("with_score", [False, True])
def test_low_memory_notices_what_was_modified_in_place(with_score):
    """As torch does without it: a gradient from what an operator saved, doubled since then, would be wrong."""

    def log_joint(z):
        hidden = (weight * z).tanh()
        return hidden.mul_(2).sum(-1)

    weight = torch.tensor(2.0, requires_grad=True)
    initial = Independent(Normal(torch.zeros(1, 2), torch.ones(1, 2)), 1)
    bridge = mcvae.Bridge(initial, log_joint, memory="low")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        bridge.sample(3, with_score=with_score, generator=generator()).log_p.sum().backward()


def test_low_memory_notices_a_step_between_forward_and_backward():
    weight = torch.tensor(2.0, requires_grad=True)
    value = recomputed(lambda: (weight * 3).sin() * weight, torch.device("cpu"))
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_a_density_that_knows_its_score_is_asked_for_it():
    class Quadratic:
        asked = 0

        def __call__(self, z):
            return -z.square().sum(-1)

        def value_and_score(self, z):
            self.asked += 1
            return self(z), -2 * z

    density = Quadratic()
    initial = Independent(Normal(torch.zeros(1, 2), torch.ones(1, 2)), 1)
    known = mcvae.recipes.l_mcvae(3, 2)(mcvae.Bridge(initial, density), generator=generator())
    found = mcvae.recipes.l_mcvae(3, 2)(mcvae.Bridge(initial, lambda z: density(z)), generator=generator())
    torch.testing.assert_close(known.bound, found.bound)
    assert density.asked == 4
    density.value_and_score = None
    wrong = type("Wrong", (Quadratic,), {"value_and_score": lambda self, z: (self(z), self(z))})()
    with pytest.raises(ValueError, match="score like z"):
        mcvae.recipes.l_mcvae(3, 2)(mcvae.Bridge(initial, wrong))


def test_memory_is_checked():
    initial = Independent(Normal(torch.zeros(1, 2), torch.ones(1, 2)), 1)
    with pytest.raises(ValueError, match='"normal" or "low"'):
        mcvae.Bridge(initial, lambda z: z.sum(-1), memory="tiny")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_model_gives_the_same_gradients():
    torch.manual_seed(0)
    model = build_model((1, 4, 4), 3, network="mlp").float()
    x = (torch.rand(5, 1, 4, 4, generator=generator(), dtype=torch.float32) < 0.3).float()
    parameters = list(model.parameters())

    def gradients(**options):
        estimate = mcvae.recipes.l_mcvae(2, 3)(model.bridge(x, **options), generator=generator())
        return torch.autograd.grad(estimate.loss.mean(), parameters)

    for a, b in zip(gradients(), gradients(compile=True), strict=True):
        torch.testing.assert_close(b, a)
    assert "_by_autograd" not in str(model.compiled)  # it did not fall back
    with pytest.raises(ValueError, match="exclude each other"):
        gradients(compile=True, memory="low")


def test_a_model_that_cannot_be_compiled_says_so_and_goes_on(monkeypatch):
    def broken(function, **options):
        def fail(*arguments):
            raise RuntimeError("no compiler here")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    model = build_model((1, 4, 4), 3, network="mlp")
    x = torch.zeros(2, 1, 4, 4)
    with pytest.warns(UserWarning, match="could not be compiled .RuntimeError: no compiler here"):
        first = mcvae.recipes.l_mcvae(2, 3)(model.bridge(x, compile=True), generator=generator())
    torch.testing.assert_close(mcvae.recipes.l_mcvae(2, 3)(model.bridge(x), generator=generator()).bound, first.bound)


def test_a_copy_of_a_compiled_model_has_its_own_weights(monkeypatch):
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: lambda *given: function(*given)
    )  # cannot be pickled
    model = build_model((1, 4, 4), 3, network="mlp")
    x = torch.zeros(2, 1, 4, 4)
    bound = lambda model, compiled: mcvae.recipes.l_mcvae(2, 3)(
        model.bridge(x, compile=compiled), generator=generator()
    ).bound.detach()
    before = bound(model, True)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    for twin in copies:
        torch.testing.assert_close(bound(twin, True), before)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(0.5)
        torch.testing.assert_close(bound(twin, True), bound(twin, False))
        assert (bound(twin, True) - before).abs().max() > 0.01
    torch.testing.assert_close(bound(model, True), before)
