"""Records as a table: for the terminal, Markdown and LaTeX. Imports no torch."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from rich import markup
from rich.console import Console
from rich.table import Table as RichTable

from mcvae.runs.method import label_of
from mcvae.runs.records import Record, Summary, summarise

__all__ = ["LABELS", "Answer", "Table", "console", "latex", "markdown", "plus_minus", "table", "terminal", "unique"]

T = TypeVar("T")

LABELS = {
    "negative_elbo": "−ELBO",
    "nll": "NLL",
    "nll_minus_vae": "NLL − VAE's",
    "certificate": "NLL certified within",
    "bits_per_dim": "bits/dim",
    "validation_negative_elbo": "validation −ELBO",
    "validation_nll": "validation NLL",
    "energy_distance": "energy distance",
    "energy_distance_resampled": "energy distance, one of 10 drawn by weight",
    "bound_gap": "log p(x) − bound",
    "squared_error": "‖θ̂ − θ‖²",
    "log_evidence_error": "log p̂ − log p",
    "log_evidence_variance": "variance of log p̂",
    "gradient_variance": "variance of gradient",
    "gradient_snr": "signal to noise of gradient",
    "gradient_bias": "gradient bias, relative to ∇log p",
    "elbo": "ELBO",
    "log_evidence": "log Ẑ",
    "derivative_z": "own bias, in standard errors",
}
"""Metrics in words."""
_LARGEST = ("certificate",)
"""Metrics whose largest value over seeds is shown: a certificate holds for the worst one."""


class Table(NamedTuple):
    """A table as text."""

    title: str
    header: list[str]
    rows: list[list[str]]
    notes: list[str]
    names: int = 1
    """How many of the first columns hold names; the others hold numbers."""


class Answer(NamedTuple):
    """The result of a table in words."""

    headline: str
    details: str = ""


def table(title: str, records: Sequence[Record], metrics: Sequence[str]) -> Table:
    """A row per method, a column per metric, data set and epoch, the paper's number beside ours; then the cost.

    With more than two metrics each of several data sets gets rows of its own instead of columns.
    """
    found = summarise(records)
    datasets = unique(s.dataset for s in found)
    apart = len(metrics) > 2 and len(datasets) > 1
    cells = dict[_Row, dict[_Column, Summary]]()
    for s in found:
        row, column = (s.dataset if apart else "", s.method), (s.metric, "" if apart else s.dataset, s.epoch)
        cells.setdefault(row, {})[column] = s
    columns = sorted(
        unique(column for row in cells.values() for column in row),
        key=lambda c: (metrics.index(c[0]), c[1] and datasets.index(c[1]), c[2] or 0),
    )
    with_paper = {c for row in cells.values() for c, s in row.items() if s.paper is not None}
    theirs = "published" if any(s.metric == "elbo" for s in found) else "paper"
    header = ["data", "method"] if apart else ["method"]
    for column in columns:
        named = len(datasets) > 1 and not apart
        header += [_heading(column, named), *([theirs] if column in with_paper else [])]
    costly = any(s.evaluations is not None for s in found)
    rows = []
    for (dataset, method), measured in sorted(cells.items(), key=lambda item: apart and datasets.index(item[0][0])):
        text = [dataset, label_of(method)] if apart else [label_of(method)]
        seeds = max(s.num_seeds for s in measured.values())
        for column in columns:
            summary = measured.get(column)
            text += [_ours(summary, seeds), *([_paper(summary)] if column in with_paper else [])]
        if costly:
            last = max(measured.values(), key=lambda s: s.epoch or 0)
            text += [_count(last.evaluations), _count(last.seconds)]
        rows.append(text)
    return Table(
        title,
        header + (["model evaluations", "seconds"] if costly else []),
        rows,
        _notes(found, theirs if with_paper else ""),
        names=2 if apart else 1,
    )


_Row = tuple[str, str]
"""Data set (or an empty string) and method."""
_Column = tuple[str, str, int | None]
"""Metric, data set (or an empty string) and epoch."""


def unique(items: Iterable[T]) -> list[T]:
    """Each item once, in the order of its first appearance."""
    return list(dict.fromkeys(items))


def _heading(column: _Column, named: bool) -> str:
    metric, dataset, epoch = column
    parts = [
        LABELS.get(metric, metric),
        *([dataset] if named else []),
        *([f"{epoch} epoch{'s' * (epoch > 1)}"] if epoch else []),
    ]
    return ", ".join(parts)


def _ours(summary: Summary | None, seeds: int) -> str:
    if summary is None:
        return ""
    value, error = (summary.largest, None) if summary.metric in _LARGEST else (summary.mean, summary.spread)
    some = f" ({summary.num_seeds} of {seeds} seeds)" if summary.num_seeds < seeds else ""
    return plus_minus(value, error, 2 if summary.metric in _LARGEST else None) + some


def _paper(summary: Summary | None) -> str:
    return "" if summary is None or summary.paper is None else plus_minus(summary.paper, summary.paper_deviation, 2)


def plus_minus(value: float, error: float | None, digits: int | None = None) -> str:
    """A value and its error, with the digits that the error allows.

    >>> plus_minus(23.3109, 0.2035), plus_minus(23.3109, None)
    ('23.31 ± 0.20', '23.31')
    """
    if not math.isfinite(value):
        return str(value)
    if digits is None:
        scale = error if error else abs(value) / 100
        digits = 2 if scale == 0 else min(5, max(0, 1 - math.floor(math.log10(scale))))
    if abs(value) >= 1e5:
        return f"{value:.2g}" + ("" if error is None else f" ± {error:.1g}")
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _notes(found: Sequence[Summary], theirs: str) -> list[str]:
    seeds = {max(s.num_seeds for s in found if s.method == method) for method in {s.method for s in found}}
    notes = []
    if max(seeds) > 1:
        few, many = min(seeds), max(seeds)
        notes.append(f"± standard deviation over {many if few == many else f'{few} to {many}'} seeds.")
    if min(seeds) == 1:
        notes.append("One seed: ± standard error within the run (data, chains or replicates).")
    if theirs:
        notes.append(_SOURCES[theirs])
    return notes


_SOURCES = {
    "paper": "Paper: mean ± standard deviation over 5 seeds, with its own likelihood estimator.",
    "published": "Published: the repository of CMCD, after 150,000 updates.",
}


def markdown(content: Table) -> str:
    """The table in Markdown.

    >>> print(markdown(Table("T", ["method", "NLL"], [["VAE", "1 ± 2"]], ["Note."])))
    **T**
    <BLANKLINE>
    | method | NLL |
    |---|---|
    | VAE | 1 ± 2 |
    <BLANKLINE>
    Note.
    """
    lines = [f"**{content.title}**", "", "| " + " | ".join(content.header) + " |", "|---" * len(content.header) + "|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in content.rows]
    return "\n".join([*lines, "", *content.notes])


_LATEX = {
    "θ̂": r"$\hat\theta$", "p̂": r"$\hat p$",  # before their letters alone
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}",
    "±": r"$\pm$", "−": "$-$", "‖": r"$\|$", "θ": r"$\theta$", "ξ": r"$\xi$", "ζ": r"$\zeta$", "²": "$^2$",
    "∇": r"$\nabla$", "̂": "",
}  # fmt: skip


def latex(content: Table) -> str:
    """The table in LaTeX, for the package booktabs.

    >>> "VAE & 1 $\\\\pm$ 2" in latex(Table("T", ["method", "NLL"], [["VAE", "1 ± 2"]], []))
    True
    """

    def escape(text: str) -> str:
        return re.sub("|".join(map(re.escape, _LATEX)), lambda found: _LATEX[found[0]], text)

    body = " \\\\\n".join(" & ".join(map(escape, row)) for row in content.rows)
    return (
        f"\\begin{{table}}\n\\caption{{{escape(' '.join([content.title + '.', *content.notes]))}}}\n"
        f"\\begin{{tabular}}{{{'l' * content.names}{'r' * (len(content.header) - content.names)}}}\n\\toprule\n"
        f"{' & '.join(map(escape, content.header))} \\\\\n\\midrule\n{body} \\\\\n\\bottomrule\n"
        "\\end{tabular}\n\\end{table}\n"
    )


def console() -> Console:
    """The terminal; where the output goes elsewhere, 160 columns wide."""
    found = Console()
    return found if found.is_terminal else Console(width=160)


def terminal(content: Table) -> RichTable:
    """The table for a terminal."""
    shown = RichTable(title=content.title, caption=" ".join(content.notes))
    for index, name in enumerate(content.header):
        shown.add_column(name, justify="left" if index < content.names else "right")
    for row in content.rows:
        shown.add_row(*map(markup.escape, row))
    return shown
