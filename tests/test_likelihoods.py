"""Every likelihood is a density of the data it is for, starts from them, and trains."""

import copy
import math

import pytest
import torch

import mcvae
from mcvae.models import Datum, build_model
from mcvae.models.build import build_likelihood
from mcvae.runs import likelihood as registry
from mcvae.runs.likelihood import LIKELIHOODS, LikelihoodEntry, bits_of_cell

PAIRS = [(name, kind) for name, entry in LIKELIHOODS.items() for kind in entry.transforms]
LEVELS = 6


def built(name, kind, shape=(2,)):
    likelihood = build_likelihood(name, Datum(shape, kind, 2 if name == "bernoulli" else LEVELS), sigma=0.7)
    for parameter in likelihood.parameters():
        parameter.data += torch.rand(parameter.shape)  # away from where it starts
    return likelihood


def support(name, kind):
    """Values of one dimension whose probabilities, or densities times width, sum to 1; and the width."""
    if name == "bernoulli":
        return torch.arange(2.0), 1.0
    if name == "logistic":
        return torch.arange(256.0) / 255, 1.0
    if name == "categorical":
        return torch.arange(float(LEVELS)), 1.0
    if kind == "counts":
        return torch.arange(4000.0), 1.0
    values = torch.linspace(-2000, 2000, 4_000_001) if name == "student-t" else torch.linspace(-30, 30, 100_001)
    return values, float(values[1] - values[0])


@torch.no_grad()
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_a_likelihood_in_half_precision_is_the_density_of_its_numbers(name, kind):
    """If σ and its logarithm are rounded each in its own way, 784 dimensions are off by nats."""
    half = built(name, kind, (784,)).to(torch.bfloat16)
    exact = copy.deepcopy(half).double()
    output = torch.randn(3, 784 * half.channels_per_channel, dtype=torch.float32)
    x = half(output).sample()
    found, expected = half(output).log_prob(x), exact(output.double()).log_prob(x.double())
    assert torch.allclose(found.double(), expected, rtol=0, atol=0.01)


@torch.no_grad()
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_a_likelihood_is_normalised_and_has_the_mean_that_it_says(name, kind):
    """The mean is the reason why a reconstruction can be shown; the discretised logistic's is its location."""
    likelihood = built(name, kind, (1,))
    outputs = torch.randn(1, likelihood.channels_per_channel, generator=torch.Generator().manual_seed(1))
    values, width = support(name, kind)
    p = likelihood(outputs)
    probabilities = p.log_prob(values.unsqueeze(1)).exp() * width
    assert abs(float(probabilities.sum()) - 1) < 1e-4
    if name != "logistic":
        assert abs(float((probabilities * values).sum() - p.mean)) < 1e-2
    assert abs(float(probabilities.sum() * 1.02) - 1) > 1e-4  # a wrong constant would be seen


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name, kind in PAIRS if kind == "pixels"])
def test_bits_are_those_of_pixels_whatever_the_scale_of_the_density(name):
    """2^−bits over the values of a pixel sums to 1; bits of the density alone would make it 256."""
    transform = LIKELIHOODS[name].transforms["pixels"]
    levels = {"bernoulli": 2, "categorical": LEVELS}.get(name, 256)
    pixels = torch.arange(float(levels))
    values = {"scale": pixels / 255, "dequantize": (pixels + 0.5) / 256}.get(transform, pixels)
    if name.startswith("gaussian"):
        p = torch.distributions.Normal(0.5, 0.05)  # nearly all of it between 0 and 1
    else:
        likelihood = built(name, "pixels", (1,))
        p = likelihood(torch.zeros(1, likelihood.channels_per_channel))
    bits = -p.log_prob(values.unsqueeze(1)) / math.log(2) + bits_of_cell(name, transform)
    assert float((2**-bits).sum()) == pytest.approx(1, abs=1e-4)
    assert bits_of_cell("gaussian", "standardize") is None


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_every_likelihood_trains_on_vectors_and_images(name, kind):
    for shape, network in (((5,), "mlp"), ((1, 8, 8), "small")):
        model = build_model(shape, 2, kind=kind, levels=2, network=network, likelihood=name)
        x, z = model.simulate(4, generator=torch.Generator().manual_seed(0))
        assert x.shape == (4, *shape)
        assert z.shape == (4, 2)
        objective = model.objective("l-mcvae-k2")
        estimate = objective(model.bridge(x), generator=torch.Generator().manual_seed(0))
        estimate.loss.mean().backward()
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
        learned = [p for p in model.decoder.likelihood.parameters() if p.requires_grad]
        assert all(bool((p.grad != 0).any()) for p in learned)


