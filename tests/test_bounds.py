import math
import pickle

import pytest
import torch

import mcvae
from mcvae.core.annealing import StepRecord
from support import LOG_Z, generator, skewed_log_joint, standard_errors_off, wide_initial

LOG_WEIGHT = torch.tensor([[0.0, -1000.0], [math.log(3.0), -1001.0]], dtype=torch.float64)


def test_values():
    torch.testing.assert_close(mcvae.elbo(LOG_WEIGHT), torch.tensor([0.5 * math.log(3.0), -1000.5]))
    log_mean = math.log((1 + math.exp(-1)) / 2)
    torch.testing.assert_close(mcvae.iwae(LOG_WEIGHT), torch.tensor([math.log(2.0), -1000 + log_mean]))
    half = 2 * math.log((1 + math.sqrt(3)) / 2)
    torch.testing.assert_close(mcvae.renyi(0.5)(LOG_WEIGHT)[0], torch.tensor(half))


def test_renyi_interpolates():
    log_weight = torch.randn(20, 5)
    torch.testing.assert_close(mcvae.renyi(0.0)(log_weight), mcvae.iwae(log_weight))
    torch.testing.assert_close(mcvae.renyi(1.0)(log_weight), mcvae.elbo(log_weight))
    torch.testing.assert_close(mcvae.renyi(1 - 1e-7)(log_weight), mcvae.elbo(log_weight), atol=1e-5, rtol=0)
    middle = mcvae.renyi(0.5)(log_weight)
    assert ((mcvae.elbo(log_weight) < middle) & (middle < mcvae.iwae(log_weight))).all()


@pytest.mark.parametrize("bound", [mcvae.elbo, mcvae.iwae, mcvae.renyi(0.5)])
def test_a_chain_of_weight_zero_is_not_dropped(bound):
    log_weight = torch.tensor([[0.0], [-torch.inf]])
    expected = {mcvae.elbo: -math.inf, mcvae.iwae: math.log(0.5)}.get(bound, 2 * math.log(0.5))
    assert bound(log_weight).item() == pytest.approx(expected)


@pytest.mark.parametrize("recipe", ["vae", "iwae", "l_mcvae", "a_mcvae", "uha", "ais_hmc"])
def test_every_recipe_is_a_lower_bound(recipe):
    objective = {
        "vae": lambda: mcvae.recipes.vae(),
        "iwae": lambda: mcvae.recipes.iwae(5),
        "l_mcvae": lambda: mcvae.recipes.l_mcvae(4, latent_dim=2, step_sizes=mcvae.FixedStepSizes(4, 0.05)),
        "a_mcvae": lambda: mcvae.recipes.a_mcvae(4, latent_dim=2, step_sizes=mcvae.FixedStepSizes(4, 0.3)),
        "uha": lambda: mcvae.recipes.uha(4, latent_dim=2, step_sizes=mcvae.FixedStepSizes(4, 0.3)),
        "ais_hmc": lambda: mcvae.recipes.ais_hmc(4, latent_dim=2, step_sizes=mcvae.FixedStepSizes(4, 0.3)),
    }[recipe]()
    bounds = replicates(objective, 4000)
    gap = LOG_Z - bounds.mean(0)
    assert (gap > 5 * bounds.std(0) / 4000**0.5).all()
    if recipe not in ("vae", "iwae"):
        assert (gap < LOG_Z - replicates(mcvae.recipes.vae(), 4000).mean(0)).all()  # annealing tightens the bound


def replicates(objective, number):
    """Independent copies of the bound on the two data of the skewed target, [number, 2]."""
    loc, scale = wide_initial().mean, wide_initial().stddev
    initial = torch.distributions.Independent(
        torch.distributions.Normal(loc.repeat(number, 1), scale.repeat(number, 1)), 1
    )
    bridge = mcvae.Bridge(initial, lambda z: skewed_log_joint(z.reshape(-1, 2, 2)).reshape(z.shape[:2]))
    with torch.no_grad():
        return objective(bridge, generator=generator()).bound.reshape(number, 2)


@pytest.mark.parametrize("control_variate", [mcvae.stopped, mcvae.leave_one_out, mcvae.no_control_variate])
@pytest.mark.parametrize("bound", [mcvae.elbo, mcvae.iwae, mcvae.renyi(0.5)])
@pytest.mark.parametrize("dead", [1, 2, 3])
def test_weights_of_zero_leave_no_nan_in_gradients(dead, bound, control_variate):
    log_weight = torch.tensor([[-torch.inf]] * dead + [[0.3 * k] for k in range(3 - dead)], requires_grad=True)
    log_accept = torch.zeros(2, 3, 1, requires_grad=True)
    steps = StepRecord(
        torch.zeros(2, 3, 1), log_accept, torch.tensor([-torch.inf, 0.2]).reshape(2, 1, 1).expand(2, 3, 1)
    )
    trajectory = mcvae.Trajectory(log_weight, None, None, None, steps=steps)
    mcvae.surrogate(trajectory, bound, control_variate).sum().backward()
    assert log_weight.grad.isfinite().all()
    assert log_accept.grad.isfinite().all()


def test_bounds_can_be_pickled():
    for bound in (mcvae.elbo, mcvae.iwae, mcvae.renyi(0.3)):
        restored = pickle.loads(pickle.dumps(bound))
        torch.testing.assert_close(restored(LOG_WEIGHT), bound(LOG_WEIGHT))
    assert "renyi(0.3)" in repr(mcvae.recipes.l_mcvae(2, 2, bound=mcvae.renyi(0.3)))


def test_the_bound_carries_no_gradient_and_the_loss_does():
    loc = torch.zeros(2, 2, requires_grad=True)
    initial = torch.distributions.Independent(torch.distributions.Normal(loc, torch.ones(2, 2)), 1)
    estimate = mcvae.recipes.a_mcvae(2, latent_dim=2)(mcvae.Bridge(initial, skewed_log_joint))
    assert not estimate.bound.requires_grad
    assert estimate.loss.requires_grad
    torch.testing.assert_close(estimate.loss.detach(), -estimate.bound)
    torch.testing.assert_close(estimate.bound, mcvae.elbo(estimate.trajectory.log_weight).detach())


def test_more_importance_samples_tighten_iwae():
    few, many = (replicates(mcvae.recipes.iwae(n), 2000) for n in (2, 50))
    assert (many.mean(0) > few.mean(0)).all()
    assert standard_errors_off(few, LOG_Z) > 5
