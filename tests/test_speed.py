"""What makes a step fast changes nothing that it computes."""

import platform
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal

import mcvae
from mcvae.core import bridge as bridge_module, estimator as estimator_module
from mcvae.core.scores import value_and_score
from mcvae.models import UpsampledConv2d
from mcvae.models.networks import conv_decoder
from support import generator


def upsample_then_convolve(layer):
    return lambda x: nn.functional.conv2d(nn.Upsample(scale_factor=2)(x), layer.weight, layer.bias, padding=1)


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (4, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_upsampling_inside_a_convolution_is_upsampling_before_it(size, bias):
    torch.manual_seed(0)
    layer = UpsampledConv2d(3, 2, bias=bias).double()
    x = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    inputs = [x, *layer.parameters()]
    outcomes = []
    for function in (layer, upsample_then_convolve(layer)):
        value = function(x)
        first = torch.autograd.grad(value.sin().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
        outcomes.append([value, *first, *second])
    for ours, plain in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, plain)
    shifted = nn.functional.conv2d(nn.Upsample(scale_factor=2)(x), layer.weight.flip(-1), layer.bias, padding=1)
    assert (shifted - outcomes[0][0]).abs().max() > 0.01  # the same with a mirrored kernel


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8)])
def test_the_decoder_is_the_network_of_upsamplings_and_convolutions(shape):
    """With the same weights, for sizes that double and for those that do not (4 to 7)."""
    torch.manual_seed(0)
    network = conv_decoder(shape, 5).double()
    layers = [upsample_then_convolve(layer) if isinstance(layer, UpsampledConv2d) else layer for layer in network]
    assert any(isinstance(layer, UpsampledConv2d) for layer in network)
    z = torch.randn(3, 5, dtype=torch.float64)
    plain = z
    for layer in layers:
        plain = layer(plain)
    torch.testing.assert_close(network(z), plain)


def test_gradients_arrive_in_the_layout_of_the_activations():
    """A layer whose gradient comes back channels first makes every elementwise operator after it crawl."""
    network = conv_decoder((1, 28, 28), 5)
    found = []
    for layer in network:
        if isinstance(layer, nn.SiLU):
            layer.register_full_backward_hook(lambda layer, inner, outer: found.append(outer[0]))
    network(torch.randn(2, 5)).sum().backward()
    images = [gradient for gradient in found if gradient.dim() == 4]
    assert len(images) == 6
    assert all(gradient.is_contiguous(memory_format=torch.channels_last) for gradient in images)


def cliff(z):
    """A density that cannot be evaluated beyond a wall where proposals do land."""
    wall = torch.where(z > 1.5, torch.nan, 1.0)
    return -0.5 * (z * wall).square().sum(-1)


def smooth(z):
    return -0.5 * z.square().sum(-1)


@pytest.fixture
def accelerator(monkeypatch):
    """Chains as on a device where looking at values means waiting for it."""
    for module in (bridge_module, estimator_module):
        monkeypatch.setattr(module, "looking_is_free", lambda device: False)


KERNELS = {"ula": mcvae.ula, "mala": mcvae.mala, "hmc": lambda: mcvae.hmc(2), "underdamped": mcvae.underdamped}


def chains(kernel, density, source):
    """Weights, gradient in the location of q, and failures of chains that meet a wall."""
    location = torch.zeros(4, 2, dtype=torch.float64, requires_grad=True)
    initial = Independent(Normal(location, 0.3 * torch.ones(4, 2, dtype=torch.float64)), 1)
    objective = mcvae.AnnealedEstimator(kernel, mcvae.FixedSchedule([0.3, 0.6]), mcvae.FixedStepSizes(2, 0.8))
    trajectory = objective.run(mcvae.Bridge(initial, density), 30, generator=source)
    finite = trajectory.log_weight.isfinite()
    loss = torch.where(finite, trajectory.log_weight, 0.0).sum() + trajectory.log_accept.sum()
    return trajectory.log_weight, *torch.autograd.grad(loss, location), trajectory.nonfinite


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("own", [True, False], ids=["generator", "global stream"])
def test_looking_once_per_chain_finds_what_looking_at_every_state_finds(name, own, request):
    results, evaluations = [], []
    for once in (False, True):
        if once:
            request.getfixturevalue("accelerator")
        calls = []

        def density(z, calls=calls):
            calls.append(z)
            return cliff(z)

        torch.manual_seed(1)
        results.append(chains(KERNELS[name](), density, generator(1) if own else None))
        evaluations.append(len(calls))
    for careful, hopeful in zip(*results, strict=True):
        torch.testing.assert_close(careful, hopeful, rtol=0, atol=0)
    assert results[0][2].any(), "no proposal failed: the test shows nothing"
    assert results[0][1].isfinite().all()
    assert evaluations[1] > evaluations[0]  # the chain was run again


@pytest.mark.usefixtures("accelerator")
def test_how_often_a_chain_waits_for_the_device(monkeypatch):
    """Not once per state: looks of Python at tensors do not grow with K."""
    looks = []
    for name in ("__bool__", "item", "__float__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda tensor, f=original: looks.append(1) or f(tensor))
    initial = Independent(Normal(torch.zeros(4, 2, requires_grad=True), torch.ones(4, 2)), 1)
    waits = []
    for k in (3, 8):
        looks.clear()
        objective = mcvae.AnnealedEstimator(
            mcvae.mala(), mcvae.LinearSchedule(k, interior=True), mcvae.FixedStepSizes(k, 0.1)
        )
        objective.run(mcvae.Bridge(initial, smooth), 3, generator=generator(1))
        waits.append(len(looks))
    assert waits[1] == waits[0] > 0


CHURN = """
import resource, sys, torch
from mcvae import allocator
for policy in sys.argv[1:]:
    getattr(allocator, policy)()
def step():
    kept = [torch.ones(1_000_000) for _ in range(50)]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a policy of glibc")
def test_kept_memory_is_not_mapped_again():
    """Whichever policy was asked for last holds. What glibc does unasked depends on what else the process allocates."""

    def faults(*policies):
        run = subprocess.run([sys.executable, "-c", CHURN, *policies], capture_output=True, text=True, check=True)
        return int(run.stdout)

    returned = faults("keep_memory", "return_memory")
    assert returned > 200  # five times fifty blocks, at least one page each
    assert faults("keep_memory") < 0.05 * returned
    assert faults("return_memory", "keep_memory") < 0.05 * returned


def test_a_score_without_gradients_has_the_layout_of_its_latents():
    z = torch.randn(2, 3, 4)
    with torch.no_grad():
        value, score = value_and_score(smooth, z)
    torch.testing.assert_close(score, -z)
    assert not value.requires_grad
