"""E[w] = Z for every composition of kernel, schedule, path and backward kernel; wrong versions are rejected."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import AffineTransform, ComposeTransform, StackTransform, TanhTransform

import mcvae
from mcvae import Hamiltonian, Langevin, RandomWalk, State, Unadjusted
from support import LOG_Z, generator, skewed_log_joint, standard_errors_off, step, wide_initial

NUM_STEPS, STEP_SIZE = 3, 0.1


def gaussian_backward() -> mcvae.GaussianBackward:
    torch.manual_seed(1)
    backward = mcvae.GaussianBackward(2, context_dim=1, hidden=(8,), scale=1.15 * math.sqrt(2 * STEP_SIZE))
    nn.init.normal_(backward.network[-1].weight, std=0.05)  # as after some training
    return backward


def bend() -> mcvae.FlowStep:
    return mcvae.FlowStep(
        ComposeTransform([AffineTransform(0.1, 0.25), TanhTransform().inv.inv, AffineTransform(0.2, 4.2)])
    )


KERNELS = {
    "ula": mcvae.ula,
    "unadjusted random walk": lambda: Unadjusted(RandomWalk()),
    "unadjusted hamiltonian": lambda: mcvae.underdamped(num_leapfrog=2, damping=0.0),
    "underdamped": lambda: mcvae.underdamped(num_leapfrog=1, damping=0.7),
    "learned backward": lambda: Unadjusted(Langevin(), gaussian_backward()),
    "mala": mcvae.mala,
    "mala barker": lambda: mcvae.mala(mcvae.barker),
    "rwm": mcvae.rwm,
    "hmc": lambda: mcvae.hmc(2),
    "hmc barker": lambda: mcvae.hmc(2, mcvae.barker),
}
SCHEDULES = {
    "linear": lambda: mcvae.LinearSchedule(NUM_STEPS),
    "linear interior": lambda: mcvae.LinearSchedule(NUM_STEPS, interior=True),
    "sigmoid": lambda: mcvae.SigmoidSchedule(NUM_STEPS, delta=2.0),
    "learned interior": lambda: mcvae.LearnedSchedule(NUM_STEPS, interior=True),
    "fixed": lambda: mcvae.FixedSchedule([0.1, 0.3, 0.9]),
}
PATHS = {"geometric": mcvae.GeometricPath(), "mixture": mcvae.MixturePath()}


def weights(kernel, schedule, path, *, step_sizes=None, num_samples=20_000, seed=0):
    """w / Z of chains on the skewed target, [S, B]."""
    bridge = mcvae.Bridge(wide_initial(), skewed_log_joint, path, context=torch.tensor([[0.5], [-0.5]]))
    source = generator(seed)
    with torch.no_grad():
        state = State(bridge.sample(num_samples, generator=source))
        steps = step_sizes if step_sizes is not None else torch.full((NUM_STEPS,), STEP_SIZE)
        trajectory = mcvae.anneal(bridge, state, kernel, schedule(), steps, generator=source)
    return (trajectory.log_weight - LOG_Z).exp()


def mean_is_one(ratio) -> bool:
    """Within five standard errors, and the standard error is small enough for that to mean something."""
    precise = (ratio.std(0) / len(ratio) ** 0.5 < 0.05).all()
    return bool(precise) and standard_errors_off(ratio, 1.0) < 5


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_mean_weight_is_the_evidence(kernel, schedule, path):
    ratio = weights(KERNELS[kernel](), SCHEDULES[schedule](), PATHS[path])
    assert mean_is_one(ratio)


@pytest.mark.parametrize("kernel", ["ula", "mala", "hmc", "underdamped", "rwm"])
def test_the_mean_weight_is_the_evidence_with_one_step_size_per_dimension(kernel):
    vector = torch.tensor([[0.05, 0.3], [0.1, 0.2], [0.2, 0.1]])
    ratio = weights(KERNELS[kernel](), mcvae.LinearSchedule(NUM_STEPS), PATHS["geometric"], step_sizes=vector)
    assert mean_is_one(ratio)


@pytest.mark.parametrize("path", PATHS)
def test_the_mean_weight_is_the_evidence_for_a_stochastic_normalising_flow(path):
    kernels = [bend(), mcvae.ula(), bend()]
    ratio = weights(kernels, mcvae.LinearSchedule(NUM_STEPS), PATHS[path])
    assert mean_is_one(ratio)


def test_the_jacobian_of_a_flow_that_treats_every_dimension_in_its_own_way():
    transform = StackTransform([AffineTransform(0.1, 1.5), AffineTransform(-0.1, 0.9)], dim=-1)
    kernels = [mcvae.FlowStep(transform), mcvae.ula(), mcvae.ula()]
    assert mean_is_one(weights(kernels, mcvae.LinearSchedule(NUM_STEPS), PATHS["geometric"]))


def test_the_mean_weight_is_the_evidence_when_support_is_bounded():
    """The joint vanishes below 0; chains that leave the support keep their place in the average."""

    def half_normal(z):
        inside = z.squeeze(-1) > 0
        return torch.where(inside, math.log(2) - 0.5 * z.squeeze(-1).square() - 0.5 * math.log(2 * math.pi), -torch.inf)

    initial = torch.distributions.Independent(torch.distributions.Normal(torch.ones(1, 1), torch.ones(1, 1)), 1)
    bridge = mcvae.Bridge(initial, half_normal)
    for kernel in (mcvae.mala(), mcvae.ula(), mcvae.hmc(2)):
        with torch.no_grad():
            source = generator()
            state = State(bridge.sample(40_000, generator=source))
            trajectory = mcvae.anneal(bridge, state, kernel, [0.3, 0.6], [0.1, 0.1], generator=source)
        assert mean_is_one(trajectory.log_weight.exp())
        assert not trajectory.nonfinite.any()


class Wrong(mcvae.Kernel):
    """A kernel whose log ratio has been tampered with."""

    def __init__(self, kernel, tamper):
        super().__init__()
        self.kernel, self.tamper, self.uses_score = kernel, tamper, kernel.uses_score

    def forward(self, bridge, state, step, *, generator=None):
        transition = self.kernel(bridge, state, step, generator=generator)
        return self.tamper(bridge, state, step, transition)


def sign_flipped(bridge, state, step, transition):
    return transition._replace(log_ratio=-transition.log_ratio)


def forgotten(bridge, state, step, transition):
    return transition._replace(log_ratio=torch.zeros_like(transition.log_ratio))


def missing_constant(bridge, state, step, transition):
    """The public code's learned backward kernel: a density of z over a density of noise."""
    return transition._replace(log_ratio=transition.log_ratio - 2 * (2 * step.step_size).sqrt().log())


