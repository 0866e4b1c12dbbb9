"""The command line as a person meets it."""

import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from mcvae.cli import main
from mcvae.cli.parser import COMMANDS, build_parser, expand
from mcvae.runs.interruption import Interruption

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


def test_help_does_not_wait_for_torch():
    """Counted in modules, not in seconds, which depend on the machine."""
    program = "import sys; from mcvae.cli.parser import build_parser; build_parser().print_help(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *help_lines, modules = done.stdout.splitlines()
    heavy = {"torch", "numpy", "lightning", "matplotlib", "sklearn", "PIL", "ray", "zuko"}
    assert not heavy & set(modules.split())
    for command in COMMANDS:
        assert command in "\n".join(help_lines)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as done:
        main([command, "--help"])
    assert done.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    module = import_module(f"mcvae.cli.{command}")
    assert " ".join(module.run.__doc__.splitlines()[0].split()) in text
    for option in fields(module.Options):
        assert option.name in text, f"{option.name} is not explained"


def test_print_config_can_be_read_back(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["train", "--data", "mnist", "--method=iwae", "--run.seed", "7", "--print_config"])
    path = tmp_path / "config.yaml"
    path.write_text(capsys.readouterr().out)
    parsed = build_parser().parse_args(["train", "--config", str(path), "--run.epochs", "3"])
    assert (parsed.train.data.name, parsed.train.method.name) == ("mnist", "iwae")
    assert (parsed.train.run.seed, parsed.train.run.epochs) == (7, 3)


def test_plain_names_are_shorthands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert expand(["--data", "mnist", "--method=vae"]) == ["--data.name=mnist", "--method.name=vae"]
    assert expand(["--data.root", "x"]) == ["--data.root", "x"]
    (tmp_path / "mnist").mkdir()
    assert expand(["--data", "mnist"]) == ["--data.name=mnist"]
    assert expand(["--data", "data.yaml"]) == ["--data", "data.yaml"]
    assert expand(["--method", "a-mcvae-k3-n2", "--method.num_steps", "7"])[-2:] == ["--method.num_steps", "7"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--method", "mcmc"], "unknown method 'mcmc'; known: vae, iwae"),
        (["train", "--data", "minst"], "mnist"),
        (["train", "--resume", "nowhere"], "nowhere is not a run folder"),
        (["evaluate", "nowhere"], "nowhere is not a run folder"),
        (["compare", "nowhere"], "nowhere is not a run folder"),
        (["sample", "nowhere"], "model.json does not exist"),
        (["train", "--trainer.gpus", "1"], "unknown trainer option 'gpus'"),
        (["train", "--trainer.max_epochs", "1"], "--trainer.max_epochs is decided by mcvae: use --run.epochs"),
        (["train", "--trainer.strategy", "ddp_spawn"], "use --trainer.strategy ddp"),
        (["train", "--resume", "x", "--run.epochs", "7"], "leave out all other options"),
        (["train", "--run.epochs", "0"], "--run.epochs must be at least 1, got 0"),
        (["train", "--data.batch_size", "-5"], "--data.batch_size must be at least 1, got -5"),
        (
            ["train", "--optimizer.learning_rate", "0"],
            "--optimizer.learning_rate must be positive and at most 1e9, got 0.0",
        ),
        (["sample", "nowhere", "--number", "0"], "--number must be at least 1, got 0"),
    ],
)
def test_a_users_mistake_gets_a_sentence_and_no_traceback(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Exception, match=re.escape(message)):  # --debug shows where it came from
        main([*arguments, "--debug"])


def test_without_a_word_it_says_what_it_can_do(capsys):
    with pytest.raises(SystemExit) as done:
        main([])
    assert done.value.code == 0
    assert "reproduce" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["trian"], ["train", "--optimizer.learning_rate", "fast"], ["train", "--x", "1"]]
)
def test_wrong_words_are_refused_by_the_parser(arguments, capsys):
    with pytest.raises(SystemExit) as done:
        main(arguments)
    assert done.value.code == 2
    assert "error" in capsys.readouterr().err


