"""Likelihoods to believe: what is reported is right, doubts itself where it should, and survives interruption."""

import json
import math
import subprocess
import sys
from functools import cache

import pytest
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.distributions import Bernoulli, Independent, Normal

import mcvae
from mcvae.core.verdict import ADVICE
from mcvae.evaluation.resume import fingerprint
from mcvae.models import PPCA
from mcvae.runs.config import DataConfig, MethodConfig, RunConfig, TrainConfig
from mcvae.training.evaluate_run import evaluate_run
from mcvae.training.run import train
from support import LOG_Z, generator, skewed_log_joint, standard_errors_off, wide_initial


def ppca_model(latent_dim=100, data_dim=784, num_data=4):
    """PPCA with a mean-field q: the diagonal of the posterior, which is too narrow or too wide in every direction."""
    ppca = PPCA.random(latent_dim, data_dim, sigma=0.5, generator=generator(3))
    x, _ = ppca.simulate(num_data, generator=generator(4))

    def encoder(x):
        posterior = ppca.posterior(x)
        return Independent(Normal(posterior.mean.detach(), posterior.stddev.detach()), 1)

    return mcvae.LatentVariableModel(encoder, ppca), x, ppca.log_evidence(x).detach()


@pytest.mark.slow
def test_intervals_cover_the_evidence_of_ppca():
    """200 independent repetitions on one datum of dimension 784 with 100 latents: 95 % intervals cover 90 to 99 %."""
    model, x, truth = ppca_model(num_data=1)
    pilot = model.bridge(x.expand(8, -1))
    tuning = mcvae.tune(pilot, mcvae.hmc(3), generator=generator()).shared()
    repeated = model.bridge(x.expand(200, -1))
    settings = {"tuning": tuning, "num_steps": 48, "num_samples": 24, "check": False}
    evidence = mcvae.estimate_log_evidence(repeated.log_joint, repeated.initial, **settings, generator=generator(1))
    low, high = evidence.interval()
    assert 0.90 <= ((low <= truth) & (truth <= high)).double().mean() <= 0.99
    assert evidence.standard_error.mean() < 0.15
    # the named wrong version: an interval that forgets the chains' spread is a standard error of the mean weight's log
    assert ((evidence.log_evidence - truth).abs() <= 0.5 * evidence.standard_error).double().mean() < 0.6


@pytest.mark.slow
def test_defaults_find_the_evidence_of_ppca_and_say_converged():
    model, x, truth = ppca_model(latent_dim=20, data_dim=50)
    bridge = model.bridge(x)
    evidence = mcvae.estimate_log_evidence(bridge.log_joint, bridge.initial, generator=generator())
    assert ((evidence.log_evidence - truth).abs() < 4 * evidence.standard_error).all()
    assert evidence.verdict() == "converged"
    assert (evidence.moved.abs().mean() < 0.1).all()


class AdaptingWhileWeighing(mcvae.Kernel):
    """The named wrong version: a chain that was rejected tries again with a third of the step."""

    def __init__(self):
        super().__init__()
        self.moves = mcvae.hmc(3)

    def forward(self, bridge, state, step, *, generator=None):
        first = self.moves(bridge, state, step, generator=generator)
        second = self.moves(bridge, first.state, step._replace(step_size=step.step_size / 3), generator=generator)
        again = (first.state.point.z == state.point.z).all(-1)
        chosen = mcvae.core.bridge.select(again, second.state.point, first.state.point)
        log_ratio = torch.where(again, second.log_ratio, first.log_ratio)
        return mcvae.Transition(mcvae.State(chosen), log_ratio, first.log_accept, first.acceptance)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "biased"), [(lambda: mcvae.hmc(3), False), (AdaptingWhileWeighing, True)])
def test_adapting_during_the_weighted_run_is_detected(kernel, biased):
    """With a step that is often rejected; the frozen one is inefficient, and right."""
    evidence = mcvae.estimate_log_evidence(
        skewed_log_joint,
        wide_initial(),
        kernel=kernel(),
        schedule=mcvae.FixedSchedule([0.2, 0.4, 0.6, 0.8]),
        step_size=1.2,
        num_samples=100_000,
        generator=generator(),
    )
    off = standard_errors_off((evidence.log_weights - LOG_Z).exp(), 1.0)
    assert off > 5 if biased else off < 5


def logistic_regression():
    """Breast cancer: 569 patients, 30 standardised features, standard normal prior on weights and intercept."""
    features, labels = load_breast_cancer(return_X_y=True)
    features = torch.as_tensor(features)
    features = (features - features.mean(0)) / features.std(0, correction=0)
    design = torch.cat([features, torch.ones(len(features), 1)], 1)
    prior = Independent(Normal(torch.zeros(1, 31), torch.ones(1, 31)), 1)
    labels = torch.as_tensor(labels, dtype=torch.float64)

    def log_joint(weights):
        return prior.log_prob(weights) + Bernoulli(logits=weights @ design.T).log_prob(labels).sum(-1)

    return log_joint, prior