def bad_moves_skipped(bridge, state, step, transition):
    """The public code's ula_skip_threshold: unlikely moves are undone and leave no trace in the weight."""
    keep = transition.acceptance > 0.3
    return transition._replace(
        state=State(mcvae.core.bridge.select(keep, transition.state.point, state.point)),
        log_ratio=torch.where(keep, transition.log_ratio, 0.0),
    )


def weighted_as_if_invariant(bridge, state, step, transition):
    """The AIS weight for a kernel that does not leave its target invariant."""
    change = bridge.log_density(state.point, step.beta) - bridge.log_density(transition.state.point, step.beta)
    return transition._replace(log_ratio=change)


def temperature_of_the_next_step(bridge, state, step, transition):
    """An AIS weight that telescopes at the wrong temperature."""
    wrong = bridge.log_density(state.point, step.beta / 2) - bridge.log_density(transition.state.point, step.beta / 2)
    return transition._replace(log_ratio=wrong)


WRONG = {
    "ula, sign flipped": ("ula", sign_flipped),
    "ula, ratio forgotten": ("ula", forgotten),
    "ula, bad moves skipped": ("ula", bad_moves_skipped),
    "ula, weighted as if invariant": ("ula", weighted_as_if_invariant),
    "unadjusted random walk, weighted as if invariant": ("unadjusted random walk", weighted_as_if_invariant),
    "unadjusted hamiltonian, sign flipped": ("unadjusted hamiltonian", sign_flipped),
    "underdamped, sign flipped": ("underdamped", sign_flipped),
    "underdamped, ratio forgotten": ("underdamped", forgotten),
    "learned backward, constant missing": ("learned backward", missing_constant),
    "learned backward, sign flipped": ("learned backward", sign_flipped),
    "mala, ratio forgotten": ("mala", forgotten),
    "mala, wrong temperature": ("mala", temperature_of_the_next_step),
    "mala barker, sign flipped": ("mala barker", sign_flipped),
    "rwm, ratio forgotten": ("rwm", forgotten),
    "hmc, sign flipped": ("hmc", sign_flipped),
    "hmc barker, ratio forgotten": ("hmc barker", forgotten),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_weight_is_rejected(wrong, path):
    name, tamper = WRONG[wrong]
    kernel = Wrong(KERNELS[name](), tamper)
    # every wrong version is eight standard errors off with 60,000 chains, but for this one, which is four
    num_samples = 200_000 if name == "unadjusted random walk" else 60_000
    ratio = weights(kernel, mcvae.LinearSchedule(NUM_STEPS), PATHS[path], num_samples=num_samples)
    assert not mean_is_one(ratio)


def test_a_flow_whose_jacobian_is_forgotten_is_rejected():
    kernels = [mcvae.FlowStep(AffineTransform(0.1, 0.9)), mcvae.ula(), mcvae.FlowStep(AffineTransform(-0.1, 1.0))]
    schedule, path = mcvae.LinearSchedule(NUM_STEPS), PATHS["geometric"]
    assert mean_is_one(weights(kernels, schedule, path))
    kernels[0] = Wrong(kernels[0], forgotten)
    assert not mean_is_one(weights(kernels, schedule, path))


@pytest.mark.slow
@pytest.mark.parametrize("proposal", [Langevin(), RandomWalk(), Hamiltonian(2)])
def test_metropolis_hastings_leaves_the_target_invariant(proposal):
    """Start from exact samples: after many moves, moments have not moved."""
    source = generator()
    first = torch.randn(40_000, 1, generator=source)
    second = torch.randn(40_000, 1, generator=source).abs()
    delta = 2 / math.sqrt(5)
    skewed = delta * second + math.sqrt(1 - delta**2) * first  # an exact skew-normal draw
    location = torch.tensor([[0.0, 0.4]])
    z0 = skewed + location
    z1 = 0.8 * torch.tanh(2 * (z0 - location)) + 0.6 * torch.randn(40_000, 2, generator=source)
    exact = torch.stack([z0, z1], -1)
    bridge = mcvae.Bridge(wide_initial(), skewed_log_joint)
    kernel = mcvae.MetropolisHastings(proposal)
    with torch.no_grad():
        state = State(bridge.evaluate(exact))
        for _ in range(20):
            state = kernel(bridge, state, step(1.0, 0.4), generator=source).state
    for moment in (lambda z: z, torch.square, lambda z: z.prod(-1)):
        difference = moment(state.point.z).mean(0) - moment(exact).mean(0)
        scale = (moment(exact).var(0) * 2 / len(exact)).sqrt()
        assert float((difference / scale).abs().max()) < 5
