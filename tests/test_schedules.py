import math

import pytest
import torch

import mcvae

SCHEDULES = {
    "linear": mcvae.LinearSchedule,
    "sigmoid": mcvae.SigmoidSchedule,
    "learned": mcvae.LearnedSchedule,
}


def scrambled(schedule):
    """The schedule at arbitrary values of its parameters."""
    with torch.no_grad():
        for parameter in schedule.parameters():
            parameter += torch.randn_like(parameter)
    return schedule


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_steps", [1, 2, 7, 500])
@pytest.mark.parametrize("name", SCHEDULES)
def test_monotone_with_exact_end_points_whatever_the_parameters(name, num_steps, dtype):
    torch.set_default_dtype(dtype)
    closed = scrambled(SCHEDULES[name](num_steps))()
    assert closed[-1] == 1.0
    assert (closed.diff() >= 0).all()
    assert closed[0] > 0 or (name == "sigmoid" and dtype == torch.float32)
    interior = scrambled(SCHEDULES[name](num_steps, interior=True))()
    assert len(interior) == num_steps
    assert (interior.diff() >= 0).all()
    assert interior[0] > 0
    assert interior[-1] < 1 or (name == "sigmoid" and dtype == torch.float32)  # which may saturate


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_steps_is_an_empty_schedule(name):
    assert SCHEDULES[name](0)().shape == (0,)
    assert SCHEDULES[name](0, interior=True)().shape == (0,)


@pytest.mark.parametrize("interior", [False, True])
def test_linear_and_learned_start_as_the_paper_and_its_code_have_it(interior):
    expected = torch.arange(1, 6) / (6 if interior else 5)
    torch.testing.assert_close(mcvae.LinearSchedule(5, interior=interior)(), expected)
    torch.testing.assert_close(mcvae.LearnedSchedule(5, interior=interior)(), expected)


def test_sigmoid_is_the_formula_normalised_at_zero():
    delta, num_steps = 2.5, 4
    raw = [1 / (1 + math.exp(-delta * (2 * k / num_steps - 1))) for k in range(num_steps + 1)]
    expected = torch.tensor([(b - raw[0]) / (raw[-1] - raw[0]) for b in raw[1:]])
    torch.testing.assert_close(mcvae.SigmoidSchedule(num_steps, delta)(), expected)
    misprint = torch.tensor([(b - raw[1]) / (raw[-1] - raw[1]) for b in raw[1:]])  # the text normalises at k = 1
    assert misprint[0] == 0
    assert not torch.allclose(mcvae.SigmoidSchedule(num_steps, delta)(), misprint)


@pytest.mark.parametrize("name", ["sigmoid", "learned"])
def test_parameters_are_learned_through_the_bound(name):
    initial = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(64, 1), 1.0), 1)
    bridge = mcvae.Bridge(initial, lambda z: -2 * (z - 2).square().sum(-1))
    objective = mcvae.AnnealedEstimator(mcvae.ula(), SCHEDULES[name](4), mcvae.FixedStepSizes(4, 0.1))
    objective(bridge).loss.mean().backward()
    (parameter,) = objective.schedule.parameters()
    assert parameter.grad.abs().max() > 1e-4


@pytest.mark.parametrize("name", SCHEDULES)
def test_saving_and_loading(name):
    schedule, other = scrambled(SCHEDULES[name](4)), SCHEDULES[name](4)
    other.load_state_dict(schedule.state_dict())
    assert torch.equal(schedule(), other())
