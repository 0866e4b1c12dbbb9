"""A new user's five minutes with a folder of photographs, a count matrix and a table: train, evaluate, encode, …"""

import csv
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from sklearn import datasets

import mcvae
from mcvae.cli import main
from mcvae.runs.plain import RunError

pytestmark = pytest.mark.slow
SHORT = [
    "--optimizer.learning_rate",
    "0.004",
    "--run.epochs",
    "6",
    "--data.batch_size",
    "16",
    "--trainer.logger",
    "false",
    "--method",
    "l-mcvae-k2",
]
FAST = ["--num_steps", "4", "--num_samples", "16"]


@pytest.fixture(autouse=True)
def _as_a_user_would(monkeypatch, tmp_path_factory):
    torch.set_default_dtype(torch.float32)
    monkeypatch.chdir(HOME["folder"])
    monkeypatch.setenv("MCVAE_DATA", str(HOME["folder"] / "cache"))


HOME = {}


@pytest.fixture(scope="module", autouse=True)
def _files(tmp_path_factory):
    """Real data of scikit-learn, as people have them: digits as PNG and as counts of ink, wines as a table."""
    home = HOME["folder"] = tmp_path_factory.mktemp("user")
    digits = datasets.load_digits()
    for index, image in enumerate(digits.images[:300]):
        folder = home / "photos" / str(digits.target[index])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 255 / 16).astype(np.uint8)).save(folder / f"{index:04}.png")
    np.save(home / "counts.npy", digits.data[:300].astype(np.int64))
    wine = datasets.load_wine()
    np.savetxt(home / "wine.csv", wine.data, delimiter=",", header=",".join(wine.feature_names), comments="")


