"""The benchmark densities have the evidence they claim, and no method exceeds it."""

import pytest
import torch

from mcvae.data.splits import DataError
from mcvae.experiments.densities import TARGETS, load_target
from mcvae.experiments.paper import DENSITIES, ReproductionOptions
from mcvae.experiments.posteriors import cells, run


@pytest.mark.parametrize(("name", "width"), [("banana", 60.0), ("mixture-40", 60.0)])
def test_two_dimensional_densities_integrate_to_their_evidence(name, width):
    target = load_target(name)
    axis = torch.linspace(-width, width, 501)
    z = torch.cartesian_prod(axis, axis).unsqueeze(1)
    cell = float(axis[1] - axis[0]) ** 2
    assert float(target.log_joint(z).double().exp().sum()) * cell == pytest.approx(1.0, abs=0.01)


def test_a_well_has_a_thirty_second_part_of_the_dimensions_and_a_sixteenth_of_the_log_evidence():
    target = load_target("many-well")
    axis = torch.linspace(-8, 8, 801)
    pair = torch.cartesian_prod(axis, axis)
    z = pair.repeat(1, 16).unsqueeze(1)
    one = target.log_joint(z).double() / 16
    log_integral = one.flatten().logsumexp(0) + 2 * torch.log((axis[1] - axis[0]).double())
    assert 16 * float(log_integral) == pytest.approx(target.log_evidence, abs=0.01)


def test_the_funnel_is_the_product_of_its_conditionals():
    z = torch.randn(7, 1, 10)
    v = z[..., 0]
    expected = torch.distributions.Normal(0, 3).log_prob(v)
    expected = expected + torch.distributions.Normal(0, (v / 2).exp().unsqueeze(-1)).log_prob(z[..., 1:]).sum(-1)
    torch.testing.assert_close(load_target("funnel").log_joint(z), expected)


@pytest.mark.parametrize("method", ["vi", "uha", "cmcd", "smc"])
def test_no_method_lies_above_the_evidence(tmp_path, method):
    settings = {"density": "banana", "method": method, "num_steps": 0 if method == "vi" else 4, "seed": 0}
    records = run(
        tmp_path, settings | {"num_updates": 30, "num_chains": 400 if method == "smc" else 500, "compile": False}
    )
    assert {record.metric for record in records} == ({"log_evidence"} if method == "smc" else {"elbo", "log_evidence"})
    for record in records:
        assert record.value < 5 * record.standard_error


def test_all_methods_have_a_cell_of_their_own():
    names = [cell.name for cell in cells(ReproductionOptions("paper"))]
    assert len(names) == len(set(names)) == 8 * (1 + 8 * 4)
    assert tuple(TARGETS) == DENSITIES


def test_a_part_of_the_benchmark_can_be_chosen():
    options = ReproductionOptions(preset="paper", methods=["vi", "cmcd-k8", "uha"], densities=["sonar"])
    options.check("posteriors")
    names = [cell.name for cell in cells(options)]
    uha = [f"posterior-sonar-uha-k{number}-s0" for number in (8, 32, 64, 256)]
    assert names == ["posterior-sonar-vi-k0-s0", "posterior-sonar-cmcd-k8-s0", *uha]
    with pytest.raises(ValueError, match="K is one of"):
        ReproductionOptions(methods=["cmcd-k7"]).check("posteriors")
    with pytest.raises(ValueError, match="sonar"):
        ReproductionOptions(densities=["sonr"]).check("posteriors")


def test_a_missing_file_is_downloaded_and_verified_or_named(tmp_path, monkeypatch):
    monkeypatch.setenv("MCVAE_DATA", str(tmp_path))
    asked = []

    def retrieve(url, known_hash, fname, path):
        asked.append((url, known_hash))
        raise OSError("no network")

    monkeypatch.setattr("pooch.retrieve", retrieve)
    with pytest.raises(DataError, match=r"ionosphere\.csv: no network.*archive\.ics\.uci\.edu"):
        load_target("ionosphere")
    assert asked[0][1].startswith("sha256:")
    with pytest.raises(DataError, match=r"expected .*sonar\.csv"):
        load_target("sonar")
