"""What a hard trial by new users found: wrong winners, lost work, unclear words. None of it may come back."""

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml
from lightning import Trainer

import mcvae
from mcvae.cli import main
from mcvae.experiments.cell import Attempts, Cell, SweepError, progress_of, write_attempts
from mcvae.experiments.cells import run_cells
from mcvae.experiments.grid import Grid
from mcvae.report.comparison import answers, comparison
from mcvae.report.groups import groups
from mcvae.runs.config import DataConfig, MethodConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from mcvae.runs.discovery import find
from mcvae.runs.plain import RunError
from mcvae.runs.results import read_result
from mcvae.runs.storage import hold
from mcvae.training.module import DivergedError, VariationalTraining
from mcvae.training.run import train
from test_report import make_run

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own
SHORT = ["--data.limit", "100", "--data.batch_size", "50", "--model.latent_dim", "2", "--run.epochs", "1"]


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


def configuration(folder, method="vae", epochs=1, **trainer) -> TrainConfig:
    return TrainConfig(
        DataConfig("digits", batch_size=50, limit=100),
        ModelConfig(latent_dim=2),
        MethodConfig(method),
        OptimizerConfig(),
        RunConfig(epochs=epochs, folder=str(folder)),
        {"enable_progress_bar": False, **trainer},
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    torch.set_default_dtype(torch.float32)
    return train(configuration(tmp_path_factory.mktemp("runs") / "run"))


@pytest.fixture
def copy(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "run"))


# Wrong winners


def changed(folder, method="vae", *, nll=None, seed=0, **settings):
    """A run with other settings, by dotted name."""
    make_run(folder, method)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    result = json.loads((folder / "result.json").read_text())
    for name, value in settings.items():
        part, _, key = name.partition("__")
        config[part][key] = value
        result |= {key: value} if key in ("epochs", "batch_size") else {}
    config["run"]["seed"] = result["seed"] = seed
    if nll is not None:
        result["evaluation"] |= {"nll": nll, "bound": -nll - 0.4}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_only_seeds_are_averaged_and_the_answer_is_the_first_row(tmp_path):
    """The case of the trial: a VAE trained longer leads, but its mean with one trained briefly would not."""
    changed(tmp_path / "vae-long", nll=24.15, run__epochs=300)
    changed(tmp_path / "vae-short", nll=40.0, run__epochs=3)
    changed(tmp_path / "l-mcvae", "l-mcvae", nll=25.15)
    found = groups(find([str(tmp_path)]).runs)
    first = comparison(found).rows[0]
    (answer,) = answers(found)
    assert first[2] == "vae (epochs 300)"
    assert "vae (epochs 300) explains the 40 test images best, with NLL 24.15" in answer.headline
    assert [group.label for group in found] == ["vae (epochs 300)", "l-mcvae-k5 (epochs 12)", "vae (epochs 3)"]
    assert [len(group.runs) for group in found] == [1, 1, 1]


@pytest.mark.parametrize("setting", ["model__latent_dim", "optimizer__learning_rate", "data__limit"])
def test_runs_that_differ_in_any_setting_are_not_seeds(setting, tmp_path):
    changed(tmp_path / "a")
    for name, value in (("b", 7), ("c", 9)):
        folder = changed(tmp_path / name, seed=1)
        config = yaml.safe_load((folder / "config.yaml").read_text())
        part, _, key = setting.partition("__")
        config.setdefault(part, {})[key] = value
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    found = groups(find([str(tmp_path)]).runs)
    assert [len(group.runs) for group in found] == [1, 1, 1]
    assert sum(f"{setting.partition('__')[2]} 7" in group.label for group in found) == 1


def test_seeds_are_averaged_and_copies_count_once(tmp_path, capsys):
    for seed, nll in enumerate((24.0, 26.0)):
        changed(tmp_path / f"vae-{seed}", nll=nll, seed=seed)
    for name in ("copy", "another-copy"):
        shutil.copytree(tmp_path / "vae-0", tmp_path / name)
    changed(tmp_path / "l-mcvae", "l-mcvae", nll=24.9)
    found = groups(find([str(tmp_path)]).runs)
    assert [(group.label, len(group.runs), group.mean("nll")) for group in found] == [
        ("l-mcvae-k5", 1, 24.9),
        ("vae", 2, 25.0),
    ]
    assert main(["compare", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "2 of the 5 runs repeat another's settings and seed" in output
    assert "l-mcvae-k5 explains the 40 test images best" in output


# Training that did not happen


class OwnSchedule(VariationalTraining):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-4)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)}

    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        self.rates = [*getattr(self, "rates", []), self.trainer.optimizers[0].param_groups[0]["lr"]]


