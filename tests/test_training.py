"""Runs: what they leave behind, and that interrupting them changes nothing."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal

import mcvae
from mcvae.runs.config import (
    DataConfig,
    MethodConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    read_config,
)
from mcvae.runs.plain import RunError, read_json
from mcvae.training import threads
from mcvae.training.evaluate_run import evaluate_run
from mcvae.training.loading import load_run
from mcvae.training.module import DivergedError, VariationalTraining
from mcvae.training.run import train

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


def configuration(folder: Path, method: str = "l-mcvae", epochs: int = 2, **method_options) -> TrainConfig:
    return TrainConfig(
        DataConfig("digits", batch_size=50, limit=200),
        ModelConfig(latent_dim=4),
        MethodConfig(method, **{"num_steps": 2, **method_options}),
        OptimizerConfig(),
        RunConfig(epochs=epochs, folder=str(folder)),
        {"enable_progress_bar": False},
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    torch.set_default_dtype(torch.float32)
    folder = tmp_path_factory.mktemp("runs") / "digits"
    config = configuration(folder)
    config.run.likelihood_every, config.run.pictures_every = 2, 1
    return train(config)


def weights(folder) -> bytes:
    return (Path(folder) / "model.safetensors").read_bytes()


def test_a_run_folder_can_be_read_by_anyone(finished):
    names = {str(path.relative_to(finished)) for path in finished.rglob("*") if path.is_file()}
    assert names >= {
        "config.yaml",
        "metrics.csv",
        "checkpoints/last.ckpt",
        "checkpoints/best.ckpt",
        "model.safetensors",
        "model.json",
        "result.json",
        "pictures/samples.png",
        "pictures/reconstructions.png",
        "pictures/samples-0001.png",
    }
    assert any(name.startswith("tensorboard/events") for name in names)
    rows = list(csv.DictReader((finished / "metrics.csv").open()))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert rows[0]["val_nll"] == ""
    assert float(rows[1]["val_nll"]) > 0
    assert float(rows[1]["train_bound"]) > float(rows[0]["train_bound"])
    result = read_json(finished / "result.json")
    assert result["status"] == "finished"
    assert result["method"] == "l-mcvae"
    assert result["evaluations"] == result["num_steps"] + 1
    for whole, parts in (("step_size", "step_sizes"), ("acceptance", "acceptances")):
        values = [float(value) for value in rows[1][parts].split()]
        assert len(values) == result["num_steps"]
        assert sum(values) / len(values) == pytest.approx(float(rows[1][whole]), rel=1e-4)


def test_pictures_are_pictures(finished):
    from PIL import Image

    for name in ("samples", "reconstructions"):
        image = Image.open(finished / "pictures" / f"{name}.png")
        assert min(image.size) > 200
        assert len(set(image.getdata())) > 2


def test_the_model_comes_back(finished):
    model, objective = load_run(finished)
    loaded = mcvae.load(finished)
    checkpoint = torch.load(finished / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, checkpoint[f"model.{name}"])
    assert torch.equal(objective.step_sizes(), checkpoint["objective.step_sizes.values"])
    assert not torch.allclose(objective.step_sizes(), torch.tensor(0.01))  # adapted in training
    x = torch.randint(2, (3, 1, 8, 8)).float()
    assert objective(model.bridge(x)).bound.isfinite().all()


@pytest.mark.slow
def test_the_written_configuration_reproduces_the_run_bit_for_bit(finished, tmp_path):
    config = read_config(finished)
    config.run.folder = str(tmp_path / "again")
    assert weights(train(config)) == weights(finished)
    config = read_config(finished)
    config.run.folder, config.run.seed = str(tmp_path / "other"), 1
    assert weights(train(config)) != weights(finished)


def test_a_finished_run_is_not_trained_again(finished, capsys):
    before = weights(finished), (finished / "checkpoints" / "last.ckpt").stat().st_mtime
    train(resume=finished)
    assert "Nothing to do" in capsys.readouterr().out
    assert (weights(finished), (finished / "checkpoints" / "last.ckpt").stat().st_mtime) == before


def test_a_folder_that_holds_a_run_is_not_overwritten(finished):
    with pytest.raises(RunError, match=r"holds a run already. Continue it with --resume"):
        train(configuration(finished))


def test_a_mistake_in_the_configuration_leaves_no_folder_behind(tmp_path):
    config = configuration(tmp_path / "run")
    config.trainer["no_such_option"] = 1
    with pytest.raises(ValueError, match="unknown trainer option 'no_such_option'; known: accelerator"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_the_test_split_is_not_touched_by_training(tmp_path, monkeypatch):
    """Every batch goes through one function, and training asks it for two splits only."""
    import mcvae.training.run as module

    seen, batches = [], module.batches
    monkeypatch.setattr(module, "batches", lambda i, c, split, **o: (seen.append(split), batches(i, c, split, **o))[1])
    train(configuration(tmp_path / "run", "vae", epochs=1))
    assert set(seen) == {"train", "validation"}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["vae", "iwae", "a-mcvae", "uha", "realnvp"])
def test_every_method_trains_and_evaluates(method, tmp_path):
    folder = train(configuration(tmp_path / method, method, epochs=1))
    summary = evaluate_run(folder, num_steps=3, num_samples=4, limit=60)
    assert summary.num_images == 60
    json.loads(json.dumps(asdict(summary), allow_nan=False))
    assert sum(summary.weights.counts) == 60 * 4
    assert len(summary.weights.edges) == len(summary.weights.counts) + 1
    assert summary.bound <= -summary.nll + 5 * summary.gap_se + 0.5
    rows = list(csv.DictReader((folder / "evaluation.csv").open()))
    assert len(rows) == 60
    mean = sum(float(row["bound"]) for row in rows) / 60
    assert mean == pytest.approx(summary.bound)
    assert read_json(folder / "result.json")["evaluation"]["nll"] == summary.nll


def test_evaluating_changes_nothing_and_repeats(finished):
    before = weights(finished)
    first = evaluate_run(finished, num_steps=3, num_samples=4, limit=60)
    second = evaluate_run(finished, num_steps=3, num_samples=4, limit=60)
    assert weights(finished) == before
    assert replace(first, seconds=0) == replace(second, seconds=0)


def test_snapshots_are_the_weights_of_their_epoch_and_are_evaluated_in_their_folder(tmp_path):
    config = configuration(tmp_path / "long")
    config.run.snapshots = [1]
    config.optimizer.milestones = []
    train(config)
    short = configuration(tmp_path / "short", epochs=1)
    short.optimizer.milestones = []
    train(short)
    assert weights(tmp_path / "long" / "epochs" / "1") == weights(tmp_path / "short")
    found = evaluate_run(tmp_path / "long", epoch=1, num_steps=2, num_samples=2, limit=10, simulated=0)
    assert read_json(tmp_path / "long" / "epochs" / "1" / "result.json")["evaluation"]["nll"] == found.nll
    assert "evaluation" not in read_json(tmp_path / "long" / "result.json")
    with pytest.raises(RunError, match="epochs/2"):
        evaluate_run(tmp_path / "long", epoch=2)
    config.run.snapshots = [3]
    with pytest.raises(ValueError, match="--run.snapshots must lie between 1 and --run.epochs 2"):
        train(config)


def test_a_limited_evaluation_sees_the_whole_split(finished, monkeypatch):
    from mcvae.training import evaluate_run as module

    seen = []
    original = module.batches
    monkeypatch.setattr(module, "batches", lambda *a, **k: seen.append(a[0].test) or original(*a, **k))
    evaluate_run(finished, num_steps=2, num_samples=2, limit=10, simulated=0)
    from mcvae.data import load_images

    test = load_images("digits").test
    torch.testing.assert_close(seen[0], test[[(2 * i + 1) * len(test) // 20 for i in range(10)]])


def command(*arguments, program=("-m", "mcvae.cli"), **options):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        **options,
    )


TRAINING = [
    *("train", "--data", "digits", "--data.batch_size", "50", "--model.latent_dim", "4"),
    *("--method", "a-mcvae", "--method.num_samples", "2", "--method.schedule", "sigmoid"),
]


SIGNALLED = """
import os, sys
number, moment, left = int(sys.argv.pop(1)), sys.argv.pop(1), int(sys.argv.pop(1))

