"""Run folders: anywhere, damaged, hostile, on a full disk. What is whole stays so, and what is wrong is named."""

import errno
import json
import os
import resource
import shutil
import sys
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path

import fsspec
import pytest
import torch
import yaml

import mcvae
from mcvae.cli import main
from mcvae.data.files import _unpack
from mcvae.runs.config import DataConfig, MethodConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from mcvae.runs.discovery import find
from mcvae.runs.plain import RunError
from mcvae.runs.storage import RunFolder
from mcvae.training.checkpoints import AtomicCheckpoints
from mcvae.training.evaluate_run import evaluate_run
from mcvae.training.run import train

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


def configuration(folder, epochs=2, **trainer) -> TrainConfig:
    return TrainConfig(
        DataConfig("digits", batch_size=50, limit=100),
        ModelConfig(latent_dim=4),
        MethodConfig("vae"),
        OptimizerConfig(),
        RunConfig(epochs=epochs, folder=str(folder)),
        {"enable_progress_bar": False, **trainer},
    )


def interrupted(folder, after=2, epochs=3) -> Path:
    """A run of which `after` epochs are done."""
    train(configuration(folder, epochs, max_steps=2 * after))
    config = RunFolder(folder).path / "config.yaml"
    if config.exists() and "://" not in str(folder):
        config.write_text(config.read_text().replace(f"max_steps: {2 * after}", "max_steps: -1"))
    return Path(folder)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    torch.set_default_dtype(torch.float32)
    return train(configuration(tmp_path_factory.mktemp("runs") / "straight", 3))


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


# Damage


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :]


def test_no_flipped_byte_of_a_checkpoint_goes_unnoticed(tmp_path):
    """Read back equal, or refused: the checksum covers what matters. torch alone lets most of these pass."""
    path, saved = tmp_path / "last.ckpt", {"step": 3, "weights": torch.arange(200.0)}
    AtomicCheckpoints().save_checkpoint(saved, path)
    content, refused, wrong_without = path.read_bytes(), 0, 0
    for place in range(0, len(content), 7):
        path.write_bytes(flipped(content, place))
        try:
            found = AtomicCheckpoints().load_checkpoint(path)
            assert found["step"] == 3
            assert torch.equal(found["weights"], saved["weights"])
        except RunError:
            refused += 1
        try:
            wrong_without += not torch.equal(torch.load(path, weights_only=True)["weights"], saved["weights"])
        except Exception:
            wrong_without += 0
    assert refused > 50
    assert wrong_without > 50  # the named wrong version


