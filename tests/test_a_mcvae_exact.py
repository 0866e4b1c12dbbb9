"""The gradient of the A-MCVAE bound in one dimension, by quadrature over the noise × enumeration of accept bits.

The reference below is written from the formulas of Section 3.2 and shares no code with the package: it differentiates
Σ_a ∫ A(u, a) W(u, a) φ(u) du as a whole. The package instead returns W and log A, and `surrogate` turns them into a
gradient; summed over the same atoms, the two must agree to rounding.
"""

import itertools
import math

import numpy
import pytest
import torch
from torch.distributions import Independent, Normal

import mcvae
from mcvae import State
from mcvae.core import kernels as kernels_module
from mcvae.core.annealing import StepRecord, Trajectory

NODES, NODE_WEIGHTS = (torch.tensor(a) for a in numpy.polynomial.hermite_e.hermegauss(14))
NODE_WEIGHTS = NODE_WEIGHTS / NODE_WEIGHTS.sum()


class Parameters:
    def __init__(self, num_steps):
        self.num_steps = num_steps
        self.loc = torch.tensor(0.3, requires_grad=True)
        self.log_scale = torch.tensor(-0.1, requires_grad=True)
        self.shift = torch.tensor(0.8, requires_grad=True)  # of the model
        self.betas = torch.linspace(0.35, 0.7, num_steps).requires_grad_()
        self.log_step = torch.full((num_steps,), -0.9).requires_grad_()

    def tensors(self):
        return [self.loc, self.log_scale, self.shift, self.betas, self.log_step]

    def log_joint(self, z):
        """A density with a tilt and a quartic tail: no symmetry."""
        return -0.3 * (z - self.shift) ** 2 - 0.05 * z**4 + 0.5 * torch.nn.functional.logsigmoid(4 * z) + 0.2


def atoms(num_steps):
    """Noise u_0..u_K, accept bits a_1..a_K and the probability of the noise, for every combination."""
    index = torch.tensor(list(itertools.product(range(len(NODES)), repeat=num_steps + 1)))
    bits = torch.tensor(list(itertools.product([0, 1], repeat=num_steps)))
    noise = NODES[index].repeat_interleave(len(bits), 0)
    probability = NODE_WEIGHTS[index].prod(1).repeat_interleave(len(bits), 0)
    return noise, bits.repeat(len(index), 1).bool(), probability


def reference(p: Parameters, rule):
    """W and A of every atom, straight from the text."""
    noise, bits, probability = atoms(p.num_steps)
    scale = p.log_scale.exp()

    def log_q(z):
        return -0.5 * ((z - p.loc) / scale) ** 2 - p.log_scale - 0.5 * math.log(2 * math.pi)

    def log_gamma(z, beta):
        return (1 - beta) * log_q(z) + beta * p.log_joint(z)

    def score(z, beta):
        return torch.autograd.grad(log_gamma(z, beta).sum(), z, create_graph=True)[0]

    z = p.loc + scale * noise[:, 0]
    log_weight, accept = torch.zeros_like(z), torch.ones_like(z)
    previous = torch.tensor(0.0)
    for k in range(p.num_steps):
        beta, step = p.betas[k], p.log_step[k].exp()
        log_weight = log_weight + log_gamma(z, beta) - log_gamma(z, previous)
        y = z + step * score(z, beta) + (2 * step).sqrt() * noise[:, k + 1]
        forward = -((y - z - step * score(z, beta)) ** 2) / (4 * step)
        backward = -((z - y - step * score(y, beta)) ** 2) / (4 * step)
        ratio = (log_gamma(y, beta) + backward - log_gamma(z, beta) - forward).exp()
        alpha = ratio / (1 + ratio) if rule == "barker" else torch.minimum(ratio, torch.ones_like(ratio))
        accept = accept * torch.where(bits[:, k], alpha, 1 - alpha)
        z = torch.where(bits[:, k], y, z)
        previous = beta
    log_weight = log_weight + log_gamma(z, torch.tensor(1.0)) - log_gamma(z, previous)
    return log_weight, accept, probability


