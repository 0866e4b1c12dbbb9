"""Training as people expect it: optimisers, schedules, stopping, averaging, loggers, networks of one's own."""

import csv
import json
import math
import subprocess
import sys
import warnings
from types import ModuleType

import pytest
import torch
from lightning.pytorch import loggers
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.distributions import Independent, Normal

import mcvae
from mcvae import ScoreScaled
from mcvae.cli import main
from mcvae.models import build_model
from mcvae.runs.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from mcvae.runs.discovery import find
from mcvae.runs.method import MethodConfig
from mcvae.runs.plain import RunError
from mcvae.training.loading import load_run
from mcvae.training.module import OPTIMIZERS, DivergedError, VariationalTraining
from mcvae.training.run import train


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


def training(**options) -> VariationalTraining:
    model = build_model((4,), 2, kind="real", network="mlp", likelihood="gaussian")
    return VariationalTraining(model, model.objective("vae"), OptimizerConfig(**options), epochs=10)


def rates(epochs=10, **options) -> list[float]:
    parts = training(**options).configure_optimizers()
    found = []
    for _ in range(epochs):
        found.append(parts["optimizer"].param_groups[0]["lr"])
        parts["optimizer"].step()
        parts["lr_scheduler"].step()
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimiser_can_be_chosen(name):
    found = training(name=name).configure_optimizers()["optimizer"]
    assert type(found).__name__.lower() == name


def test_settings_of_an_optimiser_are_its_own():
    group = training(name="sgd", settings={"momentum": 0.5, "nesterov": True}).configure_optimizers()["optimizer"]
    assert (group.param_groups[0]["momentum"], group.param_groups[0]["nesterov"]) == (0.5, True)
    with pytest.raises(ValueError, match="--optimizer.settings do not suit adam: .*momentum"):
        training(name="adam", settings={"momentum": 0.5}).configure_optimizers()


def test_schedules_are_what_they_are_called():
    assert rates(schedule="constant") == [1e-3] * 10
    assert rates() == pytest.approx([1e-3] * 6 + [3e-4] * 3 + [9e-5])  # as before
    cosine = rates(schedule="cosine")
    assert cosine == pytest.approx([5e-4 * (1 + math.cos(math.pi * epoch / 10)) for epoch in range(10)])
    warm = rates(schedule="constant", warmup=4)
    assert warm == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4] + [1e-3] * 6)


def test_a_weight_of_the_kl_divergence_gives_the_bound_of_the_beta_vae():
    model = build_model((4,), 2, kind="real", network="mlp", likelihood="gaussian")
    x, beta = torch.randn(6, 4), 0.25
    torch.manual_seed(0)
    bound = beta * model.objective("vae")(model.bridge(x, kl_weight=beta)).bound
    torch.manual_seed(0)
    z = model.encoder(x).rsample((1,))
    q = model.encoder(x).log_prob(z)
    prior = model.prior_like(z).log_prob(z)
    expected = model.decoder(z[0]).log_prob(x) + beta * (prior - q)[0]
    assert torch.allclose(bound.float(), expected, atol=1e-4)
    assert not torch.allclose(model.objective("vae")(model.bridge(x)).bound.float(), expected, atol=1e-2)


def test_the_bound_in_training_is_what_is_maximised_also_while_the_weight_of_the_kl_divergence_rises(monkeypatch):
    """Without the weight it would be ten times too low in the first of ten epochs, and drown the curve."""
    module = training(kl_warmup=9)
    monkeypatch.setattr(module, "_generator", lambda *args, **options: None)
    loss = module.training_step(torch.randn(6, 4), 0)
    assert module.kl_weight == 0.1
    assert torch.isclose(module._seen[0][0], -loss.detach().double())


def configuration(folder, optimizer=None, data=None, **run) -> TrainConfig:
    return TrainConfig(
        data=data or DataConfig("digits", limit=100, batch_size=50),
        model=ModelConfig(latent_dim=2),
        method=MethodConfig("vae"),
        optimizer=optimizer or OptimizerConfig(),
        run=RunConfig(folder=str(folder), **run),
        trainer={"logger": False},
    )


