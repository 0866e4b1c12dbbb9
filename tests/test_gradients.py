"""The gradient menu: unbiased where allowed, refused where not, and the variance of the stopped control variate."""

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal

import mcvae
from mcvae import recipes
from mcvae.models import PPCA, LatentVariableModel
from support import generator, standard_errors_off


class Encoder(nn.Module):
    """A mean-field Gaussian with free parameters, off the optimum."""

    def __init__(self, num_data, latent_dim):
        super().__init__()
        self.loc = nn.Parameter(0.3 * torch.randn(num_data, latent_dim, generator=generator(1)))
        self.log_scale = nn.Parameter(torch.full((num_data, latent_dim), -0.4))

    def forward(self, x):
        return Independent(Normal(self.loc, self.log_scale.exp()), 1)


@pytest.fixture
def problem():
    ppca = PPCA.random(3, 6, generator=generator(2))
    x, _ = ppca.simulate(2, generator=generator(3))
    return LatentVariableModel(Encoder(2, 3), ppca), x


def gradient_samples(objective, model, x, number):
    """Independent gradients of one datum's loss, [number, parameters], from copies of the datum."""
    rows = []
    for seed in range(number):
        loss = objective(model.bridge(x), generator=generator(seed)).loss.mean()
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return torch.stack(rows)


def exact_elbo_gradient(model, x):
    """The ELBO of a linear-Gaussian model with a Gaussian q, in closed form, differentiated."""
    q, ppca = model.encoder(x).base_dist, model.decoder
    weight, offset, sigma = ppca.theta_1, ppca.theta_0, ppca.sigma
    mean = offset + q.loc @ weight.T
    spread = (q.scale.square() @ weight.square().T).sum(-1)
    reconstruction = -0.5 * (((x - mean).square().sum(-1) + spread) / sigma**2)
    reconstruction = reconstruction - x.shape[1] * (
        torch.as_tensor(sigma).log() + 0.5 * torch.log(torch.tensor(2 * torch.pi))
    )
    divergence = torch.distributions.kl_divergence(q, Normal(0.0, 1.0)).sum(-1)
    bound = (reconstruction - divergence).mean()
    return torch.cat([g.flatten() for g in torch.autograd.grad(-bound, list(model.parameters()))])


@pytest.mark.parametrize("gradient", ["pathwise", "sticking-the-landing", "doubly-reparameterised"])
def test_every_choice_is_unbiased_for_the_elbo(problem, gradient):
    model, x = problem
    samples = gradient_samples(recipes.vae(3, gradient=gradient), model, x, 1500)
    assert standard_errors_off(samples, exact_elbo_gradient(model, x)) < 5


def test_dropping_the_score_of_q_altogether_is_rejected(problem):
    """The named wrong version: log q without any gradient, where sticking the landing keeps the way through z."""
    model, x = problem
    rows = []
    for seed in range(1500):
        point = model.bridge(x).sample(3, with_score=False, generator=generator(seed))
        loss = -(point.log_p - point.log_q.detach()).mean()
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    assert standard_errors_off(torch.stack(rows), exact_elbo_gradient(model, x)) > 5


def test_doubly_reparameterised_iwae_has_the_gradient_of_pathwise_iwae_and_less_variance(problem):
    model, x = problem
    plain = gradient_samples(recipes.iwae(8), model, x, 1500)
    doubly = gradient_samples(recipes.iwae(8, gradient="doubly-reparameterised"), model, x, 1500)
    error = ((plain.var(0) + doubly.var(0)) / 1500).sqrt()
    assert ((plain.mean(0) - doubly.mean(0)).abs() < 5 * error).all()
    encoder = sum(p.numel() for p in model.encoder.parameters())
    assert doubly[:, :encoder].var(0).sum() < plain[:, :encoder].var(0).sum()
    # the named wrong version: sticking the landing in a bound over samples is biased
    wrong = []
    for seed in range(1500):
        bridge = model.bridge(x)
        point = bridge.sample(8, with_score=False, generator=generator(seed))
        still = Independent(Normal(bridge.initial.mean.detach(), bridge.initial.stddev.detach()), 1)
        loss = -mcvae.iwae(point.log_p - still.log_prob(point.z)).mean()
        wrong.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    difference = (torch.stack(wrong).mean(0) - plain.mean(0)).abs() / error
    assert difference.max() > 5


