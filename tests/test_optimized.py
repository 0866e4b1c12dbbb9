"""A network and its optimised twin: the same function, parameters and keys, in networks of many styles."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.distributions import Bernoulli, Independent, Normal
from torch.nn import functional as F  # noqa: N812

import mcvae
from mcvae.core.scores import value_and_score
from mcvae.models import optimized
from mcvae.models.networks import upsample_and_convolve
from support import generator


def sequential():
    return nn.Sequential(
        nn.Linear(6, 18), nn.GELU(), nn.Unflatten(1, (2, 3, 3)), nn.Upsample(scale_factor=2),
        nn.Conv2d(2, 3, 3, padding=1), nn.LeakyReLU(), nn.UpsamplingNearest2d(size=12),
        nn.Conv2d(3, 1, 5, padding="same"),
    )  # fmt: skip


class Functional(nn.Module):
    """Functions for layers, views, a skip connection, in-place activations and a branch on the mode."""

    def __init__(self):
        super().__init__()
        self.start, self.first, self.second = nn.Linear(6, 18), nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 4, 3)
        self.temperature = 1.0

    def forward(self, z):
        image = F.relu_(self.start(z).view(-1, 2, 3, 3))
        large = F.interpolate(image, scale_factor=2.0, mode="nearest")
        large = large + F.silu(self.first(large), inplace=True)
        hidden = F.elu(self.second(F.interpolate(large, size=[12, 24], mode="nearest-exact")))
        hidden = hidden.view(hidden.size(0), -1)  # impossible with channels last
        return hidden * self.temperature if self.training else hidden


class Rewritten(nn.Module):
    """Images that change between upsampling and convolution."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, z):
        image = z.view(-1, 2, 3, 1) * 1
        large = F.interpolate(image, scale_factor=2)
        large.mul_(2)  # no longer an upsampled image
        other = F.interpolate(image, scale_factor=2)
        image.add_(1)  # no longer the image that was upsampled
        return self.layer(large) + self.layer(other)


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(6, 24)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.end = nn.ConvTranspose2d(8, 2, 4, stride=2, padding=1)

    def forward(self, z):
        tokens = self.block(self.start(z).reshape(-1, 3, 8))
        return self.end(tokens.transpose(1, 2).unflatten(2, (1, 3)))


STYLES = {
    "sequential": sequential,
    "functional": Functional,
    "rewritten": Rewritten,
    "attention": Attentive,
    "transposed": lambda: nn.Sequential(
        nn.Unflatten(1, (6, 1, 1)), nn.ConvTranspose2d(6, 4, 4), nn.ELU(), nn.ConvTranspose2d(4, 2, 4, 2, 1), nn.Tanh()
    ),
    "mlp": lambda: nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 3)),
    "normalised": lambda: nn.Sequential(
        nn.Unflatten(1, (6, 1, 1)), nn.Upsample(scale_factor=4), nn.Conv2d(6, 4, 3, groups=2), nn.GroupNorm(2, 4),
        nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(4, 2, 3, padding=1, padding_mode="reflect"),
        nn.Upsample(scale_factor=3), nn.PixelShuffle(1), nn.Conv2d(2, 2, 3, stride=2, padding=1), nn.Flatten(),
    ),
    "one-dimensional": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.Upsample(scale_factor=2), nn.Conv1d(2, 3, 3), nn.SiLU()
    ),
}  # fmt: skip


def chain_gradients(network, parameters):
    """Value, score and the gradients of both, as a chain needs them."""
    z = torch.randn(2, 2, 6, generator=generator()).requires_grad_()
    density = lambda z: network(z.flatten(0, 1)).square().flatten(1).sum(1).reshape(2, 2)
    value, score = value_and_score(density, z)
    total = value.sum() + (score * torch.randn(z.shape, generator=generator(1))).sum()
    return [value.detach(), score.detach(), *torch.autograd.grad(total, [z, *parameters], materialize_grads=True)]


@pytest.mark.parametrize("style", STYLES)
def test_the_same_function_and_derivatives(style):
    network = STYLES[style]()
    fast = optimized(network)
    parameters = list(network.parameters())
    assert all(a is b for a, b in zip(parameters, fast.parameters(), strict=True))
    assert list(fast.state_dict()) == list(network.state_dict())
    z = torch.randn(4, 6)
    assert fast(z).is_contiguous()  # so that what follows may view it
    for a, b in zip(chain_gradients(fast, parameters), chain_gradients(network, parameters), strict=True):
        torch.testing.assert_close(a, b)


