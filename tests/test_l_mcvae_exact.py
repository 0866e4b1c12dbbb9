"""On a linear-Gaussian model the Langevin chain is Gaussian, so the L-MCVAE bound and its gradient have closed forms.

The log-weight is a quadratic function of the noise, and the 2n points ±√n e_i integrate quadratics exactly: fed with
those points as noise, the estimator's mean *is* its expectation, and no Monte Carlo error stands between it and the
closed form.
"""

import math
from functools import partial

import pytest
import torch
from torch.distributions import Independent, Normal

import mcvae
from mcvae.core import bridge as bridge_module, kernels as kernels_module

LATENT_DIM, DATA_DIM, SIGMA = 2, 3, 0.8


class Parameters:
    """Everything the bound depends on, as leaves."""

    def __init__(self, num_steps):
        source = torch.Generator().manual_seed(5)
        draw = lambda *shape: torch.randn(*shape, generator=source)
        self.weight = draw(DATA_DIM, LATENT_DIM).requires_grad_()
        self.offset = draw(DATA_DIM).requires_grad_()
        self.loc = draw(1, LATENT_DIM).requires_grad_()
        self.log_scale = (0.3 * draw(1, LATENT_DIM) - 0.3).requires_grad_()
        self.log_step = (0.2 * draw(num_steps, LATENT_DIM) - 2.5).requires_grad_()
        self.betas = torch.linspace(0.2, 0.9, num_steps).requires_grad_()
        self.x = draw(1, DATA_DIM)

    def tensors(self):
        return [self.weight, self.offset, self.loc, self.log_scale, self.log_step, self.betas]


def closed_form(p: Parameters, backward_scale: float | None = None) -> torch.Tensor:
    """E[log w] of Algorithm 1, by propagating the mean and covariance of z_k."""
    scale = p.log_scale[0].exp()
    precision_q = torch.diag(scale**-2)
    precision_p = torch.eye(LATENT_DIM) + p.weight.T @ p.weight / SIGMA**2
    shift_p = p.weight.T @ (p.x[0] - p.offset) / SIGMA**2
    mean, covariance = p.loc[0], torch.diag(scale**2)
    value = 0.5 * LATENT_DIM * (1 + math.log(2 * math.pi)) + p.log_scale.sum()  # -E log q(z_0)
    for beta, log_step in zip(p.betas, p.log_step, strict=True):
        step = log_step.exp()
        precision = (1 - beta) * precision_q + beta * precision_p
        drift = step * ((1 - beta) * precision_q @ p.loc[0] + beta * shift_p)
        move = torch.eye(LATENT_DIM) - step[:, None] * precision
        noise = torch.diag(2 * step)
        value = (
            value + 0.5 * LATENT_DIM * (1 + math.log(2 * math.pi)) + 0.5 * (2 * step).log().sum()
        )  # -E log m forward
        if backward_scale is None:  # reverse residual z_{k-1} - z_k - step * score(z_k)
            back = torch.eye(LATENT_DIM) - move @ move
            residual_mean = back @ mean - move @ drift - drift
            residual_covariance = back @ covariance @ back.T + move @ noise @ move.T
            variance = 2 * step
        else:  # a learned backward kernel in its initial state, N(z_{k-1}; z_k, scale^2)
            back = torch.eye(LATENT_DIM) - move
            residual_mean = back @ mean - drift
            residual_covariance = back @ covariance @ back.T + noise
            variance = torch.full_like(step, backward_scale**2)
        squares = residual_mean.square() + residual_covariance.diagonal()
        value = value - 0.5 * (squares / variance + (2 * math.pi * variance).log()).sum()
        mean = move @ mean + drift
        covariance = move @ covariance @ move.T + noise
    residual = p.x[0] - p.offset - p.weight @ mean
    spread = p.weight @ covariance @ p.weight.T
    value = value - 0.5 * (mean @ mean + covariance.trace() + LATENT_DIM * math.log(2 * math.pi))
    likelihood = (residual @ residual + spread.trace()) / SIGMA**2 + DATA_DIM * math.log(2 * math.pi * SIGMA**2)
    return value - 0.5 * likelihood


def model_bridge(p: Parameters) -> mcvae.Bridge:
    decoder = lambda z: Independent(Normal(z @ p.weight.T + p.offset, torch.full((DATA_DIM,), SIGMA)), 1)
    encoder = lambda x: Independent(Normal(p.loc, p.log_scale.exp()), 1)
    return mcvae.LatentVariableModel(encoder, decoder).bridge(p.x)


class Given(torch.nn.Module):
    """Temperatures or step sizes as a module."""

    def __init__(self, values):
        super().__init__()
        self.values, self.num_steps = values, len(values)

    def forward(self, initial=None):
        return self.values


