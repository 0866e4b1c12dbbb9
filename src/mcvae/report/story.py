"""The demonstration in one picture and three sentences: where chains win, and where they do not."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy
from matplotlib.figure import Figure

from mcvae.report.figures import STYLE, draw_ring, passes_of, spent_on
from mcvae.report.groups import paired_difference
from mcvae.report.page import Story
from mcvae.runs.discovery import Found, Reproduction
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
    baseline = next((run for run in found.runs if run.key == "vae"), None)
    gains = dict[str, tuple[float, float]]()
    for run in found.runs:
        if baseline and (gain := paired_difference(run, baseline, "log_likelihood")):
            gains[run.key] = gain
    if not rings or not gains:
        raise RunError(f"{folder} does not hold a whole demonstration; remove it, and run mcvae demo again.")
    gains = dict(sorted(gains.items(), key=lambda item: item[1][0], reverse=True))
    picture = folder / "story.png"
    _draw(rings[0], gains, picture)
    return Story(picture, [_on_the_ring(rings[0].records), _on_digits(gains), _ADVICE])


def _draw(ring: Reproduction, gains: dict[str, tuple[float, float]], path: Path) -> None:
    """Samples on the ring above, likelihoods on digits below."""
    methods = {"vae": "VAE's q", "iwae": "IWAE's q", "l-mcvae": "L-MCVAE's chains", "a-mcvae": "A-MCVAE's chains"}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 4.9))
        parts: Any = figure.subfigures(2, 1, height_ratios=(3, 2), hspace=0.04)
        panels, found = parts[0].subplots(1, 1 + len(methods), sharey=True), summarise(ring.records)
        draw_ring(panels, list(methods), found, dict(numpy.load(ring.folder / "arrays.npz")))
        distances = {s.method: s.mean for s in found if s.metric == "energy_distance"}
        for axis, (method, name) in zip(panels[1:], methods.items(), strict=True):
            axis.set_title(f"{name}: {distances[method]:.3f}")
        parts[0].suptitle("Chains win: a posterior that no Gaussian q can be, and the energy distance of draws to it")
        axis = parts[1].subplots()
        for height, (method, (gain, error)) in enumerate(reversed(gains.items())):
            axis.barh(height, gain, 0.6, color=method_named(method).colour, alpha=0.75)
            axis.errorbar(gain, height, xerr=error, color="#333333", capsize=2, lw=1)
        axis.set_yticks(range(len(gains)), [spent_on(method) for method in reversed(gains)])
        axis.set_xlabel("log-likelihood of test images above the VAE's, nats ± standard error; more is better")
        axis.axvline(0, color="#666666", lw=0.8)
        axis.grid(visible=False, axis="y")
        passes = " or ".join(str(number) for number in sorted({passes_of(method) for method in gains}))
        best = "Chains win" if method_named(next(iter(gains))).annealed else "Samples are enough"
        parts[1].suptitle(f"{best}: 8 × 8 digits, q nearly fits; {passes} decoder passes per image")
        figure.savefig(path, dpi=160)


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
    "On MNIST, with 64 latents and a linear encoder, it is the other way round: at equal cost, CMCD's five learned "
    "steps beat six samples by 4.4 ± 0.2 nats, L-MCVAE's by 3.7 ± 0.2 (one seed, not certified: results/frontier). "
    "What to choose when: docs/choosing.md."
)
"""Measured by `mcvae reproduce frontier --preset paper`, which is too long for a demonstration."""