@pytest.mark.slow
def test_two_ways_to_the_evidence_of_a_logistic_regression_agree():
    log_joint, prior = logistic_regression()
    settings = {"num_steps": 512, "num_samples": 200, "check": False}
    from_prior = mcvae.estimate_log_evidence(log_joint, prior, **settings, generator=generator())
    mode = torch.zeros(1, 1, 31, requires_grad=True)
    optimiser = torch.optim.LBFGS([mode], max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimiser.zero_grad()
        loss = -log_joint(mode).sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    hessian = torch.autograd.functional.hessian(lambda z: -log_joint(z).sum(), mode.detach()).reshape(31, 31)
    scale = 1.5 * hessian.diagonal().rsqrt()
    laplace = Independent(Normal(mode.detach()[0], scale.unsqueeze(0)), 1)
    from_laplace = mcvae.estimate_log_evidence(
        log_joint, laplace, kernel=mcvae.hmc(4), schedule="sigmoid", **settings, generator=generator(1)
    )
    for evidence in (from_prior, from_laplace):
        assert evidence.verdict() == "no contradiction found"
    error = from_prior.standard_error.hypot(from_laplace.standard_error)
    assert abs(from_prior.log_evidence - from_laplace.log_evidence) < 3 * error < 0.3


def test_too_small_a_budget_is_called_not_converged():
    model, x, _ = ppca_model()
    bridge = model.bridge(x)
    evidence = mcvae.estimate_log_evidence(
        bridge.log_joint, bridge.initial, num_samples=16, max_steps=2, check=False, generator=generator()
    )
    assert evidence.num_steps == 2
    assert not evidence.converged.any()
    assert evidence.verdict().startswith("not converged, because (4 of 4: ")
    assert "more temperatures" in evidence.verdict()


@cache
def sound_datum():
    initial = Independent(Normal(torch.zeros(1, 2), 2 * torch.ones(1, 2)), 1)
    return mcvae.estimate_log_evidence(lambda z: -z.square().sum(-1), initial, seed=0)


def one_datum(**changed):
    """A sound estimate of one datum, with parts of it changed."""
    evidence = sound_datum()
    checks = evidence.checks._replace(**{name: changed.pop(name) for name in list(changed) if name in CHECKS})
    return evidence._replace(checks=checks, **changed)


CHECKS = ("strays", "hidden", "drift")


def test_every_doubt_has_a_cause_and_advice():
    sound = one_datum()
    assert sound.verdict() == "converged"
    second = sound.checks.log_evidence
    wrong = {
        "empty": {"log_evidence": torch.tensor([-torch.inf])},
        "broken": {"num_nonfinite": torch.tensor([3])},
        "coarse": {"resolution": torch.tensor([0.2])},
        "stuck": {"acceptance": torch.tensor([0.01])},
        "unfinished": {"tuning": sound.tuning._replace(reached=0.3)},
        "elsewhere": {"strays": torch.tensor([0.1])},
        "hidden": {"hidden": torch.tensor([0.5])},
        "disagreeing": {"log_evidence": second - 2},
        "drifting": {"drift": torch.tensor([9.0])},
        "moving": {"moved": torch.tensor([0.2]), "standard_error": torch.zeros(1)},
        "few": {"ess": torch.tensor([1.5])},
        "tail": {"pareto_k": torch.tensor([0.9]), "ess": torch.tensor([20.0])},
        "noisy": {"standard_error": torch.tensor([0.5])},
    }
    assert set(wrong) == set(ADVICE)
    for name, change in wrong.items():
        changed = one_datum(**change)
        assert name in changed.doubts()[0]
        assert ADVICE[name] in changed.verdict()
        assert not changed.converged.any()


def test_a_heavy_tail_is_read_whatever_the_effective_sample_size():
    assert "tail" in one_datum(pareto_k=torch.tensor([1.8]), ess=torch.tensor([60.0])).doubts()[0]


def test_all_reasons_are_shown_and_the_gravest_first():
    """Of five reasons three were shown, and "no chain ended where the density is positive" was not among them."""
    everything = one_datum(
        log_evidence=torch.tensor([-torch.inf]),
        standard_error=torch.tensor([torch.inf]),
        ess=torch.zeros(1),
        pareto_k=torch.tensor([torch.inf]),
        acceptance=torch.zeros(1),
    )
    said = everything.verdict()
    for name in ("empty", "stuck", "few", "tail", "noisy"):
        assert ADVICE[name] in said
    assert said.index(ADVICE["empty"]) < said.index(ADVICE["noisy"])


def test_adaptive_temperatures_beat_even_ones_from_the_prior():
    """A posterior a hundred times narrower than the prior needs most temperatures near 0."""
    initial = Independent(Normal(torch.zeros(1, 3), torch.ones(1, 3)), 1)
    log_joint = lambda z: -0.5 * (100 * z).square().sum(-1)
    errors = {
        spacing: mcvae.estimate_log_evidence(
            log_joint, initial, num_steps=150, num_samples=400, schedule=spacing, generator=generator()
        ).standard_error.item()
        for spacing in ("adaptive", "linear")
    }
    assert errors["adaptive"] < 0.5 * errors["linear"]


def test_a_saved_tuning_is_used_again(tmp_path):
    first = mcvae.estimate_log_evidence(skewed_log_joint, wide_initial(), num_steps=20, generator=generator())
    first.tuning.save(tmp_path / "tuning.json")
    tuning = mcvae.Tuning.load(tmp_path / "tuning.json")
    torch.testing.assert_close(tuning.temperatures(20), first.temperatures)
    again = mcvae.estimate_log_evidence(
        skewed_log_joint, wide_initial(), num_steps=20, tuning=tuning, generator=generator(7)
    )
    torch.testing.assert_close(again.step_sizes, first.step_sizes)
    assert ((again.log_evidence - LOG_Z).abs() < 5 * again.standard_error).all()


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="spacing must be one of adaptive, sigmoid, linear"):
        mcvae.estimate_log_evidence(skewed_log_joint, wide_initial(), schedule="cosine")
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        mcvae.estimate_log_evidence(skewed_log_joint, wide_initial(), num_steps=-1, step_size=0.1, schedule="sigmoid")
    with pytest.raises(ValueError, match="num_samples must be at least 1"):
        mcvae.estimate_log_evidence(skewed_log_joint, wide_initial(), num_samples=0)
    with pytest.raises(ValueError, match="tolerance must be positive"):
        mcvae.estimate_log_evidence(skewed_log_joint, wide_initial(), tolerance=0)
    model, _, _ = ppca_model(2, 3)
    with pytest.raises(ValueError, match="no data"):
        mcvae.evaluate(model, torch.zeros(0, 3))


