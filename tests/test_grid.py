"""Grids: the same records from local processes and from Ray; killed at random, nothing is lost."""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from mcvae.cli import main
from mcvae.experiments.grid import Grid
from mcvae.runs.records import read_records

SMALL = {"data.limit": 100, "data.batch_size": 50, "model.latent_dim": 2, "run.epochs": 2}
EVALUATION = "{limit: 10, num_steps: 2, num_samples: 2, simulated: 0, compare_iwae: false}"


def arguments(out, *more, methods="[vae,l-mcvae-k2]", epochs=2, seeds=1):
    settings = f"{{data.limit: 100, data.batch_size: 50, model.latent_dim: 2, run.epochs: {epochs}}}"
    return [
        *("sweep", "--methods", methods, "--vary", "{optimizer.learning_rate: [0.001, 0.01]}", "--seeds", str(seeds)),
        *("--settings", settings, "--evaluation", EVALUATION, "--out", str(out), *more),
    ]


def numbers(out):
    """Records without the clock."""
    return [replace(record, seconds=None) for record in read_records(out / "records.csv")]


@pytest.mark.slow
def test_cells_agree_between_two_workers_and_a_ray_cluster(tmp_path, capsys):
    assert main(arguments(tmp_path / "local", "--workers", "2")) == 0
    assert main(arguments(tmp_path / "ray", "--backend", "ray", "--address", "local")) == 0
    assert len(list((tmp_path / "ray").glob("*/records.csv"))) == 4
    assert numbers(tmp_path / "local") == numbers(tmp_path / "ray")
    assert {r.method for r in numbers(tmp_path / "ray")} >= {"vae-learning_rate=0.01", "l-mcvae-k2-learning_rate=0.001"}


def test_names_of_a_grid_are_stable_and_mistakes_are_named():
    cells = Grid(["digits"], ["vae"], 1, SMALL, {"trainer": [{"precision": "32-true"}]}, {}).cells()
    assert [cell.name for cell in cells] == ["digits-vae-trainer=__precision____32-true__-s0"]
    for settings, message in [
        ({"run.epoch": 3}, "unknown setting 'run.epoch'"),
        ({"run.epochs": "many"}, "epochs"),
        ({"run.epochs": 0}, "--run.epochs must be at least 1"),
        ({"run.folder": "../elsewhere"}, "decided by the grid"),
    ]:
        with pytest.raises(ValueError, match=message):
            Grid(["digits"], ["vae"], 1, settings, {}, {}).cells()
    with pytest.raises(ValueError, match="unknown method 'vea'"):
        Grid(["digits"], ["vea"], 1, {}, {}, {}).cells()


def test_an_unreachable_cluster_is_named(tmp_path, capsys):
    code = main(arguments(tmp_path, "--backend", "ray", "--address", "127.0.0.1:1"))
    assert code == 1
    assert "no Ray cluster at '127.0.0.1:1'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_failing_cell_does_not_stop_the_others(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MCVAE_DATA", str(tmp_path / "nothing"))  # CelebA fails wherever this runs
    settings = ("--settings", "{data.limit: 50, run.epochs: 1}", "--evaluation", EVALUATION)
    place = ("--out", str(tmp_path), "--retries", "0", "--workers", "1")
    assert main(["sweep", "--data", "[digits,celeba]", "--methods", "[vae]", *settings, *place]) == 1
    error = capsys.readouterr().err
    assert "1 of 2 cells are not done" in error
    assert "celeba-vae-s0: DataError" in error
    assert (tmp_path / "digits-vae-s0" / "records.csv").exists()


@pytest.mark.slow
@pytest.mark.skipif("MCVAE_KILL" not in os.environ, reason="takes minutes; run with MCVAE_KILL=1")
def test_killed_ten_times_the_sweep_ends_as_if_undisturbed(tmp_path):
    assert main(arguments(tmp_path / "quiet", "--workers", "2", epochs=4, seeds=3)) == 0
    sweep = arguments(tmp_path / "killed", "--workers", "2", epochs=4, seeds=3)
    command = [sys.executable, "-m", "mcvae.cli", *sweep]
    command += ["--retries", "50"]
    chance, killed = random.Random(0), 0
    while True:
        driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(chance.uniform(6, 12))
        if driver.poll() is not None:
            break
        victims = [driver.pid] if chance.random() < 0.5 else _children(driver.pid) or [driver.pid]
        os.kill(chance.choice(victims), signal.SIGKILL)
        killed += 1
        if victims != [driver.pid]:
            time.sleep(chance.uniform(2, 6))
            if driver.poll() is None:
                driver.kill()
                killed += 1
        driver.wait()
    assert main(sweep) == 0
    assert killed >= 10
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "quiet")


def _children(parent):
    found = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True, check=False).stdout
    return [int(line) for line in found.split()]
