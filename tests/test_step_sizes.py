import pytest
import torch
from torch.distributions import Independent, Normal

import mcvae
from support import generator

STEP_SIZES = {
    "fixed": lambda: mcvae.FixedStepSizes(3, 0.1),
    "learned": lambda: mcvae.LearnedStepSizes(3, torch.tensor([[0.1, 0.2]])),
    "acceptance": lambda: mcvae.AcceptanceAdapted(3, 0.1),
    "score": lambda: mcvae.ScoreScaled(3, latent_dim=2, step_size=0.1),
}


def stretched_bridge(batch=50):
    """Scales 1 and 0.1: a good step size differs by dimension."""
    initial = Independent(Normal(torch.zeros(batch, 2), torch.tensor([1.2, 0.12]).expand(batch, 2)), 1)
    return mcvae.Bridge(initial, lambda z: -0.5 * (z / torch.tensor([1.0, 0.1])).square().sum(-1) - z[..., 0].tanh())


def estimator(step_sizes, kernel=None):
    kernel = kernel if kernel is not None else mcvae.mala()
    return mcvae.AnnealedEstimator(kernel, mcvae.LinearSchedule(3, interior=True), step_sizes, num_samples=4)


@pytest.mark.parametrize("name", STEP_SIZES)
def test_only_adapt_changes_step_sizes(name):
    objective = estimator(STEP_SIZES[name]())
    before = {key: value.clone() for key, value in objective.state_dict().items()}
    estimate = objective(stretched_bridge())
    with torch.no_grad():
        objective(stretched_bridge())
    objective.eval()(stretched_bridge())
    assert all(torch.equal(before[key], value) for key, value in objective.state_dict().items())
    objective.adapt(estimate)
    changed = any(not torch.equal(before[key], value) for key, value in objective.state_dict().items())
    assert changed == (name in ("acceptance", "score"))


@pytest.mark.parametrize("name", STEP_SIZES)
def test_everything_adapted_is_in_the_checkpoint(name):
    first, second = estimator(STEP_SIZES[name]()), estimator(STEP_SIZES[name]())
    for seed in range(5):
        first.adapt(first(stretched_bridge(), generator=generator(seed)))
    second.load_state_dict(first.state_dict())
    for seed in range(5, 8):
        for objective in (first, second):
            objective.adapt(objective(stretched_bridge(), generator=generator(seed)))
    assert torch.equal(first.step_sizes(), second.step_sizes())


@pytest.mark.parametrize("kernel", [mcvae.mala(), mcvae.ula(), mcvae.hmc(3), mcvae.rwm(), mcvae.underdamped(2)])
def test_acceptance_is_driven_to_the_target(kernel):
    objective = estimator(mcvae.AcceptanceAdapted(3, 0.5, target=0.7), kernel)
    acceptance = []
    for seed in range(150):
        estimate = objective(stretched_bridge(), generator=generator(seed))
        objective.adapt(estimate)
        acceptance.append(estimate.trajectory.acceptance.mean(1))
    assert ((torch.stack(acceptance[50:]).mean(0) - 0.7).abs() < 0.03).all()


@pytest.mark.parametrize(("kernel", "target"), [(mcvae.mala(), 0.8), (mcvae.ula(), 0.9)])
def test_score_scaling_finds_acceptance_and_shape(kernel, target):
    objective = estimator(mcvae.ScoreScaled(3, latent_dim=2, target=target), kernel)
    for seed in range(200):
        objective.adapt(objective(stretched_bridge(), generator=generator(seed)))
    acceptance = objective(stretched_bridge(2000), generator=generator(999)).trajectory.acceptance.mean(1)
    assert ((acceptance - target).abs() < 0.05).all()
    ratio = objective.step_sizes()[:, 0] / objective.step_sizes()[:, 1]
    assert (ratio > 4).all()  # the wide dimension gets the longer step


def test_score_scaling_is_the_papers_rule():
    steps = mcvae.ScoreScaled(1, latent_dim=2, step_size=0.2, target=0.9, rate=0.0, epsilon=0.01)
    trajectory = mcvae.Trajectory(
        torch.zeros(4, 3), None, torch.full((1, 3), 0.5), None, score_std=torch.tensor([[2.0, 0.0]])
    )
    steps.update(trajectory)
    expected = 0.9 * 0.2 + 0.1 * 0.2 / (0.01 + torch.tensor([[2.0, 0.0]]))
    torch.testing.assert_close(steps(), expected)


def test_score_std_is_the_spread_of_the_joints_score_over_samples_and_batch():
    bridge = stretched_bridge(30)
    state = mcvae.State(bridge.sample(7, generator=generator()))
    trajectory = mcvae.anneal(bridge, state, mcvae.ula(), [0.5, 1.0], [0.001, 0.001])
    expected = state.point.score_p.reshape(-1, 2).std(0, correction=0)
    torch.testing.assert_close(trajectory.score_std[0], expected)