def trajectory_on_atoms(p: Parameters, rule, monkeypatch):
    """The package's chains, fed with the same noise and made to take the same decisions."""
    noise, bits, _ = atoms(p.num_steps)
    steps, decisions = iter(noise[:, 1:].T), iter(bits.T)
    below_one = 1 - 1e-16  # rejects unless acceptance is certain
    monkeypatch.setattr(kernels_module, "standard_normal", lambda like, source: next(steps).reshape(-1, 1, 1))
    monkeypatch.setattr(
        kernels_module, "uniform", lambda like, source: torch.where(next(decisions), 0.0, below_one).unsqueeze(-1)
    )
    initial = Independent(Normal(p.loc.reshape(1, 1), p.log_scale.exp().reshape(1, 1)), 1)
    bridge = mcvae.Bridge(initial, lambda z: p.log_joint(z.squeeze(-1)))
    start = bridge.evaluate(p.loc + p.log_scale.exp() * noise[:, 0].reshape(-1, 1, 1))
    kernel = mcvae.mala(getattr(mcvae, rule))
    return mcvae.anneal(bridge, State(start), kernel, p.betas, p.log_step.exp())


def gradients(value, p, **options):
    return torch.autograd.grad(value, p.tensors(), **options)


def assert_close(ours, truth):
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("rule", ["metropolis", "barker"])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_gradient_equals_quadrature_times_enumeration(num_steps, rule, monkeypatch):
    p = Parameters(num_steps)
    log_weight, accept, probability = reference(p, rule)
    exact = (probability * accept * log_weight).sum()
    trajectory = trajectory_on_atoms(p, rule, monkeypatch)
    mass = (probability * accept).detach()
    torch.testing.assert_close(mass.sum(), torch.tensor(1.0))
    w, log_a = trajectory.log_weight.squeeze(-1), trajectory.log_accept.squeeze(-1)
    torch.testing.assert_close((mass * w).sum(), exact)
    truth = gradients(exact, p)
    assert_close(gradients((mass * (w + w.detach() * log_a)).sum(), p, retain_graph=True), truth)
    alone = trajectory._replace(  # every atom as a datum of its own, so that one chain is all there is
        log_weight=trajectory.log_weight.T, steps=StepRecord(*(values.transpose(1, 2) for values in trajectory.steps))
    )
    assert_close(gradients((mass * mcvae.surrogate(alone)).sum(), p, retain_graph=True), truth)
    later = alone.steps._replace(stopped=torch.cat([alone.steps.stopped[1:], alone.log_weight.detach().unsqueeze(0)]))
    late = gradients((mass * mcvae.surrogate(alone._replace(steps=later))).sum(), p, retain_graph=True)
    assert max((a - b).abs().max() for a, b in zip(late, truth, strict=True)) > 1e-3  # V_k instead of V_{k−1}
    for pathwise, expected in zip(gradients((mass * w).sum(), p), truth, strict=True):  # the named wrong version
        assert (pathwise - expected).abs().max() > 1e-3


BOUNDS = {"elbo": mcvae.elbo, "iwae": mcvae.iwae, "renyi": mcvae.renyi(0.5)}
CONTROL_VARIATES = {
    "stopped": mcvae.stopped,
    "leave one out": mcvae.leave_one_out,
    "none": mcvae.no_control_variate,
}


def pairs(trajectory, mass):
    """All pairs of atoms as trajectories of two samples, with the probability of each pair."""
    keep = mass > 1e-9  # certain rejections and far tails; their mass is checked to be negligible
    assert mass[~keep].sum() < 1e-6
    w, mass = trajectory.log_weight[keep, 0], mass[keep]
    i, j = torch.cartesian_prod(torch.arange(len(w)), torch.arange(len(w))).T
    steps = StepRecord(
        *(torch.stack([values[:, keep, 0][:, i], values[:, keep, 0][:, j]], 1) for values in trajectory.steps)
    )
    return Trajectory(torch.stack([w[i], w[j]]), None, None, None, steps=steps), mass[i] * mass[j], keep


@pytest.mark.parametrize("control_variate", CONTROL_VARIATES)
@pytest.mark.parametrize("bound", BOUNDS)
def test_surrogate_is_unbiased_for_every_bound_and_control_variate(bound, control_variate, monkeypatch):
    p = Parameters(1)
    log_weight, accept, probability = reference(p, "barker")
    trajectory = trajectory_on_atoms(p, "barker", monkeypatch)
    both, mass, keep = pairs(trajectory, (probability * accept).detach())
    ours = (mass * mcvae.surrogate(both, BOUNDS[bound], CONTROL_VARIATES[control_variate])).sum()
    w, a = log_weight[keep], (probability * accept)[keep]
    i, j = torch.cartesian_prod(torch.arange(len(w)), torch.arange(len(w))).T
    exact = (a[i] * a[j] * BOUNDS[bound](torch.stack([w[i], w[j]]))).sum()
    truth = gradients(exact, p)
    for mine, expected in zip(gradients(ours, p, retain_graph=True), truth, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)  # the atoms left out carry mass 1e-6
    pathwise = gradients((mass * BOUNDS[bound](both.log_weight)).sum(), p)
    assert abs(pathwise[-1] - truth[-1]) > 1e-3  # the named wrong version, seen in the step size's gradient


