"""Wrong and unlucky calls over all commands: refused in one sentence, without a traceback, a hang or a loss.

Most are generated: every option of every command with values of the wrong kind and with its name misspelt, every file
of a run damaged in every way before every command that reads runs. hypothesis adds what nobody thought of.
"""

import hashlib
import json
import shutil
import signal
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from mcvae.cli import main
from mcvae.cli.parser import COMMANDS, build_parser, parse
from mcvae.runs.config import DataConfig, MethodConfig, ModelConfig, RunConfig, TrainConfig
from mcvae.runs.discovery import find
from mcvae.training.evaluate_run import evaluate_run
from mcvae.training.run import train

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own
NEEDED = {"evaluate": ["run"], "sample": ["run"], "compare": ["run"], "report": ["run"], "reproduce": ["mnist"]}
"""Arguments that commands cannot do without."""


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A run that was trained and evaluated."""
    torch.set_default_dtype(torch.float32)
    config = TrainConfig(
        DataConfig("digits", batch_size=50, limit=60),
        ModelConfig(latent_dim=2),
        MethodConfig("vae"),
        run=RunConfig(epochs=1, folder=str(tmp_path_factory.mktemp("sound") / "run")),
        trainer={"enable_progress_bar": False},
    )
    folder = train(config)
    evaluate_run(folder, num_steps=2, num_samples=2, limit=4, simulated=0)
    return folder


@contextmanager
def limited(seconds=20):
    """Nothing may hang."""

    def stop(*_):
        raise AssertionError(f"still busy after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def call(arguments, capsys):
    """Exit code and what was said."""
    with limited():
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def assert_refused(arguments, capsys):
    code, _, error = call(arguments, capsys)
    assert code in (1, 2), (arguments, code, error)
    assert "Traceback" not in error
    assert "a bug in mcvae" not in error, error
    (sentence,) = [line for line in error.splitlines() if line.startswith("mcvae")]
    assert 20 < len(sentence) < 900, sentence
    assert sentence.endswith((".", "?", "!")), sentence
    return sentence


def options_of(command):
    """Its options, with the type of each."""
    parser = build_parser([command])._subcommands_action._name_parser_map[command]
    skipped = ("--help", "--config", "--print_config")
    return [
        (action.option_strings[-1], action)
        for action in parser._actions
        if action.option_strings and not action.option_strings[-1].startswith(skipped)
    ]


def wrong_values(action):
    """Values that no option of this type can have."""
    kind = str(getattr(action, "_typehint", "") or "")
    values = []
    if "str" not in kind.replace("Literal", "") or "Literal" in kind or "list[int]" in kind:
        values += ["@!", ""] if "Any" not in kind else ["[1", "@!"]
    if kind == "<class 'int'>":
        values += ["1.5", "[1]"]
    return values if kind else []


EVERY_OPTION = [(command, name, action) for command in COMMANDS for name, action in options_of(command)]
WRONG_VALUES = [
    pytest.param(command, name, value, id=f"{command} {name} {value}")
    for command, name, action in EVERY_OPTION
    for value in wrong_values(action)
]
MISSPELT = [
    pytest.param(command, name, wrong, id=f"{command} {wrong}")
    for command, name, _ in EVERY_OPTION
    for wrong in (name[:-2] + name[-1], name.replace("_", "-") + "s")
    if wrong not in {option for _, option, _ in EVERY_OPTION} and not wrong.startswith("--trainer.")
]


def test_the_corpus_is_large():
    assert len(WRONG_VALUES) > 60
    assert len(MISSPELT) > 120
    assert len(EXTREME) + len(DAMAGED) > 100


@pytest.mark.parametrize(("command", "name", "value"), WRONG_VALUES)
def test_a_value_of_the_wrong_kind(command, name, value, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sentence = assert_refused([command, *NEEDED.get(command, []), name, value], capsys)
    assert name.strip("-+").rpartition(".")[2] in sentence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--method.schedule", "cosine"], "one of linear, sigmoid, learned, got cosine"),
        (["--data.condition", "label"], "a list such as [a,b], got label"),
        (["--data.size", "small"], "a whole number, got small"),
        (["--optimizer.name", "sdg"], "one of adam, adamw, adamax, nadam, radam, rmsprop, sgd, got sdg"),
    ],
)
def test_a_wrong_value_is_told_what_is_expected(arguments, expected, capsys):
    assert f"expected {expected}" in assert_refused(["train", *arguments], capsys)


@pytest.mark.parametrize(("command", "name", "wrong"), MISSPELT)
def test_an_option_that_is_misspelt(command, name, wrong, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sentence = assert_refused([command, *NEEDED.get(command, []), wrong, "1"], capsys)
    assert wrong in sentence
    assert "Did you mean --" in sentence
    assert list(tmp_path.iterdir()) == []


SHORT = ["--data.limit", "50", "--run.epochs", "1"]
EXTREME = [
    *(["train", *SHORT, "--optimizer.learning_rate", value] for value in ("1e30", "0", "-1", "nan", "inf")),
    *(["train", *SHORT, "--model.latent_dim", value] for value in ("1000000000000", "0", "-3")),
    *(["train", *SHORT, "--method.num_steps", value] for value in ("1000000000", "-1")),
    *(["train", *SHORT, "--method.num_samples", value] for value in ("1000000000", "0")),
    *(["train", *SHORT, "--method.step_size", value] for value in ("0", "-1", "nan", "1e300")),
    *(["train", *SHORT, "--data.batch_size", value] for value in ("0", "-1", "1000000000000")),
    *(["train", *SHORT, "--data.validation", value] for value in ("-1", "1000000000", "1797")),
    *(["train", "--data.limit", value] for value in ("0", "-4")),
    *(["train", *SHORT, "--run.seed", value] for value in ("-1", "99999999999999999999")),
    *(["train", *SHORT, "--run.snapshots", value] for value in ("[0]", "[5]", "[-1]")),
    *(["train", *SHORT, "--trainer.devices", value] for value in ("-7", "0", "many")),
    *(["train", *SHORT, "--trainer.accelerator", value] for value in ("gpu", "abacus")),
    *(["train", *SHORT, "--trainer.precision", value] for value in ("7", "1-bit")),
    *(["train", *SHORT, "--trainer.strategy", value] for value in ("ddp_spawn", "alone")),
    ["train", *SHORT, "--trainer.logger", "wandb"],
    ["train", *SHORT, "--trainer.max_epochs", "3"],
    ["train", *SHORT, "--trainer.num_nodes", "0"],
    ["train", *SHORT, "--trainer.limit_train_batches", "-3"],
    ["train", *SHORT, "--trainer.val_check_interval", "-3"],
    ["train", *SHORT, "--trainer.accumulate_grad_batches", "0"],
    ["train", *SHORT, "--trainer.check_val_every_n_epoch", "many"],
    ["train", *SHORT, "--trainer", "7"],
    ["train", *SHORT, "--method", "l-mcvae-k5-k7"],
    ["train", *SHORT, "--method", "../../etc"],
    ["train", *SHORT, "--method", "mle"],
    ["train", *SHORT, "--method", "l-mcvae", "--method.schedule", "cosine"],
    ["train", *SHORT, "--data", "mnits"],
    ["train", *SHORT, "--data", "celeba", "--data.root", "."],
    ["train", *SHORT, "--data", "cifar10", "--data.root", "/dev/null"],
    ["train", *SHORT, "--data.transform", "blur"],
    ["train", *SHORT, "--model.likelihood", "poisson"],
    ["train", *SHORT, "--model.sigma", "0"],
    ["train", *SHORT, "--model.flow", "maf"],
    ["train", *SHORT, "--run.folder", "/dev/null/run"],
    ["train", *SHORT, "--run.folder", "/proc/mcvae"],
    ["train", *SHORT, "--run.folder", "nowhere://run"],
    ["train", *SHORT, "--run.folder", "run"],
    ["train", "--config", "nowhere.yaml"],
    ["train", "--config", "binary.yaml"],
    ["train", "--config", "itself.yaml"],
    ["train", "--config", "list.yaml"],
    ["train", "--config", "typo.yaml"],
    ["train", "--config", "."],
    ["train", "--resume", "nowhere"],
    ["train", "--resume", "."],
    ["train", "--resume", "run/config.yaml"],
    ["train", "--resume", "run", "--run.epochs", "9"],
    ["train", "--resume", "nowhere://run"],
    ["train", "extra"],
    *(["evaluate", "run", "--simulated", value] for value in ("-1", "1000000000")),
    *(["evaluate", "run", "--num_steps", value] for value in ("-1", "1000000000", "never")),
    *(["evaluate", "run", "--num_samples", value] for value in ("0", "-1", "100000000000")),
    *(["evaluate", "run", "--limit", value] for value in ("0", "1", "-5")),
    *(["evaluate", "run", "--tuning", value] for value in ("nowhere.json", "run/result.json", "binary.yaml", ".")),
    *(["evaluate", "run", "--memory", value] for value in ("lots", "0GB", "-1GB", "1", "nanGB", "infGB")),
    *(["evaluate", "run", "--device", value] for value in ("cuda:99", "abacus")),
    *(["evaluate", "run", "--shard", value] for value in ("2/2", "1", "-1/2", "a/b", "1/0")),
    *(["evaluate", "run", "--epoch", value] for value in ("0", "7")),
    *(["evaluate", "run", "--processes", value] for value in ("0", "-2", "100000")),
    *(["evaluate", "run", "--max_steps", value] for value in ("0", "-1")),
    ["evaluate", "run", "--tolerance", "0"],
    ["evaluate", "nowhere"],
    ["evaluate", "empty"],
    ["evaluate", "run", "nowhere"],
    *(["sample", "run", "--number", value] for value in ("0", "-1", "100000000")),
    ["sample", "run", "--out", "."],
    ["sample", "run", "--out", "/dev/null/x.png"],
    ["sample", "nowhere"],
    ["sample", "run", "run"],
    ["compare", "nowhere"],
    ["compare", "empty"],
    ["compare", "binary.yaml"],
    ["compare", "run", "nowhere"],
    ["compare", "nowhere://bucket"],
    ["report", "nowhere"],
    ["report", "empty"],
    ["report", "run", "--out", "."],
    ["report", "run", "--out", "/dev/null/page.html"],
    ["methods", "vae"],
    *(["demo", "--epochs", value] for value in ("0", "-1", "100000000000")),
    ["demo", "--seed", "-1"],
    ["demo", "--folder", "s3://bucket"],
    ["demo", "--folder", "/dev/null/demo"],
    ["reproduce", "mnits"],
    ["reproduce"],
    *(["reproduce", "mnist", "--seeds", value] for value in ("0", "-1")),
    *(["reproduce", "mnist", "--epochs", value] for value in ("[]", "[0]", "[3,2]", "[2,2]", "5")),
    *(["reproduce", "mnist", "--methods", value] for value in ("[vea]", "[l-mcvae-k5-z]", "vae")),
    ["reproduce", "mnist", "--limit", "1"],
    ["reproduce", "mnist", "--workers", "-1"],
    ["reproduce", "mnist", "--collect", "true"],
    ["reproduce", "mnist", "--out", "/dev/null/x", "--collect", "true"],
    *(["sweep", "--workers", value] for value in ("0", "-1")),
    *(["sweep", "--seeds", value] for value in ("0", "-1")),
    *(["sweep", "--data", value] for value in ("[]", "[minst]", "[digits,digits]")),
    *(["sweep", "--methods", value] for value in ("[]", "[vea]", "[vae,vae]")),
    *(["sweep", "--settings", value] for value in ("{run.epoch: 3}", "{run: 3}", "{run.epochs: -1}", "{run.seed: 1}")),
    *(["sweep", "--vary", value] for value in ("{run.epochs: []}", "{run.epoch: [1]}", "{run.epochs: [a]}")),
    *(["sweep", "--evaluation", value] for value in ("{limt: 3}", "{limit: x}", "{epoch: 3}", "{simulated: -1}")),
    ["sweep", "--threads", "0"],
    ["sweep", "--retries", "-1"],
    ["sweep", "--gpus", "-1"],
    ["sweep", "--out", "s3://bucket"],
    ["sweep", "--out", "/dev/null/sweep"],
    ["sweep", "--backend", "slurm"],
    ["sweep", "--backend", "ray", "--address", "127.0.0.1:1", "--out", "new"],
    ["trian"],
    ["--epochs", "3"],
]


def prints(folder: Path) -> dict[str, str]:
    """Of every file that matters: locks and logs may come and go."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".") and not path.name.startswith("events.")
    }


