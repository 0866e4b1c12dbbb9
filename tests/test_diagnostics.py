import math

import pytest
import torch
from scipy import stats

import mcvae
from mcvae.core.diagnostics import _fit_generalised_pareto
from support import generator, standard_errors_off


def test_effective_sample_size():
    equal, one = torch.zeros(10), torch.tensor([0.0] + [-torch.inf] * 9)
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0] + [0.0] * 6)
    ess = mcvae.effective_sample_size(torch.stack([equal, one, weights.log()], 1))
    torch.testing.assert_close(ess, torch.tensor([10.0, 1.0, 100 / 30]))
    shifted = mcvae.effective_sample_size(torch.stack([equal - 1e4, one + 1e4], 1))
    torch.testing.assert_close(shifted, torch.tensor([10.0, 1.0]))
    assert mcvae.effective_sample_size(torch.full((5, 1), -torch.inf)) == 0


def test_standard_error_is_that_of_the_log_of_the_mean():
    """4,000 estimates of 500 lognormal weights each: their spread is what the standard error says."""
    log_weight = 0.7 * torch.randn(500, 4000, generator=generator())
    error = mcvae.standard_error(log_weight)
    spread = mcvae.iwae(log_weight).std()
    assert abs(error.mean() / spread - 1) < 0.05
    exact = math.sqrt((math.exp(0.49) - 1) / 500)
    assert abs(spread / exact - 1) < 0.05
    wrong = log_weight.std(0) / math.sqrt(500)  # the named wrong version: the error of the mean log-weight
    assert abs(wrong.mean() / spread - 1) > 0.1


def test_standard_error_when_there_is_nothing_to_go_by():
    assert mcvae.standard_error(torch.zeros(1, 1)) == torch.inf
    assert mcvae.standard_error(torch.full((5, 1), -torch.inf)) == torch.inf
    assert mcvae.standard_error(torch.full((5, 1), -3.0)) == 0


@pytest.mark.parametrize("shape", [-0.3, 0.2, 0.5, 0.9])
def test_generalised_pareto_fit_agrees_with_maximum_likelihood(shape):
    """On exact generalised Pareto samples, against scipy's maximum likelihood, prior removed."""
    samples = stats.genpareto.rvs(shape, size=(2000, 3), random_state=1)
    expected = torch.tensor([stats.genpareto.fit(column, floc=0)[0] for column in samples.T])
    fitted = _fit_generalised_pareto(torch.tensor(samples).sort(0).values)
    torch.testing.assert_close((fitted * 2010 - 5) / 2000, expected, atol=0.01, rtol=0)


@pytest.mark.parametrize("tail", [0.25, 0.5, 1.0])
def test_pareto_k_recovers_the_tail_of_the_weights(tail):
    """Weights u^(-k) have tail shape exactly k."""
    log_weight = -tail * torch.rand(40_000, 20, generator=generator()).log() - 500
    estimates = mcvae.pareto_k(log_weight)
    assert standard_errors_off(estimates, tail) < 5
    assert estimates.std() < 0.1


def test_pareto_k_needs_enough_samples():
    assert mcvae.pareto_k(torch.randn(20, 2)).isnan().all()
    assert mcvae.pareto_k(torch.randn(21, 2)).isfinite().all()


def test_pareto_k_of_weights_without_spread_is_harmless():
    """Equal weights, or all but one: a perfect estimate must not be reported as broken, nor a broken one as perfect."""
    assert (mcvae.pareto_k(torch.zeros(100, 1)) < 0.5).all()
    log_weight = torch.full((100, 1), -torch.inf)
    log_weight[0] = 0.0
    assert (mcvae.pareto_k(log_weight) > 0.7).all()
    assert (mcvae.pareto_k(torch.full((100, 1), -torch.inf)) == torch.inf).all()
