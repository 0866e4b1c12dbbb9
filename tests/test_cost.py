"""What an estimate costs: model evaluations, graphs kept, import time."""

import subprocess
import sys

import pytest
import torch

import mcvae
from mcvae import State
from support import generator, skewed_log_joint, wide_initial


class Counting:
    """A log density that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, z):
        self.calls += 1
        return skewed_log_joint(z)


@pytest.mark.parametrize("num_steps", [0, 1, 5])
@pytest.mark.parametrize("kernel", [mcvae.ula(), mcvae.mala(), mcvae.rwm(), mcvae.underdamped(1)])
def test_single_gradient_kernels_evaluate_the_model_once_per_state(kernel, num_steps):
    log_joint = Counting()
    objective = mcvae.AnnealedEstimator(
        kernel, mcvae.LinearSchedule(num_steps), mcvae.FixedStepSizes(num_steps, 0.1), num_samples=3
    )
    objective(mcvae.Bridge(wide_initial(), log_joint)).loss.sum()
    assert log_joint.calls == num_steps + 1


@pytest.mark.parametrize(
    ("objective", "calls"),
    [
        (mcvae.recipes.vae(), 1),
        (mcvae.recipes.iwae(10), 1),
        (mcvae.recipes.l_mcvae(5, latent_dim=2), 6),
        (mcvae.recipes.a_mcvae(5, latent_dim=2), 6),
        (mcvae.recipes.uha(5, latent_dim=2, num_leapfrog=2), 11),
        (mcvae.recipes.ais_hmc(5, latent_dim=2), 16),
    ],
)
def test_recipes_evaluate_the_model_as_often_as_promised(objective, calls):
    log_joint = Counting()
    objective(mcvae.Bridge(wide_initial(), log_joint)).loss.sum().detach()
    assert log_joint.calls == calls


def test_the_backward_pass_and_adaptation_do_not_evaluate_the_model():
    log_joint = Counting()
    loc = torch.zeros(2, 2, requires_grad=True)
    initial = torch.distributions.Independent(torch.distributions.Normal(loc, torch.ones(2, 2)), 1)
    objective = mcvae.recipes.l_mcvae(3, latent_dim=2)
    estimate = objective(mcvae.Bridge(initial, log_joint))
    estimate.loss.sum().backward()
    objective.adapt(estimate)
    assert log_joint.calls == 4


@pytest.mark.parametrize("kernel", [mcvae.ula(), mcvae.mala(), mcvae.hmc(2)])
def test_evaluation_keeps_no_graph(kernel, monkeypatch):
    """Under no_grad nothing requires gradients, and no score was computed with a second-order graph."""
    second_order = []
    autograd_grad = torch.autograd.grad

    def watched(*args, create_graph=False, **kwargs):
        second_order.append(create_graph)
        return autograd_grad(*args, create_graph=create_graph, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", watched)
    scale = torch.ones(2, 2, requires_grad=True)
    initial = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(2, 2), scale), 1)
    bridge = mcvae.Bridge(initial, skewed_log_joint)
    with torch.no_grad():
        trajectory = mcvae.anneal(bridge, State(bridge.sample(4)), kernel, [0.3, 0.6], [0.1, 0.1])
    tensors = [trajectory.log_weight, trajectory.log_accept, *trajectory.state.point[:5]]
    assert not any(tensor.requires_grad for tensor in tensors)
    assert second_order
    assert not any(second_order)


def test_estimating_evidence_keeps_no_graph():
    scale = torch.ones(2, 2, requires_grad=True)
    initial = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(2, 2), scale), 1)
    evidence = mcvae.estimate_log_evidence(skewed_log_joint, initial, num_steps=3, num_samples=30, step_size=0.2)
    assert not any(tensor.requires_grad for tensor in evidence if isinstance(tensor, torch.Tensor))


def test_log_weights_are_accumulated_in_double_precision():
    torch.set_default_dtype(torch.float32)
    estimate = mcvae.recipes.l_mcvae(3, latent_dim=2)(mcvae.Bridge(wide_initial(), skewed_log_joint))
    assert estimate.trajectory.state.point.z.dtype == torch.float32
    assert estimate.trajectory.log_weight.dtype == torch.float64


def test_large_densities_that_cancel_lose_no_precision():
    """q equals the target up to exp(-1e5): in float32 increments the weights would scatter by 0.03."""
    torch.set_default_dtype(torch.float32)
    initial = wide_initial()
    bridge = mcvae.Bridge(initial, lambda z: initial.log_prob(z) - 1e5)
    betas = mcvae.LinearSchedule(100, interior=True)()
    with torch.no_grad():
        state = State(bridge.sample(200, generator=generator()))
        trajectory = mcvae.anneal(bridge, state, mcvae.mala(), betas, 0.1, generator=generator(1))
    # what is left is the rounding of log_joint itself, 0.008 a value
    assert trajectory.log_weight.std() < 0.01


def test_half_precision_encoders_get_chains_in_single_precision():
    initial = torch.distributions.Independent(
        torch.distributions.Normal(torch.zeros(2, 2, dtype=torch.bfloat16), torch.ones(2, 2, dtype=torch.bfloat16)), 1
    )
    point = mcvae.Bridge(initial, lambda z: -z.square().sum(-1)).sample(3)
    assert point.z.dtype == torch.float32


def test_importing_brings_in_next_to_nothing():
    """Neither torch nor a module of ours: names are imported when first used."""
    program = "import sys; before = set(sys.modules); import mcvae; print(*set(sys.modules) - before)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert {name.partition(".")[0] for name in found} - set(sys.stdlib_module_names) == {"mcvae", "lazy_loader"}
    assert {name for name in found if name.startswith("mcvae.") and not name.startswith("mcvae._")} == set()


@pytest.mark.slow
def test_memory_of_an_evaluation_does_not_grow_with_the_number_of_steps():
    """Points of past steps are let go: count the tensors of latents that are alive at the end of the chain."""
    alive = []

    def watch(z):
        import gc

        gc.collect()
        alive.append(sum(1 for o in gc.get_objects() if type(o) is torch.Tensor and o.shape == (7, 2, 2)))
        return skewed_log_joint(z)

    bridge = mcvae.Bridge(wide_initial(), watch)
    with torch.no_grad():
        state = State(bridge.sample(7, generator=generator()))
        mcvae.anneal(bridge, state, mcvae.mala(), [0.1 * k for k in range(1, 9)], [0.1] * 8)
    assert alive[-1] <= alive[3]