# Over a model and data


class BatchNormEncoder(nn.Module):
    """A network whose rows influence each other, and whose statistics move, in train mode."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4))

    def forward(self, x):
        location, scale = self.body(x).chunk(2, -1)
        return Independent(Normal(location, scale.exp()), 1)


def test_evaluation_is_in_eval_mode_and_changes_nothing():
    torch.manual_seed(0)
    decoder = nn.Linear(2, 6)
    encoder = BatchNormEncoder()
    model = mcvae.LatentVariableModel(encoder, lambda z: Independent(Bernoulli(logits=decoder(z)), 1))
    encoder.body[1].eval()  # modes that differ are restored one by one
    x = (torch.rand(12, 6, generator=generator()) < 0.5).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first = mcvae.evaluate(model, x, protocol="paper", simulated=0)
    assert encoder.training
    assert not encoder.body[1].training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    second = mcvae.evaluate(model, x, protocol="paper", simulated=0)
    assert first.table == second.table
    alone, together = (
        model.score(rows, num_steps=5, num_samples=200, check=False, seed=0).log_evidence for rows in (x[:1], x)
    )
    assert abs(alone[0] - together[0]) < 0.1  # the statistics of a batch of one are other ones
    assert torch.equal(model.encode(x[:1]).mean, model.encode(x).mean[:1])
    assert torch.allclose(model.reconstruct(x[:2]), model.reconstruct(x)[:2])
    assert encoder.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_arrays_pairs_and_seeds_are_accepted():
    model, x, _ = ppca_model(latent_dim=3, data_dim=6, num_data=10)
    options = {"protocol": mcvae.Protocol(num_steps=4, num_samples=8), "simulated": 0}
    expected = mcvae.evaluate(model, x, **options).table
    pairs = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.zeros(10)), batch_size=10)
    for data in (x.numpy(), pairs, [x.numpy()]):
        assert mcvae.evaluate(model, data, **options).table == expected
    with pytest.raises(TypeError, match="data must be a tensor, a NumPy array, or batches of those, got str"):
        mcvae.evaluate(model, ["x"], **options)
    bridge = model.bridge(x)
    first, second = (
        mcvae.estimate_log_evidence(bridge.log_joint, bridge.initial, num_steps=4, check=False, seed=3)
        for _ in range(2)
    )
    assert torch.equal(first.log_evidence, second.log_evidence)
    with pytest.raises(ValueError, match="a generator or a seed, not both"):
        mcvae.estimate_log_evidence(bridge.log_joint, bridge.initial, seed=3, generator=generator())


def test_time_left_is_written(capsys, monkeypatch):
    from mcvae.evaluation import portions

    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(portions.time, "monotonic", lambda: next(clock))
    assert list(portions.with_time_left("abcdef", 6)) == list("abcdef")
    assert "about" in capsys.readouterr().err


def test_auto_without_temperatures_is_refused():
    model, x, _ = ppca_model(latent_dim=3, data_dim=6, num_data=10)
    with pytest.raises(ValueError, match="max_steps must be at least 1"):
        mcvae.evaluate(model, x, protocol=mcvae.Protocol(max_steps=0))


@pytest.mark.parametrize(("number", "limit"), [(10, 3), (100, 99), (7, 7), (5, 9), (1000, 16)])
def test_a_limit_is_evenly_spaced(number, limit):
    """The named wrong version takes every n-th and cuts: of 100 data it took the first 99 for a limit of 99."""
    from mcvae.evaluation import evenly_spaced

    chosen = evenly_spaced(number, limit)
    assert len(chosen) == min(number, limit)
    assert len(set(chosen.tolist())) == len(chosen)
    gaps = torch.cat([torch.tensor([-1]), chosen, torch.tensor([number])]).diff().double()
    assert gaps[1:-1].max() - gaps[1:-1].min() <= 1 if len(chosen) > 1 else True
    assert abs(gaps[0] - gaps[-1]) <= 1


def test_the_jackknife_finds_the_bias_of_log_of_a_mean():
    """Over 4,000 repetitions of 16 lognormal weights; the named wrong version is no correction."""
    log_weight = torch.randn(16, 4000, generator=generator()) - 0.5  # mean weight 1
    found = mcvae.iwae(log_weight)
    assert abs((found + mcvae.jackknife_bias(log_weight)).mean()) < 0.3 * abs(found.mean())
    assert found.mean() < -0.03


def test_a_set_is_certified_or_told_how_far_it_is():
    model, x, truth = ppca_model(latent_dim=3, data_dim=6, num_data=30)
    fine = mcvae.evaluate(model, x, simulated=32).summary
    assert fine["verdict"].startswith("converged, certified within 0.1 nat")
    assert fine["remaining"] <= 0.1
    assert abs(fine["nll"] + truth.mean()) < 0.1
    assert fine["bits_per_dim"] == pytest.approx(fine["nll"] / 6 / math.log(2))
    assert mcvae.evaluate(model, x, simulated=0).summary["verdict"].startswith("no contradiction found")
    hard, x, _ = ppca_model(latent_dim=40, data_dim=80, num_data=16)
    crude = mcvae.Protocol(num_steps=1, num_samples=16, start="encoder")
    coarse = mcvae.evaluate(hard, x, protocol=crude, simulated=32).summary
    assert coarse["verdict"].startswith("not converged, because")
    assert coarse["remaining"] > 1


def test_noise_alone_earns_no_certificate():
    """Bounds 20 ± 17 nats apart contradict nothing, and confirm nothing."""
    from mcvae.evaluation import Certificate

    small = torch.full((16,), 0.01)
    wide = Certificate.of(small, small, {"gap": 19.8, "gap_se": 16.7})
    assert wide.verdict([()] * 16, 0.1).startswith("no contradiction found, but the bounds allow 53.20 nat")
    assert Certificate.of(small, small, {"gap": 0.2, "gap_se": 0.1}).verdict([()] * 16, 0.1).startswith("converged;")


def test_noise_is_no_alarm():
    """Changes that average to nothing: their mean size exceeds the tolerance, their mean does not."""
    from mcvae.evaluation import Certificate

    noisy = torch.tensor([0.3, -0.3] * 8)
    found = Certificate.of(torch.full((16,), 0.01), noisy, {"gap": 0.01, "gap_se": 0.01})
    assert found.verdict([()] * 16, 0.1).startswith("converged")
    moved = Certificate.of(torch.full((16,), 0.01), noisy + 0.4, {"gap": 0.01, "gap_se": 0.01})
    assert "more temperatures still change it" in moved.verdict([()] * 16, 0.1)


def test_another_decoder_prior_or_objective_does_not_use_what_was_saved(tmp_path):
    """Functions have no weights: the named wrong version compares state dictionaries only."""
    x = (torch.rand(20, 6, generator=generator()) < 0.5).double()
    encoder = lambda x: Independent(Normal(torch.zeros(len(x), 2), torch.ones(len(x), 2)), 1)
    options = {"protocol": mcvae.Protocol(num_steps=2, num_samples=4), "simulated": 0}

    def model(scale):
        return mcvae.LatentVariableModel(
            encoder,
            lambda z: Independent(Bernoulli(logits=scale * z.sum(-1, keepdim=True).expand(*z.shape[:-1], 6)), 1),
        )

    def interrupt(work):
        yield next(iter(work))
        raise KeyboardInterrupt

    objectives = [None, mcvae.recipes.iwae(num_samples=3), mcvae.recipes.iwae(num_samples=5)]
    for scale, objective in [(1.0, None), (2.0, None), (2.0, objectives[1]), (2.0, objectives[2])]:
        with pytest.raises(KeyboardInterrupt):
            mcvae.evaluate(
                model(1.5 * scale),
                torch.split(x, 10),
                **options,
                objective=objectives[1],
                folder=tmp_path,
                progress=interrupt,
            )
        found = mcvae.evaluate(model(scale), torch.split(x, 10), **options, objective=objective, folder=tmp_path)
        assert found.table == mcvae.evaluate(model(scale), torch.split(x, 10), **options, objective=objective).table


@pytest.mark.slow
def test_evaluate_finds_the_evidence_of_every_datum():
    model, x, truth = ppca_model(latent_dim=5, data_dim=12, num_data=30)
    found = mcvae.evaluate(model, torch.split(x, 7), simulated=16)
    difference = found.column("log_likelihood") - truth
    assert (difference.abs() < 5 * found.column("standard_error") + 1e-3).all()
    summary = found.summary
    assert summary["verdict"].startswith("converged")
    assert abs(summary["nll"] + truth.mean()) < 0.05
    assert summary["nll_interval"][0] < -truth.mean() < summary["nll_interval"][1]
    assert summary["num_images"] == 30
    assert summary["active_units"] == summary["latent_dim"] == 5
    # ELBO = -rate - distortion <= IWAE of ten <= importance sampling, log p, in the mean
    assert summary["bound"] == pytest.approx(-summary["rate"] - summary["distortion"])
    assert summary["bound"] < summary["iwae_10"] < -summary["nll"] + 0.01
    assert abs(summary["sandwich"]["gap"]) < 0.2 + 3 * summary["sandwich"]["gap_se"]
    assert found.worst(2) == truth.argsort()[:2].tolist()


def test_starting_from_the_prior_agrees_with_starting_from_the_encoder():
    model, x, truth = ppca_model(latent_dim=3, data_dim=6, num_data=10)
    found = mcvae.evaluate(model, x, protocol=mcvae.Protocol(start="prior"), simulated=0, compare_iwae=False)
    assert ((found.column("log_likelihood") - truth).abs() < 5 * found.column("standard_error") + 1e-3).all()
    assert found.column("importance").isnan().all()


class Bent(nn.Module):
    """Two latents whose posterior is bent and correlated; its evidence is known by quadrature."""

    def forward(self, z):
        first, second = z.unbind(-1)
        mean = torch.stack([first + second, 0.5 * first.square() - second, first.sin()], -1)
        return Independent(Normal(mean, torch.full_like(mean, 0.3)), 1)

    def log_evidence(self, x):
        axis = torch.linspace(-6, 6, 1201, dtype=torch.float64)
        z = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 1, 2)
        log_joint = self(z).log_prob(x.double()) + Normal(0.0, 1.0).log_prob(z).sum(-1)
        return log_joint.logsumexp(0) + 2 * math.log(0.01)


def lost_encoder(x):
    """A q that knows nothing of the posterior."""
    return Independent(Normal(torch.full_like(x[:, :2], 0.5), torch.full_like(x[:, :2], 0.8)), 1)


@pytest.mark.parametrize("weighs_the_volume", [True, False])
def test_chains_that_start_around_a_mode_find_the_evidence(monkeypatch, weighs_the_volume):
    """The named wrong version forgets that a frame changes volumes."""
    from mcvae.core import frames

    if not weighs_the_volume:
        monkeypatch.setattr(frames._InFrame, "__call__", lambda self, u: self.log_joint(self.frame.to_latents(u)))
    decoder = Bent().double()
    model = mcvae.LatentVariableModel(lost_encoder, decoder)
    z = torch.randn(20, 2, generator=generator(), dtype=torch.float64)
    x = decoder(z).mean + 0.3 * torch.randn(20, 3, generator=generator(1), dtype=torch.float64)
    found = mcvae.evaluate(model, x, protocol=mcvae.Protocol(num_steps=32, num_samples=64), simulated=0)
    assert found.summary["start"] == "fitted"
    error = found.column("log_likelihood") - decoder.log_evidence(x)
    right = (error.abs() < 5 * found.column("standard_error") + 1e-3).double().mean() > 0.9
    assert bool(right) == weighs_the_volume


def test_a_start_around_the_mode_needs_fewer_temperatures():
    model, x, truth = ppca_model(latent_dim=20, data_dim=40, num_data=16)
    errors = {}
    for start in ("fitted", "encoder"):
        protocol = mcvae.Protocol(num_steps=4, num_samples=8, start=start)
        found = mcvae.evaluate(model, x, protocol=protocol, simulated=0, compare_iwae=False)
        errors[start] = (found.column("log_likelihood") - truth).abs().mean()
    assert errors["fitted"] < 0.5 * errors["encoder"]


def test_a_fitted_start_is_saved_without_its_data(tmp_path):
    model, x, truth = ppca_model(latent_dim=5, data_dim=12, num_data=30)
    options = {"protocol": mcvae.Protocol(num_steps=8, num_samples=8), "simulated": 0, "compare_iwae": False}
    first = mcvae.evaluate(model, x[:10], **options)
    assert first.tuning.fitted
    assert first.tuning.frame is None
    first.tuning.save(tmp_path / "tuning.json")
    again = mcvae.evaluate(model, x[10:], tuning=mcvae.Tuning.load(tmp_path / "tuning.json"), **options)
    assert (again.column("log_likelihood") - truth[10:]).abs().max() < 0.2


def test_a_datum_without_a_mode_starts_from_its_initial_distribution():
    from mcvae.core.starts import fit

    initial = Independent(Normal(torch.tensor([[1.0, 0.5], [1.0, 0.5]]), torch.tensor([[1.0, 2.0], [1.0, 2.0]])), 1)

    def log_joint(z):  # the first has a mode at 0 of variance 1/4, the second is a plateau
        return torch.stack([-2 * z[:, 0].square().sum(-1), torch.zeros(len(z))], 1)

    for max_rows in (2, 4096):
        frame, alone = fit(mcvae.Bridge(initial, log_joint), max_rows=max_rows)
        assert alone.tolist() == [True, False]
        assert torch.allclose(frame.mean[0], torch.zeros(2), atol=1e-3)
        covariance = (frame.factor @ frame.factor.mT)[0]
        assert torch.allclose(covariance, covariance[0, 0] * torch.eye(2), atol=1e-2)
        assert 0.24 < covariance[0, 0] < 0.25 * 1.1**2 + 0.01  # perhaps a tenth wider, in deviations


def test_the_fitted_gaussian_is_the_nearest_one_not_that_of_the_mode():
    """log p = Σ z − e^z: the mode is 0, the curvature there 1, and the Gaussian of least KL(q ‖ p) is N(−1/2, 1)."""
    from mcvae.core.frames import Frame
    from mcvae.core.starts import fit

    data, dim = 60, 20
    initial = Independent(Normal(torch.full((data, dim), 0.3), torch.full((data, dim), 0.6)), 1)
    bridge = mcvae.Bridge(initial, lambda z: (z - z.exp()).sum(-1))
    frame, alone = fit(bridge, generator=generator())
    assert alone.all()
    assert -0.6 < frame.mean.mean() < -0.25  # after four steps
    assert abs((frame.factor @ frame.factor.mT).diagonal(dim1=-2, dim2=-1).mean() - 1) < 0.15
    u = torch.randn(200, data, dim, generator=generator(1))

    def bound(frame):
        return frame.bridge(bridge).log_joint(u).mean(0)

    at_the_mode = Frame(torch.zeros(data, dim), torch.eye(dim).expand(data, -1, -1))
    nearest = Frame(torch.full((data, dim), -0.5), at_the_mode.factor)
    gain, best = (bound(frame) - bound(at_the_mode)).mean(), (bound(nearest) - bound(at_the_mode)).mean()
    assert 0.4 * best < gain < best + 0.1  # 3 nats in 20 dimensions


def test_an_encoder_whose_scale_underflows_is_not_fitted():
    """Far from all it has seen its scale is 0 in float32. `mcvae score` then starts from the prior."""
    model = mcvae.LatentVariableModel(
        lambda x: Independent(Normal(x, 1e-30 ** x.abs(), validate_args=False), 1),
        lambda z: Independent(Normal(z, torch.ones_like(z)), 1),
    )
    for x in (torch.tensor([[0.0, 0.0], [9.0, 9.0]]), torch.cat([torch.zeros(99, 2), torch.full((1, 2), 9.0)])):
        with pytest.raises(mcvae.NonFiniteDensityError):
            mcvae.evaluate(
                model, x, protocol=mcvae.Protocol(num_steps=2, num_samples=2), simulated=0, compare_iwae=False
            )


@pytest.mark.parametrize("beyond", [-math.inf, math.nan])
def test_a_gaussian_is_fitted_to_half_of_one(beyond):
    """Half of all samples meet a density that is 0, or broken."""
    from mcvae.core.starts import fit

    initial = Independent(Normal(torch.full((8, 3), 0.4), torch.ones(8, 3)), 1)

    def log_joint(z):
        inside = -(z - 0.3).square().sum(-1)
        return torch.where((z > 0).all(-1), inside, beyond)

    frame, _ = fit(mcvae.Bridge(initial, log_joint), num_starts=4, generator=generator())
    assert frame.mean.isfinite().all()
    assert frame.factor.isfinite().all()


class Squared(nn.Module):
    """A decoder that sees z² only, so that ± z are two modes, of unequal mass under a prior that is not centred."""

    def forward(self, z):
        return Independent(Normal(z.square() + 0.2 * z, torch.full_like(z, 0.5)), 1)


@pytest.mark.parametrize("looks_for_rivals", [True, False])
def test_a_second_mode_is_not_missed(monkeypatch, looks_for_rivals):
    """The named wrong version starts all chains around the first mode that it finds."""
    from mcvae.core import starts
    from mcvae.evaluation import runner

    if not looks_for_rivals:

        def first_mode(bridge, **options):
            found = starts.fit(bridge, **options)
            return found._replace(alone=torch.ones_like(found.alone))

        for module in (runner, sys.modules["mcvae.core.pilot"]):
            monkeypatch.setattr(module, "fit" if module is runner else "fit_to", first_mode)
    decoder = Squared()
    model = mcvae.LatentVariableModel(
        lambda x: Independent(Normal(torch.full_like(x, 0.2), torch.full_like(x, 1.5)), 1), decoder
    )
    # below -1 the posterior has one mode; most of the first data, on which the pilot decides, are there
    x = torch.cat([torch.linspace(-3.0, -1.0, 12), torch.linspace(0.5, 6.0, 24)]).double().unsqueeze(-1)
    axis = torch.linspace(-8, 8, 4001, dtype=torch.float64).reshape(-1, 1, 1)
    truth = (decoder(axis).log_prob(x) + Normal(0.0, 1.0).log_prob(axis).sum(-1)).logsumexp(0) + math.log(16 / 4000)
    found = mcvae.evaluate(model, x, protocol=mcvae.Protocol(num_steps=32), simulated=16, compare_iwae=False)
    assert found.summary["start"] == "fitted"
    error = found.column("log_likelihood") - truth
    right = (error.abs() < 5 * found.column("standard_error") + 1e-3).double().mean() > 0.9
    assert bool(right) == looks_for_rivals


def test_evaluating_leaves_the_global_stream_alone():
    model, x, _ = ppca_model(latent_dim=3, data_dim=6, num_data=10)
    before = torch.get_rng_state()
    mcvae.evaluate(model, x, protocol="paper", simulated=4)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_papers_protocol_is_a_preset():
    model, x, _ = ppca_model(latent_dim=3, data_dim=6, num_data=10)
    summary = mcvae.evaluate(model, x, protocol="paper", simulated=0).summary
    assert (summary["num_steps"], summary["num_samples"], summary["spacing"]) == (5, 10, "linear")


@pytest.mark.slow
def test_any_pair_of_modules_and_a_flow():
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 9)

        def forward(self, z):
            return Independent(Bernoulli(logits=self.layer(z)), 1)

    from mcvae.models.flows import FlowEncoder

    torch.manual_seed(0)
    model = mcvae.LatentVariableModel(FlowEncoder(nn.Linear(9, 4), 2), Decoder())
    x = (torch.rand(12, 9, generator=generator()) < 0.5).double()
    found = mcvae.evaluate(model, x, simulated=16)
    assert found.summary["verdict"].startswith("converged")
    both = found.summary["sandwich"]
    assert abs(both["gap"]) < 0.2 + 3 * both["gap_se"]


class Scaling(nn.Module):
    """A decoder whose state_dict does not say all that it computes with."""

    def __init__(self, factor=1.0, offset=0.0, kept=0.0):
        super().__init__()
        self.factor, self.offset = factor, torch.full((2,), offset)
        self.register_buffer("kept", torch.full((2,), kept), persistent=False)

    def forward(self, z):
        return Independent(Normal(self.factor * z + self.offset + self.kept, 1.0), 1)


class Edited(Scaling):
    def forward(self, z):
        return Independent(Normal(self.factor * z - self.offset + self.kept, 1.0), 1)


Edited.__qualname__ = "Scaling"  # as if the file had been edited between two runs


@pytest.mark.parametrize("changed", [Scaling(2.0), Scaling(offset=1.0), Scaling(kept=1.0), Edited()])
def test_saved_batches_of_another_model_are_not_taken(changed, tmp_path):
    """The wrong version knew modules by their layout and state alone, and told the first model's likelihood."""
    x, encoder = torch.ones(4, 2), lambda x: Independent(Normal(0.5 * x, torch.ones_like(x)), 1)
    options = {"protocol": mcvae.Protocol(num_steps=2, num_samples=4), "simulated": 0, "compare_iwae": False}
    first = mcvae.LatentVariableModel(encoder, Scaling())
    second = mcvae.LatentVariableModel(encoder, changed)
    mcvae.evaluate(first, x, folder=tmp_path, keep=True, **options)
    assert fingerprint(first) == fingerprint(mcvae.LatentVariableModel(encoder, Scaling())) != fingerprint(second)
    found = mcvae.evaluate(second, x, folder=tmp_path, keep=True, **options)
    assert found.table == mcvae.evaluate(second, x, **options).table


