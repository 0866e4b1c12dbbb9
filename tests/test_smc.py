"""Resampling: unbiased evidence, honest errors from islands, equally weighted posterior samples."""

import math

import pytest
import torch
from torch.distributions import Independent, Normal

import mcvae
from mcvae import Resampling, State
from mcvae.core.resampling import systematic
from support import LOG_Z, generator, skewed_log_joint, standard_errors_off, wide_initial

KERNELS = {
    "mala": mcvae.mala,
    "hmc": lambda: mcvae.hmc(2),
    "rwm": mcvae.rwm,
    "ula": mcvae.ula,
    "uha": mcvae.underdamped,
}


def islands_of_evidence(kernel, threshold, number=4000, size=8, betas=(0.3, 0.6, 0.9)):
    """Independent estimates of Z / Z by islands of a few chains, where a bias would show, [islands, B]."""
    bridge = mcvae.Bridge(wide_initial(), skewed_log_joint)
    source = generator()
    with torch.no_grad():
        state = State(bridge.sample(number * size, generator=source))
        trajectory = mcvae.anneal(
            bridge, state, kernel, betas, 0.2, resample=Resampling(threshold, number), generator=source
        )
    return (trajectory.log_weight - LOG_Z).exp().reshape(number, size, 2).mean(1)


@pytest.mark.parametrize("threshold", [0.5, 1.0])
@pytest.mark.parametrize("kernel", KERNELS)
def test_islands_are_unbiased(kernel, threshold):
    assert standard_errors_off(islands_of_evidence(KERNELS[kernel](), threshold), 1.0) < 5


def test_resampling_without_carrying_the_mean_weight_is_rejected(monkeypatch):
    """The named wrong version: weights that are set to 1 instead of to the island's mean."""
    original = Resampling.__call__

    def forgetful(self, bridge, state, log_weight, beta, source):
        moved, weights = original(self, bridge, state, log_weight, beta, source)
        fresh = -bridge.log_density(moved.point, beta)
        return moved, torch.where(weights == log_weight, log_weight, fresh)

    monkeypatch.setattr(Resampling, "__call__", forgetful)
    assert standard_errors_off(islands_of_evidence(mcvae.mala(), 1.0), 1.0) > 5


def test_systematic_resampling_chooses_in_proportion():
    log_weight = torch.tensor([[0.5, 1.0], [0.3, 0.0], [0.2, 0.0]]).log()
    counts = torch.zeros(3, 2)
    source = generator()
    for _ in range(2000):
        rows = systematic(log_weight, 4, source)
        counts += torch.stack([(rows == k).sum(0) for k in range(3)])
    share = counts / 8000
    torch.testing.assert_close(share, log_weight.exp(), atol=0.02, rtol=0)
    one = systematic(log_weight, 10, source)[:, 0]
    assert abs((one == 0).sum().item() - 5) <= 1  # rounded up or down, never further


def test_evidence_with_islands_covers_the_truth_and_one_without_does_not():
    """Errors from islands: over repetitions, 95 % intervals cover; from dependent chains they would be too narrow."""
    covered = 0
    for seed in range(60):
        e = mcvae.estimate_log_evidence(
            skewed_log_joint,
            wide_initial(),
            kernel=mcvae.rwm(),
            num_steps=6,
            step_size=0.5,
            num_samples=128,
            resample=Resampling(1.0, 16),
            generator=generator(seed),
        )
        low, high = e.interval()
        covered += int(((low <= LOG_Z) & (high >= LOG_Z)).sum())
        assert e.pareto_k.isnan().all()
    assert 100 <= covered <= 120  # of 120


def test_posterior_samples_are_equally_weighted_samples_of_the_posterior():
    e = mcvae.estimate_log_evidence(skewed_log_joint, wide_initial(), num_samples=2000, generator=generator())
    z = e.posterior(4000, generator=generator(1))
    assert z.shape == (4000, 2, 2)
    assert not z.requires_grad
    first = z[..., 0] - torch.tensor([0.0, 0.4])
    delta = 2 / math.sqrt(5)
    mean = delta * math.sqrt(2 / math.pi)
    error = math.sqrt((1 - mean**2) / 1500)  # copies of 2000 chains, moved
    assert (first.mean(0) - mean).abs().max() < 5 * error
    assert (first.var(0) - (1 - mean**2)).abs().max() < 0.1
    assert len(z[:, 0].unique(dim=0)) > 3900  # copies have been pulled apart
    raw = e.posterior(4000, num_moves=0, generator=generator(1))
    assert len(raw[:, 0].unique(dim=0)) <= 2000
    # the named wrong version: end states without their weights, where the weights matter
    rough = mcvae.estimate_log_evidence(
        skewed_log_joint, wide_initial(), num_samples=4000, num_steps=1, step_size=0.01, generator=generator()
    )
    unweighted = (rough.latents[..., 0] - torch.tensor([0.0, 0.4])).mean(0)
    assert (unweighted - mean).abs().max() > 5 * error
    weighted = (rough.posterior(4000, generator=generator(1))[..., 0] - torch.tensor([0.0, 0.4])).mean(0)
    assert (weighted - mean).abs().max() < 0.15


def test_settings_that_cannot_work_are_refused():
    initial = Independent(Normal(torch.zeros(1, 2), torch.ones(1, 2)), 1)
    bridge = mcvae.Bridge(initial, lambda z: -z.square().sum(-1))
    with pytest.raises(ValueError, match="resampling has no gradient"):
        mcvae.anneal(bridge, State(bridge.sample(8)), mcvae.ula(), [0.5], 0.1, resample=Resampling(0.5, 2))
    with pytest.raises(ValueError, match="60 chains cannot be divided into 8"):
        mcvae.estimate_log_evidence(lambda z: -z.square().sum(-1), initial, num_samples=60, resample=0.5)
    with pytest.raises(ValueError, match=r"in \(0, 1\], got 2.0"):
        mcvae.estimate_log_evidence(lambda z: -z.square().sum(-1), initial, resample=2.0)
    with pytest.raises(ValueError, match="max_steps must be at least 1"):
        mcvae.estimate_log_evidence(lambda z: -z.square().sum(-1), initial, max_steps=0)
