"""Likelihoods are normalised, networks fit any shape, and every model of the command line trains."""

import math

import pytest
import torch
import zuko
from torch.distributions import Independent, Normal

import mcvae
from mcvae.models import (
    BernoulliLikelihood,
    DiscretizedLogistic,
    GaussianLikelihood,
    LogisticLikelihood,
    build_model,
)
from mcvae.models.networks import conv_decoder, conv_encoder
from support import generator


@pytest.mark.parametrize("location", [-0.2, 0.0, 0.37, 1.0])
@pytest.mark.parametrize("log_scale", [-7.0, -3.0, 0.0])
def test_the_discretised_logistic_sums_to_one_and_equals_its_definition(location, log_scale):
    distribution = DiscretizedLogistic(torch.tensor(location), torch.tensor(log_scale))
    levels = torch.arange(256) / 255
    log_prob = distribution.log_prob(levels)
    assert log_prob.exp().sum().item() == pytest.approx(1.0)
    scale = math.exp(log_scale)
    cdf = lambda value: torch.sigmoid((value - location) / scale)
    direct = cdf(levels + 0.5 / 255) - cdf(levels - 0.5 / 255)
    direct[0], direct[-1] = cdf(levels[0] + 0.5 / 255), 1 - cdf(levels[-1] - 0.5 / 255)
    visible = direct > 1e-10  # elsewhere the difference of two sigmoids has lost its digits, which ours has not
    torch.testing.assert_close(log_prob.exp()[visible], direct[visible], rtol=1e-4, atol=1e-12)
    assert log_prob.isfinite().all()


def test_the_discretised_logistic_samples_what_it_says():
    torch.manual_seed(0)
    distribution = DiscretizedLogistic(torch.tensor(0.9), torch.tensor(-2.0))
    levels = (distribution.sample((200_000,)) * 255).round().long()
    frequency = torch.bincount(levels, minlength=256) / 200_000
    probability = distribution.log_prob(torch.arange(256) / 255).exp()
    error = (frequency - probability) / (probability * (1 - probability) / 200_000).sqrt()
    assert error.abs().max() < 5


def test_likelihoods_are_those_of_the_paper():
    output, x = torch.randn(4, 1, 3, 3), torch.rand(4, 1, 3, 3).round()
    bernoulli = BernoulliLikelihood()(output).log_prob(x)
    expected = -torch.nn.functional.binary_cross_entropy_with_logits(output, x, reduction="none").sum((1, 2, 3))
    torch.testing.assert_close(bernoulli, expected)
    gaussian = GaussianLikelihood(0.5)(output).log_prob(x)
    expected = Normal(output.sigmoid(), 0.5).log_prob(x).sum((1, 2, 3))
    torch.testing.assert_close(gaussian, expected)
    assert not GaussianLikelihood(0.5).log_sigma.requires_grad
    assert GaussianLikelihood(0.5, learned=True).log_sigma.requires_grad
    assert LogisticLikelihood()(torch.randn(4, 6, 3, 3)).event_shape == (3, 3, 3)


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 64, 64), (2, 19, 30)])
def test_networks_fit_any_shape(shape):
    assert conv_encoder(shape, 6)(torch.zeros(2, *shape)).shape == (2, 6)
    assert conv_decoder(shape, 5)(torch.zeros(2, 5)).shape == (2, *shape)


def test_the_papers_encoder_has_eight_convolutions_and_one_linear_layer():
    layers = list(conv_encoder((1, 28, 28), 128))
    assert sum(isinstance(layer, torch.nn.Conv2d) for layer in layers) == 8
    assert sum(isinstance(layer, torch.nn.Linear) for layer in layers) == 1
    assert not any(isinstance(layer, torch.nn.ReLU) for layer in layers)
    upsamplings = [layer for layer in conv_decoder((1, 28, 28), 64) if isinstance(layer, torch.nn.Upsample)]
    assert upsamplings
    assert all(layer.mode == "nearest" for layer in upsamplings)


def test_a_deep_decoder_hears_its_latents():
    """With torch's default initialisation the output varies 20 times less: the named wrong version."""
    torch.manual_seed(0)
    z = torch.randn(200, 64)
    ours = conv_decoder((1, 28, 28), 64)
    default = conv_decoder((1, 28, 28), 64)
    for layer in default:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    with torch.no_grad():
        assert ours(z).std(0).mean() > 0.1
        assert default(z).std(0).mean() < 0.02


@pytest.mark.parametrize("flow", [None, "realnvp", "nsf"])
@pytest.mark.parametrize("likelihood", ["bernoulli", "gaussian", "gaussian-learned", "logistic"])
@pytest.mark.parametrize("network", ["conv", "small", "mlp"])
def test_every_model_trains_one_step_and_simulates(network, likelihood, flow):
    torch.manual_seed(0)
    model = build_model((1, 8, 8), 3, network=network, likelihood=likelihood, flow=flow)
    x = torch.randint(2, (4, 1, 8, 8)).to(torch.get_default_dtype())
    estimate = mcvae.recipes.l_mcvae(2, latent_dim=3)(model.bridge(x))
    estimate.loss.mean().backward()
    assert estimate.bound.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    data, latents = model.simulate(5, latent_dim=3, generator=generator())
    assert data.shape == (5, 1, 8, 8)
    assert latents.shape == (5, 3)


def test_a_flow_encoder_is_a_normalised_density():
    """In one and two dimensions: importance sampling from a wide Gaussian gives 1."""
    torch.manual_seed(0)
    model = build_model((1, 8, 8), 2, network="mlp", flow="realnvp")
    with torch.no_grad():
        q = model.encoder(torch.rand(1, 1, 8, 8))
        wide = Independent(Normal(torch.zeros(1, 2), torch.full((1, 2), 4.0)), 1)
        z = wide.sample((100_000,))
        ratio = (q.log_prob(z) - wide.log_prob(z)).exp()
    assert abs(ratio.mean() - 1) < 5 * ratio.std() / 100_000**0.5
    assert isinstance(q, zuko.distributions.NormalizingFlow)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"network": "resnet"}, "unknown network 'resnet'; known: conv, small, mlp"),
        ({"likelihood": "cauchy"}, "unknown likelihood 'cauchy'; known: bernoulli"),
        ({"likelihood": "poisson"}, "poisson is for counts, not for pixels"),
        ({"flow": "glow"}, "unknown flow 'glow'; known: realnvp, nsf"),
        ({"latent_dim": 0}, "latent_dim must be at least 1, got 0"),
        ({"likelihood": "gaussian", "sigma": 0.0}, "sigma must be positive"),
    ],
)
def test_unknown_parts(options, message):
    with pytest.raises(ValueError, match=message):
        build_model((1, 8, 8), **{"latent_dim": 2, **options})