@pytest.fixture
def expectation(monkeypatch):
    """Run an estimator on the cubature points instead of random noise."""

    def run(p: Parameters, kernel, num_steps):
        num_noise = LATENT_DIM * (num_steps + 1)
        points = math.sqrt(num_noise) * torch.cat([torch.eye(num_noise), -torch.eye(num_noise)])
        slices = list(points.unsqueeze(1).split(LATENT_DIM, -1))  # [S, 1, D] for z_0 and every step
        initial_noise, step_noise = slices[0], iter(slices[1:])
        monkeypatch.setattr(bridge_module, "draw", lambda q, shape, source: q.mean + q.stddev * initial_noise)
        monkeypatch.setattr(kernels_module, "standard_normal", lambda like, source: next(step_noise))
        objective = mcvae.AnnealedEstimator(kernel, Given(p.betas), Given(p.log_step.exp()), num_samples=2 * num_noise)
        return objective(model_bridge(p))

    return run


def gradients(value, p: Parameters):
    return torch.autograd.grad(value, p.tensors(), materialize_grads=True)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_bound_and_gradient_equal_the_closed_form(expectation, num_steps):
    p = Parameters(num_steps)
    exact = closed_form(p)
    estimate = expectation(p, mcvae.ula(), num_steps)
    torch.testing.assert_close(estimate.bound.squeeze(), exact.detach())
    torch.testing.assert_close(-estimate.loss.squeeze().detach(), exact.detach())
    for ours, truth in zip(gradients(-estimate.loss.sum(), p), gradients(exact, p), strict=True):
        torch.testing.assert_close(ours, truth)


def test_one_leapfrog_step_has_the_same_bound_and_gradient(expectation):
    """Uncorrected Hamiltonian steps of size √(2η) are Langevin steps of size η."""
    p = Parameters(3)
    exact = closed_form(p)
    truth = gradients(exact, p)
    q = Parameters(3)
    with torch.no_grad():
        q.log_step.copy_(0.5 * (math.log(2) + p.log_step))
    estimate = expectation(q, mcvae.underdamped(num_leapfrog=1, damping=0.0), 3)
    torch.testing.assert_close(estimate.bound.squeeze(), exact.detach())
    for name, ours, expected in zip(
        ["weight", "offset", "loc", "log_scale"], gradients(-estimate.loss.sum(), q), truth, strict=False
    ):
        torch.testing.assert_close(ours, expected, msg=name)


def test_bound_and_gradient_with_a_learned_backward_kernel_equal_the_closed_form(expectation):
    p = Parameters(2)
    exact = closed_form(p, backward_scale=0.5)
    kernels = [mcvae.Unadjusted(mcvae.Langevin(), mcvae.GaussianBackward(LATENT_DIM, scale=0.5)) for _ in range(2)]
    estimate = expectation(p, kernels, 2)
    torch.testing.assert_close(estimate.bound.squeeze(), exact.detach())
    for ours, truth in zip(gradients(-estimate.loss.sum(), p), gradients(exact, p), strict=True):
        torch.testing.assert_close(ours, truth)


def _without_gradient(value_and_score, *arguments):
    value, score = value_and_score(*arguments)
    return value, score.detach()


def test_a_drift_without_gradient_is_rejected(expectation, monkeypatch):
    """The named wrong version: scores computed without create_graph, as if the drift were constant."""
    p = Parameters(2)
    exact = closed_form(p)
    for name in ("value_and_score", "distribution_and_score"):
        monkeypatch.setattr(bridge_module, name, partial(_without_gradient, getattr(bridge_module, name)))
    estimate = expectation(p, mcvae.ula(), 2)
    torch.testing.assert_close(estimate.bound.squeeze(), exact.detach())  # the value cannot tell
    for ours, truth in zip(gradients(-estimate.loss.sum(), p), gradients(exact, p), strict=True):
        assert (ours - truth).abs().max() > 1e-3


def test_a_backward_density_of_noise_is_rejected(expectation):
    """The named wrong version: the public code's backward kernel, which lacks (2η)^(d/2) per step."""
    p = Parameters(2)
    exact = closed_form(p, backward_scale=0.5)
    kernels = [mcvae.Unadjusted(mcvae.Langevin(), mcvae.GaussianBackward(LATENT_DIM, scale=0.5)) for _ in range(2)]
    estimate = expectation(p, kernels, 2)
    constant = 0.5 * (2 * p.log_step.exp()).log().sum()
    assert (estimate.bound + constant - exact).abs() > 1
    wrong = gradients(-estimate.loss.sum() + constant, p)
    assert (wrong[-2] - gradients(exact, p)[-2]).abs().max() > 0.1  # the step size's gradient is off
