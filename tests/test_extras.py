"""`pip install mcvae` is enough for a density; everything else names the extra that it needs."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import mcvae
from mcvae._extras import EXTRAS, needs_extra

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WITHOUT_EXTRAS = f"""
import sys

class Absent:
    def find_spec(self, fullname, path, target=None):
        if fullname.partition(".")[0] in {sorted(name for names in EXTRAS.values() for name in names)}:
            raise ModuleNotFoundError(f"No module named {{fullname!r}}", name=fullname)

sys.meta_path.insert(0, Absent())
"""


def run_without_extras(program, *arguments):
    command = [sys.executable, "-c", WITHOUT_EXTRAS + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_the_evidence_of_a_density_and_a_bound_need_no_extra():
    done = run_without_extras("""
import torch
from torch.distributions import Independent, Normal
import mcvae

q = Independent(Normal(torch.zeros(1, 2), 2 * torch.ones(1, 2)), 1)
e = mcvae.estimate_log_evidence(
    lambda z: -0.5 * (z - 1).square().sum(-1), q, num_steps=10, generator=torch.Generator().manual_seed(0)
)
assert abs(e.log_evidence.item() - 1.838) < 5 * e.standard_error.item() + 0.01, e

encoder = decoder = lambda x: Independent(Normal(x, torch.ones_like(x)), 1)
model = mcvae.LatentVariableModel(encoder, decoder)
objective = mcvae.recipes.l_mcvae(num_steps=2, latent_dim=2)
objective(model.bridge(torch.randn(4, 2))).loss.mean().backward()
mcvae.evaluate(model, torch.randn(4, 2), protocol=mcvae.Protocol(num_steps=3, num_samples=4), simulated=0)
print("done")
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import mcvae; mcvae.load", "mcvae.load needs the extra 'train': pip install 'mcvae[train]'"),
        ("from mcvae.data import load_images; load_images('digits')", "the data set digits needs the extra 'train'"),
    ],
)
def test_a_missing_extra_is_named_in_python(program, message):
    done = run_without_extras(program)
    assert done.returncode == 1
    assert f"MissingExtraError: {message}" in done.stderr


@pytest.mark.parametrize("arguments", [["train", "--data", "mnist"], ["--help"], ["report", "runs"]])
def test_a_missing_extra_is_one_sentence_on_the_command_line(arguments):
    done = run_without_extras("from mcvae.__main__ import main; sys.exit(main())", *arguments)
    assert done.returncode == 1
    command = "" if arguments == ["--help"] else f" {arguments[0]}"
    assert done.stderr == f"mcvae{command} needs the extra 'train': pip install 'mcvae[train]'\n"
    debugged = run_without_extras("from mcvae.__main__ import main; sys.exit(main())", *arguments, "--debug")
    assert "Traceback" in debugged.stderr


def test_a_module_of_no_extra_is_reported_as_it_is():
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'no_such_module'$"), needs_extra("this"):
        import no_such_module  # noqa: F401


def declared(requirements):
    return {re.match(r"[\w.-]+", requirement)[0].lower() for requirement in requirements}


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_declares_the_packages_it_is_named_for(extra):
    distributions = packages_distributions()
    if not set(EXTRAS[extra]) <= distributions.keys():
        pytest.skip(f"{extra} is not installed")
    expected = {name.lower() for module in EXTRAS[extra] for name in distributions[module]}
    assert declared(PROJECT["optional-dependencies"][extra]) <= expected
    for module in EXTRAS[extra]:
        assert declared(PROJECT["optional-dependencies"][extra]) & {name.lower() for name in distributions[module]}


def test_every_imported_package_is_declared():
    imports = re.compile(r"^\s*(?:import|from) +(\w+)", re.MULTILINE)
    sources = [path.read_text() for path in Path(mcvae.__file__).parent.rglob("*.py")]
    modules = {module for source in sources for module in imports.findall(source)}
    distributions = packages_distributions()
    third_party = {module for module in modules if module in distributions} - sys.stdlib_module_names - {"mcvae"}
    assert third_party >= {"torch", "markupsafe", "lazy_loader"}
    known = {module for names in EXTRAS.values() for module in names} | {"lazy_loader", "numpy", "torch"}
    assert third_party <= known, "add it to an extra in pyproject.toml and src/mcvae/_extras.py"
    assert declared(PROJECT["dependencies"]) == {"lazy-loader", "numpy", "torch"}
