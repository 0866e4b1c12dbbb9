"""Every mistake gets an error that says what was expected, what came, and what to do."""

import pytest
import torch
from torch.distributions import Bernoulli, Categorical, Gamma, Independent, MixtureSameFamily, Normal, Uniform

import mcvae
from mcvae import State
from support import generator, skewed_log_joint, wide_initial

ONE = Independent(Normal(torch.zeros(1, 2), torch.ones(1, 2)), 1)


def quadratic(z):
    return -z.square().sum(-1)


@pytest.fixture
def bridge():
    return mcvae.Bridge(wide_initial(), skewed_log_joint)


@pytest.mark.parametrize(
    ("initial", "error", "message"),
    [
        (Normal(torch.zeros(3, 2), 1.0), ValueError, r"batch \[3, 2\] and event \[\] from Normal. Wrap it"),
        (Independent(Normal(torch.zeros(2), 1.0), 1), ValueError, r"expand\(\(1,\)\)"),
        (Independent(Normal(torch.zeros(3, 4, 5), 1.0), 2), ValueError, "Flatten the latent"),
        (Independent(Bernoulli(torch.full((3, 2), 0.5)), 1), ValueError, r"continuous, got Independent\(Bernoulli\)"),
        (quadratic, TypeError, "unnormalised density belongs in log_joint"),
        (Independent(Gamma(torch.ones(3, 2), 1.0), 1), ValueError, "positive on all of R.D, got Independent.Gamma"),
        (Independent(Uniform(torch.zeros(3, 2), 1.0), 1), ValueError, "Change variables"),
    ],
)
def test_initial_distribution(initial, error, message):
    with pytest.raises(error, match=message):
        mcvae.Bridge(initial, quadratic)
    with pytest.raises(error, match=message):
        mcvae.estimate_log_evidence(quadratic, initial)


@pytest.mark.parametrize(
    ("log_joint", "message"),
    [
        (lambda z: -z.square(), r"= \[4, 1\], got \[4, 1, 2\]"),
        (lambda z: -z.square().sum(), r"got \[\]"),
        (lambda z: -z.square().sum(-1).mean(0), r"got \[1\]"),
        (lambda z: -z.detach().square().sum(-1), "must be differentiable in z by autograd"),
        (lambda z: quadratic(z) * torch.nan, "NaN or .inf at 4 of 4 samples"),
        (lambda z: quadratic(z) + torch.inf, "NaN or .inf at 4 of 4 samples"),
        (lambda z: (z - z).sqrt().sum(-1), "its score"),  # finite, with an infinite derivative
    ],
)
def test_log_joint(log_joint, message):
    with pytest.raises(ValueError, match=message):
        mcvae.estimate_log_evidence(log_joint, ONE, num_samples=4, num_steps=2, step_size=0.1)
    with pytest.raises(ValueError, match=message):
        mcvae.recipes.a_mcvae(2, latent_dim=2, num_samples=4)(mcvae.Bridge(ONE, log_joint))


def test_nan_in_only_one_datum_is_found():
    def log_joint(z):
        return quadratic(z) + torch.tensor([0.0, torch.nan])

    with pytest.raises(ValueError, match="at 5 of 10 samples"):
        mcvae.Bridge(wide_initial(), log_joint).sample(5)


def test_latents_of_the_wrong_shape(bridge):
    with pytest.raises(ValueError, match=r"\[S, B, D\] = \[S, 2, 2\], got \[5, 2\]"):
        bridge.evaluate(torch.zeros(5, 2))


def test_a_learnable_initial_without_reparameterised_samples():
    logits = torch.zeros(1, 2, requires_grad=True)
    mixture = MixtureSameFamily(Categorical(logits=logits), Independent(Normal(torch.zeros(1, 2, 1), 1.0), 1))
    bridge = mcvae.Bridge(mixture, quadratic)
    with pytest.raises(ValueError, match="no reparameterised sampler"):
        mcvae.recipes.vae()(bridge)
    with torch.no_grad():
        assert mcvae.recipes.vae()(bridge).bound.isfinite().all()


def test_inference_mode(bridge):
    with torch.inference_mode(), pytest.raises(RuntimeError, match="Use torch.no_grad"):
        mcvae.recipes.l_mcvae(2, latent_dim=2)(bridge)


