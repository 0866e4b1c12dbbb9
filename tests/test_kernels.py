"""Laws of proposals and kernels, and what happens when a density cannot be evaluated."""

import math

import pytest
import torch
from torch.distributions import Independent, Normal

import mcvae
from mcvae import Hamiltonian, Langevin, RandomWalk, State
from mcvae.core.acceptance import log1mexp
from support import generator, skewed_log_joint, standard_errors_off, step, wide_initial

BETA = torch.tensor(0.6)


@pytest.fixture
def bridge():
    return mcvae.Bridge(wide_initial(), skewed_log_joint)


@pytest.fixture
def state(bridge):
    with torch.no_grad():
        return State(bridge.sample(50, generator=generator()))


@pytest.mark.parametrize("step_size", [torch.tensor(0.2), torch.tensor([0.1, 0.3])])
def test_leapfrog_is_reversible_and_preserves_volume(bridge, state, step_size):
    noise = torch.randn(50, 2, 2, generator=generator(1))
    proposal = Hamiltonian(num_leapfrog=4)
    there = proposal(bridge, state, step(BETA, step_size), noise).state
    back = proposal(bridge, State(there.point), step(BETA, step_size), -there.momentum).state
    torch.testing.assert_close(back.point.z, state.point.z)
    torch.testing.assert_close(back.momentum, -noise)

    def flow(phase):
        z, momentum = phase.reshape(1, 1, 4).expand(1, 2, 4).split(2, -1)
        moved = proposal(bridge, State(bridge.evaluate(z)), step(BETA, step_size), momentum).state
        return torch.cat([moved.point.z[0, 0], moved.momentum[0, 0]])

    jacobian = torch.autograd.functional.jacobian(flow, torch.tensor([0.3, -0.2, 0.5, 1.1]))
    torch.testing.assert_close(jacobian.det().abs(), torch.tensor(1.0))


def test_a_langevin_step_is_one_leapfrog_step(bridge, state):
    noise = torch.randn(50, 2, 2, generator=generator(1))
    eta = torch.tensor([0.05, 0.2])
    langevin = Langevin()(bridge, state, step(BETA, eta), noise)
    leapfrog = Hamiltonian(1)(bridge, state, step(BETA, (2 * eta).sqrt()), noise)
    torch.testing.assert_close(langevin.state.point, leapfrog.state.point)
    torch.testing.assert_close(
        langevin.log_backward - langevin.log_forward, leapfrog.log_backward - leapfrog.log_forward
    )


@pytest.mark.parametrize("proposal", [Langevin(), RandomWalk()])
def test_transition_densities_are_normalised_densities_of_the_new_latent(bridge, state, proposal):
    """Compare with torch's own Normal around the same mean, constants included."""
    noise = torch.randn(50, 2, 2, generator=generator(1))
    eta = torch.tensor([0.05, 0.2])
    proposed = proposal(bridge, state, step(BETA, eta), noise)
    drifts = isinstance(proposal, Langevin)
    scale = (2 * eta).sqrt() if drifts else eta

    def density(origin, destination):
        mean = origin.z + eta * bridge.score(origin, BETA) if drifts else origin.z
        return Independent(Normal(mean, scale.expand_as(mean)), 1).log_prob(destination.z)

    torch.testing.assert_close(proposed.log_forward, density(state.point, proposed.state.point))
    torch.testing.assert_close(proposed.log_backward, density(proposed.state.point, state.point))


@pytest.mark.parametrize("kernel", [mcvae.mala(), mcvae.rwm(), mcvae.hmc(2), mcvae.mala(mcvae.barker)])
def test_ais_weights_telescope(bridge, state, kernel):
    """log w is Σ_k log γ_k(z_{k-1}) − log γ_{k-1}(z_{k-1}), eq. (AISweight), with K + 1 increments."""
    betas, source = [0.2, 0.5, 0.9], generator(2)
    trajectory = mcvae.anneal(bridge, state, kernel, betas, [0.3] * 3, generator=source)
    source, expected = generator(2), torch.zeros(50, 2)
    current, previous = state, 0.0
    for beta in [*betas, 1.0]:
        expected += bridge.log_density(current.point, beta) - bridge.log_density(current.point, previous)
        if beta < 1:
            current = kernel(bridge, current, step(beta, 0.3), generator=source).state
        previous = beta
    torch.testing.assert_close(trajectory.log_weight, expected)


def test_log_accept_is_the_probability_of_the_decisions_taken(bridge, state):
    transition = mcvae.mala()(bridge, state, step(BETA, 0.8), generator=generator(1))
    moved = (transition.state.point.z != state.point.z).all(-1)
    assert 0.1 < moved.double().mean() < 0.9
    torch.testing.assert_close(transition.log_accept[moved].exp(), transition.acceptance[moved])
    torch.testing.assert_close(transition.log_accept[~moved].exp(), 1 - transition.acceptance[~moved])