def test_a_schedule_of_ones_own_is_left_alone():
    encoder = torch.nn.Linear(2, 2)
    gaussian = lambda rows: torch.distributions.Independent(torch.distributions.Normal(rows, 1.0), 1)
    model = mcvae.LatentVariableModel(lambda x: gaussian(encoder(x)), gaussian)
    model.network = encoder
    module = OwnSchedule(model, mcvae.recipes.vae(), OptimizerConfig(), epochs=3)
    trainer = Trainer(max_epochs=3, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(16, 2), batch_size=8))
    assert max(module.rates) <= 1e-4
    assert module.rates[-1] < 1e-6


def test_the_usual_schedule_is_a_function_of_the_epoch(tmp_path):
    config = configuration(tmp_path / "run", epochs=4)
    config.optimizer = OptimizerConfig(learning_rate=0.01, milestones=[0.5, 0.75], decay=0.1)
    train(config)
    lines = [line.split(",") for line in (tmp_path / "run" / "metrics.csv").read_text().splitlines()]
    rates = [float(line[lines[0].index("learning_rate")]) for line in lines[1:]]
    assert rates == pytest.approx([0.01, 0.01, 0.001, 0.0001])


@pytest.mark.parametrize(
    "options",
    [
        ["--method", "l-mcvae-k2", "--method.step_size", "1e6"],
        ["--method", "vae", "--optimizer.learning_rate", "1e8"],
    ],
)
def test_a_run_whose_steps_were_all_skipped_is_not_called_trained(options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *options, *SHORT, "--run.folder", "run"]) == 1
    printed = capsys.readouterr()
    assert "run diverged" in printed.err
    assert "trained" not in printed.out
    assert read_result(tmp_path / "run").status == "diverged"
    for command in ("compare", "evaluate"):
        assert main([command, "run"]) == 1
        assert "run diverged" in capsys.readouterr().err


def test_too_many_skipped_steps_are_written_down(tmp_path):
    config = configuration(tmp_path / "run", "l-mcvae")
    config.method.step_size, config.optimizer.patience = 1e6, 2
    with pytest.raises(DivergedError, match="2 non-finite steps in a row"):
        train(config)
    assert read_result(tmp_path / "run").status == "diverged"
    assert find([str(tmp_path)]).runs[0].state == "diverged"


def test_a_trial_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--method", "vae", *SHORT, "--trainer.fast_dev_run", "true"]) == 0
    assert "nothing of it is kept" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    old = make_run(tmp_path / "old")  # of a release that kept them
    config = yaml.safe_load((old / "config.yaml").read_text()) | {"trainer": {"fast_dev_run": True}}
    (old / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["compare", str(old)]) == 1
    assert "is a trial" in capsys.readouterr().err


def test_an_epoch_that_was_cut_short_does_not_count(tmp_path, capsys):
    folder = train(configuration(tmp_path / "run", epochs=1, max_steps=1))
    assert "stopped after epoch 0 of 1" in capsys.readouterr().out
    assert not (folder / "result.json").exists()
    assert not (folder / "checkpoints" / "last.ckpt").exists()


def test_old_validation_bounds_are_not_repeated(tmp_path):
    folder = train(configuration(tmp_path / "run", epochs=4, check_val_every_n_epoch=2))
    lines = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    bounds = [line[lines[0].index("val_bound")] for line in lines[1:]]
    assert [bool(bound) for bound in bounds] == [False, True, False, True]


# Weights


def test_zeroed_weights_are_noticed_and_restored(trained, copy, capsys):
    path = copy / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: -len(content) * 4 // 10] + bytes(len(content) * 4 // 10))
    with pytest.raises(RunError, match="the checksum of model.safetensors is wrong"):
        mcvae.load(copy)
    assert main(["evaluate", str(copy), "--limit", "4"]) == 1
    train(resume=copy)
    assert "Its lost weights are restored" in capsys.readouterr().out
    assert path.read_bytes() == (trained / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["model.json", "model.safetensors"])
def test_lost_weights_are_restored_from_the_last_checkpoint(name, trained, copy):
    (copy / name).unlink()
    train(resume=copy)
    assert (copy / name).read_bytes() == (trained / name).read_bytes()


@pytest.mark.parametrize("kept", ["averaged", "best", "stopped early"])
def test_the_weights_that_are_restored_are_those_that_were_kept(kept, tmp_path):
    """Before, they were those of the last epoch, without the average; and a run that had stopped early was refused."""
    config = configuration(tmp_path / "run", epochs=2)
    if kept == "averaged":
        config.optimizer.average = 0.9
    else:  # epoch 7 is the best of 8, and epoch 1 is better than epoch 2
        config.optimizer.learning_rate, config.optimizer.schedule = 0.05, "constant"
        config.run.keep, config.run.patience, config.run.epochs = "best", int(kept == "stopped early"), 8
    path = train(config) / "model.safetensors"
    trained = path.read_bytes()
    path.unlink()
    train(resume=path.parent)
    assert path.read_bytes() == trained


