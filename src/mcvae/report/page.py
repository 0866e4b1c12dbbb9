"""One self-contained page about runs and reproductions: it fetches nothing, and escapes all names."""

import base64
import hashlib
import shlex
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from mcvae.report.comparison import answers, certificate, comparison
from mcvae.report.groups import groups, kind
from mcvae.report.panels import panels
from mcvae.report.reproductions import record_answers, record_table
from mcvae.runs.discovery import FILES, Found, Reproduction, Run, find
from mcvae.runs.plain import RunError, number, write_atomically

__all__ = ["Story", "render", "write_page"]

HERE = Path(__file__).parent
_MOST_BYTES = 600_000
"""Largest size of a picture; larger ones are left out to keep the page small."""
_MOST_PICTURES = 60
_PICTURES = {
    "samples": "Samples: means of p(x | z), z from the prior",
    "reconstructions": "Originals, each left of its reconstruction",
    "worst": "Explained worst, the worst first",
}


class Story(NamedTuple):
    """The picture and the sentences at the top of a page."""

    picture: Path
    sentences: list[str]


def write_page(paths: list[str], out: str | Path, found: Found | None = None, story: Story | None = None) -> Path:
    """Write the page and return where it is; a reader sees the old page or the new one.

    Args:
        paths: run folders, reproduction folders, or folders of them.
        out: the HTML file; its folder is created if it does not exist.
        found: what `find` returned for these paths, if it has been called.
        story: a picture and sentences to open with.
    """
    out = Path(out)
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; give a file, such as {out / 'report.html'}.")
    found = found or find(paths)
    if not found.runs and not found.reproductions:
        raise RunError(f"nothing here can be read: {' '.join(found.left_out)}")
    text = render(found, command=shlex.join(["mcvae", "report", *paths, "--out", str(out)]), story=story)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"--out {out} cannot be written: {error.strerror}.") from None
    write_atomically(out, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return out


def render(found: Found, *, command: str = "mcvae report", story: Story | None = None) -> str:
    """The page as HTML."""
    reproductions, tried = found.reproductions, groups(found.runs)
    counted = [run for group in tried for run in group.runs]
    runs = counted + [run for run in found.runs if not any(run is other for other in counted)]
    style = {run.name: index for index, run in enumerate(runs)}
    kinds = dict[tuple[str, ...], list[Run]]()
    for run in runs:
        kinds.setdefault(kind(run), []).append(run)
    css, script = (Markup((HERE / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("template.html").render(
        number=number,
        css=css,
        script=script,
        css_hash=_hash(css),
        script_hash=_hash(script),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=version("mcvae"),
        command=command,
        digest=_digest(runs, reproductions),
        opening=_inline(story.picture) if story else None,
        sentences=story.sentences if story else [],
        answers=answers(tried) + [a for each in reproductions for a in record_answers(each.name, each.records)],
        left_out=found.left_out,
        comparison=comparison(tried),
        styles=[style[group.runs[0].name] for group in tried],
        groups=[panels(label, members, style) for label, members in kinds.items()],
        pictures=_pictures(runs),
        reproductions=[_reproduction(each) for each in reproductions],
        runs=[_describe_run(run) for run in runs],
    )


def _hash(text: str) -> str:
    """Hash for the page's content security policy, which allows our own script and style only."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _digest(runs: list[Run], reproductions: list[Reproduction]) -> str:
    """Digest of the files that the page was made from."""
    digest = hashlib.sha256()
    for folder in (*(run.folder for run in runs), *(found.folder for found in reproductions)):
        for path in (folder / name for name in FILES):
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
    """What is needed to repeat a run, and the verdict of its evaluation."""
    following = f"Not evaluated. Next: mcvae evaluate {shlex.quote(run.place)}"
    words = f"Trained for {len(run.metrics)} of {run.result.epochs} epochs."
    words += "" if run.state == "trained" else f" Not finished: {run.state}. {run.result.reason}"
    return {
        "name": run.name,
        "method": run.key,
        "words": words,
        "certificate": certificate(run.name, run.evaluation) if run.evaluation else following,
        "versions": run.result.versions,
        "config": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True) if run.config else "",
    }


def _reproduction(found: Reproduction) -> dict[str, Any]:
    figure = _inline(found.figure) or _inline(found.folder / "figure.png")
    return {
        "name": found.name,
        "figure": figure,
        "too_large": figure is None and found.figure is not None,
        "table": record_table(found),
        "provenance": yaml.safe_dump(found.provenance, sort_keys=False, allow_unicode=True) if found.provenance else "",
    }


def _inline(path: Path | None) -> str | None:
    """A picture as a data URI, where scripts inside of it cannot run; None if it is missing or too large."""
    if path is None or not path.exists() or path.stat().st_size > _MOST_BYTES:
        return None
    mime = "image/svg+xml" if path.suffix == ".svg" else "image/png"
    return f"data:{mime};base64,{base64.b64encode(path.read_bytes()).decode()}"
