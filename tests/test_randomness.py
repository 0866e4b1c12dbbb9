"""Same seed, same numbers; an explicit generator leaves the global stream alone; no device is assumed."""

import pytest
import torch
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

import mcvae
from support import generator, skewed_log_joint, wide_initial

OBJECTIVES = {
    "vae": lambda: mcvae.recipes.vae(),
    "iwae": lambda: mcvae.recipes.iwae(5),
    "l_mcvae": lambda: mcvae.recipes.l_mcvae(3, latent_dim=2, schedule=mcvae.SigmoidSchedule),
    "a_mcvae": lambda: mcvae.recipes.a_mcvae(3, latent_dim=2, schedule=mcvae.LearnedSchedule),
    "uha": lambda: mcvae.recipes.uha(3, latent_dim=2),
    "ais_hmc": lambda: mcvae.recipes.ais_hmc(3, latent_dim=2),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_same_seed_gives_the_same_bits_and_leaves_the_global_stream_untouched(name):
    bridge = mcvae.Bridge(wide_initial(), skewed_log_joint)
    objective = OBJECTIVES[name]()
    before = torch.get_rng_state()
    first, second, other = (objective(bridge, generator=generator(seed)) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.loss, second.loss)
    assert torch.equal(first.trajectory.state.point.z, second.trajectory.state.point.z)
    assert not torch.equal(first.bound, other.bound)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_without_a_generator_the_global_seed_decides(name):
    bridge = mcvae.Bridge(wide_initial(), skewed_log_joint)
    objective = OBJECTIVES[name]()
    torch.manual_seed(1)
    first = objective(bridge).bound
    torch.manual_seed(1)
    assert torch.equal(objective(bridge).bound, first)


def test_evidence_is_repeatable_and_leaves_the_global_stream_untouched():
    before = torch.get_rng_state()
    first, second = (
        mcvae.estimate_log_evidence(skewed_log_joint, wide_initial(), num_steps=5, generator=generator(7))
        for _ in range(2)
    )
    assert torch.equal(first.log_weights, second.log_weights)
    exact = torch.zeros(2, 2)
    mcvae.sandwich_log_evidence(skewed_log_joint, wide_initial(), exact, num_steps=5, generator=generator(7))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_distribution_that_only_samples_from_the_global_stream_obeys_the_generator():
    mixture = MixtureSameFamily(
        Categorical(torch.ones(1, 2)), Independent(Normal(torch.tensor([[[-1.0], [1.0]]]), torch.ones(1, 2, 1)), 1)
    )
    before = torch.get_rng_state()
    bridge = mcvae.Bridge(mixture, lambda z: -z.square().sum(-1))
    with torch.no_grad():
        first, second = (bridge.sample(5, generator=generator(1)).z for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_device_is_assumed(name):
    """With another default device, any tensor made without naming its device would not mix with the data."""
    objective = OBJECTIVES[name]()
    bridge = mcvae.Bridge(wide_initial(), skewed_on_device)
    with torch.device("meta"):
        estimate = objective(bridge, generator=generator())
        estimate.loss.sum()
        objective.adapt(estimate)
    assert estimate.bound.device.type == "cpu"


def skewed_on_device(z):
    return -(z - 0.5).square().sum(-1) - z[..., 0] ** 4


def test_evidence_assumes_no_device():
    initial, schedule = wide_initial(), mcvae.LinearSchedule(3)
    with torch.device("meta"):
        evidence = mcvae.estimate_log_evidence(skewed_on_device, initial, schedule=schedule, generator=generator())
    assert evidence.log_evidence.device.type == "cpu"
    assert evidence.pareto_k.isfinite().all()