@pytest.mark.parametrize("damage", [lambda c: c[: len(c) // 2], lambda c: flipped(c, len(c) // 2), lambda c: b""])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(damage, straight, tmp_path, capsys):
    folder = interrupted(tmp_path / "run")
    last = folder / "checkpoints" / "last.ckpt"
    last.write_bytes(damage(last.read_bytes()))
    train(resume=folder)
    assert f"the checkpoint {last} cannot be read" in capsys.readouterr().err
    assert weights(folder) == weights(straight)
    assert (folder / "checkpoints" / "last.damaged").exists()


def test_without_any_sound_checkpoint_nothing_is_started_again(tmp_path, capsys):
    folder = interrupted(tmp_path / "run")
    for name in ("last", "previous", "best"):
        (folder / "checkpoints" / f"{name}.ckpt").write_bytes(b"damaged")
    assert main(["train", "--resume", str(folder)]) == 1
    assert "no checkpoint in" in capsys.readouterr().err
    assert not (folder / "checkpoints" / "last.ckpt").exists()


def test_a_run_killed_between_two_checkpoints_goes_on_from_the_previous(straight, tmp_path):
    folder = interrupted(tmp_path / "run")
    (folder / "checkpoints" / "last.ckpt").unlink()
    train(resume=folder)
    assert weights(folder) == weights(straight)


# Elsewhere


def test_a_run_at_a_url_is_trained_resumed_evaluated_and_compared(straight, tmp_path, capsys):
    place = "memory://bucket/run"
    interrupted(place)
    system = fsspec.filesystem("memory")
    assert system.exists("/bucket/run/checkpoints/previous.ckpt")
    config = yaml.safe_load(system.cat("/bucket/run/config.yaml"))
    assert config["run"]["folder"] == place
    config["trainer"]["max_steps"] = -1
    system.pipe("/bucket/run/config.yaml", yaml.safe_dump(config).encode())
    last = system.cat("/bucket/run/checkpoints/last.ckpt")
    system.pipe("/bucket/run/checkpoints/last.ckpt", last[:1000])  # torn by a lost connection
    train(resume=place)
    assert system.cat("/bucket/run/model.safetensors") == weights(straight)
    options = {"num_steps": 2, "num_samples": 2, "limit": 20, "simulated": 0}
    summary = evaluate_run(place, **options)
    expected = evaluate_run(straight, **options)
    assert summary.nll == expected.nll
    assert json.loads(system.cat("/bucket/run/result.json"))["evaluation"]["nll"] == summary.nll
    assert not system.glob("/bucket/run/evaluation*.partial")
    assert mcvae.load(place).state_dict().keys() == mcvae.load(straight).state_dict().keys()
    assert [run.place for run in find(["memory://bucket"]).runs] == [place]
    assert main(["sample", place, "--number", "4"]) == 0
    assert system.exists("/bucket/run/pictures/drawn.png")
    with pytest.raises(RunError, match="memory://bucket/run holds a run already"):
        train(configuration(place))
    assert main(["compare", place]) == 0
    assert place in capsys.readouterr().out
    system.rm("/bucket", recursive=True)


def test_a_file_url_is_a_folder(tmp_path):
    assert RunFolder(f"file://{tmp_path}/run").path == tmp_path / "run"


def test_an_unknown_url_is_named(capsys):
    assert main(["train", "--data.limit", "100", "--run.folder", "nowhere://x"]) == 1
    assert "nowhere://x cannot be used: Protocol not known" in capsys.readouterr().err


def test_a_lost_connection_loses_nothing(monkeypatch, capsys):
    system = fsspec.filesystem("memory")
    home = RunFolder("memory://lost/run")
    (home.path / "result.json").write_text("{}")
    monkeypatch.setattr(type(system), "put_file", lambda *a, **o: (_ for _ in ()).throw(OSError("connection lost")))
    with pytest.raises(RunError, match=r"could not be copied to memory://lost/run: connection lost. Nothing is lost"):
        home.push()
    home._remove()
    assert (home.path / "result.json").exists()
    monkeypatch.undo()
    home.push()
    home._remove()
    assert system.cat("/lost/run/result.json") == b"{}"
    assert not home.path.exists()


def test_names_at_a_url_cannot_leave_the_copy(monkeypatch):
    system = fsspec.filesystem("memory")
    system.pipe("/hostile/run/config.yaml", b"")
    monkeypatch.setattr(type(system), "find", lambda *a, **o: ["/hostile/run/../../escaped"])
    with pytest.raises(RunError, match="name leads out of the folder"):
        RunFolder("memory://hostile/run")


# Hostile files


class Evil:
    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return os.system, (f"touch {self.trace}",)


def test_a_hostile_checkpoint_is_refused_and_the_previous_one_used(straight, tmp_path, capsys):
    folder = interrupted(tmp_path / "run")
    torch.save({"state_dict": Evil(tmp_path / "executed")}, folder / "checkpoints" / "last.ckpt")
    train(resume=folder)
    assert "last.ckpt cannot be read (UnpicklingError" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()
    assert weights(folder) == weights(straight)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: [", "while parsing"),
        ("", "NoneType"),
        ("data: !!python/object/apply:os.system ['touch executed']", "could not determine a constructor"),
        ("trainer: {logger: {class_path: hostile.Anything}}", "trainer"),
        ("run: {epochs: many}", "run.epochs"),
        ("method: {schedule: cosine}", "method.schedule"),
        ("run: {colour: red}", "colour"),
    ],
)
def test_a_configuration_is_data_and_what_is_wrong_with_it_is_named(text, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "hostile.py").write_text("open('executed', 'w')")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(text)
    assert main(["train", "--resume", "run"]) == 1
    error = capsys.readouterr().err
    assert "run/config.yaml cannot be read as the configuration of a run" in error
    assert message in error
    with pytest.raises(SystemExit):  # the parser refuses it, too
        sys.exit(main(["train", "--config", "run/config.yaml", "--run.epochs", "0"]))
    assert not (tmp_path / "executed").exists()


def test_a_hostile_run_folder_writes_nowhere_else(straight, tmp_path, monkeypatch):
    options = {"num_steps": 2, "num_samples": 2, "limit": 10, "simulated": 0}
    run, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("mine")
    shutil.copytree(straight, run)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["run"]["folder"] = str(outside)
    config["data"]["root"] = str(outside / "data")
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"folder": str(outside), "pictures": ["../../x.png"]}))
    evaluate_run(run, **options)
    assert find([str(run)]).runs[0].folder == run
    config["data"]["name"] = "mnist"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(Exception, match="which does not exist, and download is off"):
        evaluate_run(run, **options)
    for name in ("evaluation.partial", "pictures/worst.png", ".result.json.1"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside / "mine")
        with pytest.raises(RunError, match=f"{name} is a link"):
            evaluate_run(run, **options)
        (run / name).unlink()
    assert (outside / "mine").read_text() == "mine"
    assert os.listdir(outside) == ["mine"]