def call(capsys, *arguments) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def read(path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


USERS = {
    "photos": ("bernoulli", "images of 1×8×8 pixels, 243 for training, 27 for validation, 30 for testing"),
    "counts.npy": ("negative-binomial", "rows of 64 counts, 243 for training, 27 for validation, 30 for testing"),
    "wine.csv": ("gaussian-per-dimension", "rows of 13 numbers, 145 for training, 16 for validation, 17 for testing"),
}


@pytest.mark.parametrize("data", USERS)
def test_one_command_each_trains_evaluates_encodes_reconstructs_scores_and_samples(data, capsys, tmp_path):
    likelihood, described = USERS[data]
    assert main(["train", "--data", data, *SHORT]) == 0
    said = capsys.readouterr()
    run = HOME["folder"] / "runs" / f"{data.partition('.')[0]}-l-mcvae-k2-s0"
    assert f"{data}: {described} (likelihood: {likelihood})" in said.err
    assert f"{run.relative_to(HOME['folder'])}: trained" in said.out
    rows = read(run / "metrics.csv")
    assert float(rows[-1]["val_bound"]) > float(rows[0]["val_bound"])  # it learns

    evaluated = call(capsys, "evaluate", run, *FAST, "--simulated", 0, "--compare_iwae", "false")
    unit = "images" if data == "photos" else "rows"
    assert re.search(rf"NLL \d+\.\d+ on \d+ test {unit}", evaluated)
    assert f", {unit} " in said.err
    nll = json.loads((run / "result.json").read_text())["evaluation"]["nll"]

    assert "mean [" in call(capsys, "encode", run, data, "--out", tmp_path / "latents.npz", "--limit", 12)
    latents = np.load(tmp_path / "latents.npz")
    assert latents["mean"].shape == latents["scale"].shape == (12, mcvae.load(run).latent_dim)
    assert latents["scale"].min() > 0
    call(capsys, "encode", run, "test", "--out", tmp_path / "latents.parquet")
    assert parquet.read_table(tmp_path / "latents.parquet").column_names[:2] == ["mean_0", "mean_1"]

    call(capsys, "reconstruct", run, "test", "--out", tmp_path / "again.npz")
    pairs = np.load(tmp_path / "again.npz")
    assert pairs["data"].shape == pairs["reconstruction"].shape
    mean_only = ((pairs["data"] - pairs["data"].mean(0)) ** 2).mean()
    assert ((pairs["data"] - pairs["reconstruction"]) ** 2).mean() < mean_only

    scored = call(capsys, "score", run, "test", *FAST, "--out", tmp_path / "scores.csv", "--show", 2)
    scores = read(tmp_path / "scores.csv")
    values = np.array([float(row["log_likelihood"]) for row in scores])
    errors = np.array([float(row["standard_error"]) for row in scores])
    assert abs(-values.mean() - nll) < 5 * errors.mean()  # the same data, other chains
    assert f"{values.min():.3f}" in scored

    call(capsys, "sample", run, "--format", "npz", "--number", 7, "--out", tmp_path / "drawn.npz")
    drawn = np.load(tmp_path / "drawn.npz")
    assert drawn["x"].shape == drawn["mean"].shape == (7, *pairs["data"].shape[1:])
    if data == "wine.csv":  # in its own units: the last column, proline, is near 750
        assert 300 < np.median(drawn["mean"][:, -1]) < 1300
        assert abs(pairs["data"][0, -1] - round(pairs["data"][0, -1])) < 1e-2


@pytest.fixture
def wine(capsys):
    run = HOME["folder"] / "runs" / "wine-l-mcvae-k2-s0"
    if not run.exists():
        call(capsys, "train", "--data", "wine.csv", *SHORT)
    return run


def fails(capsys, *arguments) -> str:
    assert main([str(argument) for argument in arguments]) == 1
    return capsys.readouterr().err


def test_an_unusual_row_is_scored_lowest_and_named(wine, capsys, tmp_path):
    lines = (HOME["folder"] / "wine.csv").read_text().splitlines()
    lines[9] = ",".join(["20"] * 13)
    (tmp_path / "new.csv").write_text("\n".join(lines[:15]))
    said = call(capsys, "score", wine, tmp_path / "new.csv", *FAST, "--out", tmp_path / "s.npz", "--show", 1)
    assert said.splitlines()[1].endswith("new.csv, line 10")
    assert np.load(tmp_path / "s.npz")["log_likelihood"].argmin() == 8


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_rows_far_from_all_others_are_scored_and_reconstructed_without_a_warning(wine, capsys, tmp_path):
    header, *lines = (HOME["folder"] / "wine.csv").read_text().splitlines()
    (tmp_path / "far.csv").write_text("\n".join([header, *lines[:3], ",".join(["1e30"] * 13)]))
    said = call(capsys, "score", wine, tmp_path / "far.csv", *FAST, "--out", tmp_path / "s.npz", "--show", 1)
    assert said.splitlines()[1].endswith("far.csv, line 5")
    said = call(capsys, "reconstruct", wine, tmp_path / "far.csv", "--out", tmp_path / "r.npz")
    assert "error inf" not in said


def test_new_data_must_be_like_those_of_training(wine, capsys, tmp_path):
    header, *lines = (HOME["folder"] / "wine.csv").read_text().splitlines()
    names = header.split(",")
    moved = tmp_path / "moved.csv"  # the same columns in another order, and one more
    moved.write_text(
        "\n".join([",".join([*names[::-1], "more"])] + [",".join([*r.split(",")[::-1], "0"]) for r in lines])
    )
    call(capsys, "encode", wine, moved, "--out", tmp_path / "a.npz")
    call(capsys, "encode", wine, "wine.csv", "--out", tmp_path / "b.npz")
    assert np.allclose(np.load(tmp_path / "a.npz")["mean"], np.load(tmp_path / "b.npz")["mean"], atol=1e-5)
    parts = [
        "split",
        *(["test", "train"][number % 2] for number in range(len(lines))),
    ]  # the order stays that of the file
    moved.write_text("\n".join(f"{row},{part}" for row, part in zip([header, *lines], parts, strict=True)))
    call(capsys, "encode", wine, moved, "--out", tmp_path / "a.npz")
    assert np.allclose(np.load(tmp_path / "a.npz")["mean"], np.load(tmp_path / "b.npz")["mean"], atol=1e-5)
    moved.write_text("\n".join([",".join(names[1:])] + [",".join(row.split(",")[1:]) for row in lines]))
    assert "the column 'alcohol', which the run was trained on, is missing" in fails(capsys, "encode", wine, moved)
    np.save(tmp_path / "x.npy", np.ones((4, 5)))
    assert "trained on data of shape [13], got [5]" in fails(capsys, "encode", wine, tmp_path / "x.npy")
    assert "must end in .npz, .csv or .parquet" in fails(capsys, "encode", wine, "test", "--out", "latents.xls")
    assert "expected train, validation, test or the path" in fails(capsys, "encode", wine, "tests")
    assert "draw numbers with --format npz" in fails(capsys, "sample", wine)


def test_data_that_have_changed_are_not_evaluated_on(wine, capsys):
    """The split would be another, and test rows would be ones that were trained on."""
    path = HOME["folder"] / "wine.csv"
    before = path.read_text()
    try:
        path.write_text("\n".join(before.splitlines()[:-1]))
        assert "has changed since the run was trained" in fails(capsys, "evaluate", wine, *FAST)
    finally:
        path.write_text(before)


def test_states_of_chains_are_samples_of_the_posterior(wine, capsys, tmp_path):
    arguments = ["encode", wine, "test", "--out", tmp_path / "s.npz", "--states", 200, "--limit", 2]
    call(capsys, *arguments)
    found = np.load(tmp_path / "s.npz")
    assert found["states"].shape == (2, 200, found["mean"].shape[1])
    model = mcvae.load(wine)
    x = next(iter(mcvae.training.applying.apply_run(wine, "test", limit=2).batches))
    log_p = model.log_joint(x, torch.from_numpy(found["states"]).transpose(0, 1))
    at_mean = model.log_joint(x, torch.from_numpy(found["mean"])[None])
    assert (log_p.mean(0) < at_mean[0]).all()  # spread around the mode, not collapsed onto it
    assert (log_p.mean(0) > at_mean[0] - 3 * found["mean"].shape[1]).all()


def test_methods_in_python_do_the_same(wine):
    model = mcvae.load(wine)
    x = torch.randn(3, 13)
    evidence = model.score(x, num_steps=4, generator=torch.Generator().manual_seed(0))
    assert evidence.log_evidence.shape == evidence.standard_error.shape == (3,)
    assert model.encode(x).mean.shape == (3, model.latent_dim)
    assert torch.equal(model.reconstruct(x), model.decoder(model.encode(x).mean).mean)
    assert model.simulate(2)[0].shape == (2, 13)


@pytest.mark.parametrize("options", [["--data.condition", "[folder]"], ["--model.likelihood", "categorical"]])
def test_images_are_drawn_whatever_their_model(options, capsys, tmp_path):
    run = tmp_path / "run"
    call(capsys, "train", "--data", "photos", *SHORT, "--run.epochs", 1, *options, "--run.folder", run)
    call(capsys, "sample", run, "--number", 9, "--out", tmp_path / "drawn.png")
    drawn = np.asarray(Image.open(tmp_path / "drawn.png"))
    dark = Image.open(tmp_path / "drawn.png").crop((4, 4, 8, 8)).getextrema()  # the corner of a digit
    assert drawn.ndim == 2
    assert drawn.max() > 150
    assert dark[0] < 60


def own_model():
    networks = torch.nn.Linear(4, 4), torch.nn.Linear(2, 4)
    return mcvae.LatentVariableModel(
        mcvae.models.GaussianEncoder(networks[0]),
        mcvae.models.Decoder(networks[1], mcvae.models.GaussianLikelihood(squashed=False)),
        latent_dim=2,
    )


def test_a_module_of_ones_own_is_saved_without_its_code(tmp_path):
    saved, x = own_model(), torch.randn(3, 4)
    mcvae.save(saved, tmp_path / "own")
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == ["model.json", "model.safetensors"]
    fresh = own_model()
    assert not torch.equal(fresh.encode(x).mean, saved.encode(x).mean)
    assert mcvae.load(tmp_path / "own", fresh) is fresh
    assert torch.equal(fresh.encode(x).mean, saved.encode(x).mean)
    mcvae.save(saved, tmp_path / "own")  # again
    with pytest.raises(RunError, match=r"of your own, LatentVariableModel, whose code is not saved.*into=module"):
        mcvae.load(tmp_path / "own")
    with pytest.raises(RunError, match="do not fit Linear"):
        mcvae.load(tmp_path / "own", torch.nn.Linear(2, 2))
    weights = tmp_path / "own" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(RunError, match="checksum"):
        mcvae.load(tmp_path / "own", own_model())


def test_a_run_is_not_overwritten_by_a_module(wine):
    with pytest.raises(RunError, match="holds a run of mcvae train"):
        mcvae.save(own_model(), wine)
