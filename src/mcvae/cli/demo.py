"""mcvae demo."""

from dataclasses import dataclass
from pathlib import Path

from mcvae.report.comparison import show
from mcvae.runs.discovery import find
from mcvae.runs.naming import check_range

__all__ = ["Options", "run"]


@dataclass
class Options:
    """How long to train, and where to write.

    Args:
        folder: where everything goes; what is finished is not trained again.
        epochs: of training on digits.
        seed: of training on digits.
    """

    folder: str = "runs/demo"
    epochs: int = 40
    seed: int = 0


def run(options: Options) -> None:
    """Show in three minutes where chains win and where they do not: a ring, and bundled digits. Writes a page."""
    if "://" in options.folder:
        raise ValueError(f"--folder must be a folder of this machine, got {options.folder}.")
    check_range("epochs", options.epochs, 1, 10**7)
    check_range("seed", options.seed, 0, 2**32 - 1)
    from mcvae.experiments.demonstration import run_demo
    from mcvae.report.page import write_page
    from mcvae.report.present import present
    from mcvae.report.story import tell_story

    folder = Path(options.folder)
    ring, digits = run_demo(folder, options.epochs, options.seed)
    present(ring)
    places = [str(digits), str(ring)]
    found = find(places)
    show(found.runs)
    story = tell_story(found, folder)
    print("\n".join(["", *story.sentences, "", "With pictures, for any browser:"]))
    print(write_page(places, folder / "report.html", found, story))
