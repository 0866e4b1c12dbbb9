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
