"""Evidence of densities whose evidence is known, and the sandwich around it."""

import math

import pytest
import torch
from torch.distributions import Independent, Normal

import mcvae
from mcvae.models import PPCA, OneDimensional, Ring
from support import LOG_Z, generator, skewed_log_joint, standard_errors_off, wide_initial

KERNELS = {
    "hmc": lambda: mcvae.hmc(num_leapfrog=3),
    "mala": mcvae.mala,
    "rwm": mcvae.rwm,
    "ula": mcvae.ula,
    "underdamped": mcvae.underdamped,
}


def test_good_by_default():
    evidence = mcvae.estimate_log_evidence(skewed_log_joint, wide_initial(), generator=generator())
    assert ((evidence.log_evidence - LOG_Z).abs() < 4 * evidence.standard_error + 1e-3).all()
    assert (evidence.standard_error < 0.15).all()
    assert evidence.verdict() == "converged"
    assert (evidence.acceptance > 0.6).all()
    assert (evidence.num_nonfinite == 0).all()


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_the_default_adapts_to_the_scale_of_the_problem(scale):
    """A pilot must find step sizes over orders of magnitude; log evidence = d/2 log(2π) + d log(scale/2)."""
    initial = Independent(Normal(torch.full((1, 3), 0.5 * scale), torch.full((1, 3), scale)), 1)
    evidence = mcvae.estimate_log_evidence(
        lambda z: -0.5 * (2 * z / scale).square().sum(-1), initial, generator=generator()
    )
    truth = 1.5 * math.log(2 * math.pi) + 3 * math.log(scale / 2)
    assert abs(evidence.log_evidence.item() - truth) < 4 * evidence.standard_error.item() + 1e-3
    assert evidence.standard_error.item() < 0.1


@pytest.mark.parametrize("step_size", [0.3, "pilot", torch.tensor([[0.2, 0.4]]).expand(20, 2)])
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_finds_the_evidence(name, step_size):
    if name == "ula" and not isinstance(step_size, str):
        step_size = 0.1 * torch.as_tensor(step_size)
    evidence = mcvae.estimate_log_evidence(
        skewed_log_joint,
        wide_initial(),
        kernel=KERNELS[name](),
        num_steps=20,
        num_samples=4000,
        step_size=step_size,
        generator=generator(),
    )
    assert ((evidence.log_evidence - LOG_Z).abs() < 5 * evidence.standard_error).all()
    assert (evidence.standard_error < 0.1).all()
    assert evidence.log_weights.shape == (4000, 2)
    assert evidence.acceptance_per_step.shape == (20, 2)
    for field in ("log_evidence", "standard_error", "ess", "pareto_k", "acceptance", "num_nonfinite"):
        assert getattr(evidence, field).shape == (2,)


def test_a_schedule_and_a_path_can_be_given():
    evidence = mcvae.estimate_log_evidence(
        skewed_log_joint,
        wide_initial(),
        num_samples=2000,
        step_size=0.3,
        schedule=mcvae.FixedSchedule([0.05, 0.2, 0.6]),
        path=mcvae.MixturePath(),
        generator=generator(),
    )
    assert evidence.acceptance_per_step.shape == (3, 2)
    assert ((evidence.log_evidence - LOG_Z).abs() < 5 * evidence.standard_error).all()


def test_no_steps_is_importance_sampling():
    evidence = mcvae.estimate_log_evidence(
        skewed_log_joint, wide_initial(), num_steps=0, num_samples=5000, generator=generator()
    )
    with torch.no_grad():
        point = mcvae.Bridge(wide_initial(), skewed_log_joint).sample(5000, generator=generator())
    torch.testing.assert_close(evidence.log_weights, point.log_p - point.log_q)


@pytest.mark.slow
def test_more_temperatures_cut_the_variance():
    few, many = (
        mcvae.estimate_log_evidence(
            skewed_log_joint, wide_initial(), num_steps=k, num_samples=2000, generator=generator()
        )
        for k in (2, 200)
    )
    assert (many.standard_error < 0.5 * few.standard_error).all()