@st.composite
def upsamplings(draw):
    pair = lambda low, high: (draw(st.integers(low, high)), draw(st.integers(low, high)))
    kernel = pair(1, 5)
    padding = tuple(draw(st.integers(0, size - 1)) for size in kernel)
    scale = (draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3, 8])))
    return kernel, padding, scale, pair(5, 6), draw(st.booleans())


@given(upsamplings())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_upsampling_and_convolution_are_one_operator(case):
    kernel, padding, scale, size, with_bias = case
    x, weight, bias = torch.randn(2, 2, *size), torch.randn(3, 2, *kernel), torch.randn(3) if with_bias else None
    large = x.repeat_interleave(scale[0], 2).repeat_interleave(scale[1], 3)
    expected = F.conv2d(large, weight, bias, padding=padding)
    torch.testing.assert_close(upsample_and_convolve(x, weight, bias, scale, padding), expected)


def test_it_says_what_it_changed_and_what_it_left_alone():
    fast = optimized(sequential())
    assert str(fast.report) == "nothing to change has been called"
    fast(torch.randn(4, 6))
    assert str(fast.report).splitlines() == [
        f"changed: upsampling by 2 × 2 and convolution {layer}: {change}"
        for layer in ("2 → 3, 3 × 3", "3 → 1, 5 × 5")
        for change in ("one operator", "channels last in memory")
    ]
    fast = optimized(STYLES["normalised"]())
    fast(torch.randn(4, 6))
    left = "\n".join(fast.report.left_alone)
    assert "before convolution 6 → 4, 3 × 3 with stride (1, 1), padding (0, 0), groups 2" in left
    assert "upsampling, bilinear, from [2, 2] to [4, 4]" in left
    assert "upsampling, nearest, from [4, 4] to [12, 12]" in left
    assert "convolution 4 → 2, 3 × 3: channels last in memory" in fast.report.changed
    layer = optimized(nn.Conv2d(2, 3, 3))
    layer(torch.randn(2, 5, 5))
    assert str(layer.report) == "left alone: convolution 2 → 3, 3 × 3"  # a single image
    fast = optimized(Rewritten())
    fast(torch.randn(4, 6))
    assert not any("one operator" in line for line in fast.report.changed)


def test_attributes_and_modes_are_those_of_the_moment():
    network = Functional()
    fast, z = optimized(network), torch.randn(4, 6)
    before = fast(z)
    fast.temperature = 2.0
    torch.testing.assert_close(fast(z), 2 * before)
    torch.testing.assert_close(fast.eval()(z), before)


def test_copies_and_pickles_have_their_own_weights():
    fast, z = optimized(Functional()), torch.randn(4, 6)
    expected = fast(z)
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        torch.testing.assert_close(twin(z), expected)
        with torch.no_grad():
            twin.second.weight.zero_()
            twin.second.bias.zero_()
        assert twin(z).abs().max() == 0
        assert str(twin.report) == str(fast.report)
    torch.testing.assert_close(fast(z), expected)


def test_weights_stay_shared():
    network = sequential()
    fast, z = optimized(network), torch.randn(4, 6)
    assert optimized(fast) is fast
    fast.load_state_dict({key: 2 * value for key, value in network.state_dict().items()})
    torch.testing.assert_close(fast(z), network(z))
    network.float()
    torch.testing.assert_close(fast(z.float()), network(z.float()))
    assert "forward" not in network.__dict__


def test_half_precision_and_inference():
    network, z = sequential().to(torch.bfloat16), torch.randn(4, 6, dtype=torch.bfloat16)
    fast = optimized(network)
    torch.testing.assert_close(fast(z), network(z), rtol=0.1, atol=0.02)
    with torch.inference_mode():
        torch.testing.assert_close(fast(z), network(z), rtol=0.1, atol=0.02)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(fast.float()(z.float()), network(z.float()), rtol=0.1, atol=0.02)


