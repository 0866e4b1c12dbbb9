"""Every Python block of the documents runs, and the examples do."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    "README.md",
    *(
        f"docs/{name}.md"
        for name in ("quickstart", "guide", "own-data", "choosing", "evaluation", "extending", "mathematics")
    ),
]


@pytest.fixture(autouse=True)
def _as_a_user_would():
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTS)
def test_python_blocks_run_in_order(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    namespace = {}
    for block in blocks:
        exec(compile(block, name, "exec"), namespace)


def test_pages_show_the_tables_of_the_results():
    with_tables = runpy.run_path(str(ROOT / "docs/tables.py"))["with_tables"]
    pages = [path for path in (ROOT / "docs").glob("*.md") if "<!-- results/" in path.read_text()]
    assert len(pages) >= 3
    for path in pages:
        assert path.read_text() == with_tables(path.read_text()), f"{path.name}: run python docs/tables.py"
    assert (
        with_tables("<!-- results/mnist/table.md -->\nold\n<!-- end -->")
        != "<!-- results/mnist/table.md -->\nold\n<!-- end -->"
    )


def test_no_document_with_python_is_forgotten():
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    with_python = {str(path.relative_to(ROOT)) for path in documents if "```python" in path.read_text()}
    assert with_python == set(DOCUMENTS)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(path, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where one writes a file
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


def test_every_name_of_the_paper_to_code_table_exists():
    import mcvae

    text = (ROOT / "docs/paper-to-code.md").read_text()
    table = text.split("## Where we do not follow the text")[0]
    for cell in re.findall(r"^\|[^|]*\|([^|\n]*)\|", table, re.MULTILINE):
        for name in re.findall(r"`([A-Za-z_.]+)", cell):
            if name in ("log_weight", "log_ratio"):
                continue
            target = mcvae
            for part in name.split("."):
                owner, target = target, getattr(target, part, None)
                assert target is not None or part in getattr(owner, "_fields", ()), name
    for name in re.findall(r"`(test_\w+\.py)`", text):
        assert (ROOT / "tests" / name).exists(), name
