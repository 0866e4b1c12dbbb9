"""Models of other libraries: their evidence against quadrature, and their parts against their own numbers."""

import math
from types import SimpleNamespace

import arviz
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import mcvae
from mcvae.adapters.from_pyro import from_pyro
from mcvae.adapters.from_pythae import from_pythae
from mcvae.adapters.to_arviz import to_arviz

EFFECTS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], dtype=torch.float64)
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], dtype=torch.float64)


def centred(effects, errors):
    mu = pyro.sample("mu", dist.Normal(torch.tensor(0.0), 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(torch.tensor(5.0)))
    with pyro.plate("schools", 8):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, errors), obs=effects)


def non_centred(effects, errors):
    mu = pyro.sample("mu", dist.Normal(torch.tensor(0.0), 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(torch.tensor(5.0)))
    with pyro.plate("schools", 8):
        eta = pyro.sample("eta", dist.Normal(torch.tensor(0.0), 1.0))
        pyro.sample("y", dist.Normal(mu + tau * eta, errors), obs=effects)


def evidence_by_quadrature() -> float:
    """Effects and mu integrate out exactly: y ~ N(0, diag(σ² + τ²) + 25); tau by quadrature of log τ."""
    log_tau = torch.linspace(-25, 15, 20_001)
    tau = log_tau.exp()
    noise = (ERRORS.square() + tau[:, None].square()).diag_embed()
    marginal = torch.distributions.MultivariateNormal(torch.zeros(8), noise + 25.0)
    log_integrand = marginal.log_prob(EFFECTS) + torch.distributions.HalfCauchy(5.0).log_prob(tau) + log_tau
    return float(log_integrand.logsumexp(0) + math.log(float(log_tau[1] - log_tau[0])))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "num_steps"), [(non_centred, 64), (centred, 256)])
def test_the_evidence_of_eight_schools_is_that_of_quadrature(model, num_steps):
    posterior = from_pyro(model, EFFECTS, ERRORS)
    evidence = mcvae.estimate_log_evidence(
        posterior.log_joint,
        posterior.initial,
        num_steps=num_steps,
        num_samples=256,
        generator=torch.Generator().manual_seed(0),
    )
    error = abs(float(evidence.log_evidence) - evidence_by_quadrature())
    assert error < 4 * float(evidence.standard_error), evidence.verdict()
    assert float(evidence.standard_error) < 0.3
    assert error < abs(float(evidence.log_evidence) - evidence_by_quadrature() - math.log(5))  # a lost constant is seen
    samples = posterior.constrained(evidence.posterior(200, generator=torch.Generator().manual_seed(1)))
    assert (samples["tau"] > 0).all()
    assert abs(float(samples["mu"].mean()) - 4.4) < 1.5  # the literature's posterior mean


def test_unconstrained_latents_carry_their_jacobian():
    """Gamma(2, 1) prior and an exponential datum 1: evidence E[s e^-s] = 2/8; by quadrature of log s."""

    def model(x):
        scale = pyro.sample("scale", dist.Gamma(torch.tensor(2.0), 1.0))
        pyro.sample("x", dist.Exponential(scale), obs=x)

    posterior = from_pyro(model, torch.tensor(1.0))
    z = torch.linspace(-20, 10, 30_001)
    total = posterior.log_joint(z.reshape(-1, 1, 1)).logsumexp(0) + math.log(float(z[1] - z[0]))
    assert abs(float(total) - math.log(0.25)) < 1e-6
    assert torch.allclose(posterior.constrained(torch.zeros(1, 1, 1))["scale"], torch.ones(1))
    assert posterior.bridge().sample(5).log_p.shape == (5, 1)


