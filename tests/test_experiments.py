"""Experiments: the numbers they report are right where the answer is known, and wrong versions are rejected."""

import csv
import json
import math
from dataclasses import replace

import pytest
import torch

import mcvae
from mcvae.cli import main
from mcvae.experiments import (
    frontier,
    image_tables,
    ppca_gradients as ppca,
    reproduction,
    toy_parameters,
    toy_posterior,
)
from mcvae.experiments.paper import NAMES, paper_value, paper_values
from mcvae.experiments.reproduction import EXPERIMENTS, ReproductionOptions as Options, reproduce
from mcvae.models import PPCA, LatentVariableModel, Ring
from mcvae.report import figures
from mcvae.report.figures import FIGURES, draw
from mcvae.report.present import present
from mcvae.report.tables import latex, markdown, table
from mcvae.runs.config import DataConfig, parse_config, resolve
from mcvae.runs.method import method_named, parse_key
from mcvae.runs.plain import write_rows
from mcvae.runs.records import Record, paired, read_records, summarise, write_records
from mcvae.training.building import build


def test_the_papers_values_are_all_there():
    values = paper_values()
    assert len(values) == 3 * 6 * (8 + 16)  # data sets, columns, rows of the main and the full tables
    assert {key[2] for key in values if key[0] == "full"} == set(image_tables.PAPER_METHODS)
    assert paper_value("mnist", "l-mcvae-learned-k10", 100, "nll") == (84.58, 0.39)
    assert paper_value("celeba", "realnvp", 100, "nll") == (11408.98, 0.2)
    assert paper_value("cifar10", "a-mcvae-linear-k3", 10, "negative_elbo") == (2869.97, 0.99)
    assert values["main", "mnist", "l-mcvae-k5", 10, "nll"] == (90.59, 2.01)


def test_exact_posterior_samples_have_the_exact_posterior():
    ring, x = Ring(1.0, 0.3, 0.5), torch.tensor([[2.0]])
    z = toy_posterior.posterior_samples(ring, x, 200_000, torch.Generator().manual_seed(0))
    radius = torch.linspace(1e-6, 8, 4001)
    density = radius * ring.log_posterior(x, torch.stack([radius, 0 * radius], -1).unsqueeze(1)).squeeze(-1).exp()
    mean = (radius * density).sum() / density.sum()
    found = z.norm(dim=-1)
    assert (found.mean() - mean).abs() < 5 * found.std() / math.sqrt(len(z))
    assert z.mean(0).abs().max() < 5 * z.std() / math.sqrt(len(z))


def test_energy_distance_is_unbiased_at_zero_and_sees_a_hole():
    generator = torch.Generator().manual_seed(1)
    ring, x = toy_posterior.ring(), torch.tensor([[toy_posterior.OBSERVATION]])
    same, filled = [], []
    for _ in range(10):
        a, b = (toy_posterior.posterior_samples(ring, x, 500, generator) for _ in range(2))
        gaussian = a.std() * torch.randn(500, 2, generator=generator)
        same.append(toy_posterior.energy_distance(a, b))
        filled.append(toy_posterior.energy_distance(gaussian, b))
    same, filled = torch.stack(same), torch.stack(filled)
    error = same.std() / math.sqrt(10)
    assert same.mean().abs() < 5 * error
    assert filled.mean() > 20 * error


def test_maximum_likelihood_of_the_ring_is_where_the_score_vanishes():
    data, _ = Ring(**toy_parameters.TRUTH, latent_dim=5).simulate(1000, generator=torch.Generator().manual_seed(0))
    ring = Ring(**toy_parameters.START, latent_dim=5)
    before = ring.log_evidence(data, 1001).mean()
    toy_parameters.maximum_likelihood(ring, data)
    after = ring.log_evidence(data, 1001).mean()
    assert after > before
    for gradient in torch.autograd.grad(after, list(ring.parameters())):
        assert gradient.abs() < 1e-4
    assert abs(float(ring.log_xi.detach().exp()) - 1.0) < 0.1