@pytest.mark.parametrize("name", ["acceptance", "score"])
def test_adapting_before_the_backward_pass_is_harmless(name):
    loc = torch.zeros(10, 2, requires_grad=True)
    bridge = mcvae.Bridge(Independent(Normal(loc, torch.ones(10, 2)), 1), lambda z: -z.square().sum(-1))
    objective = estimator(STEP_SIZES[name](), mcvae.ula())
    estimate = objective(bridge)
    objective.adapt(estimate)
    estimate.loss.sum().backward()
    assert loc.grad.isfinite().all()


def test_vectors_adapt_to_the_acceptance_of_their_step():
    steps = mcvae.AcceptanceAdapted(2, torch.full((2, 2), 0.1), target=0.5)
    acceptance = torch.tensor([[1.0], [0.0]])
    steps.update(mcvae.Trajectory(torch.zeros(1, 1), None, acceptance, None))
    assert (steps()[0] > 0.1).all()
    assert (steps()[1] < 0.1).all()


def test_learned_step_sizes_get_a_gradient():
    objective = estimator(mcvae.LearnedStepSizes(3, 0.05), mcvae.ula())
    objective(stretched_bridge()).loss.mean().backward()
    assert objective.step_sizes.log_values.grad.abs().min() > 0


def test_shapes():
    assert mcvae.FixedStepSizes(3, 0.1)().shape == (3,)
    assert mcvae.FixedStepSizes(3, torch.tensor([0.1, 0.2, 0.3]))().tolist() == [0.1, 0.2, 0.3]
    assert mcvae.FixedStepSizes(3, torch.ones(1, 2))().shape == (3, 2)
    assert mcvae.FixedStepSizes(3, torch.ones(3, 2))().shape == (3, 2)
    assert mcvae.FixedStepSizes(0)().shape == (0,)
    assert mcvae.ScoreScaled(0, 5)().shape == (0, 5)


def test_an_estimator_stays_in_single_precision_where_a_model_is_in_half():
    """Otherwise adaptation by a factor of 1 + 1e-3 would be rounded away."""
    objective = mcvae.recipes.cmcd(3, 2).to(torch.bfloat16)
    assert {values.dtype for values in (*objective.parameters(), *objective.buffers())} == {torch.float32}
    adapted = mcvae.recipes.l_mcvae(3, 2).to(torch.bfloat16)
    assert adapted.step_sizes().dtype == torch.float32
    assert mcvae.recipes.l_mcvae(3, 2).double().step_sizes().dtype == torch.float64


@pytest.mark.parametrize("recipe", ["l_mcvae", "a_mcvae", "uha", "ais_hmc"])
def test_recipes_find_the_latent_dimension_when_they_adapt(recipe):
    """Bit for bit what a recipe that was told it does; and what it learned can be loaded into a new one."""
    build = getattr(mcvae.recipes, recipe)
    told, found = build(3, 2), build(3)
    for seed in range(3):
        expected = told(stretched_bridge(), generator=generator(seed))
        estimate = found(stretched_bridge(), generator=generator(seed))
        assert torch.equal(estimate.bound, expected.bound)
        told.adapt(expected)
        found.adapt(estimate)
        assert torch.equal(found.step_sizes(), told.step_sizes())
    assert (found.step_sizes()[:, 0] > 1.1 * found.step_sizes()[:, 1]).all()  # a vector, not one number
    fresh = build(3)
    fresh.load_state_dict(found.state_dict())
    assert torch.equal(fresh.step_sizes(), told.step_sizes())
    with pytest.raises(RuntimeError, match="size mismatch"):
        build(3, 4).load_state_dict(found.state_dict())


class Detached(mcvae.RelativeStepSizes):
    """The named wrong version: the bound depends on q's scales through the step sizes, the gradient does not."""

    def forward(self, initial=None):
        return super().forward(initial).detach()


@pytest.mark.parametrize("kind", [mcvae.RelativeStepSizes, Detached])
def test_the_gradient_knows_that_relative_steps_follow_the_scales(kind):
    kernel = mcvae.ula()
    objective = estimator(kind(mcvae.FixedStepSizes(3, 0.2), kernel.step_unit), kernel)

    def loss(log_scale):
        initial = Independent(Normal(torch.zeros(6, 2), log_scale.exp().expand(6, 2)), 1)
        bridge = mcvae.Bridge(initial, lambda z: -(z - 0.5).square().sum(-1))
        return objective(bridge, generator=generator()).loss.mean()

    log_scale = torch.tensor(0.3, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(log_scale), log_scale)
    with torch.no_grad():
        difference = (loss(log_scale + 1e-5) - loss(log_scale - 1e-5)) / 2e-5
    assert bool(torch.isclose(gradient, difference, rtol=1e-5)) == (kind is mcvae.RelativeStepSizes)