def test_leave_one_out_is_the_papers_control_variate_for_the_elbo():
    log_weight = torch.tensor([[1.0], [2.0], [6.0]])
    signal = mcvae.elbo(log_weight) - mcvae.leave_one_out(mcvae.elbo, Trajectory(log_weight, None, None, None))
    others = torch.tensor([[4.0], [3.5], [1.5]])
    torch.testing.assert_close(signal, (log_weight - others) / 3)


def test_without_control_variate_the_signal_is_that_of_the_paper():
    log_weight = torch.tensor([[1.0], [2.0], [6.0]])
    signal = mcvae.elbo(log_weight) - mcvae.no_control_variate(mcvae.elbo, Trajectory(log_weight, None, None, None))
    torch.testing.assert_close(signal, log_weight / 3)


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_decision_does_not_change_what_was_predicted_before_it(bound):
    """So the signal has mean 0 against it. A line through all data, the datum itself among them, fails."""
    draws = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(0))
    steps = StepRecord(torch.zeros(3, 2, 6), torch.zeros(3, 2, 6), draws[:3])

    def predicted(log_weight):
        value = mcvae.predicted(BOUNDS[bound], Trajectory(log_weight, None, None, None, steps=steps))
        return value[:, 0, 2]  # of the first chain of the third datum

    other_end, other_datum = draws[3].clone(), draws[3].clone()
    other_end[0, 2] += 5
    other_datum[0, 4] += 5
    torch.testing.assert_close(predicted(other_end), predicted(draws[3]), rtol=1e-12, atol=1e-12)
    assert (predicted(other_datum) - predicted(draws[3])).abs().min() > 1e-3


def test_a_gain_that_is_a_line_in_what_was_reached_is_predicted():
    reached = torch.randn(1, 1, 2000, generator=torch.Generator().manual_seed(0))
    steps = StepRecord(torch.zeros_like(reached), torch.zeros_like(reached), reached)
    found = mcvae.predicted(mcvae.elbo, Trajectory(7 + 0.4 * reached[0], None, None, None, steps=steps))
    inside = reached.abs() < 2.5
    torch.testing.assert_close(found[inside], (7 + 0.4 * reached)[inside], rtol=0, atol=0.02)
    alone = StepRecord(*(values[..., :1] for values in steps))
    one = mcvae.predicted(mcvae.elbo, Trajectory(reached[0, :, :1] + 7, None, None, None, steps=alone))
    torch.testing.assert_close(one, reached[..., :1])  # a batch of one has nothing to learn from


@pytest.mark.parametrize("broken", [-math.inf, math.nan])
def test_a_chain_that_failed_does_not_spoil_the_prediction_of_others(broken):
    reached, log_weight = torch.zeros(2, 1, 5), torch.full((1, 5), 3.0)
    log_weight[0, 1] = reached[1, 0, 2] = broken
    steps = StepRecord(torch.zeros_like(reached), torch.zeros_like(reached), reached)
    found = mcvae.predicted(mcvae.elbo, Trajectory(log_weight, None, None, None, steps=steps))
    torch.testing.assert_close(found[:, 0, [0, 3, 4]], torch.full((2, 3), 3.0))


@pytest.mark.parametrize("bound", BOUNDS)
def test_leave_one_out_reduces_the_variance_of_the_gradient(bound):
    """One gradient per datum, 20,000 data that are all alike, evidence far from 1 as in every image model."""
    p = Parameters(2)
    num_data = 20_000

    def variance(control_variate):
        loc = torch.full((num_data, 1), 0.3, requires_grad=True)
        bridge = mcvae.Bridge(Independent(Normal(loc, torch.ones_like(loc)), 1), lambda z: p.log_joint(z[..., 0]) - 90)
        objective = mcvae.AnnealedEstimator(
            mcvae.mala(),
            mcvae.LinearSchedule(2, interior=True),
            mcvae.FixedStepSizes(2, 0.4),
            num_samples=3,
            bound=BOUNDS[bound],
            control_variate=control_variate,
        )
        loss = objective(bridge, generator=torch.Generator().manual_seed(0)).loss
        return torch.autograd.grad(loss.sum(), loc)[0].var()

    assert variance(mcvae.leave_one_out) < 0.01 * variance(mcvae.no_control_variate)