@pytest.mark.parametrize(
    "build",
    [
        lambda: mcvae.LinearSchedule(-1),
        lambda: mcvae.SigmoidSchedule(-2),
        lambda: mcvae.LearnedSchedule(-1),
        lambda: mcvae.FixedStepSizes(-1, 0.1),
        lambda: mcvae.recipes.l_mcvae(-3, latent_dim=2),
        lambda: mcvae.recipes.a_mcvae(-3, latent_dim=2),
        lambda: mcvae.estimate_log_evidence(quadratic, ONE, num_steps=-5),
    ],
)
def test_negative_number_of_steps(build):
    with pytest.raises(ValueError, match="must not be negative, got -"):
        build()


@pytest.mark.parametrize("betas", [[0.5, 0.2], [0.5, 0.5], [0.0, 0.5], [0.5, 1.1], [0.1, float("nan")]])
def test_a_schedule_that_does_not_increase(betas, bridge):
    with pytest.raises(ValueError, match="strictly increasing temperatures"):
        mcvae.FixedSchedule(betas)


@pytest.mark.parametrize("betas", [[0.5, 0.2], [-0.1, 0.5], [0.5, 1.1], [0.1, float("nan")]])
def test_annealing_that_does_not_move_towards_its_end(betas, bridge):
    with pytest.raises(ValueError, match=r"move monotonically from start=0.0 to end=1.0.* got temperatures"):
        mcvae.anneal(bridge, State(bridge.sample(3)), mcvae.ula(), betas, [0.1, 0.1])


def test_reverse_annealing_needs_decreasing_temperatures(bridge):
    with pytest.raises(ValueError, match=r"from start=1.0 to end=0.0"):
        mcvae.anneal(bridge, State(bridge.sample(3)), mcvae.ula(), [0.2, 0.5], [0.1, 0.1], start=1.0, end=0.0)


@pytest.mark.parametrize("step_sizes", [[0.1, 0.0], [0.1, -1.0], [float("nan"), 0.1]])
def test_step_sizes_that_are_not_positive(step_sizes, bridge):
    with pytest.raises(ValueError, match="step sizes must be positive"):
        mcvae.anneal(bridge, State(bridge.sample(3)), mcvae.ula(), [0.2, 0.5], step_sizes)


def test_numbers_of_steps_that_disagree(bridge):
    state = State(bridge.sample(3))
    with pytest.raises(ValueError, match="1 kernels, temperatures .2. and step sizes .2."):
        mcvae.anneal(bridge, state, [mcvae.ula()], [0.2, 0.5], [0.1, 0.1])
    with pytest.raises(ValueError, match="2 kernels, temperatures .2. and step sizes .3."):
        mcvae.anneal(bridge, state, mcvae.ula(), [0.2, 0.5], [0.1, 0.1, 0.1])
    with pytest.raises(ValueError, match="schedule has 2 steps, but there are 3 step sizes"):
        mcvae.AnnealedEstimator(mcvae.ula(), mcvae.LinearSchedule(2), mcvae.FixedStepSizes(3, 0.1))
    with pytest.raises(ValueError, match="one for each of the 2 steps, got 3"):
        mcvae.AnnealedEstimator([mcvae.ula()] * 3, mcvae.LinearSchedule(2), mcvae.FixedStepSizes(2, 0.1))
    with pytest.raises(ValueError, match="one for each of the 2 steps, got 1"):
        mcvae.recipes.l_mcvae(2, latent_dim=2, backward=[mcvae.GaussianBackward(2)])