def test_methods_lists_what_there_is(capsys):
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("vae", "l-mcvae", "a-mcvae", "realnvp", "digits", "celeba"):
        assert any(line.strip().startswith(name) for line in lines)


@pytest.mark.filterwarnings("ignore")
def test_train_evaluate_sample_compare(capsys, tmp_path, monkeypatch):
    """The whole way of a new user, on very short runs, and the demonstration in small."""
    monkeypatch.chdir(tmp_path)
    short = ["--data.limit", "100", "--data.batch_size", "50", "--model.latent_dim", "4", "--run.epochs", "1"]
    assert main(["train", "--data", "digits", "--method", "vae", *short]) == 0
    assert main(["train", "--data", "digits", "--method", "l-mcvae", "--method.num_steps", "2", *short]) == 0
    runs = ["runs/digits-vae-s0", "runs/digits-l-mcvae-k2-s0"]
    assert main(["compare", *runs]) == 0
    assert "not evaluated" in capsys.readouterr().out
    assert main(["evaluate", *runs, "--num_steps", "3", "--num_samples", "4", "--limit", "50"]) == 0
    output = capsys.readouterr().out
    assert "explains the 50 test images best" in output
    assert "bound - VAE's" in output
    assert "±" in output
    assert main(["sample", runs[0], "--number", "9", "--out", "drawn.png"]) == 0
    assert (tmp_path / "drawn.png").stat().st_size > 100
    assert main(["report", "runs", "--out", "report.html"]) == 0
    page = (tmp_path / "report.html").read_text()
    for title in ("explains the 50 test images best", "Step size by transition", "Weights of the chains"):
        assert title in page


def test_paired_differences_see_the_method_and_not_the_image(tmp_path):
    """Images differ by 10 nats, methods by 0.1: unpaired that would be lost in a standard error of 1."""
    import json
    import random

    from mcvae.report.groups import paired_difference
    from mcvae.runs.discovery import find

    source = random.Random(0)
    images = [source.gauss(-80, 10) for _ in range(100)]
    for name, shift in (("vae", 0.0), ("iwae", 0.1)):
        (tmp_path / name).mkdir()
        evaluation = {"split": "test", "num_images": 100}
        result = {"data": "digits", "seed": 0, "batch_size": 50, "method": name, "num_steps": 0, "num_samples": 1}
        (tmp_path / name / "result.json").write_text(json.dumps(result | {"evaluation": evaluation}))
        rows = "".join(f"{i},{value + shift + source.gauss(0, 0.01)}\n" for i, value in enumerate(images))
        (tmp_path / name / "evaluation.csv").write_text("image,bound\n" + rows)
    first, second = find([str(tmp_path / "vae"), str(tmp_path / "iwae")]).runs
    mean, error = paired_difference(second, first)
    assert abs(mean - 0.1) < 5 * error < 0.02
    for key, value in (("seed", 1), ("batch_size", 10), ("transform", "scale")):  # other images
        other = replace(second, result=replace(second.result, **{key: value}))
        assert paired_difference(other, first) is None


def test_threads_are_limited_before_torch_starts_them(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS")}
    script = (
        "import os, sys; from mcvae.cli import main; main(['methods', '--threads', '1']); import torch; "
        "print(torch.get_num_threads(), os.environ['OMP_WAIT_POLICY'])"
    )
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "1 PASSIVE"
    environment["OMP_WAIT_POLICY"] = "ACTIVE"  # the user's own choice stays
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "1 ACTIVE"


def test_threads_must_be_a_number(capsys):
    assert main(["methods", "--threads", "many"]) == 1
    assert "--threads must be a number" in capsys.readouterr().err


def test_an_interrupt_that_was_dropped_is_raised_again():
    interruption = Interruption()
    interruption.check()
    with pytest.raises(KeyboardInterrupt):
        interruption()
    with pytest.raises(KeyboardInterrupt):
        interruption.check()


@pytest.mark.parametrize("arguments", [["methods"], ["train", "--help"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_ends_a_command_in_silence(arguments, unbuffered):
    reading, writing = os.pipe()
    os.close(reading)
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "mcvae", *arguments]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writing)
    assert done.stderr == ""