def test_functional_transforms():
    network, z = sequential(), torch.randn(4, 6)
    energy = lambda network: lambda z: network(z[None]).square().sum()
    fast = optimized(network)
    torch.testing.assert_close(
        torch.vmap(torch.func.grad(energy(fast)))(z), torch.vmap(torch.func.grad(energy(network)))(z)
    )


def test_a_scripted_module_is_refused():
    with pytest.raises(TypeError, match="forward is Python, got a ScriptModule"):
        optimized(torch.jit.ScriptModule())


class Pixels(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, z):
        return Independent(Bernoulli(logits=self.network(z)), 3)


@pytest.mark.parametrize("memory", ["normal", "low"])
def test_a_chain_has_the_same_gradients(memory):
    network = sequential()
    x = (torch.rand(5, 1, 12, 12) < 0.3).double()
    results = []
    for decoder in (network, optimized(network)):
        encoder = lambda x: Independent(Normal(x.flatten(1)[:, :6], 1.0), 1)
        model = mcvae.models.LatentVariableModel(encoder, Pixels(decoder))
        loss = mcvae.recipes.l_mcvae(3, 6)(model.bridge(x, memory=memory), generator=generator()).loss.mean()
        results.append([loss.detach(), *torch.autograd.grad(loss, list(network.parameters()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


class Trap(nn.Module):
    """A convolution, and something around it that an exchange of operators may get wrong."""

    def __init__(self, call):
        super().__init__()
        self.layer, self.call = nn.Conv2d(2, 4, 3, padding=1), call

    def forward(self, x):
        return self.call(self.layer, x)


def without_graph(layer, x):
    with torch.no_grad():
        large = F.interpolate(x, scale_factor=2)
    return layer(large) + x.sum()


def with_hook(layer, x):
    large = F.interpolate(x, scale_factor=2)
    large.register_hook(lambda gradient: 3 * gradient)
    return layer(large)


TRAPS = {
    "a factor of 4.4": lambda layer, x: layer(F.interpolate(x, scale_factor=4.4)),
    "a factor of 2.2, exact": lambda layer, x: layer(F.interpolate(x, scale_factor=2.2, mode="nearest-exact")),
    "upsampled without a graph": without_graph,
    "a hook on the upsampled image": with_hook,
    "part of an image, flattened": lambda layer, x: layer(x).chunk(2, 1)[0].view(len(x), -1),
    "one image, flattened": lambda layer, x: layer(x)[0].view(-1),
    "a view of a view": lambda layer, x: layer(x).view(len(x), 2, 2, *x.shape[2:]).view(len(x), -1),
    "the shape of another": lambda layer, x: layer(x).view_as(torch.empty(len(x), 4 * x[0, 0].numel())),
    "strides of a transposed image": lambda layer, x: (layer(x).sum() + x.transpose(2, 3)).as_strided((2, 2), (4, 1)),
}


@pytest.mark.parametrize("name", TRAPS)
def test_values_and_gradients_survive(name):
    torch.manual_seed(0)
    plain = Trap(TRAPS[name])
    fast, results = optimized(plain), []
    for network in (plain, fast):
        x = torch.randn(3, 2, 2, 2, generator=generator()).requires_grad_()
        output = network(x)
        results.append((output, *torch.autograd.grad(output.square().sum(), x)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-10)


def test_distributions_come_out_in_the_usual_layout():
    network = optimized(Trap(lambda layer, x: Independent(Normal(layer(x), layer(x).exp()), 3)))
    assert network(torch.randn(3, 2, 4, 4)).mean.view(3, -1).shape == (3, 64)


def test_inference_tensors_parametrised_layers_and_a_report_of_its_own():
    with torch.inference_mode():
        x = torch.randn(1, 2, 4, 4)
    with torch.no_grad():
        assert optimized(Trap(lambda layer, x: layer(F.interpolate(x, scale_factor=2))))(x).shape == (1, 4, 8, 8)
    layer = nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 4, 3))
    x = torch.randn(1, 2, 4, 4)
    assert torch.allclose(optimized(layer)(x), layer(x))
    own = nn.Linear(2, 2)
    own.report = print
    with pytest.raises(ValueError, match="attribute `report`"):
        optimized(own)
    with pytest.raises(TypeError, match="needs an nn.Module, got function"):
        optimized(lambda x: x)
