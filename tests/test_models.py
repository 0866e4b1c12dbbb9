"""Closed forms against independent answers, and the composition of encoder and decoder."""

import math

import pytest
import torch
import zuko
from scipy import integrate
from torch import nn
from torch.distributions import Independent, MultivariateNormal, Normal

import mcvae
from mcvae.models import PPCA, LatentVariableModel, OneDimensional, Ring, build_model, log_integral
from support import generator, standard_errors_off


@pytest.fixture
def ppca():
    return PPCA.random(3, 5, sigma=0.7, generator=generator(1))


def test_ppca_evidence_is_the_marginal_gaussian(ppca):
    x, _ = ppca.simulate(4, generator=generator())
    covariance = ppca.theta_1 @ ppca.theta_1.T + 0.49 * torch.eye(5)
    torch.testing.assert_close(ppca.log_evidence(x), MultivariateNormal(ppca.theta_0, covariance).log_prob(x))


def test_ppca_obeys_bayes_rule(ppca):
    """log p(x) = log p(x, z) − log p(z | x) for every z."""
    x, z = ppca.simulate(4, generator=generator())
    z = z + torch.randn(6, 4, 3)
    log_joint = LatentVariableModel(ppca.posterior, ppca).log_joint(x, z)
    difference = log_joint - ppca.posterior(x).log_prob(z)
    torch.testing.assert_close(difference, ppca.log_evidence(x).expand(6, 4))


def test_ppca_gradient_is_fishers_identity(ppca):
    """∇ log p(x) = E_{p(z|x)}[∇ log p(x, z)], by exact posterior samples."""
    x, _ = ppca.simulate(2, generator=generator())
    exact = torch.autograd.grad(ppca.log_evidence(x).sum(), [ppca.theta_0, ppca.theta_1])
    model = LatentVariableModel(ppca.posterior, ppca)
    with torch.no_grad():
        draws = ppca.posterior(x).sample((400,))
    samples = [torch.autograd.grad(model.log_joint(x, z[None]).sum(), [ppca.theta_0, ppca.theta_1]) for z in draws]
    for index, truth in enumerate(exact):
        assert standard_errors_off(torch.stack([s[index] for s in samples]), truth) < 5


def test_the_exact_posterior_makes_every_bound_exact(ppca):
    x, _ = ppca.simulate(4, generator=generator())
    model = LatentVariableModel(ppca.posterior, ppca)
    for objective in (mcvae.recipes.vae(3), mcvae.recipes.iwae(3), mcvae.recipes.a_mcvae(3, latent_dim=3)):
        torch.testing.assert_close(objective(model.bridge(x)).bound, ppca.log_evidence(x).detach())