def test_a_rejected_chain_keeps_its_whole_point(bridge, state):
    transition = mcvae.hmc(2)(bridge, state, step(BETA, 1.0), generator=generator(1))
    stayed = (transition.state.point.z == state.point.z).all(-1)
    assert stayed.any()
    for new, old in zip(transition.state.point[:5], state.point[:5], strict=True):
        assert torch.equal(new[stayed], old[stayed])
    fresh = bridge.evaluate(transition.state.point.z)
    torch.testing.assert_close(transition.state.point, mcvae.Point(*(t.detach() for t in fresh[:5])))


def test_momentum_survives_in_underdamped_dynamics_only_by_the_damping(bridge, state):
    kernel = mcvae.underdamped(1, damping=0.6)
    tiny = step(BETA, 1e-9)  # the leapfrog changes nothing, so that only refreshments are seen
    first = kernel(bridge, state, tiny, generator=generator(1)).state
    second = kernel(bridge, first, tiny, generator=generator(2)).state
    noise = torch.randn(50, 2, 2, generator=generator(2))
    torch.testing.assert_close(second.momentum, 0.6 * first.momentum + 0.8 * noise, atol=1e-7, rtol=0)


def testlog1mexp_is_accurate_and_has_a_finite_gradient_everywhere():
    x = torch.tensor([-1e-300, -1e-20, -1e-3, -0.69, -0.7, -5.0, -800.0, -torch.inf], requires_grad=True)
    value = log1mexp(x)
    exact = [math.log(-math.expm1(v)) if v > -700 else 0.0 for v in x.tolist()]
    torch.testing.assert_close(value, torch.tensor(exact), rtol=1e-12, atol=1e-12)
    value.sum().backward()
    assert x.grad.isfinite().all()


def narrow_log_joint(z):
    """NaN beyond 2, with an infinite derivative there: a proposal that lands outside cannot be evaluated."""
    return (4 - z.square()).sqrt().sum(-1)


@pytest.mark.parametrize(
    ("kernel", "step_size"),
    [(mcvae.mala(), 3.0), (mcvae.mala(mcvae.barker), 3.0), (mcvae.hmc(2), 0.8), (mcvae.rwm(), 3.0)],
)
def test_metropolis_hastings_rejects_and_counts_what_it_cannot_evaluate(kernel, step_size):
    bridge = mcvae.Bridge(Independent(Normal(torch.zeros(3, 1), 0.3 * torch.ones(3, 1)), 1), narrow_log_joint)
    with torch.no_grad():
        state = State(bridge.sample(200, generator=generator()))
        trajectory = mcvae.anneal(bridge, state, kernel, [0.5, 0.9], [step_size] * 2, generator=generator(1))
    assert trajectory.nonfinite.any()
    assert not trajectory.nonfinite.all()
    assert trajectory.log_weight.isfinite().all()
    assert (trajectory.state.point.z.abs() < 2).all()


def test_a_leapfrog_path_that_fails_on_its_way_is_rejected_even_if_it_ends_well():
    visited = []

    def gap(z):
        visited.append(z[..., 0].detach())
        return torch.where((z[..., 0] > 1) & (z[..., 0] < 2), torch.nan, -0.1 * z[..., 0].square())

    bridge = mcvae.Bridge(Independent(Normal(-torch.ones(1, 1), 0.1 * torch.ones(1, 1)), 1), gap)
    with torch.no_grad():
        state = State(bridge.sample(250, generator=generator()))
        visited.clear()
        transition = mcvae.hmc(3)(bridge, state, step(1.0, 1.0), generator=generator(1))
    fell = [(z > 1) & (z < 2) for z in visited]
    ends_well = (fell[0] | fell[1]) & ~fell[2]
    assert ends_well.any()
    assert torch.equal(transition.nonfinite, fell[0] | fell[1] | fell[2])
    assert torch.equal(transition.state.point.z[ends_well], state.point.z[ends_well])


def test_unadjusted_chains_that_diverge_get_weight_zero_and_are_counted():
    bridge = mcvae.Bridge(Independent(Normal(torch.zeros(3, 1), torch.ones(3, 1)), 1), lambda z: -(z**4).sum(-1))
    with torch.no_grad():
        state = State(bridge.sample(200, generator=generator()))
        trajectory = mcvae.anneal(bridge, state, mcvae.ula(), [0.5] * 8, [1.0] * 8, generator=generator(1))
    assert trajectory.nonfinite.any()
    assert (trajectory.log_weight[trajectory.nonfinite] == -torch.inf).all()
    assert (trajectory.log_weight < torch.inf).all()
    assert not trajectory.log_weight.isnan().any()
    assert trajectory.state.point.z.isfinite().all()


@pytest.mark.parametrize("step_size", [0.5, 1e6, 1e20, 1e30])
@pytest.mark.parametrize("kernel", [mcvae.mala(), mcvae.mala(mcvae.barker), mcvae.hmc(2)])
@pytest.mark.parametrize("path", [mcvae.GeometricPath(), mcvae.MixturePath()])
def test_rejected_proposals_leave_no_nan_in_gradients(kernel, step_size, path):
    """In float32, where steps of this size overflow squares and densities."""
    torch.set_default_dtype(torch.float32)
    loc = torch.zeros(3, 1, requires_grad=True)
    schedule = mcvae.LearnedSchedule(2, interior=True)
    steps = mcvae.LearnedStepSizes(2, step_size)
    bridge = mcvae.Bridge(Independent(Normal(loc, torch.ones(3, 1)), 1), lambda z: -(z**4).sum(-1) - z.sum(-1), path)
    objective = mcvae.AnnealedEstimator(kernel, schedule, steps, num_samples=64)
    estimate = objective(bridge, generator=generator())
    estimate.loss.sum().backward()
    assert estimate.bound.isfinite().all()
    for tensor in (loc, *objective.parameters()):
        assert tensor.grad.isfinite().all()


