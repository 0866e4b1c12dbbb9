"""Models given labels or covariates, and priors that are learned."""

import copy
import math

import numpy as np
import pytest
import torch
from torch.distributions import Independent, Normal

import mcvae
from mcvae.data import DataError, load_data
from mcvae.models import LatentVariableModel, build_model
from mcvae.models.priors import PRIORS, build_prior
from mcvae.runs.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from mcvae.runs.method import MethodConfig
from mcvae.training.applying import apply_run
from mcvae.training.evaluate_run import evaluate_run
from mcvae.training.run import train


@pytest.fixture
def labelled(tmp_path):
    """Two groups whose means differ by 40 scales, a label and a covariate that shifts the second column."""
    noise = np.random.default_rng(0)
    label = np.array(["left", "right"])[noise.integers(2, size=120)]
    age = noise.normal(50, 10, 120)
    first = np.where(label == "left", -20.0, 20.0) + noise.normal(size=120)
    second = 0.5 * age + noise.normal(size=120)
    path = tmp_path / "groups.csv"
    rows = zip(first, second, label, age, strict=True)
    path.write_text("first,second,label,age\n" + "\n".join(f"{a},{b},{c},{d}" for a, b, c, d in rows))
    return path


def test_labels_become_indicators_and_covariates_are_standardised(labelled):
    data = load_data(str(labelled), condition=["label", "age"])
    assert data.shape == (2,)
    assert data.columns == ["first", "second"]
    given = data.given_of("train")
    assert given.shape == (len(data.train), 3)
    assert torch.equal(given[:, 0] == 1, data.train[:, 0] < 0)  # left
    assert torch.equal(given[:, :2].sum(1), torch.ones(len(given), dtype=given.dtype))
    correlation = torch.corrcoef(torch.stack([given[:, 2], data.train[:, 1]]))[0, 1]
    assert correlation > 0.9
    everything = torch.cat([data.given_of(split) for split in ("train", "validation", "test")])[:, 2]
    assert abs(everything.mean()) < 1e-5


def test_what_cannot_be_conditioned_on_is_named(labelled, tmp_path):
    with pytest.raises(DataError, match="no column 'height' to condition on; it has first, second, label, age"):
        load_data(str(labelled), condition=["height"])
    with pytest.raises(DataError, match=r"line 2, column 'label': expected a number, got .*--data.condition \[label\]"):
        load_data(str(labelled))
    np.savez(tmp_path / "x.npz", x=np.ones((5, 2)), y=np.arange(4))
    with pytest.raises(DataError, match="x.npz: 'y' must have one value for each of 5 rows"):
        load_data(str(tmp_path / "x.npz"), condition=["y"])


@pytest.mark.slow
def test_a_conditional_model_knows_what_its_labels_say(labelled, tmp_path, monkeypatch):
    """From train to score: rows whose label is exchanged become far less likely."""
    torch.set_default_dtype(torch.float32)
    config = TrainConfig(
        data=DataConfig(str(labelled), condition=["label", "age"], batch_size=20),
        model=ModelConfig(latent_dim=2),
        method=MethodConfig("l-mcvae", num_steps=2),
        run=RunConfig(epochs=40, folder=str(tmp_path / "run")),
        trainer={"logger": False},
    )
    run = train(config)
    short = {"num_steps": 4, "num_samples": 16}
    summary = evaluate_run(run, **short, limit=6, simulated=4, compare_iwae=False)
    assert summary.sandwich is not None
    exchanged = tmp_path / "exchanged.csv"
    swap = {"left": "right", "right": "left"}
    header, *rows = labelled.read_text().splitlines()
    lines = [",".join([*row.split(",")[:2], swap[row.split(",")[2]], row.split(",")[3]]) for row in rows]
    exchanged.write_text("\n".join([header, *lines]))
    protocol = mcvae.Protocol(**short)
    right, wrong = (apply_run(run, str(path), limit=20).score(protocol) for path in (labelled, exchanged))
    difference = right.column("log_likelihood") - wrong.column("log_likelihood")
    assert difference.min() > 2
    drawn = mcvae.load(run).simulate(500, generator=torch.Generator().manual_seed(0))[0]
    assert drawn.shape == (500, 2 + 3)
    left, right = (drawn[drawn[:, column] == 1, 0] for column in (2, 3))
    for group, sign in ((left, -1), (right, 1)):  # a model that ignores its label has one mean for both
        assert sign * group.mean() > 5 * group.std() / len(group) ** 0.5
    exchanged.write_text("first,second,label,age\n1,2,left,old\n")
    with pytest.raises(DataError, match="exchanged.csv, line 2: age is 'old'; the training data have numbers"):
        apply_run(run, str(exchanged))
    exchanged.write_text("first,second,label,age\n1,2,up,3\n")
    with pytest.raises(
        DataError, match="exchanged.csv, line 2: label is 'up'; the training data have only left, right"
    ):
        apply_run(run, str(exchanged))


