"""What is said about the project in several places is the same."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["repository-code"] == PROJECT["urls"]["Homepage"]
    newest = re.search(r"^## (\S+?),", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert newest == PROJECT["version"]


def test_every_address_of_the_project_is_below_its_home():
    """Whoever publishes the project elsewhere changes `Homepage`, and this test says what else."""
    home = PROJECT["urls"]["Homepage"]
    own = [url for name, url in PROJECT["urls"].items() if name not in ("Homepage", "Paper")]
    assert own
    assert all(url.startswith(f"{home}/") for url in own)
    changes = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]
    raw = home.replace("https://github.com/", "https://raw.githubusercontent.com/")
    assert f"({raw}/main/" in changes[0]["replacement"]
    assert f"({home}/blob/main/" in changes[1]["replacement"]


def test_the_files_that_the_design_names_exist():
    """The way of the data, as it is now: the last column of that table."""
    text = (ROOT / "docs" / "design.md").read_text()
    table = text[text.index("| | before | now |") :].split("\n\n")[0]
    now = [row.split(" | ")[2] for row in table.splitlines()[2:]]
    named = [path for cell in now for path in re.findall(r"`([a-z_]+(?:/[a-z_]+)?)`", cell)]
    assert len(named) > 12
    for path in named:
        place = ROOT / "src" / "mcvae" / path
        assert place.is_dir() or place.with_suffix(".py").is_file(), path


def test_no_link_or_picture_of_the_readme_is_relative_on_pypi():
    link = re.compile(r"\]\((?!https?:)[^)]+\)")
    text = (ROOT / "README.md").read_text()
    assert link.search(text)  # relative in the repository
    for change in PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    assert not link.search(text)
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert pictures
    for picture in pictures:
        place = picture.removeprefix("https://raw.githubusercontent.com/mcvae/mcvae/main/")
        assert (ROOT / place).is_file(), picture


def test_documents_link_to_files_that_exist():
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_makefile_has_every_target_that_is_spoken_of():
    known = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    spoken = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / ".ci" / "run", *(ROOT / "docs").glob("*.md")]
    spoken += (ROOT / ".github" / "workflows").glob("*.yml")  # not part of the sdist
    named = {target for path in spoken for target in re.findall(r"(?:`|run: |^)make ([a-z]+)", path.read_text(), re.M)}
    assert named >= {"test", "fast", "lint", "docs", "bench", "demo"}
    assert named <= known
