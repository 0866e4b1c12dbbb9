"""The successors of the paper: E[w] = Z for any network, gradients by finite differences, wrong versions rejected."""

import copy
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributions import AffineTransform, Independent, Normal, StudentT, TransformedDistribution

import mcvae
from mcvae import AtNextStep, Controlled, DriftNetwork, Friction, Hamiltonian, Langevin, State, Unadjusted, recipes
from mcvae.core import step_sizes
from support import LOG_Z, generator, skewed_log_joint, standard_errors_off, step, wide_initial

CONTEXT = torch.tensor([[0.5], [-0.5]])
RECIPES = {
    "mcd": recipes.mcd,
    "cmcd": recipes.cmcd,
    "dbs": recipes.dbs,
    "ldvi": recipes.ldvi,
    "cmcd_ud": recipes.cmcd_ud,
}
SCHEDULES = {"linear": mcvae.LinearSchedule, "sigmoid": mcvae.SigmoidSchedule, "learned": mcvae.LearnedSchedule}
PATHS = {"geometric": mcvae.GeometricPath(), "mixture": mcvae.MixturePath()}


def randomised(objective: nn.Module, seed: int = 0) -> nn.Module:
    """Random networks: as after training on something else."""
    torch.manual_seed(seed)
    for module in objective.modules():
        if isinstance(module, DriftNetwork):
            for layer in (module.outputs, module.multiple):
                nn.init.normal_(layer.weight, std=0.1)
                nn.init.normal_(layer.bias, std=0.1)
    return objective


def build(name, *, schedule=mcvae.LinearSchedule, num_steps=3, **options):
    step_size = 0.3 if name in ("ldvi", "cmcd_ud") else 0.1
    return RECIPES[name](
        num_steps,
        2,
        context_dim=1,
        schedule=schedule,
        step_sizes=mcvae.LearnedStepSizes(num_steps, step_size),
        **options,
    )


def ratios(objective, path=PATHS["geometric"], number=20_000, seed=0):
    bridge = mcvae.Bridge(wide_initial(), skewed_log_joint, path, context=CONTEXT)
    with torch.no_grad():
        return (objective.run(bridge, number, generator=generator(seed)).log_weight - LOG_Z).exp()


