"""One self-contained page over runs and reproductions: nothing is fetched, and names of users are escaped."""

import base64
import hashlib
import os
import shlex
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from mcvae.report.compare import answers, certificate, describe, kind, rows
from mcvae.report.panels import panels
from mcvae.report.read import Reproduction, Run, find
from mcvae.report.records import record_answers, record_charts, record_rows

__all__ = ["render", "write_page"]

HERE = Path(__file__).parent
_MOST_BYTES = 400_000
"""Of one picture; larger ones are left out, so that the page stays a page."""
_MOST_PICTURES = 60
_PICTURES = {
    "samples": "Samples: means of p(x | z), z from the prior",
    "reconstructions": "Originals, each left of its reconstruction",
    "worst": "Explained worst, the worst first",
}


def write_page(paths: list[str], out: str | Path) -> Path:
    """Write the page and return where it is; a reader sees the old page or the new one.

    Args:
        paths: run folders, reproduction folders, or folders of them.
        out: the HTML file; its folder is created if need be.
    """
    out = Path(out)
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; give a file, such as {out / 'report.html'}.")
    text = render(*find(paths), command=shlex.join(["mcvae", "report", *paths, "--out", str(out)]))
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    return out


def render(runs: list[Run], reproductions: list[Reproduction], *, command: str = "mcvae report") -> str:
    """The page as HTML."""
    results = [run.result | {"folder": str(run.folder), "name": run.name} for run in runs]
    columns, body = rows(results)
    order = {row[0].text: index for index, row in enumerate(body)}
    runs = sorted(runs, key=lambda run: order[run.name])
    style = {run.name: index for index, run in enumerate(runs)}
    kinds = dict[tuple[str, ...], list[Run]]()
    for run in runs:
        kinds.setdefault(kind(run.result), []).append(run)
    css, script = (Markup((HERE / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("template.html").render(
        css=css,
        script=script,
        css_hash=_hash(css),
        script_hash=_hash(script),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=version("mcvae"),
        command=command,
        digest=_digest(runs, reproductions),
        answers=answers(results) + [a for found in reproductions for a in record_answers(found.name, found.records)],
        columns=columns,
        rows=body,
        style=style,
        groups=[panels(label, members, style) for label, members in kinds.items()],
        pictures=_pictures(runs),
        reproductions=[_reproduction(found) for found in reproductions],
        runs=[_describe_run(run) for run in runs],
    )


def _hash(text: str) -> str:
    """For the page's content security policy: only our own script and style may run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _digest(runs: list[Run], reproductions: list[Reproduction]) -> str:
    """Of everything that the page was made from."""
    digest = hashlib.sha256()
    files = ("config.yaml", "metrics.csv", "result.json", "evaluation.csv", "records.csv", "provenance.json")
    for folder in (*(run.folder for run in runs), *(found.folder for found in reproductions)):
        for path in (folder / name for name in files):
            digest.update(path.read_bytes() if path.exists() else b"")
    return digest.hexdigest()[:16]


def _pictures(runs: list[Run]) -> list[tuple[str, list[tuple[str, str]]]]:
    """For every run, captions and inlined pictures."""
    found, left = [], _MOST_PICTURES
    for run in runs:
        paths = [(text, run.folder / "pictures" / f"{name}.png") for name, text in _PICTURES.items()]
        shown = [(text, uri) for text, path in paths if (uri := _inline(path))][:left]
        left -= len(shown)
        if shown:
            found.append((run.name, shown))
    return found


def _describe_run(run: Run) -> dict[str, Any]:
    """Everything needed to repeat a run, and what its evaluation says of itself."""
    words = f"Trained for {len(run.metrics)} of {run.result.get('epochs', 'unknown')} epochs."
    words += "" if run.finished else " Not finished."
    return {
        "name": run.name,
        "method": describe(run.result),
        "words": words,
        "certificate": _certificate(run),
        "versions": run.result.get("versions", {}),
        "config": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True) if run.config else "",
    }


def _certificate(run: Run) -> str:
    if not run.evaluation:
        return f"Not evaluated. Next: mcvae evaluate {run.folder}"
    try:
        return certificate(run.name, run.evaluation)
    except (KeyError, TypeError):  # a model that diverged has no such numbers
        return f"The evaluation is not complete: {run.evaluation.get('verdict', 'it has no verdict')}"


def _reproduction(found: Reproduction) -> dict[str, Any]:
    figure = _inline(found.figure) or _inline(found.folder / "figure.png")
    return {
        "name": found.name,
        "figure": figure,
        "too_large": figure is None and found.figure is not None,
        "rows": record_rows(found.records),
        "charts": record_charts(found.records),
        "provenance": yaml.safe_dump(found.provenance, sort_keys=False, allow_unicode=True) if found.provenance else "",
    }


def _inline(path: Path | None) -> str | None:
    """A picture as a data URI, where scripts inside of it cannot run; None if it is missing or too large."""
    if path is None or not path.exists() or path.stat().st_size > _MOST_BYTES:
        return None
    mime = "image/svg+xml" if path.suffix == ".svg" else "image/png"
    return f"data:{mime};base64,{base64.b64encode(path.read_bytes()).decode()}"