@pytest.mark.parametrize("name", ["poisson", "negative-binomial", "categorical"])
def test_counts_start_from_their_means(name):
    counts = torch.distributions.Poisson(torch.tensor([0.5, 3.0])).sample((500,)).clamp(max=LEVELS - 1)
    likelihood = build_likelihood(name, Datum((2,), "counts", LEVELS))
    likelihood.start(counts)
    started = likelihood(torch.zeros(1, 2 * likelihood.channels_per_channel)).mean
    assert (started - counts.mean(0)).abs().max() < 0.05


def test_the_variance_of_the_negative_binomial_exceeds_the_mean():
    p = build_likelihood("negative-binomial", Datum((1,), "counts"))(torch.tensor([[1.2]]))
    draws = p.sample((200_000,))
    assert abs(draws.mean() - p.mean) / p.mean < 0.02
    assert abs(draws.var() - (p.mean + p.mean**2)) / p.variance < 0.05  # r = 1
    assert abs(draws.var() - p.mean) / p.variance > 0.5  # not Poisson's


def test_a_sigma_of_every_dimension_is_learned_apart_and_stays_above_its_floor():
    data = torch.randn(400, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([0.1, 2.0])
    data = torch.cat([data, torch.zeros(400, 1)], 1)  # a constant column
    likelihood = build_likelihood("gaussian-per-dimension", Datum((3,), "real"))
    optimizer = torch.optim.Adam(likelihood.parameters(), 0.1)
    for _ in range(300):
        optimizer.zero_grad()
        (-likelihood(torch.zeros(400, 3)).log_prob(data).mean()).backward()
        optimizer.step()
    sigma = likelihood(torch.zeros(1, 3)).base_dist.scale[0].detach()
    assert torch.allclose(sigma[:2], data[:, :2].square().mean(0).sqrt(), rtol=0.05)
    assert abs(float(sigma[2]) - 0.01) < 1e-6


def test_a_likelihood_for_other_data_is_refused():
    with pytest.raises(ValueError, match="poisson is for counts, not for real data"):
        build_likelihood("poisson", Datum((2,), "real"))
    with pytest.raises(ValueError, match="data of 0 and 1, got whole numbers up to 5"):
        build_likelihood("bernoulli", Datum((2,), "counts", 6))
    with pytest.raises(ValueError, match="2 to 256 levels, got 1000"):
        build_likelihood("categorical", Datum((2,), "counts", 1000))
    with pytest.raises(ValueError, match="conv is for images"):
        build_model((5,), 2, kind="real", network="conv", likelihood="gaussian")


def test_a_new_likelihood_is_a_file_and_a_line(monkeypatch):
    """As a file it would be found by its path below mcvae.models.likelihoods; here the module is made in memory."""
    import sys
    from types import ModuleType

    module = ModuleType("mcvae.models.likelihoods.laplace")
    module.laplace = lambda datum, sigma: _Laplace()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entry = LikelihoodEntry("laplace.laplace", {"real": "standardize"}, "heavier tails than Gaussian")
    monkeypatch.setitem(registry.LIKELIHOODS, "laplace", entry)
    model = build_model((3,), 2, kind="real", network="mlp", likelihood="laplace")
    assert model.bridge(torch.zeros(2, 3)).sample(4).log_p.shape == (4, 2)


class _Laplace(mcvae.models.Likelihood):
    def forward(self, output):
        return torch.distributions.Independent(torch.distributions.Laplace(output, 1.0), 1)