def mean_is_one(ratio) -> bool:
    precise = (ratio.std(0) / len(ratio) ** 0.5 < 0.05).all()
    return bool(precise) and standard_errors_off(ratio, 1.0) < 5


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("interior", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_the_mean_weight_is_the_evidence_for_random_networks(name, interior, schedule, path):
    objective = randomised(build(name, schedule=SCHEDULES[schedule], interior=interior))
    assert mean_is_one(ratios(objective, PATHS[path]))


class Forgetful(nn.Module):
    """The named wrong version: a network that is left out of a density although the move followed it."""

    def __init__(self, kernel, network):
        super().__init__()
        self.kernel, self.network = kernel, network
        self.uses_score, self.accepts = True, False
        self.num_evaluations, self.target_acceptance = 1, 0.9

    def forward(self, bridge, state, step, *, generator=None):
        transition = self.kernel(bridge, state, step, generator=generator)
        control = self.network(bridge, state, step)
        shift = transition.state.point.z - state.point.z - step.step_size * bridge.score(state.point, step.beta)
        scale = (2 * step.step_size).sqrt()
        right = Normal(-step.step_size * control, scale).log_prob(shift).sum(-1)
        wrong = Normal(0.0, scale).log_prob(shift).sum(-1)
        return transition._replace(log_ratio=transition.log_ratio + right - wrong)


def test_a_network_missing_in_the_forward_density_is_rejected():
    objective = randomised(build("cmcd"))
    (kernel,) = objective.kernels
    control = kernel.proposal.drift.control
    nn.init.constant_(control.outputs.bias, 1.0)
    assert mean_is_one(ratios(objective, number=40_000))
    objective.kernels[0] = Forgetful(kernel, control)
    assert not mean_is_one(ratios(objective, number=40_000))


class ExactControl(nn.Module):
    """∇φ of a Gaussian path: the velocity that carries γ_β's marginals along β, divided by dη/dβ's rate."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, bridge, state, step):
        return -self.rate * torch.ones_like(state.point.z)


def shifted_bridge(distance):
    """N(0, 1) to N(distance, 1): geometric bridges are N(β distance, 1), so that the exact control is constant."""
    initial = Independent(Normal(torch.zeros(1, 1), torch.ones(1, 1)), 1)
    return mcvae.Bridge(
        initial, lambda z: -0.5 * (z - distance).square().sum(-1) - 0.5 * torch.log(torch.tensor(2 * torch.pi))
    )


def transport_gap(drift, backward_drift, num_steps=64, step_size=0.02):
    schedule = mcvae.LinearSchedule(num_steps, interior=True)
    objective = mcvae.AnnealedEstimator(
        Unadjusted(Langevin(drift, backward_drift)), schedule, mcvae.FixedStepSizes(num_steps, step_size)
    )
    with torch.no_grad():
        return -objective.run(shifted_bridge(3.0), 4000, generator=generator()).log_weight.mean().item()


def test_cmcd_with_the_exact_control_closes_the_gap_and_wrong_versions_do_not():
    """Marginals move by distance/(K+1) per step, so u = −distance / ((K+1) η); every bound here has evidence 0."""
    control = ExactControl(3.0 / 65 / 0.02)
    plus, minus = Controlled(control, 1.0), Controlled(control, -1.0)
    right = transport_gap(minus, AtNextStep(plus))
    assert abs(right) < 0.01
    wrong = {
        "no network at all": transport_gap(mcvae.score, AtNextStep(mcvae.score)),
        "network missing backward": transport_gap(minus, AtNextStep(mcvae.score)),
        "network missing forward": transport_gap(mcvae.score, AtNextStep(plus)),
        "same sign in both directions": transport_gap(minus, AtNextStep(minus)),
    }
    assert min(wrong.values()) > 1


def log_ratio_by_hand(name, kernel, bridge, old, new, place, next_place):
    """The table of the recipes, written down with torch's own densities; `old` and `new` are states."""
    size, proposal = place.step_size, kernel.proposal
    normal = lambda mean, scale, value: Normal(mean, scale).log_prob(value).sum(-1)
    s = lambda state, where: bridge.score(state.point, where.beta)
    if name in ("mcd", "cmcd", "dbs"):
        networks = [module for module in kernel.modules() if isinstance(module, DriftNetwork)]
        u, r = networks[0], networks[-1]
        z, scale = (old.point.z, new.point.z), (2 * size).sqrt()
        forward = {
            "mcd": z[0] + size * s(old, place),
            "cmcd": z[0] + size * s(old, place) - size * u(bridge, old, place),
            "dbs": z[0] + size * s(old, place) + size * u(bridge, old, place),
        }[name]
        backward = {
            "mcd": z[1] + size * s(new, place) + size * r(bridge, new, place),
            "cmcd": z[1] + size * s(new, next_place) + size * u(bridge, new, next_place),
            "dbs": z[1] + size * s(new, place) + size * r(bridge, new, place),
        }[name]
        return normal(backward, scale, z[0]) - normal(forward, scale, z[1])
    (network,) = {module for module in kernel.modules() if isinstance(module, DriftNetwork)}
    lost = proposal.refreshment.log_friction.exp() * size
    # one leapfrog step backwards in time finds the momentum after the refreshment
    refreshed = (new.point.z - old.point.z) / size - 0.5 * size * s(old, place)
    control = lambda momentum: network(bridge, State(old.point, momentum), place)
    forward, backward = (1 - lost) * old.momentum, (1 - lost) * refreshed + 2 * lost * control(refreshed)
    if name == "cmcd_ud":
        forward = forward - 2 * lost * control(old.momentum)
    refresh = normal(backward, (2 * lost).sqrt(), old.momentum) - normal(forward, (2 * lost).sqrt(), refreshed)
    return refresh + normal(0.0, 1.0, new.momentum) - normal(0.0, 1.0, old.momentum)


@pytest.mark.parametrize("name", RECIPES)
def test_log_ratios_are_those_of_the_table(name):
    (kernel,) = randomised(build(name)).kernels
    bridge = mcvae.Bridge(wide_initial(), skewed_log_joint, context=CONTEXT)
    place = step(beta=0.3, step_size=0.2, index=2, num_steps=3, next_beta=0.6)
    with torch.no_grad():
        point = bridge.sample(50, generator=generator())
        old = State(point, torch.randn(50, 2, 2, generator=generator(1)))
        transition = kernel(bridge, old, place, generator=generator(2))
        by_hand = lambda next_place: log_ratio_by_hand(name, kernel, bridge, old, transition.state, place, next_place)
        torch.testing.assert_close(transition.log_ratio, by_hand(place._replace(index=3, beta=torch.tensor(0.6))))
        if name == "cmcd":  # the named wrong version: the move's own temperature in the backward density
            assert (transition.log_ratio - by_hand(place)).abs().mean() > 0.01


@pytest.mark.parametrize("bound", [mcvae.elbo, mcvae.iwae])
@pytest.mark.parametrize("name", RECIPES)
def test_gradients_equal_finite_differences(name, bound):
    """Common random numbers: the loss is a smooth function of every parameter."""
    objective = randomised(build(name, schedule=mcvae.LearnedSchedule, num_samples=3, bound=bound))
    bridge = mcvae.Bridge(wide_initial(), skewed_log_joint, context=CONTEXT)
    loss = lambda: objective(bridge, generator=generator(3)).loss.sum()
    loss().backward()
    for key, parameter in objective.named_parameters():
        place = parameter.grad.abs().argmax()
        with torch.no_grad():
            flat, values = parameter.view(-1), []
            start = flat[place].item()
            for shift in (1e-5, -1e-5):
                flat[place] = start + shift
                values.append(loss())
            flat[place] = start
        numerical = ((values[0] - values[1]) / 2e-5).item()
        assert parameter.grad.view(-1)[place].item() == pytest.approx(numerical, rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("name", ["cmcd", "ldvi"])
def test_the_scales_of_a_flow_are_part_of_the_gradient(name, detached, monkeypatch):
    """Step sizes in units of the scales of q follow them. Of a flow, scales are quantiles of samples."""
    samples = step_sizes.standard_deviation
    if detached:  # the named wrong version
        monkeypatch.setattr(step_sizes, "standard_deviation", lambda initial: samples(initial).detach())
    log_scale, objective = torch.zeros((), requires_grad=True), RECIPES[name](3, 2)

    def loss():
        base = Independent(Normal(torch.zeros(2, 2), torch.ones(2, 2)), 1)
        q = TransformedDistribution(base, AffineTransform(0.3, 2 * log_scale.exp(), event_dim=1))
        return objective(mcvae.Bridge(q, skewed_log_joint), generator=generator(3)).loss.sum()

    (gradient,) = torch.autograd.grad(loss(), log_scale)
    values = []
    for shift in (1e-5, -1e-5):
        log_scale = torch.tensor(shift)
        values.append(loss().item())
    assert (gradient.item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-4)) != detached


@pytest.mark.parametrize("name", RECIPES)
def test_networks_may_start_from_a_distribution_without_moments(name):
    q = Independent(StudentT(torch.tensor([[1.0, 2.0]] * 2), 0.0, 1.0), 1)
    objective = randomised(RECIPES[name](3, 2, num_samples=50))
    estimate = objective(mcvae.Bridge(q, skewed_log_joint), generator=generator(0))
    estimate.loss.sum().backward()
    assert bool(estimate.bound.isfinite().all())
    assert all(bool(p.grad.isfinite().all()) for p in objective.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", RECIPES)
def test_networks_start_at_zero_and_one_evaluation_per_state_is_enough(name):
    calls = []

    def counted(z):
        calls.append(z)
        return skewed_log_joint(z)

    objective = build(name)
    bridge = mcvae.Bridge(wide_initial(), counted, context=CONTEXT)
    with torch.no_grad():
        trajectory = objective.run(bridge, 5, generator=generator())
        assert len(calls) == objective.num_evaluations == 4
        for module in objective.modules():
            if isinstance(module, DriftNetwork):
                state = State(trajectory.state.point, torch.ones_like(trajectory.state.point.z))
                assert module(bridge, state, step()).abs().max() == 0


def test_mcd_and_dbs_without_networks_are_l_mcvae():
    options = {"schedule": mcvae.LinearSchedule, "step_sizes": mcvae.FixedStepSizes(3, 0.1)}
    expected = ratios(recipes.l_mcvae(3, 2, **options), number=100)
    for name in ("mcd", "dbs"):
        torch.testing.assert_close(ratios(RECIPES[name](3, 2, **options), number=100), expected)


def test_friction_and_networks_are_shared_between_directions_and_copied_together():
    objective = build("cmcd_ud")
    proposal = objective.kernels[0].proposal
    assert proposal.refreshment.log_friction is proposal.backward_refreshment.log_friction
    assert proposal.refreshment.control is proposal.backward_refreshment.control
    copied = copy.deepcopy(objective).kernels[0].proposal
    assert copied.refreshment.log_friction is copied.backward_refreshment.log_friction
    assert copied.refreshment.control is not proposal.refreshment.control


def test_damping_and_friction_get_a_gradient():
    for objective, name in (
        (recipes.uha(3, 2, learned_damping=True, step_sizes=mcvae.FixedStepSizes(3, 0.3)), "logit"),
        (build("ldvi"), "log_friction"),
    ):
        objective(mcvae.Bridge(wide_initial(), skewed_log_joint, context=CONTEXT)).loss.sum().backward()
        (parameter,) = {p for key, p in objective.named_parameters() if key.endswith(name)}
        assert parameter.grad.abs() > 0


@pytest.mark.parametrize("name", RECIPES)
def test_training_tightens_the_bound_beyond_l_mcvae(name):
    """A few hundred steps on one density: the learned method beats the same chain without a network."""
    objective = build(name, num_steps=4, schedule=mcvae.LearnedSchedule)
    bridge = mcvae.Bridge(wide_initial(), skewed_log_joint, context=CONTEXT)
    optimizer = torch.optim.Adam(objective.parameters(), 5e-3)
    before = ratios(objective).log().mean()
    for seed in range(300):
        optimizer.zero_grad()
        objective.num_samples = 32
        objective(bridge, generator=generator(seed)).loss.mean().backward()
        optimizer.step()
    after = ratios(objective).log().mean()
    assert before < after < 0
    assert after > 0.5 * before


def test_errors_say_what_is_missing():
    bridge = mcvae.Bridge(wide_initial(), skewed_log_joint)
    with pytest.raises(ValueError, match=r"context \[B, C\] = \[2, 1\], got None"):
        build("cmcd")(bridge)
    state = State(bridge.sample(1))
    with pytest.raises(ValueError, match="sees the momentum"):
        DriftNetwork(2, uses_momentum=True)(bridge, state, step())
    with pytest.raises(ValueError, match="friction must be positive, got 0"):
        Friction(0.0)
    with pytest.raises(ValueError, match="its own reversal"):
        mcvae.MetropolisHastings(Langevin(backward_drift=Controlled(DriftNetwork(2))))
    with pytest.raises(ValueError, match="its own reversal"):
        mcvae.MetropolisHastings(Hamiltonian(2, refreshment=Friction(1.0)))


def test_a_kernel_of_the_first_edition_still_works_and_says_what_to_write():
    class Old(mcvae.Kernel):
        def forward(self, bridge, state, beta, step_size, *, generator=None):
            return mcvae.ula()(bridge, state, step(beta, step_size), generator=generator)

    bridge = mcvae.Bridge(wide_initial(), skewed_log_joint)
    state = State(bridge.sample(50, generator=generator()))
    new = mcvae.anneal(bridge, state, mcvae.ula(), [0.5], [0.1], generator=generator(1))
    with pytest.warns(DeprecationWarning, match="is now forward"):
        old = mcvae.anneal(bridge, state, Old(), [0.5], [0.1], generator=generator(1))
    torch.testing.assert_close(old.log_weight, new.log_weight)


def test_a_method_that_nobody_named_is_one_file_of_sixty_lines():
    """`examples/new_method.py`: tamed Langevin, added without touching anything else, is right by construction."""
    path = Path(__file__).parent.parent / "examples" / "new_method.py"
    assert len(path.read_text().splitlines()) <= 60
    example = runpy.run_path(str(path))
    objective = example["tamed"](3)
    assert mean_is_one(ratios(objective))
    # the named wrong version: taming the move but not its density
    (kernel,) = objective.kernels
    objective.kernels[0] = Forgetful(
        kernel,
        lambda bridge, state, step: mcvae.score(bridge, state, step) - example["tamed_score"](bridge, state, step),
    )
    assert not mean_is_one(ratios(objective))
