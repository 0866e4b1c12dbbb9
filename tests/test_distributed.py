"""Many processes: the number of them changes nothing but rounding."""

import csv
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal

import mcvae
from mcvae.core.randomness import draw, seeded_generator
from mcvae.models import PPCA
from mcvae.models.flows import FlowEncoder
from mcvae.runs.config import DataConfig, MethodConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from mcvae.training.evaluate_run import evaluate_run
from mcvae.training.module import VariationalTraining
from mcvae.training.run import train

METHODS = ("vae", "l-mcvae", "a-mcvae")
SCRIPT = """
import sys
import mcvae.training.run as run
from mcvae.core.randomness import seeded_generator
from mcvae.runs.config import *
from mcvae.training.module import VariationalTraining

folder, nodes, *methods = sys.argv[1:]
trainer = {"accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "precision": "64-true"}
if int(nodes) > 1:
    trainer |= {"strategy": "ddp", "num_nodes": int(nodes)}
for name in methods:
    method = name.removeprefix("private-")
    if method != name:  # the named wrong version: every rank has a stream of its own
        VariationalTraining._generator = lambda self, purpose, batch_idx, shared=False: seeded_generator(
            purpose, self.seed, self.current_epoch if shared else 0, batch_idx, self.global_rank
        )
    settings = MethodConfig(method, num_steps=2, control_variate="stopped" if method == "a-mcvae" else None)
    run.train(TrainConfig(DataConfig("digits", batch_size=50, limit=205), ModelConfig(latent_dim=4),
        settings, OptimizerConfig(), RunConfig(epochs=2, folder=f"{folder}/{name}"), trainer))
"""


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def train_on(nodes: int, folder: Path, *methods: str) -> Path:
    """Train in one process, or in several that find each other as nodes do: by environment variables."""
    common = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder), str(nodes), *methods],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=common | {"NODE_RANK": str(node)},
        )
        for node in range(nodes)
    ]
    for process in started:
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
    return folder


def state(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def curve(run: Path) -> torch.Tensor:
    names = ("train_bound", "val_bound", "acceptance", "step_size", "skipped")
    rows = csv.DictReader((run / "metrics.csv").read_text().splitlines())
    return torch.tensor([[float(row[name] or 0) for name in names] for row in rows])


@pytest.mark.slow
def test_two_processes_train_what_one_does_and_private_noise_is_found_out(tmp_path):
    """In float64, where rounding is far from everything else; 205 validation images cannot be shared evenly."""
    one = train_on(1, tmp_path / "one", *METHODS)
    two = train_on(2, tmp_path / "two", *METHODS, "private-l-mcvae")
    for method in METHODS:
        torch.testing.assert_close(curve(two / method), curve(one / method), rtol=1e-6, atol=1e-6)  # logged in float32
        expected, found = state(one / method), state(two / method)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-9)
    private = curve(two / "private-l-mcvae") - curve(one / "l-mcvae")
    assert private[:, 0].abs().max() > 1e-3


def gaussian(rows: torch.Tensor):
    return Independent(Normal(rows[:, :2], rows[:, 2:].exp()), 1)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("flow", [False, True])
def test_a_row_has_the_noise_of_its_place_in_the_whole_batch(flow, world_size):
    encoder = FlowEncoder(nn.Linear(4, 4), 2) if flow else gaussian
    x = torch.randn(6, 4)
    whole = draw(encoder(x), (3,), seeded_generator("noise"))
    for rank, part in enumerate(x.chunk(world_size)):
        found = draw(encoder(part), (3,), seeded_generator("noise", rank=rank, world_size=world_size))
        torch.testing.assert_close(found, whole.chunk(world_size, 1)[rank])