@pytest.fixture(scope="module")
def small_ppca():
    torch.set_default_dtype(torch.float64)
    decoder = PPCA.random(3, 6, generator=torch.Generator().manual_seed(0))
    x, _ = decoder.simulate(20, generator=torch.Generator().manual_seed(1))

    exact = decoder.posterior(x)

    def encoder(x):  # does not change with the decoder
        return torch.distributions.Independent(
            torch.distributions.Normal(exact.mean.detach() + 0.1, 1.3 * exact.stddev.detach()), 1
        )

    return LatentVariableModel(encoder, decoder), x


def test_ppca_measurement_agrees_with_the_closed_form_for_the_elbo(small_ppca):
    model, x = small_ppca
    found = ppca.measure(model, mcvae.recipes.vae(), x, 400, seed=0)
    q, exact = model.encoder(x), model.decoder.posterior(x)
    full = torch.distributions.MultivariateNormal(q.mean, covariance_matrix=torch.diag_embed(q.variance))
    gap = torch.distributions.kl_divergence(full, exact).mean().detach()
    value, error = found.metrics["log_evidence_error"]
    assert abs(value + gap) < 5 * error
    assert abs(found.metrics["derivative_z"][0]) < 5


@pytest.mark.slow
def test_unbiased_gradients_pass_and_the_pathwise_one_is_rejected(small_ppca):
    model, x = small_ppca
    objective = mcvae.recipes.a_mcvae(3, 3, step_sizes=mcvae.FixedStepSizes(3, 0.1), num_samples=5)
    right = ppca.measure(model, objective, x, 250, seed=0)
    wrong = ppca.measure(model, objective, x, 250, seed=0, pathwise=True)
    assert abs(right.metrics["derivative_z"][0]) < 4
    assert abs(wrong.metrics["derivative_z"][0]) > 6
    without = mcvae.recipes.a_mcvae(
        3, 3, step_sizes=mcvae.FixedStepSizes(3, 0.1), num_samples=5, control_variate=mcvae.no_control_variate
    )
    noisy = ppca.measure(model, without, x, 100, seed=0)
    assert noisy.metrics["gradient_variance"][0] > 3 * right.metrics["gradient_variance"][0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Sizes that take seconds."""
    patch = pytest.MonkeyPatch()
    patch.setitem(toy_posterior.SIZES, "quick", {"num_updates": 20, "num_steps": 2, "num_data": 200, "batches": 2})
    patch.setitem(
        toy_parameters.SIZES, "quick", {"dimensions": (2, 5), "num_updates": 5, "num_steps": 1, "num_data": 100}
    )
    patch.setitem(ppca.SIZES, "quick", {"latent_dim": 3, "data_dim": 6, "replicates": 5, "num_updates": 8})
    patch.setattr(ppca, "_PILOT", 3)
    patch.setitem(
        image_tables.PRESETS, "quick", image_tables.PRESETS["quick"] | {"epochs": (1, 2), "seeds": 1, "limit": 8}
    )
    patch.setitem(image_tables.QUICK_DATA, "mnist", image_tables.DataConfig("digits", batch_size=50, limit=60))
    digits = DataConfig("digits", batch_size=50)
    patch.setitem(frontier.PRESETS, "quick", {"data": (digits,), "epochs": (1,), "seeds": 1, "limit": 4})
    yield tmp_path_factory.mktemp("reproduction")
    patch.undo()


@pytest.fixture(autouse=True)
def _as_a_user_would():
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["toy-posterior", "toy-parameters", "ppca", "mnist", "training-curves", "frontier"])
def test_every_experiment_leaves_records_table_and_figure(tiny, name, capsys, monkeypatch):
    few = ["--images", "60", "--methods", "[vae,iwae-6,l-mcvae-k2-n2-iwae]"] if name == "frontier" else []
    arguments = ["reproduce", name, "--out", str(tiny), "--workers", "0", *few]
    assert main(arguments) == 0
    folder = tiny / ("quick-clean-60-images" if few else "quick-clean") / name
    records = read_records(folder / "records.csv")
    assert {record.metric for record in records} <= set(EXPERIMENTS[name].metrics)
    assert {record.experiment for record in records} == {name}
    assert all(math.isfinite(record.value) for record in records)
    for file in ("table.md", "table.tex", "figure.png", "figure.svg", "provenance.json"):
        assert (folder / file).stat().st_size > 100
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["unfinished"] == []
    assert provenance["versions"]["torch"] == torch.__version__
    assert "standard" in capsys.readouterr().out
    # a second time, nothing is run
    monkeypatch.setattr("mcvae.experiments.cells.attempt", lambda *_: pytest.fail("a finished cell was run again"))
    assert main(arguments) == 0


@pytest.mark.slow
def test_runs_of_another_length_leave_those_of_the_first_alone(tiny):
    arguments = ["reproduce", "mnist", "--out", str(tiny), "--workers", "0", "--methods", "[vae]", "--epochs"]
    assert main([*arguments, "[1]"]) == main([*arguments, "[2]"]) == 0
    epochs = {
        folder: {record.epoch for record in read_records(tiny / folder / "mnist" / "records.csv")}
        for folder in ("quick-clean-1-epochs", "quick-clean-2-epochs")
    }
    assert epochs == {"quick-clean-1-epochs": {1}, "quick-clean-2-epochs": {2}}


def test_curves_use_the_runs_of_the_table(tiny):
    assert {cell.name for cell in EXPERIMENTS["training-curves"].cells(Options())} <= {
        cell.name for cell in EXPERIMENTS["mnist"].cells(Options())
    }


def test_unfinished_training_can_be_looked_at(tiny, tmp_path):
    cell = EXPERIMENTS["mnist"].cells(Options(methods=["vae"]))[0]
    folder = tmp_path / "quick-clean" / "cells" / cell.name
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("epoch,val_bound,val_nll,seconds\n1,-20.0,,3.5\n")
    found = reproduce("training-curves", Options(methods=["vae"]), tmp_path, collect=True)
    (record,) = read_records(found / "records.csv")
    assert (record.metric, record.value, record.epoch, record.seconds) == ("validation_negative_elbo", 20.0, 1, 3.5)
    present(found)
    assert "Not finished: mnist-vae-s0" in (found / "table.md").read_text()


def test_both_protocols_differ_in_what_they_should(tiny):
    clean, paper = (EXPERIMENTS["mnist"].cells(Options(protocol=p, methods=["vae"]))[0] for p in ("clean", "paper"))
    assert clean.settings["config"]["optimizer"]["milestones"]
    assert clean.settings["config"]["optimizer"]["clip"] > 0
    assert paper.settings["config"]["optimizer"]["milestones"] == []
    assert paper.settings["config"]["optimizer"]["clip"] == 0
    assert paper.settings["evaluation"]["protocol"] == "paper"


def test_the_presets_of_the_paper_are_the_papers():
    for name in ("mnist", "celeba", "cifar10"):
        cells = EXPERIMENTS[name].cells(Options("paper"))
        assert len(cells) == 16 * 5
        config = cells[0].settings["config"]
        assert (config["run"]["epochs"], config["run"]["snapshots"]) == (100, [10, 30])
    dimensions = {cell.settings["latent_dim"] for cell in EXPERIMENTS["toy-parameters"].cells(Options("paper"))}
    assert dimensions == {2, 5, 10, 20, 50, 100, 150, 200, 300}
    size = EXPERIMENTS["ppca"].cells(Options("paper"))[0].settings
    assert (size["latent_dim"], size["data_dim"], size["replicates"]) == (100, 784, 200)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mnits"], "unknown experiment 'mnits'"),
        (["mnist", "--methods", "[vea]"], "unknown method 'vea'"),
        (["mnist", "--epochs", "[30,10]"], "--epochs must increase"),
        (["mnist", "--seeds", "0"], "--seeds must be at least 1"),
        (["mnist", "--collect", "true"], "there is nothing of mnist"),
    ],
)
def test_mistakes_are_named(tmp_path, arguments, message, capsys):
    assert main(["reproduce", *arguments, "--out", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err


def test_every_experiment_has_a_figure_and_a_name():
    assert set(FIGURES) == set(EXPERIMENTS)
    assert list(EXPERIMENTS) == list(NAMES)


def test_what_a_user_chooses_is_not_replaced_and_digits_are_called_digits():
    """The quick preset of photographs is short, but not if somebody asks for more, be it the default of digits."""
    asked = Options(methods=["vae"], epochs=[10, 30], limit=300)
    settings = EXPERIMENTS["cifar10"].cells(asked)[0].settings
    assert (settings["config"]["run"]["epochs"], settings["evaluation"]["limit"]) == (30, 300)
    own = EXPERIMENTS["cifar10"].cells(Options(methods=["vae"]))[0].settings
    assert (own["config"]["run"]["epochs"], own["evaluation"]["limit"]) == (5, 50)
    for dataset, title in {"digits": "Table 1: MNIST, on digits instead", "mnist": "Table 1: MNIST"}.items():
        assert reproduction._title("Table 1: MNIST", [Record("mnist", dataset, "vae", "nll", 1.0)]) == title


def test_tables_show_the_papers_number_and_deviation_over_seeds():
    records = [
        Record("mnist", "mnist", "vae", "nll", value, seed, 10, 0.1, 89.83, 0.59, evaluations=1e6, seconds=5.0)
        for seed, value in enumerate((90.0, 92.0))
    ]
    assert summarise(records)[0].deviation == pytest.approx(math.sqrt(2))
    content = table("Table", records, ("nll",))
    assert content.header == ["method", "NLL, 10 epochs", "paper", "model evaluations", "seconds"]
    assert content.rows == [["VAE", "91.0 ± 1.4", "89.83 ± 0.59", "1e+06", "5"]]
    assert "| VAE | 91.0 ± 1.4 | 89.83 ± 0.59 |" in markdown(content)
    assert "89.83 $\\pm$ 0.59" in latex(content)


def test_paper_csv_has_no_duplicates():
    with open(image_tables.__file__.replace("image_tables.py", "paper.csv"), newline="") as file:
        rows = [tuple(row.values())[:5] for row in csv.DictReader(file)]
    assert len(rows) == len(set(rows))


@pytest.mark.parametrize("name", ["k-sweep", "cifar10", "celeba"])
def test_figures_of_experiments_that_take_longer(name, tmp_path):
    methods = ("vae", "iwae-10", "l-mcvae-linear-k1", "l-mcvae-linear-k10")
    records = [
        Record(name, "mnist", method, metric, 90.0 - index + seed, seed, 10, 0.1)
        for index, method in enumerate(methods)
        for metric in ("negative_elbo", "nll")
        for seed in range(2)
    ]
    paths = draw(name, EXPERIMENTS[name].title, records, {}, tmp_path)
    assert all(path.stat().st_size > 1000 for path in paths)


def test_every_method_of_the_frontier_spends_the_same():
    spent = {method: method_named(method).cost(parse_key(method)) for method in frontier.METHODS}
    assert spent.pop("vae") == 1
    assert sorted(spent.values()) == [6] * 5 + [12] * 6
    for preset, datasets in {"quick": {"digits"}, "paper": {"mnist", "fashion-mnist"}}.items():
        cells = frontier.cells(Options(preset, seeds=1, images=70))
        configs = [cell.settings["config"] for cell in cells]
        assert {config["data"]["name"] for config in configs} == datasets
        assert {config["data"]["limit"] for config in configs} == {70}
        assert {config["model"]["encoder"] for config in configs} == {"linear", None}
        assert len({cell.name for cell in cells}) == len(cells) == 2 * len(datasets) * len(frontier.METHODS)


def test_the_weak_encoder_is_linear_and_needs_no_trust():
    """The strong one is not linear; both have the same decoder."""
    cells = frontier.cells(Options(seeds=1, methods=["vae"]))
    bent, decoders = {}, []
    for cell in cells:
        config = resolve(parse_config(cell.settings["config"]), (1, 8, 8))
        model, _ = build(config.model, config.method, mcvae.models.Datum((1, 8, 8), "pixels", 256))
        a, b = torch.rand(2, 5, 1, 8, 8).unbind()
        with torch.no_grad():
            mean = [model.encoder(x).mean for x in (a, b, a + b, 0 * a)]
        bent[config.model.encoder] = (mean[2] + mean[3] - mean[0] - mean[1]).abs().max().item()
        decoders.append(sum(parameter.numel() for parameter in model.decoder.parameters()))
    assert bent["linear"] < 1e-5 < 1e-2 < bent[None]
    assert decoders[0] == decoders[1]


def test_differences_to_the_vae_are_paired_image_by_image(tmp_path):
    cells = frontier.cells(Options(seeds=1, methods=["vae", "iwae-6"]))
    for cell in cells:
        folder, method = tmp_path / cell.name, cell.settings["method"]
        folder.mkdir()
        gain = 0.0 if method == "vae" else 0.5
        values = [{"log_likelihood": -100.0 * image + gain + 0.01 * image * gain} for image in range(5)]
        write_rows(folder / "evaluation.csv", ["log_likelihood"], values)
        nll = Record("images", cell.settings["subject"], method, "nll", 200.0 - gain, epoch=20, standard_error=70.0)
        write_records(folder / "records.csv", [nll])
    found = image_tables.differences(tmp_path, cells)
    assert [record.dataset for record in found] == ["digits, weak encoder", "digits, strong encoder"]
    for record in found:
        assert record.value == pytest.approx(-0.51)  # minus: a smaller NLL
        assert record.standard_error < 0.01  # unpaired it would be 70
    assert paired([{"x": "1"}], [{"x": "1"}], "x") is None
    assert paired([{"x": "1"}] * 3, [{"x": "1"}] * 2, "x") is None


def test_a_table_of_many_metrics_has_rows_for_every_data_set_and_says_which_seeds_are_certified():
    records = [
        Record("frontier", dataset, method, metric, value + seed, seed, 20, evaluations=6.0, seconds=1.0)
        for dataset in ("digits, weak encoder", "digits, strong encoder")
        for method in ("vae", "iwae-6")
        for metric, value in (("nll", 23.0), ("negative_elbo", 24.0), ("certificate", 0.1))
        for seed in range(2)
        if (metric, seed) != ("certificate", 1)
    ]
    content = table("Table", records, EXPERIMENTS["frontier"].metrics)
    assert content.header[:3] == ["data", "method", "NLL, 20 epochs"]
    assert [row[:2] for row in content.rows[1:3]] == [
        ["digits, weak encoder", "IWAE, K = 6"],
        ["digits, strong encoder", "VAE"],
    ]
    assert all(row[3] == "0.10 (1 of 2 seeds)" for row in content.rows)
    assert content.notes == ["± standard deviation over 2 seeds."]
    worst = [Record("frontier", "digits", "vae", "certificate", value, seed) for seed, value in enumerate((0.1, 0.3))]
    assert table("Table", worst, ("certificate",)).rows == [["VAE", "0.30"]]


def test_the_frontier_draws_every_way_to_spend_and_both_budgets(tmp_path):
    records = [
        Record("frontier", f"digits, {encoder} encoder", method, "nll_minus_vae", -0.1 * index, 0, 20, 0.05)
        for encoder in frontier.ENCODERS
        for index, method in enumerate(frontier.METHODS[1:])
    ]
    _, svg = draw("frontier", "title", records, {}, tmp_path)
    assert svg.stat().st_size > 1000
    rows = {figures.spent_on(record.method) for record in records}
    assert rows == set(figures._SPENT_ON)
    alone = [replace(record, metric="nll") for record in records]
    _, svg = draw("frontier", "title", alone, {}, tmp_path)  # without a VAE there is nothing to compare with
    assert svg.stat().st_size > 0