@pytest.mark.parametrize("arguments", EXTREME, ids=" ".join)
def test_an_unlucky_call(arguments, sound, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(sound, tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary.yaml").write_bytes(bytes(range(128, 256)) * 3)
    (tmp_path / "itself.yaml").write_text("run: &it {epochs: 1, snapshots: *it}")
    (tmp_path / "list.yaml").write_text("[1, 2]")
    (tmp_path / "typo.yaml").write_text("run: {epoch: 3}")
    before = prints(tmp_path)
    assert_refused(arguments, capsys)
    assert prints(tmp_path).items() >= before.items()  # nothing is lost
    assert not (tmp_path / "runs").exists()  # and no folder is left that "holds a run already"


FILES = ("config.yaml", "result.json", "model.json", "model.safetensors", "metrics.csv", "evaluation.csv")
DAMAGE = {
    "missing": None,
    "empty": b"",
    "binary": bytes(range(256)),
    "cut": lambda content: content[: len(content) // 2],
    "zeroed": lambda content: content[: len(content) // 2] + bytes(len(content) - len(content) // 2),
    "list": b"[1, 2]",
    "object": b"{}",
    "itself": b"a: &a [*a]\n",
}
DAMAGED = [(file, damage) for file in FILES for damage in DAMAGE]
READERS = {
    "evaluate": ["--limit", "4", "--num_steps", "1", "--num_samples", "2", "--simulated", "0"],
    "sample": ["--number", "1"],
    "compare": [],
    "report": ["--out", "page.html"],
    "train --resume": [],
}


@pytest.mark.parametrize(("file", "damage"), DAMAGED, ids=lambda part: part)
def test_a_damaged_run_is_refused_or_not_needed(file, damage, sound, capsys, tmp_path, monkeypatch):
    """Every command either does not need the file, or names what is wrong; all other files stay as they are."""
    monkeypatch.chdir(tmp_path)
    for command, options in READERS.items():
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(sound, tmp_path / "run")
        path, change = tmp_path / "run" / file, DAMAGE[damage]
        if change is None:
            path.unlink()
        else:
            path.write_bytes(change(path.read_bytes()) if callable(change) else change)
        before = prints(tmp_path / "run")
        code, _, error = call([*command.split(), "run", *options], capsys)
        assert "Traceback" not in error, (command, error)
        assert "a bug in mcvae" not in error, (command, error)
        if code != 0:
            assert code == 1, (command, error)
            assert "run" in error, (command, error)
            assert prints(tmp_path / "run") == before, command


@pytest.mark.parametrize("file", ["config.yaml", "result.json"])
def test_one_damaged_run_does_not_stop_the_others(file, sound, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("damaged", "sound"):
        shutil.copytree(sound, tmp_path / "runs" / name)
    (tmp_path / "runs" / "damaged" / file).write_bytes(b"\xff")
    for command in (["compare", "runs"], ["report", "runs"], ["evaluate", "runs", *READERS["evaluate"]]):
        code, out, error = call(command, capsys)
        assert code == 0, error
        assert f"left out: runs/damaged/{file}" in error
        assert "sound" in out or command[0] == "report"


# What nobody wrote

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
OFTEN = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@OFTEN
@given(key=st.sampled_from(["status", "method", "num_steps", "seed", "evaluation", "versions", "last"]), value=PLAIN)
def test_any_value_in_a_result_is_read_or_named(key, value, sound, tmp_path):
    result = json.loads((sound / "result.json").read_text())
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result | {key: value}))
    found = find([str(folder)])
    assert len(found.runs) + len(found.left_out) == 1
    for run in found.runs:
        assert run.key
        assert run.settings


@OFTEN
@given(key=st.sampled_from(["nll", "bound_se", "num_images", "weights", "sandwich", "verdict", "split"]), value=PLAIN)
def test_any_value_in_an_evaluation_is_shown_or_named(key, value, sound, tmp_path):
    from mcvae.report.page import render

    result = json.loads((sound / "result.json").read_text())
    result["evaluation"][key] = value
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result))
    found = find([str(folder)])
    assert len(found.runs) + len(found.left_out) == 1
    assert "<html" in render(found)


@OFTEN
@given(file=st.sampled_from(["config.yaml", "result.json", "metrics.csv", "evaluation.csv"]), content=st.binary())
def test_any_bytes_in_a_file_are_read_or_named(file, content, sound, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    for name in ("config.yaml", "result.json", "metrics.csv", "evaluation.csv"):
        shutil.copy(sound / name, folder)
    (folder / file).write_bytes(content)
    found = find([str(folder)])
    assert len(found.runs) + len(found.left_out) >= 1


WORDS = st.sampled_from([name for _, name, _ in EVERY_OPTION] + ["--", "-", "--=", "--x=1", "run", "--trainer.a.b"])


@OFTEN
@given(
    command=st.sampled_from([*COMMANDS]),
    words=st.lists(WORDS | st.text(max_size=6) | st.integers().map(str), max_size=5),
)
def test_any_arguments_are_parsed_or_refused(command, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with suppress(SystemExit):
        name, _, options = parse([command, *words])
        assert name == f"mcvae {command}"
        assert options is not None
