"""Make the table and the figure of a reproduction from its records."""

from pathlib import Path

import numpy

from mcvae.report.figures import draw
from mcvae.report.tables import console, latex, markdown, table, terminal
from mcvae.runs.plain import read_json
from mcvae.runs.records import read_records

__all__ = ["present"]


def present(folder: Path) -> list[Path]:
    """Write `table.md`, `table.tex`, `figure.png` and `figure.svg` of a reproduction, and print the table."""
    provenance = read_json(folder / "provenance.json")
    records = read_records(folder / "records.csv")
    path = folder / "arrays.npz"
    arrays = dict(numpy.load(path)) if path.exists() else {}
    title = f"{provenance['title']} ({provenance['preset']}, protocol {provenance['protocol']})"
    content = table(title, records, provenance["metrics"])
    if unfinished := provenance["unfinished"]:
        more = f" and {len(unfinished) - 5} more" if len(unfinished) > 5 else ""
        content.notes.append(f"Not finished: {', '.join(unfinished[:5])}{more}.")
    (folder / "table.md").write_text(markdown(content) + "\n")
    (folder / "table.tex").write_text(latex(content))
    console().print(terminal(content))
    return [folder / "table.md", folder / "table.tex", *draw(provenance["experiment"], title, records, arrays, folder)]