def square_root(z):
    return (4 - z.square()).sqrt().sum(-1)


def square_root_or_nothing(z):
    return torch.where(z.abs() < 2, (4 - z.square()).sqrt(), -torch.inf).sum(-1)


@pytest.mark.parametrize("log_joint", [square_root, square_root_or_nothing])
@pytest.mark.parametrize("kernel", [mcvae.mala(), mcvae.mala(mcvae.barker), mcvae.hmc(2), mcvae.rwm()])
def test_a_model_without_a_derivative_where_a_proposal_landed_leaves_no_nan_in_gradients(kernel, log_joint):
    loc, exponent = torch.zeros(3, 1, requires_grad=True), torch.tensor(1.0, requires_grad=True)
    bridge = mcvae.Bridge(Independent(Normal(loc, 0.3 * torch.ones(3, 1)), 1), lambda z: exponent * log_joint(z))
    objective = mcvae.AnnealedEstimator(
        kernel, mcvae.LearnedSchedule(2, interior=True), mcvae.LearnedStepSizes(2, 2.0), num_samples=64
    )
    estimate = objective(bridge, generator=generator())
    estimate.loss.sum().backward()
    assert estimate.bound.isfinite().all()
    for tensor in (loc, exponent, *objective.parameters()):
        assert tensor.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("step_size", [10.0, 100.0, 1e4])
def test_a_decoder_that_overflows_where_a_proposal_landed_is_a_rejection(step_size, dtype):
    """Its scale becomes 0, inf or NaN, which torch's validation would turn into an exception."""
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    validation = torch.distributions.Distribution._validate_args
    mean, log_scale = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    decoder = lambda z: Independent(Normal(mean(z), log_scale(z).exp()), 1)
    encoder = lambda x: Independent(Normal(x[:, :2], torch.ones(len(x), 2)), 1)
    objective = mcvae.recipes.a_mcvae(2, latent_dim=2, step_sizes=mcvae.FixedStepSizes(2, step_size))
    estimate = objective(mcvae.LatentVariableModel(encoder, decoder).bridge(torch.randn(8, 3)))
    assert estimate.bound.isfinite().all()
    assert torch.distributions.Distribution._validate_args == validation


def test_the_mixture_path_where_both_densities_vanish():
    """At β = 1 outside the support of p the bridge is 0; unadjusted chains that pass there keep their weight."""
    half_normal = lambda z: torch.where(
        z[..., 0] > 0, math.log(2) - 0.5 * z[..., 0].square() - 0.5 * math.log(2 * math.pi), -torch.inf
    )
    bridge = mcvae.Bridge(Independent(Normal(torch.ones(1, 1), torch.ones(1, 1)), 1), half_normal, mcvae.MixturePath())
    with torch.no_grad():
        state = State(bridge.sample(100_000, generator=generator()))
        trajectory = mcvae.anneal(bridge, state, mcvae.ula(), [0.3, 1.0, 1.0], 0.2, generator=generator(1))
    assert not trajectory.nonfinite.any()
    assert standard_errors_off(trajectory.log_weight.exp(), 1.0) < 5


def test_vanishing_density_outside_the_support_leaves_no_nan_in_gradients():
    def half(z):
        return torch.where(z[..., 0] > -0.5, -z[..., 0].square(), -torch.inf)

    loc = torch.full((3, 1), 2.0, requires_grad=True)
    objective = mcvae.AnnealedEstimator(
        mcvae.mala(), mcvae.LearnedSchedule(2, interior=True), mcvae.LearnedStepSizes(2, 0.6), num_samples=64
    )
    estimate = objective(mcvae.Bridge(Independent(Normal(loc, 0.5 * torch.ones(3, 1)), 1), half), generator=generator())
    estimate.loss.sum().backward()
    assert estimate.bound.isfinite().all()
    for tensor in (loc, *objective.parameters()):
        assert tensor.grad.isfinite().all()


def test_a_chain_that_starts_outside_the_support_has_weight_zero():
    def positive(z):
        return torch.where(z[..., 0] > 0, -z[..., 0], -torch.inf)

    bridge = mcvae.Bridge(Independent(Normal(torch.zeros(1, 1), torch.ones(1, 1)), 1), positive)
    with torch.no_grad():
        point = bridge.sample(1000, generator=generator())
        trajectory = mcvae.anneal(bridge, State(point), mcvae.mala(), [0.5], [0.1], generator=generator(1))
    assert torch.equal(trajectory.log_weight == -torch.inf, point.log_p == -torch.inf)
