"""Replaced operators and recomputed evaluations: the same numbers, by another way."""

import gc

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Independent, Normal

import mcvae
from mcvae.core.operators import TwiceDifferentiable
from mcvae.core.scores import recomputed
from mcvae.models import build_model
from support import generator

NETWORKS = {
    "convolution": (lambda: nn.Conv2d(2, 4, 3, padding=1), (2, 6, 6)),
    "strided, uneven": (lambda: nn.Conv2d(2, 4, (3, 2), stride=(2, 3), padding=(1, 0)), (2, 8, 9)),
    "dilated, grouped, without bias": (lambda: nn.Conv2d(4, 4, 3, dilation=2, groups=2, bias=False), (4, 7, 7)),
    "one-dimensional": (lambda: nn.Conv1d(2, 3, 3, stride=2), (2, 8)),
    "three-dimensional": (lambda: nn.Conv3d(1, 2, 2), (1, 3, 4, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 4, stride=2, padding=1), (2, 5, 5)),
    "transposed, output padding": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, output_padding=1), (2, 4, 4)),
    "transposed, grouped, dilated": (lambda: nn.ConvTranspose1d(2, 4, 3, groups=2, dilation=2), (2, 6)),
    "padding by name": (lambda: nn.Conv2d(2, 4, 3, padding="same"), (2, 6, 6)),
    "padding mode": (lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), (2, 6, 6)),
    "silu": (lambda: nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 4), nn.SiLU(inplace=True)), (3,)),
    "nothing to replace": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh()), (3,)),
}


def double_gradients(network, z, cotangent, direction, mode):
    """Gradients of <c, f(z)²> + <v, ∇<c, f(z)²>>, as a chain needs them."""
    z = z.clone().requires_grad_()
    if mode:
        with TwiceDifferentiable() as active:
            value = (cotangent * network(z).square()).sum()
        with active.score_pass():
            (score,) = torch.autograd.grad(value, z, create_graph=True)
    else:
        value = (cotangent * network(z).square()).sum()
        (score,) = torch.autograd.grad(value, z, create_graph=True)
    total = value + (direction * score).sum()
    return value.detach(), score.detach(), *torch.autograd.grad(total, [z, *network.parameters()])


@pytest.mark.parametrize("name", NETWORKS)
def test_values_and_both_derivatives_equal_torchs(name):
    build, shape = NETWORKS[name]
    network = build()
    z = torch.randn(3, *shape, generator=generator())
    cotangent = torch.randn(network(z).shape, generator=generator(1))
    direction = torch.randn(z.shape, generator=generator(2))
    ours = double_gradients(network, z, cotangent, direction, mode=True)
    torchs = double_gradients(network, z, cotangent, direction, mode=False)
    for a, b in zip(ours, torchs, strict=True):
        torch.testing.assert_close(a, b)


def test_the_bernoulli_likelihood_equals_torchs():
    x = torch.tensor([0.0, 1.0, 1.0, 0.0])
    network = lambda z: Bernoulli(logits=z, validate_args=False).log_prob(x)
    network.parameters = list
    z = torch.tensor([[0.3, -0.2, 40.0, -40.0]])
    for a, b in zip(
        double_gradients(network, z, torch.ones(1, 4), torch.randn(1, 4, generator=generator()), mode=True),
        double_gradients(network, z, torch.ones(1, 4), torch.randn(1, 4, generator=generator()), mode=False),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_third_derivatives_are_torchs_too():
    x = torch.linspace(-3, 3, 7).requires_grad_()
    with TwiceDifferentiable():
        value = nn.functional.silu(x).sum()
    for _ in range(2):
        (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(value.sum(), x)
    truth = torch.func.vmap(torch.func.grad(torch.func.grad(torch.func.grad(nn.functional.silu))))(x.detach())
    torch.testing.assert_close(third, truth)


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


RECIPES = {
    "vae": mcvae.recipes.vae,
    "iwae": lambda: mcvae.recipes.iwae(3),
    "l-mcvae": lambda: mcvae.recipes.l_mcvae(3, 4, schedule=mcvae.SigmoidSchedule),
    "a-mcvae": lambda: mcvae.recipes.a_mcvae(3, 4, num_samples=2),
    "uha": lambda: mcvae.recipes.uha(3, 4),
}


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
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
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


def test_a_model_that_changes_between_the_passes_is_noticed():
    weight, calls = torch.tensor(2.0, requires_grad=True), []

    def fickle():
        calls.append(None)
        return weight.sin() if len(calls) == 1 else weight.sin().sin()

    value = recomputed(fickle, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="not deterministic"):
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
    def broken(function):
        def fail(*arguments):
            raise RuntimeError("no compiler here")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    model = build_model((1, 4, 4), 3, network="mlp")
    x = torch.zeros(2, 1, 4, 4)
    with pytest.warns(UserWarning, match="could not be compiled .RuntimeError: no compiler here"):
        first = mcvae.recipes.l_mcvae(2, 3)(model.bridge(x, compile=True), generator=generator())
    torch.testing.assert_close(mcvae.recipes.l_mcvae(2, 3)(model.bridge(x), generator=generator()).bound, first.bound)
