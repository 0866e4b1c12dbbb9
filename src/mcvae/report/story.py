"""The demonstration in one picture and three sentences: where chains win, and where they do not."""

from pathlib import Path

import numpy

from mcvae.report.figures import draw_story
from mcvae.report.groups import paired_difference
from mcvae.report.page import Story
from mcvae.runs.discovery import Found
from mcvae.runs.method import label_of, method_named
from mcvae.runs.plain import RunError
from mcvae.runs.records import Record, summarise

__all__ = ["tell_story"]


def tell_story(found: Found, folder: Path) -> Story:
    """Draw `story.png` in the folder, and say what it shows.

    Args:
        found: the runs on digits, one of them a VAE, and the ring's reproduction.
        folder: of the demonstration.
    """
    rings = [each for each in found.reproductions if each.provenance.get("experiment") == "toy-posterior"]
    baselines = [run for run in found.runs if run.key == "vae"]
    if not rings or not baselines:
        raise RunError(f"{folder} does not hold a whole demonstration; remove it, and run mcvae demo again.")
    measured = [(run.key, paired_difference(run, baselines[0], "log_likelihood")) for run in found.runs]
    gains = {key: gain for key, gain in sorted(measured, key=lambda item: -(item[1] or (0.0,))[0]) if gain is not None}
    picture = folder / "story.png"
    draw_story(rings[0].records, dict(numpy.load(rings[0].folder / "arrays.npz")), gains, picture)
    return Story(picture, [_on_the_ring(rings[0].records), _on_digits(gains), _ADVICE])


def _on_the_ring(records: list[Record]) -> str:
    """How near the draws come to the exact posterior, and what weighing IWAE's draws repairs."""
    found = {(s.method, s.metric): s.mean for s in summarise(records)}
    near = {method: found[method, "energy_distance"] for method in ("a-mcvae", "l-mcvae", "iwae", "vae")}
    weighed = found["iwae", "energy_distance_resampled"]
    return (
        f"A posterior that is a ring: draws of A-MCVAE and L-MCVAE are at energy distance {near['a-mcvae']:.3f} and "
        f"{near['l-mcvae']:.3f} from it, those of IWAE's q at {near['iwae']:.3f}, of the VAE's at {near['vae']:.3f}. "
        f"One of ten of IWAE's, drawn by weight, is at {max(weighed, 0.0):.3f}: two dimensions are few."
    )


def _on_digits(gains: dict[str, tuple[float, float]]) -> str:
    best = next(iter(gains))
    told = "; ".join(f"{label_of(key)}: {mean:+.2f} ± {error:.2f}" for key, (mean, error) in gains.items())
    words = "chains win" if method_named(best).annealed else "samples are enough, and take less time"
    return f"8 × 8 digits, log-likelihood over the VAE's in nats. {told}. With 16 latents and a good encoder {words}."


_ADVICE = (
    "On MNIST, with 64 latents and a linear encoder, it was the other way round: two chains of two steps beat six "
    "samples by 3.0 ± 0.2 nats at equal cost (one seed, not certified: results/frontier). What to choose when: "
    "docs/choosing.md."
)
"""Measured by `mcvae reproduce frontier --preset paper`, which is too long for a demonstration."""