def count():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), number)

if moment == "step":
    from torch.optim.optimizer import register_optimizer_step_post_hook
    register_optimizer_step_post_hook(lambda *_: count())
else:  # just before a file of this name appears
    sys.addaudithook(lambda event, paths: event == "os.rename" and str(paths[1]).endswith(moment) and count())
from mcvae.cli import main
sys.exit(main())
"""


@pytest.mark.slow
def test_killed_three_times_and_resumed_equals_undisturbed_bit_for_bit(tmp_path):
    """Within an epoch; between metrics and checkpoint; and when the old checkpoint is moved and the new not there."""
    options = [*TRAINING, "--data.limit", "200", "--run.epochs", "5"]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    process = command(*options, "--run.folder", straight)
    arguments = [*options, "--run.folder", broken]
    for moment, number, complete in (("step", 6, 1), ("best.ckpt", 1, 1), ("last.ckpt", 2, 2)):
        killed = command(signal.SIGKILL.value, moment, number, *arguments, program=("-c", SIGNALLED))
        output, _ = killed.communicate(timeout=120)
        assert killed.returncode == -signal.SIGKILL, output
        saved = sorted((broken / "checkpoints").glob("[lp]*.ckpt"))
        epochs = [torch.load(path, weights_only=True)["epoch"] + 1 for path in saved]
        assert max(epochs) == complete, (moment, saved)
        arguments = ["train", "--resume", broken]
    last = command(*arguments)
    for each in (last, process):
        output, _ = each.communicate(timeout=120)
        assert each.returncode == 0, output
    assert weights(broken) == weights(straight)
    rows = [[row[:-1] for row in csv.reader((folder / "metrics.csv").open())] for folder in (broken, straight)]
    assert rows[0] == rows[1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_says_how_to_go_on(number, tmp_path):
    options = [*TRAINING, "--data.limit", "200", "--run.epochs", "5", "--run.folder", tmp_path / "run"]
    process = command(number.value, "step", 6, *options, program=("-c", SIGNALLED))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert f"Continue with: mcvae train --resume {tmp_path / 'run'}" in output
    assert "Traceback" not in output


def test_a_half_written_checkpoint_is_never_read(tmp_path):
    from mcvae.training.checkpoints import AtomicCheckpoints

    path = tmp_path / "last.ckpt"
    AtomicCheckpoints().save_checkpoint({"step": 1}, path)

    class Explosive:
        def __reduce__(self):
            raise OSError("disk full")

    with pytest.raises(RunError, match="could not write .*last.ckpt: disk full. Nothing that was there before is lost"):
        AtomicCheckpoints().save_checkpoint({"step": 2, "tensor": torch.zeros(1000), "bad": Explosive()}, path)
    assert AtomicCheckpoints().load_checkpoint(path) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_checkpoints_execute_nothing(tmp_path):
    from mcvae.training.checkpoints import AtomicCheckpoints

    class Evil:
        def __reduce__(self):
            return os.system, ("touch " + str(tmp_path / "executed"),)

    torch.save({"x": Evil()}, tmp_path / "last.ckpt")
    with pytest.raises(RunError, match=r"last.ckpt cannot be read"):
        AtomicCheckpoints().load_checkpoint(tmp_path / "last.ckpt")
    assert not (tmp_path / "executed").exists()


@pytest.mark.slow
def test_two_processes_train_and_agree_on_step_sizes(tmp_path):
    """DDP on the CPU: every rank writes what it ended with."""
    script = tmp_path / "ddp.py"
    script.write_text(
        "import os, sys, torch\n"
        "from pathlib import Path\n"
        "from mcvae.runs.config import *\n"
        "import mcvae.training.run as run\n"
        "fit = run._fit\n"
        "def watched(parts, *rest):\n"
        "    fit(parts, *rest)\n"
        "    torch.save(parts.module.state_dict(), Path(sys.argv[1]) / f'rank{parts.trainer.global_rank}.pt')\n"
        "run._fit = watched\n"
        "run.train(TrainConfig(DataConfig('digits', batch_size=50, limit=200), ModelConfig(latent_dim=4),\n"
        "    MethodConfig('a-mcvae', num_steps=2, num_samples=2), OptimizerConfig(),\n"
        "    RunConfig(epochs=2, folder=sys.argv[1] + '/run'),\n"
        "    {'devices': 2, 'strategy': 'ddp', 'accelerator': 'cpu', 'enable_progress_bar': False}))\n"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stderr
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name
    assert not torch.allclose(first["objective.step_sizes.values"], torch.tensor(0.01))
    assert len(list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))) == 2


class Fragile(nn.Module):
    """A decoder that returns NaN for the calls it is told to."""

    def __init__(self, bad_calls):
        super().__init__()
        self.layer, self.calls, self.bad_calls = nn.Linear(2, 4), 0, bad_calls

    def forward(self, z):
        self.calls += 1
        mean = self.layer(z)
        return Independent(Normal(mean * torch.nan if self.calls in self.bad_calls else mean, 1.0, False), 1)


def fit(decoder, patience=20, learning_rate=1e-3, steps=10):
    from lightning import Trainer

    encoder = nn.Linear(4, 4)
    model = mcvae.LatentVariableModel(
        lambda x: Independent(Normal(encoder(x)[:, :2], nn.functional.softplus(encoder(x)[:, 2:])), 1), decoder
    )
    model.encoder_network = encoder
    config = OptimizerConfig(patience=patience, learning_rate=learning_rate)
    module = VariationalTraining(model, mcvae.recipes.vae(), config)
    trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(8 * steps, 4), batch_size=8))
    return module


def test_non_finite_steps_are_skipped_and_counted(capsys):
    module = fit(Fragile({3, 7}))
    assert module.skipped == 2
    assert all(p.isfinite().all() for p in module.parameters())
    warning = capsys.readouterr().out
    assert warning.count("not finite") == 2
    assert "Likely causes" in warning
    undisturbed = fit(Fragile(set()))
    assert undisturbed.skipped == 0


def test_a_skipped_step_changes_nothing():
    torch.manual_seed(0)
    after_one = fit(Fragile(set()), steps=1).state_dict()
    torch.manual_seed(0)
    bad_follows = fit(Fragile({2}), steps=2).state_dict()
    for name in after_one:
        if name != "skipped":
            assert torch.equal(after_one[name], bad_follows[name])


def test_too_many_non_finite_steps_in_a_row_end_the_run_with_advice():
    with pytest.raises(DivergedError, match=r"3 non-finite steps in a row.*--method.step_size"):
        fit(Fragile({4, 5, 6}), patience=3)
    fit(Fragile({2, 3, 5, 6}), patience=3)  # not in a row


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "method"),
    [
        ({"learning_rate": 100.0}, {}),
        ({"patience": 3}, {"step_size": 1e6, "step_sizes": "fixed"}),
    ],
)
def test_real_divergence_is_skipped_counted_and_ends_with_advice(options, method, tmp_path):
    """A learning rate that ruins the weights, and steps that no chain survives."""
    config = configuration(tmp_path / "run", epochs=30, **method)
    config.optimizer = OptimizerConfig(**{"patience": 10, **options})
    with pytest.raises(DivergedError, match="non-finite steps in a row"):
        train(config)


def test_a_run_that_was_stopped_early_is_not_called_finished(tmp_path, capsys):
    config = configuration(tmp_path / "run", "vae", epochs=3)
    config.trainer["max_steps"] = 4
    folder = train(config)
    assert "stopped after epoch 1 of 3" in capsys.readouterr().out
    assert not (folder / "result.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed"])
def test_other_precisions_train_to_the_end(precision, tmp_path):
    config = configuration(tmp_path / "run", epochs=1)
    config.trainer["precision"], config.run.likelihood_every = precision, 1
    folder = train(config)
    assert mcvae.load(folder).decoder(torch.zeros(1, 4)).mean.dtype == torch.float32
    assert evaluate_run(folder, num_steps=2, num_samples=2, limit=10, spacing="linear", simulated=4).bound < 0


def test_damaged_run_folders_are_named(finished, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    (copy / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(RunError, match=r"the model in .*copy cannot be read"):
        mcvae.load(copy)
    (copy / "config.yaml").write_text("data: [")
    with pytest.raises(RunError, match=r"config.yaml cannot be read as the configuration"):
        read_config(copy)
    (copy / "model.json").write_text("{")
    with pytest.raises(RunError, match="model.json is not valid JSON"):
        mcvae.load(copy)
    with pytest.raises(RunError, match="is not a run folder: it has no config.yaml"):
        read_config(tmp_path)


def test_celeba_in_its_canonical_layout_trains(tmp_path, monkeypatch):
    """On generated faces: 178 × 218 JPEG files and the official partition list."""
    from PIL import Image

    from mcvae.data import celeba

    folder = tmp_path / "celeba" / "img_align_celeba"
    folder.mkdir(parents=True)
    names = [f"{index:06d}.jpg" for index in range(1, 41)]
    for name in names:
        pixels = torch.randint(256, (218, 178, 3), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / name)
    parts = [0] * 30 + [1] * 5 + [2] * 5
    lines = "".join(f"{name} {part}\n" for name, part in zip(names, parts, strict=True))
    (tmp_path / "celeba" / "list_eval_partition.txt").write_text(lines)
    monkeypatch.setattr(celeba, "_COUNTS", {"train": 30, "validation": 5, "test": 5})
    config = configuration(tmp_path / "run", "l-mcvae", epochs=1)
    config.data = DataConfig("celeba", root=str(tmp_path), batch_size=10)
    run = train(config)
    described = json.loads((run / "model.json").read_text())
    assert described["shape"] == [3, 64, 64]
    assert described["model"]["likelihood"] == "gaussian"
    options = {"spacing": "linear", "simulated": 0, "compare_iwae": False}
    found = evaluate_run(run, num_steps=2, num_samples=2, **options)
    assert found.num_images == 5
    assert found.bits_per_dim == pytest.approx(found.nll / (3 * 64 * 64 * math.log(2)) + math.log2(255))


@pytest.fixture
def two_threads(monkeypatch):
    """Two threads, as torch takes them by itself on two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_threads_are_as_many_as_pay_unless_the_user_chose(monkeypatch):
    for free, values, expected in ((2, 3_200, 1), (2, 78_400, 2), (1, 78_400, 1), (8, 78_400, 2), (1, None, 1)):
        monkeypatch.setattr(threads, "free_cores", lambda free=free: free)
        with threads.threads_for(values):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with threads.threads_for(3_200):
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cpu 100 0 0 100 0 0 0 0", 2),  # of four cores two are busy
        ("cpu 100 100 0 0 0 0 0 0", 2),  # nice ones make way
        ("cpu 10 0 10 160 20 0 0 0", 4),
        ("cpu 150 0 50 0 0 0 0 0", 1),  # never less than one
        (None, 4),  # a system that does not say
    ],
)
def test_free_cores_are_those_that_others_left_idle(monkeypatch, line, expected):
    moments = iter([[0] * 8, [int(number) for number in line.split()[1:]]] if line else [None])
    monkeypatch.setattr(threads, "_ticks", lambda: next(moments))
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 4)
    assert threads.free_cores(0.0) == expected


@pytest.mark.usefixtures("two_threads")
def test_a_resumed_run_has_the_threads_it_had():
    module = VariationalTraining(mcvae.models.build_model((1, 8, 8), 2), mcvae.recipes.vae(), OptimizerConfig())
    checkpoint = {}
    module.on_save_checkpoint(checkpoint)
    torch.set_num_threads(1)
    module.on_load_checkpoint(checkpoint)
    assert torch.get_num_threads() == 2
    module.on_load_checkpoint({})  # of an earlier release
    assert torch.get_num_threads() == 2