@pytest.mark.parametrize("torn", [False, True])
def test_an_interrupted_evaluation_goes_on_and_ends_with_the_same_numbers(tmp_path, torn):
    model, x, _ = ppca_model(latent_dim=3, data_dim=6, num_data=20)
    batches = torch.split(x, 5)
    options = {"protocol": mcvae.Protocol(num_steps=4, num_samples=8), "simulated": 4}
    undisturbed = mcvae.evaluate(model, batches, **options)
    started = []

    def interrupt(work):
        for index, batch in work:
            started.append(index)
            if index == 2:
                raise KeyboardInterrupt
            yield index, batch

    with pytest.raises(KeyboardInterrupt):
        mcvae.evaluate(model, batches, **options, folder=tmp_path, progress=interrupt)
    saved = tmp_path / "evaluation.partial"
    assert len(saved.read_text().splitlines()) == 3  # settings, two batches
    if torn:
        saved.write_text(saved.read_text()[:-20])
    resumed = mcvae.evaluate(model, batches, **options, folder=tmp_path)
    assert resumed.table == undisturbed.table
    assert json.dumps(resumed.summary) == json.dumps(undisturbed.summary)
    assert not saved.exists()


def test_other_data_and_other_weights_do_not_use_what_was_saved(tmp_path):
    """The named wrong version: rows of an interrupted validation split reported as those of the test split."""
    model, x, _ = ppca_model(latent_dim=3, data_dim=6, num_data=20)
    options = {"protocol": mcvae.Protocol(num_steps=4, num_samples=8), "simulated": 0}

    def interrupt(work):
        yield next(iter(work))
        raise KeyboardInterrupt

    for data, shift in ((x + 1, 0.0), (x, 0.5)):
        with torch.no_grad():
            model.decoder.theta_0 += shift
        with pytest.raises(KeyboardInterrupt):
            mcvae.evaluate(model, torch.split(data, 10), **options, folder=tmp_path, progress=interrupt)
        with torch.no_grad():
            model.decoder.theta_0 -= shift
        found = mcvae.evaluate(model, torch.split(x, 10), **options, folder=tmp_path)
        assert found.table == mcvae.evaluate(model, torch.split(x, 10), **options).table