def test_archives_cannot_leave_their_folder(tmp_path):
    """Names that climb, absolute names, and links."""
    into, outside = tmp_path / "a" / "into", tmp_path / "outside"
    into.mkdir(parents=True)
    outside.mkdir()
    (tmp_path / "x").write_text("x")
    for name, link in (("../x", ""), (str(outside / "x"), ""), ("link", str(outside)), ("link", "../../outside")):
        with tarfile.open(tmp_path / "hostile.tar.gz", "w:gz") as tar:
            member = tarfile.TarInfo(name)
            if link:
                member.type, member.linkname = tarfile.SYMTYPE, link
            tar.addfile(member)
            tar.add(tmp_path / "x", "link/x" if link else "y")
        with suppress(tarfile.TarError):  # refused, or put inside
            _unpack(tmp_path / "hostile.tar.gz", into)
        with zipfile.ZipFile(tmp_path / "hostile.zip", "w") as zipped:
            member = zipfile.ZipInfo(name)
            member.external_attr = 0o120777 << 16 if link else 0
            zipped.writestr(member, link or "x")
        _unpack(tmp_path / "hostile.zip", into)
    assert not list(outside.iterdir())
    assert not list((tmp_path / "a").glob("x"))
    assert not any(path.is_symlink() for path in into.rglob("*"))


# No space, no permission


def test_a_full_disk_stops_a_run_that_goes_on_when_there_is_space(straight, tmp_path, capsys):
    folder = interrupted(tmp_path / "run")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # a checkpoint is larger
    try:
        assert main(["train", "--resume", str(folder)]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = capsys.readouterr().err
    assert "could not write" in error
    assert "File too large. Nothing that was there before is lost" in error
    train(resume=folder)
    assert weights(folder) == weights(straight)


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "message"), [(2, "no more can be: No space"), (3, "evaluation.csv: [Errno 28] No")])
def test_a_full_disk_keeps_what_was_evaluated(moment, message, straight, tmp_path, monkeypatch, capsys):
    """Full at the second of two batches, or when the table is written."""
    shutil.copytree(straight, tmp_path / "run")
    protocol = ["--protocol", "paper", "--num_samples", "2", "--limit", "60", "--simulated", "0"]
    sync, calls = os.fsync, []

    def fill(file):
        calls.append(file)
        if len(calls) == moment:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(file)

    monkeypatch.setattr(os, "fsync", fill)
    assert main(["evaluate", str(tmp_path / "run"), *protocol]) == 1
    assert message in capsys.readouterr().err
    assert len((tmp_path / "run" / "evaluation.partial").read_text().splitlines()) >= moment  # settings, batches
    assert main(["evaluate", str(tmp_path / "run"), *protocol]) == 0


def test_a_folder_that_cannot_be_written_is_named(capsys):
    assert main(["train", "--data.limit", "100", "--run.folder", "/sys/mcvae-run"]) == 1
    assert "/sys/mcvae-run" in capsys.readouterr().err


def test_the_version_is_known(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert mcvae.__version__ in capsys.readouterr().out