def test_one_sample_with_leave_one_out(bridge):
    with pytest.raises(ValueError, match="num_samples >= 2, got 1.*mcvae.stopped"):
        mcvae.recipes.a_mcvae(2, latent_dim=2, control_variate=mcvae.leave_one_out)
    with pytest.raises(ValueError, match="num_samples >= 2, got 1.*mcvae.stopped"):
        mcvae.leave_one_out(mcvae.elbo, mcvae.Trajectory(torch.zeros(1, 3), None, None, None))
    for control_variate in (mcvae.stopped, mcvae.no_control_variate):
        estimate = mcvae.recipes.a_mcvae(2, latent_dim=2, control_variate=control_variate)(bridge)
        assert estimate.loss.isfinite().all()
    assert mcvae.recipes.l_mcvae(2, latent_dim=2, num_samples=1)(bridge).loss.isfinite().all()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: mcvae.MetropolisHastings(mcvae.Hamiltonian(2, damping=0.5)),
            "its own reversal, got Hamiltonian.*Unadjusted",
        ),
        (lambda: mcvae.Hamiltonian(0), "num_leapfrog must be at least 1, got 0"),
        (lambda: mcvae.Hamiltonian(1, damping=1.0), r"damping must lie in \[0, 1\), got 1.0"),
        (lambda: mcvae.Unadjusted(mcvae.Hamiltonian(1), mcvae.GaussianBackward(2)), "density in z"),
        (lambda: mcvae.recipes.vae(num_samples=0), "num_samples must be at least 1, got 0"),
        (lambda: mcvae.FixedStepSizes(2, -0.1), "step sizes must be positive, got -0.1"),
        (lambda: mcvae.FixedStepSizes(2, torch.ones(3)), r"with K = 2, got \[3\]"),
        (
            lambda: mcvae.AcceptanceAdapted(2, target=1.5),
            "strictly between 0 and 1, got 1.5",
        ),
        (lambda: mcvae.SigmoidSchedule(3, delta=0.0), "delta must be positive, got 0.0"),
        (lambda: mcvae.FixedSchedule(torch.zeros(2, 2)), r"shape \[K\], got \[2, 2\]"),
        (lambda: mcvae.GaussianBackward(2, scale=0.0), "scale must be positive"),
        (lambda: mcvae.estimate_log_evidence(quadratic, ONE, step_size="auto"), 'or "pilot", got "auto"'),
        (lambda: mcvae.sandwich_log_evidence(quadratic, ONE, torch.zeros(3)), r"\[B, D\] = \[1, 2\].*got \[3\]"),
        (lambda: mcvae.models.PPCA(torch.zeros(3), torch.zeros(4, 2), 0.1), r"got \[3\] and \[4, 2\]"),
        (lambda: mcvae.models.Ring(-1.0, 0.0, 0.1), "must be positive, got -1.0"),
    ],
)
def test_settings(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_function_where_a_transform_is_needed():
    with pytest.raises(TypeError, match="Transform"):
        mcvae.FlowStep(lambda z: z)


def test_an_amortised_backward_kernel_without_context(bridge):
    objective = mcvae.recipes.l_mcvae(1, latent_dim=2, backward=[mcvae.GaussianBackward(2, context_dim=3)])
    with pytest.raises(ValueError, match=r"\[B, C\] = \[2, 3\], got None. Pass Bridge\(..., context="):
        objective(bridge)


def test_a_point_without_score(bridge):
    point = bridge.sample(3, with_score=False)
    with pytest.raises(ValueError, match="carries no score"):
        bridge.score(point, 0.5)


def test_score_scaled_step_sizes_need_scores(bridge):
    steps = mcvae.ScoreScaled(1, latent_dim=2)
    objective = mcvae.AnnealedEstimator(mcvae.rwm(), mcvae.LinearSchedule(1), steps, num_samples=2)
    with pytest.raises(ValueError, match="this kernel computes none. Use AcceptanceAdapted"):
        objective.adapt(objective(bridge))


def test_a_last_batch_of_one_chain_is_no_reason_to_stop():
    objective = mcvae.recipes.l_mcvae(1, latent_dim=2)
    before = objective.step_sizes().clone()
    objective.adapt(objective(mcvae.Bridge(ONE, quadratic)))
    assert torch.equal(objective.step_sizes(), before)


def test_a_fixed_initial_without_reparameterised_samples_is_fine():
    mixture = MixtureSameFamily(Categorical(torch.ones(1, 2)), Independent(Normal(torch.zeros(1, 2, 1), 1.0), 1))
    assert mcvae.recipes.l_mcvae(2, latent_dim=1)(mcvae.Bridge(mixture, quadratic)).bound.isfinite().all()


@pytest.mark.parametrize(
    ("encoder", "decoder", "message"),
    [
        (lambda x: ONE, lambda z: Independent(Normal(z, 1.0), 1), r"batch shape \[3\], got \[1\]"),
        (
            lambda x: Independent(Normal(x, torch.ones_like(x)), 1),
            lambda z: Normal(z, 1.0),
            r"has shape \[12\], got \[12, 2\]. Wrap it in torch.distributions.Independent\(distribution, 1\)",
        ),
        (lambda x: x, lambda z: Independent(Normal(z, 1.0), 1), "got Tensor"),
        (lambda x: Independent(Normal(x, torch.ones_like(x)), 1), lambda z: z, "the decoder must return .* got Tensor"),
        (lambda x: (x, x.exp()), lambda z: z, "the encoder must return .* got tuple. Wrap its output"),
        (
            lambda x: Independent(Normal(x, torch.ones_like(x)), 1),
            lambda z: Independent(Normal(z.repeat(1, 2), 1.0), 1),
            r"a distribution over data \[2\], got one of shape \[12, 4\] for 12 latents. Change the size",
        ),
    ],
)
def test_encoder_and_decoder(encoder, decoder, message):
    model = mcvae.LatentVariableModel(encoder, decoder)
    with pytest.raises((ValueError, TypeError), match=message):
        mcvae.recipes.vae(4)(model.bridge(torch.zeros(3, 2)))


def test_an_error_of_the_users_own_distribution_is_not_called_one_of_shapes():
    class Odd(Normal):
        def log_prob(self, value):
            raise ValueError("only on Sundays")

    model = mcvae.LatentVariableModel(lambda x: Independent(Normal(x, 1.0), 1), lambda z: Independent(Odd(z, 1.0), 1))
    with pytest.raises(ValueError, match="only on Sundays"):
        mcvae.recipes.vae(4)(model.bridge(torch.zeros(3, 2)))


def test_a_prior_that_is_not_over_one_latent():
    encoder, decoder = lambda x: Independent(Normal(x, 1.0), 1), lambda z: Independent(Normal(z, 1.0), 1)
    model = mcvae.LatentVariableModel(encoder, decoder, prior=Normal(torch.zeros(2), 1.0))
    with pytest.raises(ValueError, match=r"the prior must be over one latent.* event shape \[2\]"):
        mcvae.recipes.vae()(model.bridge(torch.zeros(3, 2)))


def test_step_sizes_for_another_dimension(bridge):
    with pytest.raises(ValueError, match=r"do not fit latents .* check latent_dim"):
        mcvae.recipes.l_mcvae(2, latent_dim=7)(bridge)


def test_a_point_or_a_number_where_more_is_needed(bridge):
    with pytest.raises(TypeError, match="starts from a State, got Point. Wrap"):
        mcvae.anneal(bridge, bridge.sample(3), mcvae.ula(), [0.5], [0.1])
    with pytest.raises(ValueError, match="expected as many kernels as temperatures"):
        mcvae.anneal(bridge, State(bridge.sample(3)), mcvae.ula(), 0.5, 0.1)
    with pytest.raises(TypeError, match="Call a shorthand to build it"):
        mcvae.estimate_log_evidence(quadratic, ONE, kernel=mcvae.hmc)
    with pytest.raises(TypeError, match="integer"):
        mcvae.LinearSchedule(2.5)
    mcvae.anneal(bridge, State(bridge.sample(3)), mcvae.ula(), [0.2, 0.5], 0.1)  # one step size for all is fine


def test_a_posterior_sample_that_cannot_be_one():
    with pytest.raises(ValueError, match="not finite at posterior_sample"):
        mcvae.sandwich_log_evidence(quadratic, ONE, torch.full((1, 2), torch.nan), num_steps=2, step_size=0.1)


def test_simulating_a_model_that_does_not_know_its_latent_dimension():
    model = mcvae.LatentVariableModel(lambda x: ONE, lambda z: Independent(Normal(z, 1.0), 1))
    with pytest.raises(ValueError, match="simulate needs latent_dim"):
        model.simulate(3, generator=generator())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mcvae.recipes.l_mcvae(3, schedule="sigmoid"), "a class such as mcvae.SigmoidSchedule"),
        (lambda: mcvae.recipes.l_mcvae(2.5), "whole number, got 2.5"),
        (lambda: mcvae.recipes.l_mcvae(2, step_sizes=0.1), "mcvae.FixedStepSizes"),
        (lambda: mcvae.recipes.l_mcvae(2, bound="iwae"), "mcvae.renyi"),
        (lambda: mcvae.renyi("a"), "alpha must be a number"),
        (lambda: mcvae.bayes_factor(1, 2), "estimate_log_evidence"),
        (lambda: mcvae.save(torch.zeros_like, "weights"), "save needs an nn.Module, got builtin_function_or_method"),
        (
            lambda: mcvae.LatentVariableModel(lambda x: ONE, lambda z: ONE).bridge([[1.0]]),
            r"x must be a tensor \[B, ...\], got list",
        ),
        (lambda: mcvae.estimate_log_evidence(lambda z: None, ONE), "must return a tensor, got NoneType"),
        (lambda: mcvae.estimate_log_evidence(lambda z: z.detach().numpy().sum(-1), ONE), "got ndarray"),
    ],
)
def test_a_part_of_the_wrong_kind(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_an_unknown_protocol():
    model = mcvae.LatentVariableModel(lambda x: ONE, lambda z: ONE)
    with pytest.raises(ValueError, match="thorough"):
        mcvae.evaluate(model, torch.zeros(1, 2), protocol="foo")