def test_other_settings_do_not_use_what_was_saved(tmp_path):
    model, x, _ = ppca_model(latent_dim=3, data_dim=6, num_data=10)
    (tmp_path / "evaluation.partial").write_text('{"num_steps": 4}\n{"batch": 0, "rows": []}\n')
    found = mcvae.evaluate(model, x, protocol=mcvae.Protocol(num_steps=4, num_samples=8), simulated=0, folder=tmp_path)
    assert len(found.table) == 10


MEMORY = """
import resource, sys, torch, mcvae
torch.manual_seed(0)
num_batches, num_steps = int(sys.argv[1]), int(sys.argv[2])
decoder_net, encoder_net = torch.nn.Linear(8, 400), torch.nn.Linear(400, 16)
from torch.distributions import Bernoulli, Independent, Normal
def encoder(x):
    loc, scale = encoder_net(x).chunk(2, -1)
    return Independent(Normal(loc, scale.exp()), 1)
model = mcvae.LatentVariableModel(encoder, lambda z: Independent(Bernoulli(logits=decoder_net(z)), 1))
batches = (torch.zeros(100, 400) for _ in range(num_batches))
mcvae.evaluate(model, batches, protocol=mcvae.Protocol(num_steps=num_steps, num_samples=8), simulated=0,
               compare_iwae=False)
unit = 2**20 if sys.platform == "darwin" else 2**10  # bytes on macOS, kilobytes on Linux
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit)
"""


