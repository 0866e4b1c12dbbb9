"""mcvae sample."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mcvae.runs.naming import check_range
from mcvae.runs.plain import RunError
from mcvae.runs.storage import RunFolder, check_links, top_level

__all__ = ["Options", "run"]


@dataclass(kw_only=True)
class Options:
    """What to draw.

    Args:
        number: how many, at most 10,000.
        out: file to write; FOLDER/pictures/drawn.png or FOLDER/drawn.npz if not given.
        seed: of the latents.
        format: png, a grid of images; npz, the arrays mean (of p(x|z)), x (drawn from it) and z, in the units of the
            data.
    """

    folder: str = field(metadata={"positional": "run folder"})
    number: int = 64
    out: str | None = None
    seed: int = 0
    format: Literal["png", "npz"] = "png"


def run(options: Options) -> None:
    """Draw data from a trained run."""
    check_range("number", options.number, 1, 10_000)
    home = RunFolder(options.folder, top_level)
    check_links(home.path)
    if not (home.path / "model.json").is_file():
        raise RunError(f"{home.path / 'model.json'} does not exist. Is it a run folder, and has the run finished?")
    default = "pictures/drawn.png" if options.format == "png" else "drawn.npz"
    path = Path(options.out) if options.out else home.path / default
    if path.is_dir():
        raise ValueError(f"--out {path} is a folder; give a file, such as {path / 'drawn.png'}.")
    from mcvae.training.applying import drawn
    from mcvae.training.exports import export
    from mcvae.training.loading import load, read_described
    from mcvae.training.pictures import save_grid

    model, described = load(home.path), read_described(home.path)
    if options.format == "png" and described.datum.kind != "pixels":
        raise ValueError(f"{options.folder} is not a run on images; draw numbers with --format npz.")
    path.parent.mkdir(parents=True, exist_ok=True)
    found = drawn(model, described, options.number, options.seed)
    if options.format == "png":
        save_grid(found["mean"] / described.white, path)
    else:
        export(path, {name: values.numpy() for name, values in found.items()})
    home.push()
    print(options.out or f"{options.folder}/{default}")