@pytest.mark.parametrize("recipe", [mcvae.recipes.l_mcvae, mcvae.recipes.a_mcvae, mcvae.recipes.uha])
def test_parts_of_a_batch_have_the_bounds_and_pool_to_the_step_sizes_of_the_whole(recipe, monkeypatch):
    """The spread of scores between parts counts, too: here the halves have different data."""
    from mcvae.training import module

    x = torch.cat([torch.randn(4, 4), 2 + torch.randn(4, 4)])
    bridge = lambda rows: mcvae.Bridge(gaussian(rows), lambda z: -(z - rows[:, 2:]).square().sum(-1))
    objective = recipe(3, latent_dim=2)
    whole = objective(bridge(x), generator=seeded_generator("chains"))
    parts = [
        objective(bridge(part), generator=seeded_generator("chains", rank=rank, world_size=2))
        for rank, part in enumerate(x.chunk(2))
    ]
    torch.testing.assert_close(torch.cat([part.bound for part in parts]), whole.bound)
    fields = ["log_weight", "acceptance", "score_std", "score_mean"]
    values = iter([torch.stack([getattr(part.trajectory, name).detach() for part in parts]) for name in fields])
    gathered = dict(zip(fields, values, strict=True))
    order = iter(["acceptance", "log_weight", "score_std", "score_mean"])
    monkeypatch.setattr(module, "_over_ranks", lambda _: gathered[next(order)])
    pooled = module._pooled(parts[0].trajectory)
    torch.testing.assert_close(pooled.acceptance, whole.trajectory.acceptance)
    torch.testing.assert_close(pooled.score_std, whole.trajectory.score_std)
    averaged = gathered["score_std"].square().mean(0).sqrt()  # the named wrong version
    assert (averaged - whole.trajectory.score_std).abs().max() > 0.1


def test_steps_skipped_in_a_row_are_remembered():
    saved, model = {}, mcvae.LatentVariableModel(gaussian, gaussian)
    first, second = (VariationalTraining(model, mcvae.recipes.vae(), OptimizerConfig()) for _ in range(2))
    first.skipped_in_a_row = 7
    first.on_save_checkpoint(saved)
    second.on_load_checkpoint(saved)
    assert second.skipped_in_a_row == 7


@pytest.mark.slow
def test_shards_of_an_evaluation_are_put_together_to_the_very_numbers_of_one_process(tmp_path):
    ppca = PPCA.random(3, 6, generator=seeded_generator("model"))
    model = mcvae.LatentVariableModel(ppca.posterior, ppca)
    x, _ = ppca.simulate(23, generator=seeded_generator("data"))
    batches, options = torch.split(x, 5), {"protocol": mcvae.Protocol(num_samples=8, max_steps=16), "simulated": 2}
    one = mcvae.evaluate(model, batches, **options)
    for part in (0, 1):  # the third is lost, and its batches are computed afterwards
        mcvae.evaluate(model, batches, **options, folder=tmp_path, shard=(part, 3))
    together = mcvae.evaluate(model, batches, **options, folder=tmp_path)
    assert together.table == one.table
    assert json.dumps(together.summary) == json.dumps(one.summary)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"a shard is \(k, n\) with 0 <= k < n, got \(2, 2\)"):
        mcvae.evaluate(model, batches, shard=(2, 2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_processes_evaluate_what_one_does(tmp_path):
    torch.set_default_dtype(torch.float32)
    run = RunConfig(epochs=1, folder=str(tmp_path / "run"))
    options = {"enable_progress_bar": False}
    data = DataConfig("digits", batch_size=50, limit=100)
    folder = train(TrainConfig(data, ModelConfig(latent_dim=4), MethodConfig("realnvp"), run=run, trainer=options))
    protocol = {"num_steps": 3, "num_samples": 4, "limit": 130, "simulated": 4, "split": "validation"}
    tables, summaries = [], []
    for processes in (1, 2):
        summaries.append(replace(evaluate_run(folder, **protocol, processes=processes), seconds=0))
        tables.append((folder / "evaluation-validation.csv").read_bytes())
    assert tables[0] == tables[1]
    assert summaries[0] == summaries[1]