def test_the_evidence_of_a_conditional_gaussian_is_exact():
    """p(z | y) = N(y, 1) through standardised latents, p(x | z, y) = N(z, 1): p(x | y) = N(y, 2)."""

    def decoder(rows):
        return Independent(Normal(rows[:, :1] + rows[:, 1:], 1.0), 1)

    def encoder(rows):  # the exact posterior of the standardised latent
        return Independent(Normal((rows[:, :1] - rows[:, 1:]) / 2, math.sqrt(0.5) * torch.ones(len(rows), 1)), 1)

    model = LatentVariableModel(encoder, decoder, latent_dim=1, data_shape=(1,), examples=torch.tensor([[3.0]]))
    x, y = torch.tensor([[1.0], [4.0]]), torch.tensor([[3.0], [-1.0]])
    point = model.bridge(torch.cat([x, y], 1)).sample(5)
    truth = Normal(y, math.sqrt(2)).log_prob(x)[:, 0]
    assert torch.allclose(point.log_p - point.log_q, truth.expand(5, 2))
    assert not torch.allclose(truth, Normal(0.0, math.sqrt(2)).log_prob(x)[:, 0])  # conditions matter
    rows, z = model.simulate(20_000, generator=torch.Generator().manual_seed(0))
    assert rows.shape == (20_000, 2)
    assert abs(float(rows[:, 0].mean()) - 3) < 5 * math.sqrt(2 / 20_000)
    assert z.shape == (20_000, 1)
    with pytest.raises(ValueError, match="expected rows of 1 values and 1 conditions"):
        model.bridge(x)


def test_bits_per_dimension_count_the_dimensions_of_the_data_and_not_conditions():
    def encoder(rows):
        return Independent(Normal(torch.zeros(len(rows), 3), 1.0), 1)

    def decoder(rows):
        return Independent(Normal(rows[:, :3], 1.0), 1)

    model = LatentVariableModel(encoder, decoder, latent_dim=3, data_shape=(3,), examples=torch.eye(4))
    protocol = mcvae.Protocol(num_steps=2, num_samples=4)
    summary = mcvae.evaluate(model, model.simulate(5)[0], protocol=protocol, compare_iwae=False).summary
    assert summary["bits_per_dim"] == pytest.approx(summary["nll"] / 3 / math.log(2))


@pytest.mark.parametrize("name", PRIORS)
def test_a_prior_integrates_to_one_and_is_learned(name):
    def encoder(x):
        return Independent(Normal(x, 0.5 * torch.ones_like(x)), 1)

    prior = build_prior(name, 2, encoder, (2,), 5)
    if prior is None:
        return
    axis = torch.linspace(-12, 12, 481)
    grid = torch.cartesian_prod(axis, axis)
    with torch.no_grad():
        total = prior().log_prob(grid).exp().sum() * (axis[1] - axis[0]) ** 2
    assert abs(float(total) - 1) < 1e-3
    (-prior().log_prob(torch.randn(10, 2) + 1).mean()).backward()
    assert all(bool((p.grad != 0).any()) for p in prior.parameters())


@pytest.mark.parametrize("name", PRIORS)
def test_a_model_in_half_precision_has_a_normalised_prior_and_simulates(name):
    torch.manual_seed(0)
    model = build_model((5,), 16, kind="real", network="mlp", likelihood="gaussian", prior=name).to(torch.bfloat16)
    x, z = model.simulate(3)
    assert x.shape == model.reconstruct(x.to(torch.bfloat16)).shape == (3, 5)
    z = z.float()
    found = model.prior_like(z).log_prob(z)
    if name == "vamp":  # whose encoder is in half precision
        return
    exact = copy.deepcopy(model).double()
    assert torch.allclose(found.double(), exact.prior_like(z.double()).log_prob(z.double()), atol=1e-3)


@pytest.mark.parametrize("name", PRIORS)
def test_a_model_knows_its_prior_and_its_latent_dimension(name):
    model = build_model((4,), 3, kind="real", network="mlp", likelihood="gaussian", prior=name)
    assert model.latent_dim == 3
    x, z = model.simulate(5, generator=torch.Generator().manual_seed(0))
    assert z.shape == (5, 3)
    log_prior = model.prior_like(z).log_prob(z)
    log_joint = model.log_joint(x, z[None])[0]
    assert torch.allclose(log_joint - model.decoder(z).log_prob(x), log_prior)
    found = mcvae.evaluate(model, x, protocol=mcvae.Protocol(num_steps=2, num_samples=8), simulated=2)
    assert found.summary["latent_dim"] == 3
    weights = [key for key in model.state_dict() if key.startswith("prior.") and "encoder" in key]
    assert not weights  # the encoder's weights are the model's


def test_pseudo_data_start_as_data_and_follow_the_encoder():
    model = build_model((4,), 2, kind="real", network="mlp", likelihood="gaussian", prior="vamp", prior_components=3)
    data = torch.randn(7, 4)
    model.prior.start(data)
    assert torch.equal(model.prior.pseudo_data, data[[0, 3, 6]])
    components = model.encoder(data[[0, 3, 6]]).log_prob(torch.zeros(3, 2))
    assert torch.allclose(model.prior().log_prob(torch.zeros(2)), components.logsumexp(0) - math.log(3))
    import copy

    double = copy.deepcopy(model)
    for parameter in double.encoder.parameters():
        parameter.data.zero_()
    assert not torch.allclose(double.prior().log_prob(torch.zeros(2)), model.prior().log_prob(torch.zeros(2)))


def test_vamp_and_a_flow_exclude_each_other():
    from mcvae.runs.config import resolve

    with pytest.raises(ValueError, match="vamp needs a Gaussian q"):
        resolve(TrainConfig(model=ModelConfig(prior="vamp", flow="nsf")), (1, 8, 8))
