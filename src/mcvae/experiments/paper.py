"""The experiments by name, their options, and the paper's published numbers. Imports no torch."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from mcvae.runs.config import check_range
from mcvae.runs.method import parse_key
from mcvae.runs.naming import check_name
from mcvae.runs.plain import read_rows

__all__ = [
    "DENSITIES",
    "NAMES",
    "POSTERIOR_METHODS",
    "POSTERIOR_STEPS",
    "ReproductionOptions",
    "paper_value",
    "paper_values",
]

NAMES = (
    "toy-posterior",
    "toy-parameters",
    "ppca",
    "mnist",
    "celeba",
    "cifar10",
    "k-sweep",
    "training-curves",
    "posteriors",
    "frontier",
)
"""Names of `reproduction.EXPERIMENTS`, repeated here because that module imports torch."""
POSTERIOR_METHODS = ("vi", "ula", "mcd", "cmcd", "uha", "ldvi", "cmcd-ud", "ais-mala", "smc")
"""Mean-field VI, methods that are trained, and two that a pilot tunes from the q of VI."""
POSTERIOR_STEPS = (8, 32, 64, 256)
DENSITIES = ("funnel", "banana", "many-well", "mixture-40", "sonar", "ionosphere", "breast-cancer", "cox-process")
"""Names of `densities.TARGETS`, repeated here because that module imports torch."""


@dataclass
class ReproductionOptions:
    """Options of an experiment; None is the preset's choice.

    Args:
        preset: quick shows the effect within minutes on two cores (digits instead of MNIST); paper is the real thing.
        protocol: clean, or what the paper states (plain Adam, its short likelihood estimator).
        seeds: how many.
        methods: only these, such as [vae,l-mcvae-linear-k5] (images) or [ula,cmcd-k8] (posteriors).
        densities: only these, such as [sonar,funnel] (posteriors).
        epochs: after which to evaluate, the last being the length of training, such as [10,30,100] (images).
        limit: test images to evaluate on (images).
        images: maximum number of training images (images).
    """

    preset: Literal["quick", "paper"] = "quick"
    protocol: Literal["clean", "paper"] = "clean"
    seeds: int | None = None
    methods: list[str] | None = None
    densities: list[str] | None = None
    epochs: list[int] | None = None
    limit: int | None = None
    images: int | None = None

    @property
    def certified(self) -> bool:
        """Whether likelihoods of images are certified: by longer chains, and bounds from both sides."""
        return self.preset == "paper" and self.protocol == "clean"

    @property
    def folder(self) -> str:
        """Of cells and results. Runs that were trained for another time, or on fewer images, have one of their own.

        >>> ReproductionOptions("paper", epochs=[10, 30]).folder
        'paper-clean-10-30-epochs'
        """
        epochs = [] if self.epochs is None else [*map(str, self.epochs), "epochs"]
        images = [] if self.images is None else [str(self.images), "images"]
        return "-".join([self.preset, self.protocol, *epochs, *images])

    def check(self, experiment: str) -> None:
        """Raise a ValueError that names the option, for values that make no sense in an experiment."""
        check_range("seeds", self.seeds, 1)
        check_range("limit", self.limit, 2)
        check_range("images", self.images, 1)
        for method in self.methods or ():
            if experiment == "posteriors":
                name, _, steps = method.partition("-k")
                check_name("method", name, POSTERIOR_METHODS)
                if steps and (name == "vi" or steps not in map(str, POSTERIOR_STEPS)):
                    raise ValueError(f"{method} is not measured: K is one of {POSTERIOR_STEPS}, and VI has none.")
            else:
                parse_key(method)
        for density in self.densities or ():
            check_name("density", density, DENSITIES)
        epochs = self.epochs
        if epochs is not None and (not epochs or list(epochs) != sorted(set(epochs)) or epochs[0] < 1):
            raise ValueError(f"--epochs must increase, such as [10,30,100]; got {list(epochs)}.")


@cache
def paper_values() -> dict[tuple[str, str, str, int, str], tuple[float, float]]:
    """Value and deviation over seeds by (table, data set, method, epoch, metric).

    Tables are "main" (Tables 1 to 3, where L-MCVAE and A-MCVAE have no schedule in their name) and "full" (supplement).
    They differ in places: CelebA's RealNVP has other numbers in each. The constants that the captions ask to add,
    11400 and 2800, are added.
    """
    values = {}
    for row in read_rows(Path(__file__).with_name("paper.csv")):
        key = (row["table"], row["dataset"], row["method"], int(row["epoch"]), row["metric"])
        values[key] = (float(row["value"]), float(row["deviation"]))
    return values


def paper_value(dataset: str, method: str, epoch: int | None, metric: str) -> tuple[float | None, float | None]:
    """Value and deviation of the full tables, or None twice where they have none.

    >>> paper_value("mnist", "vae", 10, "nll")
    (89.83, 0.59)
    >>> paper_value("digits", "vae", 10, "nll")
    (None, None)
    """
    if epoch is None:
        return None, None
    return paper_values().get(("full", dataset, method, epoch, metric), (None, None))