def test_weights_that_cannot_be_restored_are_said_to_be_lost(copy):
    shutil.rmtree(copy / "checkpoints")
    (copy / "model.safetensors").unlink()
    with pytest.raises(RunError, match="There is no .*last.ckpt to restore it from"):
        train(resume=copy)


def test_runs_of_earlier_releases_have_no_checksum_and_are_read(copy):
    described = json.loads((copy / "model.json").read_text())
    del described["sha256"]
    (copy / "model.json").write_text(json.dumps(described))
    mcvae.load(copy)


# Two at once


def test_a_folder_that_is_being_trained_in_is_refused(copy, tmp_path):
    (copy / "result.json").unlink()
    for folder, action in (
        (tmp_path / "new", lambda: train(configuration(tmp_path / "new"))),
        (copy, lambda: train(resume=copy)),
    ):
        with hold(folder, "training", str(folder)):
            with pytest.raises(RunError, match=f"another process is training {folder}"):
                action()
            if folder == copy:
                assert find([str(copy)]).runs[0].state == "training"
    assert find([str(copy)]).runs[0].state == "interrupted"
    train(configuration(tmp_path / "new"))  # free again


def test_two_evaluations_of_one_run_are_refused_but_training_goes_on_beside(copy):
    from mcvae.training.evaluate_run import evaluate_run

    with hold(copy, "evaluating", str(copy)), pytest.raises(RunError, match="another process is evaluating"):
        evaluate_run(copy, num_steps=2, num_samples=2, limit=4)
    with hold(copy, "training", str(copy)):
        evaluate_run(copy, num_steps=2, num_samples=2, limit=4, simulated=0)


def test_a_lock_that_leads_elsewhere_is_not_followed(copy, tmp_path):
    (tmp_path / "mine").write_text("mine")
    (copy / "result.json").unlink()
    (copy / ".training.lock").unlink(missing_ok=True)
    (copy / ".training.lock").symlink_to(tmp_path / "mine")
    assert find([str(copy)]).runs[0].state == "interrupted"
    with pytest.raises(RunError, match="is a link"):
        train(resume=copy)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".training.lock").symlink_to(tmp_path / "mine")
    with pytest.raises(RunError, match="is a link"):
        train(configuration(tmp_path / "new"))
    assert (tmp_path / "mine").read_text() == "mine"


RACE = """
import sys
from mcvae.cli import main
sys.exit(main(["train", "--method", "vae", "--data.limit", "50", "--run.epochs", "1", "--run.folder", sys.argv[1]]))
"""


def test_of_trainings_started_together_one_wins(tmp_path):
    command = [sys.executable, "-c", RACE, str(tmp_path / "run")]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=240) for process in started]
    assert sorted(process.returncode for process in started) == [0, 1, 1], outputs
    for process, (_, error) in zip(started, outputs, strict=True):
        assert process.returncode == 0 or "another process is training" in error or "holds a run already" in error


# Sweeps

GRID = ["sweep", "--methods", "[vae]", "--workers", "1", "--retries", "0"]