@pytest.mark.parametrize("latent_dim", [1, 2, 5])
def test_ring_evidence_against_adaptive_quadrature(latent_dim):
    ring = Ring(xi=1.3, zeta=0.4, sigma=0.3, latent_dim=latent_dim).double()
    x = torch.tensor([[0.9], [2.2]])
    area = 2 * math.pi ** (latent_dim / 2) / math.gamma(latent_dim / 2)

    def integrand(radius, datum):
        log_prior = -0.5 * radius**2 - 0.5 * latent_dim * math.log(2 * math.pi)
        log_likelihood = Normal(1.3 * (radius + 0.4), 0.3).log_prob(torch.tensor(datum)).item()
        return area * radius ** (latent_dim - 1) * math.exp(log_prior + log_likelihood)

    expected = [math.log(integrate.quad(integrand, 0, 15, args=(datum.item(),), limit=200)[0]) for datum in x]
    torch.testing.assert_close(ring.log_evidence(x), torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_ring_evidence_in_many_dimensions_against_simulation():
    """p(x) averaged over data from the model has a known mean: E[1{x < c}] = ∫_{x<c} p(x) dx."""
    ring = Ring(xi=0.7, zeta=0.4, sigma=0.5, latent_dim=300).double()
    x, _ = ring.simulate(20_000, generator=generator())
    median = x.median().item()
    half = log_integral(lambda t: ring.log_evidence(t.unsqueeze(-1)), median - 15.0, median, num_points=301).exp()
    assert abs(half.item() - 0.5) < 5 * 0.5 / 20_000**0.5


def test_ring_mean_is_linear_in_the_norm():
    """The main text's ‖z‖² is a slip (named wrong version): at ‖z‖ = 2 the two differ."""
    ring = Ring(xi=1.5, zeta=0.5, sigma=0.1).double()
    assert ring(torch.tensor([[2.0, 0.0]])).mean.item() == pytest.approx(1.5 * 2.5)


def test_ring_posterior_is_normalised():
    ring = Ring(xi=1.0, zeta=0.2, sigma=0.3).double()
    axis = torch.linspace(-6, 6, 301)
    grid = torch.cartesian_prod(axis, axis).unsqueeze(1)
    with torch.no_grad():
        mass = ring.log_posterior(torch.tensor([[1.5]]), grid).exp().sum() * (axis[1] - axis[0]) ** 2
    assert mass.item() == pytest.approx(1, abs=1e-4)


def test_quadrature():
    assert log_integral(lambda z: -0.5 * z.square(), -12.0, 12.0).item() == pytest.approx(0.5 * math.log(2 * math.pi))
    assert log_integral(lambda z: 3 * z.log(), 1.0, 2.0).exp().item() == pytest.approx(15 / 4, rel=1e-6)
    shifted = OneDimensional(lambda z: -0.5 * (z - 1.5).square() / 0.04, -3.0, 6.0)
    assert shifted.log_evidence().exp().item() == pytest.approx(0.2 * math.sqrt(2 * math.pi))
    assert shifted.expectation(lambda z: z).item() == pytest.approx(1.5)
    assert shifted.expectation(torch.square).item() == pytest.approx(1.5**2 + 0.04)


class ConvolutionalDecoder(nn.Module):
    """A decoder as people write them: it knows rows, and nothing of samples."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Unflatten(1, (2, 1, 1)), nn.ConvTranspose2d(2, 1, 4), nn.Softplus())

    def forward(self, z):
        mean = self.network(z)
        assert mean.shape == (len(z), 1, 4, 4)
        return Independent(Normal(mean, 1.0), 3)


@pytest.mark.parametrize("num_samples", [1, 3])
def test_a_decoder_that_knows_only_rows_sees_every_sample_with_its_own_datum(num_samples):
    decoder = ConvolutionalDecoder()
    model = LatentVariableModel(lambda x: Independent(Normal(torch.zeros(5, 2), torch.ones(5, 2)), 1), decoder)
    x, z = torch.randn(5, 1, 4, 4), torch.randn(num_samples, 5, 2)
    prior = Independent(Normal(torch.zeros(2), 1.0), 1)
    for s in range(num_samples):
        for b in range(5):
            expected = prior.log_prob(z[s, b]) + decoder(z[s, b : b + 1]).log_prob(x[b])
            torch.testing.assert_close(model.log_joint(x, z)[s, b], expected.squeeze())


def test_priors():
    encoder = lambda x: Independent(Normal(x, torch.ones_like(x)), 1)
    decoder = lambda z: Independent(Normal(z, 1.0), 1)
    x, z = torch.randn(4, 2), torch.randn(3, 4, 2)
    wide = Independent(Normal(torch.zeros(2), torch.full((2,), 3.0)), 1)
    flow = zuko.flows.NSF(features=2, transforms=1, hidden_features=(8,))
    for prior, expected in [(wide, wide), (flow, flow()), (None, Independent(Normal(torch.zeros(2), 1.0), 1))]:
        model = LatentVariableModel(encoder, decoder, prior)
        difference = model.log_joint(x, z) - decoder(z).log_prob(x)
        torch.testing.assert_close(difference, expected.log_prob(z))
        data, latents = model.simulate(6, latent_dim=2, generator=generator())
        assert data.shape == latents.shape == (6, 2)
    assert len(list(LatentVariableModel(encoder, decoder, flow).parameters())) > 0


def test_a_flow_is_a_fine_initial_distribution():
    """RealNVP from zuko as q, with and without annealing: gradients reach it."""
    flow = zuko.flows.RealNVP(features=2, context=3, transforms=2, hidden_features=(8,))
    model = LatentVariableModel(flow, lambda z: Independent(Normal(z @ torch.ones(2, 3), 1.0), 1))
    x = torch.randn(4, 3)
    for objective in (mcvae.recipes.vae(), mcvae.recipes.l_mcvae(2, 2), mcvae.recipes.a_mcvae(2, 2)):
        flow.zero_grad()
        estimate = objective(model.bridge(x))
        estimate.loss.mean().backward()
        assert estimate.bound.isfinite().all()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in flow.parameters())


def test_a_lazy_transform_is_a_fine_flow_step():
    """zuko's conditional coupling as a kernel: learned, amortised over the context."""
    flow = zuko.flows.RealNVP(features=2, context=3, transforms=1, hidden_features=(8,))
    model = LatentVariableModel(
        lambda x: Independent(Normal(torch.zeros(4, 2), torch.ones(4, 2)), 1),
        lambda z: Independent(Normal(z @ torch.ones(2, 3), 1.0), 1),
    )
    objective = mcvae.AnnealedEstimator(
        [mcvae.FlowStep(flow.transform), mcvae.ula()], mcvae.LinearSchedule(2), mcvae.FixedStepSizes(2, 0.05)
    )
    objective(model.bridge(torch.randn(4, 3))).loss.mean().backward()
    assert all(p.grad.abs().sum() > 0 for p in flow.transform.parameters())


@pytest.mark.slow
def test_training_recovers_the_model_and_monte_carlo_tightens_the_bound():
    """A user's loop on PPCA data with a poor encoder: L-MCVAE and A-MCVAE end nearer the evidence than the VAE."""
    truth = PPCA.random(2, 8, sigma=0.5, generator=generator(5))
    x, _ = truth.simulate(200, generator=generator(6))

    def train(objective):
        torch.manual_seed(0)
        decoder = PPCA(x.mean(0), truth.theta_1.detach().clone(), sigma=0.5)  # theta fixed: the gap is the encoder's
        encoder_net = nn.Linear(8, 2)
        encoder = lambda x: Independent(Normal(encoder_net(x), torch.full((len(x), 2), 0.6)), 1)
        model = LatentVariableModel(encoder, decoder)
        optimizer = torch.optim.Adam([*encoder_net.parameters(), *objective.parameters()], lr=0.02)
        for step in range(250):
            estimate = objective(model.bridge(x), generator=generator(step))
            optimizer.zero_grad()
            estimate.loss.mean().backward()
            optimizer.step()
            objective.adapt(estimate)
        with torch.no_grad():
            bound = torch.stack([objective(model.bridge(x), generator=generator(s)).bound.mean() for s in range(50)])
        return (decoder.log_evidence(x).mean() - bound.mean()).item()

    gaps = {
        "vae": train(mcvae.recipes.vae()),
        "l_mcvae": train(mcvae.recipes.l_mcvae(5, latent_dim=2)),
        "a_mcvae": train(mcvae.recipes.a_mcvae(5, latent_dim=2)),
    }
    assert min(gaps.values()) > 0
    assert gaps["l_mcvae"] < 0.8 * gaps["vae"]
    assert gaps["a_mcvae"] < 0.8 * gaps["vae"]


@pytest.mark.parametrize("recipe", mcvae.recipes.__all__)
def test_a_model_gives_recipes_the_sizes_they_ask_for(recipe):
    model = build_model((4,), 2, kind="real", network="mlp", likelihood="gaussian")
    x = torch.randn(3, 4)
    options = {} if recipe in ("vae", "iwae") else {"num_steps": 2}
    objective = model.objective(getattr(mcvae.recipes, recipe), x, **options)
    estimate = objective(model.bridge(x))
    estimate.loss.mean().backward()
    objective.adapt(estimate)
    networks = [part for part in objective.modules() if isinstance(part, mcvae.DriftNetwork)]
    assert all((part.latent_dim, part.context_dim) == (2, 4) for part in networks)
    assert bool(networks) == (recipe in ("mcd", "cmcd", "dbs", "ldvi", "cmcd_ud"))


def test_a_key_takes_no_options():
    model = build_model((4,), 2, kind="real", network="mlp", likelihood="gaussian")
    with pytest.raises(TypeError, match="options are for recipes; .* Got num_steps"):
        model.objective("l-mcvae-k3", num_steps=5)