@pytest.mark.slow
def test_training_stops_when_validation_does_not_improve_and_keeps_the_best(tmp_path, capsys):
    """With a learning rate of 0.03 an early epoch is as good as it gets."""
    config = configuration(tmp_path / "run", OptimizerConfig(learning_rate=0.03), epochs=40, patience=2)
    run = train(config)
    with open(run / "metrics.csv") as file:
        bounds = [float(row["val_bound"]) for row in csv.DictReader(file)]
    assert len(bounds) < 40
    best = max(range(len(bounds)), key=bounds.__getitem__)
    assert len(bounds) == best + 1 + 2
    assert f"after epoch {best + 1}, the best" in capsys.readouterr().out
    assert json.loads((run / "result.json").read_text())["status"] == "finished"
    state = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]
    weights = load_run(run)[0].state_dict()
    assert all(torch.equal(state[f"model.{name}"], value) for name, value in weights.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bounds", "patience", "reason"),
    [
        ([-30.0, math.nan, math.nan], 2, "cannot be evaluated any more"),
        ([-math.inf, -math.inf], 1, "finite in no epoch"),
        ([-math.inf, -math.inf, -math.inf], 2, "finite in no epoch"),
        ([-30.0, -math.inf, -31.0], 2, None),
        ([-30.0, -30.0], 1, None),
    ],
)
def test_early_stopping_and_divergence_are_told_apart(bounds, patience, reason, tmp_path, monkeypatch):
    """Both end a run before its last epoch; only one of them leaves weights to use."""

    def validated(self, batch, batch_idx):
        self._validation.append(torch.full((1,), bounds[self.current_epoch]))

    monkeypatch.setattr(VariationalTraining, "validation_step", validated)
    config = configuration(tmp_path / "run", epochs=20, patience=patience)
    if reason is None:
        train(config)
    else:
        with pytest.raises(DivergedError, match=reason):
            train(config)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == ("finished" if reason is None else "diverged")
    assert find([str(tmp_path)]).runs[0].state == ("trained" if reason is None else "diverged")
    with open(tmp_path / "run" / "metrics.csv") as file:
        assert len(list(csv.DictReader(file))) == min(len(bounds), 1 + patience if bounds[0] == -30 else patience)