def test_tuning_on_the_weighted_chains_is_rejected_and_the_frozen_pilot_is_not():
    """A step size that looks at the chains it moves breaks E[w] = Z; frozen after a pilot it does not.

    The named wrong version picks, for every chain, the step size that leads to the larger weight.
    """
    bridge = mcvae.Bridge(wide_initial(), skewed_log_joint)
    betas = mcvae.LinearSchedule(3, interior=True)()
    with torch.no_grad():
        source = generator()
        steps = mcvae.pilot_step_sizes(bridge, mcvae.hmc(3), betas, generator=source)
        start = mcvae.State(bridge.sample(20_000, generator=source))
        frozen = mcvae.anneal(bridge, start, mcvae.hmc(3), betas, steps, generator=source).log_weight
        other = mcvae.anneal(bridge, start, mcvae.hmc(3), betas, 0.3 * steps, generator=source).log_weight
    assert standard_errors_off((frozen - LOG_Z).exp(), 1.0) < 5
    assert standard_errors_off((torch.maximum(frozen, other) - LOG_Z).exp(), 1.0) > 5


def ppca_problem(latent_dim=10, data_dim=30, batch=20):
    model = PPCA.random(latent_dim, data_dim, sigma=0.5, generator=generator(3))
    x, z = model.simulate(batch, generator=generator(4))
    posterior = model.posterior(x)
    encoder = lambda x: Independent(Normal(posterior.mean + 0.1, 1.5 * posterior.stddev), 1)
    bridge = mcvae.LatentVariableModel(encoder, model).bridge(x)
    return bridge, z, model.log_evidence(x).detach()


@pytest.mark.parametrize("name", ["hmc", "mala", "ula"])
def test_the_sandwich_holds_the_evidence_of_ppca(name):
    bridge, z, truth = ppca_problem()
    sandwich = mcvae.sandwich_log_evidence(
        bridge.log_joint, bridge.initial, z, kernel=KERNELS[name](), num_steps=30, generator=generator()
    )
    # bounds hold in expectation: over the data, the mean lower bound is below and the mean upper bound above
    below, above = truth - sandwich.lower, sandwich.upper - truth
    assert below.mean() > -4 * below.std() / len(truth) ** 0.5
    assert above.mean() > -4 * above.std() / len(truth) ** 0.5
    torch.testing.assert_close(sandwich.gap, sandwich.upper - sandwich.lower)
    assert sandwich.gap.mean() < 1.5


@pytest.mark.slow
def test_the_sandwich_closes_with_more_temperatures():
    bridge, z, truth = ppca_problem()
    tighter = mcvae.sandwich_log_evidence(bridge.log_joint, bridge.initial, z, num_steps=200, generator=generator())
    assert tighter.gap.mean().abs() < 0.3
    assert (tighter.lower - truth).mean().abs() < 0.15


@pytest.mark.parametrize("path", [mcvae.GeometricPath(), mcvae.MixturePath()])
@pytest.mark.parametrize("name", KERNELS)
def test_reverse_weights_have_mean_one_over_the_evidence(name, path):
    """From exact posterior samples of a skewed density in one dimension."""
    target = OneDimensional(lambda z: -0.5 * z.square() + torch.nn.functional.logsigmoid(3 * z) + 0.4, -12.0, 12.0)
    grid = torch.linspace(-12, 12, 200_001)
    cumulative = target.log_density(grid).softmax(0).cumsum(0)
    exact = grid[torch.searchsorted(cumulative, torch.rand(40_000, generator=generator())).clamp(max=200_000)]
    exact = exact + (torch.rand(40_000, generator=generator(1)) - 0.5) * (grid[1] - grid[0])
    initial = Independent(Normal(torch.full((1, 1), 0.8), torch.full((1, 1), 0.6)), 1)
    bridge = mcvae.Bridge(initial, target.log_joint, path)
    with torch.no_grad():
        state = mcvae.State(bridge.evaluate(exact.reshape(-1, 1, 1)))
        trajectory = mcvae.anneal(
            bridge, state, KERNELS[name](), [0.8, 0.5, 0.2], [0.1] * 3, start=1.0, end=0.0, generator=generator(2)
        )
        biased = mcvae.State(bridge.sample(40_000, generator=generator(3)))  # the named wrong version: start from q
        wrong = mcvae.anneal(
            bridge, biased, KERNELS[name](), [0.8, 0.5, 0.2], [0.1] * 3, start=1.0, end=0.0, generator=generator(2)
        )
    evidence = target.log_evidence()
    assert standard_errors_off((trajectory.log_weight + evidence).exp(), 1.0) < 5
    assert standard_errors_off((wrong.log_weight + evidence).exp(), 1.0) > 5