@pytest.mark.parametrize(
    "wrong",
    [
        ["--evaluation", "{limt: 4}"],
        ["--evaluation", "{limit: four}"],
        ["--evaluation", "{limit: 1}"],
        ["--evaluation", "{tuning: nowhere.json}"],
        ["--data", "[digits,minst]"],
        ["--methods", "[vae,l-mcvea]"],
        ["--settings", "{trainer: {gpus: 1}}"],
        ["--vary", "{run.epochs: 3}"],
    ],
)
def test_a_typo_is_found_before_the_first_cell(wrong, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    begin = time.perf_counter()
    with suppress(SystemExit):  # by the parser
        assert main([*GRID, *wrong]) == 1
    assert time.perf_counter() - begin < 5
    assert capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_changed_in_the_evaluation_repeats_the_evaluation_only(tmp_path):
    settings = {"data.limit": 60, "data.batch_size": 50, "model.latent_dim": 2, "run.epochs": 1}
    evaluation = {"limit": 6, "num_steps": 2, "simulated": 0, "compare_iwae": False}

    def sweep(num_samples, **more):
        asked = {**evaluation, "num_samples": num_samples}
        run_cells(tmp_path, Grid(["digits"], ["vae"], 1, settings | more, {}, asked).cells())

    sweep(2)
    folder = tmp_path / "digits-vae-s0"
    weights, first = (folder / "model.safetensors").stat().st_mtime_ns, read_result(folder).evaluation
    sweep(3)
    assert (folder / "model.safetensors").stat().st_mtime_ns == weights
    assert (first.num_samples, read_result(folder).evaluation.num_samples) == (2, 3)
    with pytest.raises(SweepError, match="was made with other settings"):
        sweep(3, **{"run.epochs": 2})


def test_a_cell_that_ends_while_somebody_looks_is_not_called_failed(tmp_path, monkeypatch):
    """The records appear after the first look at them, and the lock is free: it has just been done."""
    from mcvae.experiments import cell

    folder = tmp_path / "cell"
    folder.mkdir()
    write_attempts(folder, Attempts(1, "exited without an error", running=True))

    def finish(*_):
        (folder / "records.csv").write_text("")
        return False

    monkeypatch.setattr(cell, "held", finish)
    assert progress_of(folder).status == "done"
    (folder / "records.csv").unlink()
    monkeypatch.setattr(cell, "held", lambda *_: False)
    assert progress_of(folder).status == "failed"


def test_a_sweep_says_how_far_a_run_is_without_checking_its_settings_every_second(tmp_path, monkeypatch):
    from mcvae.experiments import cell
    from mcvae.runs import config

    monkeypatch.setattr(cell, "held", lambda *_: True)
    monkeypatch.setattr(config, "parse_config", lambda _: pytest.fail("parsing takes 40 ms"))
    write_attempts(tmp_path, Attempts(1, "exited without an error", running=True))
    (tmp_path / "config.yaml").write_text("run:\n  epochs: 30\n")
    assert progress_of(tmp_path).detail == ""
    (tmp_path / "metrics.csv").write_text("epoch,seconds\n1,20\n2,50\n")
    assert progress_of(tmp_path).detail == "epoch 2 of 30, 700 s left"
    (tmp_path / "config.yaml").write_text("run: [1]\n")
    assert progress_of(tmp_path).detail == ""


def test_success_leaves_no_complaint(tmp_path):
    run_cells(tmp_path, [Cell("a", "sweep_tasks:write", {"value": 1.0})])
    assert json.loads((tmp_path / "a" / "attempts.json").read_text())["error"] == ""


def test_folders_of_an_earlier_release_are_recognised(tmp_path):
    cell = Cell("a", "mcvae.experiments.image_tables:run", {"x": 1})
    (tmp_path / "a").mkdir()
    old = {"task": "mcvae.experiments.images:run", "settings": {"x": 1}}
    (tmp_path / "a" / "cell.json").write_text(json.dumps(old))
    shutil.copy(Path(__file__).parent.parent / "results/mnist/records.csv", tmp_path / "a")
    assert run_cells(tmp_path, [cell])
    with pytest.raises(SweepError, match="other settings"):
        run_cells(tmp_path, [cell._replace(settings={"x": 2})])


# Words


def test_suggested_commands_can_be_pasted(tmp_path, capsys):
    place = tmp_path / "my runs" / "it's"
    train(configuration(place))
    command = capsys.readouterr().out.split("Next: ")[1].strip()
    assert shlex.split(command) == ["mcvae", "evaluate", str(place)]
    (place / "result.json").unlink()
    assert main(["compare", str(place)]) == 1
    command = capsys.readouterr().err.split("continue it (")[1].strip().removesuffix(").")
    assert shlex.split(command) == ["mcvae", "train", "--resume", str(place)]


def test_other_sizes_in_the_configuration_of_an_interrupted_run_are_named(tmp_path):
    train(configuration(tmp_path / "run", epochs=2, max_steps=2))
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("latent_dim: 2", "latent_dim: 3").replace("max_steps: 2", "max_steps: -1"))
    with pytest.raises(RunError, match="last.ckpt does not fit config.yaml, which may have been changed"):
        train(resume=tmp_path / "run")


def test_a_file_is_not_a_run(copy):
    with pytest.raises(RunError, match="is a file; give the run folder that it is in"):
        mcvae.load(copy / "model.json")


def test_a_refused_option_leaves_no_folder_that_holds_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for option in (["--trainer.logger", "wandb"], ["--trainer.overfit_batches", "many"]):
        assert main(["train", "--method", "vae", *SHORT, *option]) == 1
        assert "Traceback" not in capsys.readouterr().err
        assert not list(tmp_path.rglob("config.yaml"))
    assert main(["train", "--method", "vae", *SHORT]) == 0


@pytest.mark.parametrize("moment", [0.15, 0.4, 1.2])
def test_an_early_interrupt_is_one_line(moment, tmp_path):
    ready = "import sys, time; from mcvae.cli import main; print('ready', flush=True); sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", ready, "train", "--method", "vae", "--run.epochs", "500"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.readline()
    time.sleep(moment)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "Interrupted" in error
    assert "Traceback" not in error