@pytest.mark.slow
def test_steps_that_are_too_long_shorten_instead_of_ending_the_run(tmp_path, capsys, monkeypatch):
    """With a step size of 1e4 no chain survives, and no training step that is skipped could adapt it."""
    config = configuration(tmp_path / "run", epochs=60)
    config.method = MethodConfig("l-mcvae", num_steps=2, step_size=1e4)
    train(config)
    with open(tmp_path / "run" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert 0 < int(rows[-1]["skipped"]) < 20
    assert float(rows[-1]["val_bound"]) > -60
    monkeypatch.setattr(ScoreScaled, "shorten", lambda self: None)
    config.run.folder = str(tmp_path / "stuck")
    with pytest.raises(DivergedError):
        train(config)


@pytest.mark.slow
def test_averaged_weights_are_saved_and_validated(tmp_path):
    runs = {
        name: train(configuration(tmp_path / name, OptimizerConfig(learning_rate=0.02, average=decay), epochs=3))
        for name, decay in {"plain": 0.0, "averaged": 0.9}.items()
    }
    plain, averaged = (load_run(run)[0].state_dict() for run in runs.values())
    last = torch.load(runs["averaged"] / "checkpoints" / "last.ckpt", weights_only=True)
    for name, value in plain.items():  # training itself is the same
        assert torch.equal(last["state_dict"][f"model.{name}"], value)
    assert any(not torch.equal(plain[name], averaged[name]) for name in plain)
    rows = [list(csv.DictReader((run / "metrics.csv").read_text().splitlines())) for run in runs.values()]
    assert rows[0][-1]["val_bound"] != rows[1][-1]["val_bound"]
    assert rows[0][-1]["train_bound"] == rows[1][-1]["train_bound"]


@pytest.mark.slow
def test_an_optimiser_and_warm_up_work_from_the_command_line(tmp_path):
    options = ["--optimizer.name", "adamw", "--optimizer.settings", "{weight_decay: 0.1}"]
    options += ["--optimizer.schedule", "cosine", "--optimizer.kl_warmup", "1", "--run.logger", "csv"]
    run = tmp_path / "run"
    where = ["--data.limit", "60", "--run.epochs", "2", "--run.folder", str(run), "--method", "l-mcvae-k2"]
    assert main(["train", *where, *options, "--model.prior", "mixture"]) == 0
    assert list(run.glob("curves/*.csv"))
    assert mcvae.load(run).prior is not None
    trial = tmp_path / "trial"
    arguments = ["--run.folder", str(trial), "--trainer.fast_dev_run", "true", *options]
    assert main(["train", "--data.limit", "60", *arguments]) == 0
    assert not trial.exists()


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_that_is_not_installed_is_named(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, name, None)
    where = ["--data.limit", "60", "--run.epochs", "1", "--run.folder", str(tmp_path / "run"), "--run.logger", name]
    assert main(["train", *where]) == 1
    told = capsys.readouterr().err
    assert f"mcvae train: --run.logger {name} needs the extra '{name}': pip install 'mcvae[{name}]'" in told
    assert not (tmp_path / "run").exists()


class Recorder(Logger):
    """The interface of Lightning's loggers."""

    def __init__(self, *names, **options):
        self.options, self.logged = {"names": names, **options}, dict[str, list[float]]()
        made.append(self)

    name, version = "recorder", "0"

    def log_hyperparams(self, params, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        for key, value in metrics.items():
            self.logged.setdefault(key, []).append(value)


made: list[Recorder] = []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "class_name"), [("wandb", "WandbLogger"), ("mlflow", "MLFlowLogger")])
def test_loggers_of_others_get_what_metrics_csv_gets(name, class_name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(loggers, class_name, Recorder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = configuration(tmp_path / "run", epochs=2, logger=name)
    config.trainer = {}
    run = train(config)
    found = made.pop()
    with open(run / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    for column in ("train_bound", "val_bound"):
        assert found.logged[column] == pytest.approx([float(row[column]) for row in rows])
    if name == "mlflow":  # a folder of files is no longer accepted there
        assert found.options["tracking_uri"] == f"sqlite:///{run}/mlflow.db"
    else:
        assert found.options["save_dir"] == run


class OwnEncoder(nn.Module):
    def __init__(self, shape, latent_dim):
        super().__init__()
        self.linear = nn.Linear(math.prod(shape), latent_dim)

    def forward(self, x):
        location = self.linear(x.flatten(1))
        return Independent(Normal(location, torch.ones_like(location)), 1)


class OwnDecoder(nn.Module):
    def __init__(self, shape, inputs):
        super().__init__()
        self.linear, self.shape = nn.Linear(inputs, math.prod(shape)), shape

    def forward(self, z):
        return self.linear(z).reshape(len(z), *self.shape)


@pytest.mark.slow
def test_networks_of_ones_own_are_imported_for_a_person_and_never_for_a_folder(tmp_path, monkeypatch, capsys):
    paths = {part: f"{__name__}:Own{part.title()}" for part in ("encoder", "decoder")}
    run = tmp_path / "run"
    chosen = [word for part, path in paths.items() for word in (f"--model.{part}", path)]
    where = ["--data.limit", "60", "--run.epochs", "1", "--run.folder", str(run), "--method", "vae"]
    assert main(["train", *where, *chosen, "--trainer.logger", "false"]) == 0
    with pytest.raises(RunError, match="nothing that a folder names is imported.*MCVAE_NETWORKS"):
        mcvae.load(run)
    assert main(["evaluate", str(run), "--limit", "4"]) == 1
    told = capsys.readouterr().err
    assert "mcvae evaluate: the run uses networks of your own" in told
    assert f"MCVAE_NETWORKS={','.join(paths.values())};" in told
    (run / "result.json").unlink()
    assert main(["train", "--resume", str(run)]) == 1
    assert "nothing that a folder names is imported" in capsys.readouterr().err
    again = ["train", "--config", str(run / "config.yaml"), "--run.folder", str(tmp_path / "again")]
    with pytest.raises(SystemExit):  # the file, and not the person, names the code
        main(again)
    assert f"a file names the network {paths['encoder']}" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()
    assert main([*again, *chosen]) == 0
    monkeypatch.setenv("MCVAE_NETWORKS", ",".join(paths.values()))
    model = mcvae.load(run)
    assert isinstance(model.encoder.network, OwnEncoder)
    assert isinstance(model.decoder.network, OwnDecoder)
    with pytest.raises(ValueError, match="'no_such:Thing' cannot be imported.*module:Class"):
        train(TrainConfig(model=ModelConfig(encoder="no_such:Thing"), run=RunConfig(folder=str(tmp_path / "no"))))


@pytest.mark.slow
def test_an_installed_command_finds_networks_in_the_folder_that_it_runs_in(tmp_path):
    """A script's own folder comes first in sys.path, where python -m has the working directory."""
    (tmp_path / "script").mkdir()
    script = tmp_path / "script" / "mcvae"
    script.write_text("import sys\nfrom mcvae.__main__ import main\nsys.exit(main())\n")
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def encoder(shape, latent_dim):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2 * latent_dim))\n"
    )
    options = ["--data.limit", "60", "--run.epochs", "1", "--method", "vae", "--model.encoder", "mine:encoder"]
    done = subprocess.run(
        [sys.executable, script, "train", *options], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "digits-vae-s0" / "result.json").exists()


def test_layers_through_which_rows_influence_each_other_are_named():
    """Their statistics are those of a batch: the score of one chain would contain the others."""
    mixing = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model = mcvae.LatentVariableModel(
        lambda x: torch.distributions.Independent(torch.distributions.Normal(x, torch.ones_like(x)), 1), mixing
    )
    for objective, warned in ((mcvae.recipes.l_mcvae(2, 4), True), (mcvae.recipes.vae(), False)):
        module = VariationalTraining(model, objective, OptimizerConfig())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module.on_fit_start()
        assert [("decoder.1" in str(w.message)) for w in caught] == [True] * warned


def test_a_file_may_name_an_encoder_that_is_part_of_the_package(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("model:\n  encoder: linear\n  network: mlp\n")
    where = [
        "--data.limit",
        "60",
        "--run.epochs",
        "1",
        "--run.folder",
        str(tmp_path / "run"),
        "--trainer.logger",
        "false",
    ]
    assert main(["train", "--config", str(config), *where]) == 0
    mcvae.load(tmp_path / "run")