def test_the_ring_model():
    """A curved posterior: annealing from the prior finds the evidence that quadrature knows."""
    ring = Ring(xi=1.0, zeta=0.3, sigma=0.2, latent_dim=2).double()
    x, z = ring.simulate(8, generator=generator())
    prior = Independent(Normal(torch.zeros(8, 2), torch.ones(8, 2)), 1)
    bridge = mcvae.LatentVariableModel(lambda x: prior, ring).bridge(x)
    sandwich = mcvae.sandwich_log_evidence(bridge.log_joint, prior, z, num_samples=400, generator=generator())
    truth = ring.log_evidence(x).detach()
    assert ((sandwich.lower - truth).abs() < 5 * sandwich.forward.standard_error + 0.01).all()
    assert ((sandwich.upper - truth).abs() < 0.5).all()
    assert sandwich.reverse.standard_error.isnan().all()  # one posterior sample: no independent chains


@pytest.mark.parametrize("name", KERNELS)
def test_defaults_survive_a_bounded_support(name):
    """Half of the chains start where the density vanishes: they cannot move and must not mislead the pilot."""
    evidence = mcvae.estimate_log_evidence(
        lambda z: torch.where((z > 0).all(-1), -0.5 * z.square().sum(-1), -torch.inf),
        Independent(Normal(torch.zeros(1, 1), torch.ones(1, 1)), 1),
        kernel=KERNELS[name](),
        num_steps=10,
        num_samples=4000,
        generator=generator(),
    )
    truth = 0.5 * math.log(math.pi / 2)
    assert abs(evidence.log_evidence.item() - truth) < 5 * evidence.standard_error.item()
    assert evidence.standard_error.item() < 0.1


def test_the_pilot_tunes_every_datum():
    """Posterior scales from 1 to 0.001: a single step size would move one datum only."""
    scale = torch.tensor([1.0, 0.1, 0.01, 0.001]).unsqueeze(-1)
    initial = Independent(Normal(torch.zeros(4, 3), (2 * scale).expand(4, 3)), 1)
    evidence = mcvae.estimate_log_evidence(
        lambda z: -0.5 * (z / scale).square().sum(-1), initial, num_steps=32, generator=generator()
    )
    assert evidence.step_sizes.shape == (evidence.num_steps, 4, 3)
    assert (evidence.step_sizes[:, :-1] > 5 * evidence.step_sizes[:, 1:]).all()
    assert (evidence.acceptance > 0.7).all()
    assert (evidence.standard_error < 0.15).all()


@pytest.mark.slow
def test_the_pilot_moves_as_the_run_will():
    """From a far too wide start a quartic density makes long steps diverge; the pilot must meet that, too."""
    initial = Independent(Normal(torch.zeros(1, 5), torch.full((1, 5), 3.0)), 1)
    evidence = mcvae.estimate_log_evidence(lambda z: -(z**4).sum(-1), initial, generator=generator())
    truth = 5 * math.log(2 * math.gamma(1.25))
    assert evidence.acceptance.item() > 0.7
    assert abs(evidence.log_evidence.item() - truth) < 4 * evidence.standard_error.item()
    assert evidence.doubts() == [()]


def test_diverging_chains_are_counted_and_keep_their_place():
    initial = Independent(Normal(torch.zeros(2, 1), torch.ones(2, 1)), 1)
    evidence = mcvae.estimate_log_evidence(
        lambda z: -(z**4).sum(-1),
        initial,
        kernel=mcvae.ula(),
        num_steps=10,
        num_samples=200,
        step_size=1.0,
        generator=generator(),
    )
    assert (evidence.num_nonfinite > 0).all()
    assert evidence.log_weights.shape == (200, 2)
    assert not evidence.log_evidence.isnan().any()


def test_witnesses_may_go_where_the_density_cannot_be_evaluated():
    """exp overflows at a start three times as wide, which is no reason to fail: the user's own start is fine."""
    torch.set_default_dtype(torch.float32)

    def log_joint(z):
        scale = (8 * z).exp()
        return -0.5 * z.square().sum(-1) + 0 * (scale * scale - scale.square()).sum(-1)

    evidence = mcvae.estimate_log_evidence(
        log_joint, Independent(Normal(torch.zeros(1, 2), 1.5 * torch.ones(1, 2)), 1), generator=generator()
    )
    assert abs(evidence.log_evidence.item() - math.log(2 * math.pi)) < 5 * evidence.standard_error.item() + 0.01