def test_sticking_the_landing_has_no_variance_at_the_optimum():
    """Where q is the posterior, log w does not depend on z, and its gradient in q's parameters vanishes."""
    loc, scale = torch.zeros(1, 2, requires_grad=True), torch.ones(1, 2, requires_grad=True)
    bridge = mcvae.Bridge(Independent(Normal(loc, scale), 1), lambda z: -0.5 * z.square().sum(-1))
    for gradient, variance in (("sticking-the-landing", 0.0), ("pathwise", 1.0)):
        loss = recipes.vae(gradient=gradient)(bridge, generator=generator()).loss.sum()
        found = torch.autograd.grad(loss, [loc, scale])
        size = sum(g.abs().sum() for g in found)
        assert size < 1e-12 if variance == 0 else size > 0.1


def test_values_do_not_depend_on_the_choice(problem):
    model, x = problem
    bounds = [
        recipes.iwae(5, gradient=gradient)(model.bridge(x), generator=generator()).loss
        for gradient in ("pathwise", "doubly-reparameterised")
    ]
    torch.testing.assert_close(*bounds)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: recipes.iwae(5, gradient="sticking-the-landing"), "unbiased for the ELBO only"),
        (lambda: recipes.vae(3, bound=mcvae.renyi(0.5), gradient="doubly-reparameterised"), "for elbo and iwae"),
        (lambda: recipes.vae(gradient="reinforce"), "must be one of pathwise"),
        (
            lambda: mcvae.AnnealedEstimator(
                mcvae.ula(), mcvae.LinearSchedule(2), mcvae.FixedStepSizes(2), gradient="sticking-the-landing"
            ),
            "After K = 2 moves",
        ),
    ],
)
def test_a_choice_that_would_be_biased_is_refused_with_an_explanation(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def ppca_gradients(number, control_variate, *, off=0.3, step_size=0.02, num_data=20):
    """Gradients in θ from 400 seeds, `[400, P]`, and a q whose mean is `off` deviations from the posterior's."""
    ppca = PPCA.random(10, 20, generator=generator(2))
    x, _ = ppca.simulate(num_data, generator=generator(3))
    with torch.no_grad():
        posterior = ppca.posterior(x)
    scale = posterior.covariance_matrix.diagonal(dim1=-2, dim2=-1).sqrt()
    q = Independent(Normal(posterior.mean + off * scale, 1.3 * scale), 1)
    model, parameters = LatentVariableModel(lambda _: q, ppca), [ppca.theta_0, ppca.theta_1]
    step_sizes = mcvae.FixedStepSizes(5, step_size)
    objective = recipes.a_mcvae(5, 10, num_samples=number, control_variate=control_variate, step_sizes=step_sizes)
    rows = []
    for seed in range(400):
        loss = objective(model.bridge(x), generator=generator(seed)).loss.mean()
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
    return torch.stack(rows)


def assert_same_mean(one, other):
    error = ((one.var(0) + other.var(0)) / len(one)).sqrt()
    assert ((one.mean(0) - other.mean(0)).abs() < 5 * error).all()


@pytest.mark.parametrize("num_samples", [2, 5])
def test_one_stopped_chain_beats_leave_one_out_at_equal_cost_on_ppca(num_samples):
    """Variance × cost of the gradient in θ, and agreement of the means, as in Section 4 of the paper."""
    one, many = ppca_gradients(1, mcvae.stopped), ppca_gradients(num_samples, mcvae.leave_one_out)
    assert_same_mean(one, many)
    assert one.var(0).sum() < num_samples * many.var(0).sum()


def test_predicting_the_gain_reduces_the_variance_where_q_is_poor():
    """There a chain gains much after any decision, and `stopped` takes all of that for the decision's merit."""
    alone, compared = (ppca_gradients(1, way, off=2.0, step_size=0.05) for way in (mcvae.stopped, mcvae.predicted))
    assert_same_mean(alone, compared)
    assert compared.var(0).sum() < 0.5 * alone.var(0).sum()