@pytest.mark.slow
def test_a_simplex_and_a_vector_are_put_back_in_their_shapes():
    def model():
        share = pyro.sample("share", dist.Dirichlet(torch.ones(3)))
        pyro.sample("loading", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
        pyro.sample("x", dist.Multinomial(10, share), obs=torch.tensor([5.0, 3.0, 2.0]))

    posterior = from_pyro(model)
    samples = posterior.constrained(torch.randn(4, 1, 2 + 6))
    assert samples["share"].shape == (4, 3)
    assert torch.allclose(samples["share"].sum(1), torch.ones(4))
    assert samples["loading"].shape == (4, 2, 3)
    e = mcvae.estimate_log_evidence(
        posterior.log_joint, posterior.initial, num_steps=16, generator=torch.Generator().manual_seed(0)
    )
    uniform = -math.log(math.comb(12, 2))  # a uniform simplex makes all 66 outcomes equally likely
    assert abs(float(e.log_evidence) - uniform) < 4 * float(e.standard_error) + 1e-3


def test_what_pyro_cannot_give_is_refused():
    def discrete():
        pyro.sample("coin", dist.Bernoulli(0.5))

    with pytest.raises(ValueError, match="discrete latent 'coin'"):
        from_pyro(discrete)
    with pytest.raises(ValueError, match="no latents"):
        from_pyro(lambda: pyro.sample("x", dist.Normal(0.0, 1.0), obs=torch.tensor(1.0)))
    with pytest.raises(TypeError, match="get_posterior"):
        from_pyro(centred, EFFECTS, ERRORS, guide=lambda: None)


@pytest.mark.slow
def test_chains_start_from_a_trained_guide():
    pyro.clear_param_store()
    guide = pyro.infer.autoguide.AutoMultivariateNormal(non_centred)
    svi = pyro.infer.SVI(non_centred, guide, pyro.optim.Adam({"lr": 0.02}), pyro.infer.Trace_ELBO())
    for _ in range(300):
        svi.step(EFFECTS, ERRORS)
    posterior = from_pyro(non_centred, EFFECTS, ERRORS, guide=guide, num_draws=2)
    e = mcvae.estimate_log_evidence(
        posterior.log_joint, posterior.initial, num_steps=32, generator=torch.Generator().manual_seed(0)
    )
    assert abs(float(e.log_evidence) - evidence_by_quadrature()) < 4 * float(e.standard_error)


def test_arviz_reads_posterior_samples_and_keeps_the_evidence():
    initial = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(1, 2), 2.0), 1)
    evidence = mcvae.estimate_log_evidence(
        lambda z: -0.5 * (z - 1).square().sum(-1), initial, num_steps=8, generator=torch.Generator().manual_seed(0)
    )
    data = to_arviz(evidence, 400, generator=torch.Generator().manual_seed(1))
    assert data.posterior["z"].shape == (1, 400, 1, 2)
    summary = arviz.summary(data, kind="stats")
    assert np.allclose(summary["mean"], 1, atol=0.3)
    assert data.posterior.attrs["log_evidence"] == evidence.log_evidence.tolist()
    named = to_arviz(evidence, named={"theta": torch.ones(5, 3)})
    assert list(named.posterior.data_vars) == ["theta"]


class _Part(nn.Module):
    """The interface of pythae's encoders and decoders: outputs by name."""

    def __init__(self, network, *names):
        super().__init__()
        self.network, self.names = network, names

    def forward(self, x):
        return dict(zip(self.names, self.network(x).chunk(len(self.names), -1), strict=True))


def pythae_like(loss):
    """A module with what `from_pythae` uses of `pythae.models.VAE`."""
    model = nn.Module()
    model.encoder = _Part(nn.Linear(4, 4), "embedding", "log_covariance")
    last = nn.Sigmoid() if loss == "bce" else nn.Identity()
    model.decoder = _Part(nn.Sequential(nn.Linear(2, 4), last), "reconstruction")
    model.latent_dim, model.model_config = 2, SimpleNamespace(reconstruction_loss=loss)
    return model


@pytest.mark.parametrize("loss", ["mse", "bce"])
def test_a_model_like_those_of_pythae_has_the_likelihood_of_its_loss(loss):
    theirs = pythae_like(loss)
    model = from_pythae(theirs)
    x = torch.rand(3, 4).round() if loss == "bce" else torch.randn(3, 4)
    z = torch.randn(3, 2)
    output = theirs.decoder(z)["reconstruction"]
    if loss == "mse":
        expected = -0.5 * ((x - output) ** 2).sum(1) - 2 * math.log(2 * math.pi)
    else:
        expected = -nn.functional.binary_cross_entropy(output, x, reduction="none").sum(1)
    assert torch.allclose(model.decoder(z).log_prob(x), expected)
    assert torch.allclose(model.encode(x).scale, (0.5 * theirs.encoder(x)["log_covariance"]).exp())
    assert model.simulate(2)[0].shape == (2, 4)
    if loss == "mse":  # linear and Gaussian: the evidence is known
        weight, bias = (p.detach() for p in theirs.decoder.network[0].parameters())
        truth = torch.distributions.MultivariateNormal(bias, weight @ weight.T + torch.eye(4)).log_prob(x)
        e = model.score(x, num_steps=16, generator=torch.Generator().manual_seed(0))
        assert ((e.log_evidence - truth).abs() < 5 * e.standard_error + 1e-3).all()


def test_what_is_not_pythae_is_refused():
    with pytest.raises(TypeError, match="expected a model of pythae, which has encoder"):
        from_pythae(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="reconstruction_loss mse or bce, got 'l1'"):
        from_pythae(pythae_like("l1"))