@pytest.mark.slow
def test_memory_grows_neither_with_the_data_nor_with_the_temperatures():
    def peak(num_batches, num_steps):
        command = [sys.executable, "-c", MEMORY, str(num_batches), str(num_steps)]
        return float(subprocess.run(command, capture_output=True, check=True, text=True).stdout)

    small = peak(2, 4)
    assert peak(40, 4) < small + 40  # MB; the additional data are 6 MB of rows in Python
    assert peak(2, 120) < small + 40


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory):
    torch.set_default_dtype(torch.float32)
    folder = tmp_path_factory.mktemp("digits") / "vae"
    data, run = DataConfig("digits", batch_size=50), RunConfig(epochs=20, folder=str(folder))
    train(TrainConfig(data=data, method=MethodConfig("vae"), run=run))
    torch.set_default_dtype(torch.float64)
    return folder


@pytest.mark.slow
def test_a_digits_vae_is_sandwiched_and_ten_samples_are_looser(digits_run):
    torch.set_default_dtype(torch.float32)
    summary = evaluate_run(digits_run, limit=40)
    both = summary.sandwich
    assert abs(both.gap) < 0.2
    assert both.iwae_10 < both.lower - 0.02
    assert summary.iwae_10 < -summary.nll - 0.02
    assert summary.verdict.startswith("converged")
    assert (digits_run / "pictures" / "worst.png").exists()
    assert len((digits_run / "evaluation.csv").read_text().splitlines()) == 41
    tuned = evaluate_run(digits_run, limit=40, tuning=str(digits_run / "tuning.json"), simulated=0, compare_iwae=False)
    assert tuned.nll == pytest.approx(summary.nll, abs=0.1)
    assert evaluate_run(digits_run, split="validation", limit=10, protocol="paper", simulated=0).split == "validation"
    result = json.loads((digits_run / "result.json").read_text())
    assert result["evaluation"]["split"] == "test"
    assert result["evaluation-validation"]["num_images"] == 10
