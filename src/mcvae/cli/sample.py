"""mcvae sample."""

from dataclasses import dataclass, field
from pathlib import Path

from mcvae.runs.config import check_range
from mcvae.runs.plain import RunError, read_json
from mcvae.runs.storage import RunFolder, check_links, top_level

__all__ = ["Options", "run"]


@dataclass(kw_only=True)
class Options:
    """What to draw.

    Args:
        number: how many, at most 10,000.
        out: PNG to write; FOLDER/pictures/drawn.png if not given.
        seed: of the latents.
    """

    folder: str = field(metadata={"positional": "run folder"})
    number: int = 64
    out: str | None = None
    seed: int = 0


def run(options: Options) -> None:
    """Draw images from a trained run."""
    check_range("number", options.number, 1, 10_000)
    home = RunFolder(options.folder, top_level)
    check_links(home.path)
    if not (home.path / "model.json").is_file():
        raise RunError(f"{home.path / 'model.json'} does not exist. Is it a run folder, and has the run finished?")
    path = Path(options.out) if options.out else home.path / "pictures" / "drawn.png"
    if path.is_dir():
        raise ValueError(f"--out {path} is a folder; give a file, such as {path / 'drawn.png'}.")
    from mcvae.training.callbacks import mean_images
    from mcvae.training.loading import load
    from mcvae.training.pictures import save_grid

    model = load(home.path)
    latent_dim = read_json(home.path / "model.json")["model"]["latent_dim"]
    path.parent.mkdir(parents=True, exist_ok=True)
    save_grid(mean_images(model, options.number, latent_dim, options.seed), path)
    home.push()
    print(options.out or f"{options.folder}/pictures/drawn.png")
