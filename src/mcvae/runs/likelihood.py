"""Likelihoods by name: the data that each is for, and the transform that they need. Imports no torch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mcvae.runs.naming import check_name

__all__ = ["LIKELIHOODS", "LikelihoodEntry", "bits_of_cell", "likelihood_for", "transform_for"]


@dataclass(frozen=True)
class LikelihoodEntry:
    """What a likelihood is for.

    Args:
        builder: called as `(datum, sigma)`; `module.function` below `mcvae.models.likelihoods` is imported when needed.
        transforms: kinds of data it is for (pixels, counts, real), each with the transform that turns them into what
            it is a density of.
        description: one line of text.
        discrete: whether it gives probabilities of whole numbers, not densities.
    """

    builder: str | Callable[..., Any]
    transforms: Mapping[str, str]
    description: str
    discrete: bool = False


_REAL = {"pixels": "scale", "real": "standardize"}
_LEARNED = {"pixels": "dequantize", "real": "standardize"}
LIKELIHOODS = {
    "bernoulli": LikelihoodEntry("bernoulli.bernoulli", {"pixels": "binarize", "counts": "keep"}, "0 or 1", True),
    "gaussian": LikelihoodEntry("gaussian.fixed_gaussian", _REAL, "Gaussian noise with a fixed sigma"),
    "gaussian-learned": LikelihoodEntry("gaussian.learned_gaussian", _LEARNED, "the same with a learned sigma"),
    "gaussian-per-dimension": LikelihoodEntry(
        "gaussian.gaussian_per_dimension", _LEARNED, "the same with a learned sigma for every dimension"
    ),
    "logistic": LikelihoodEntry(
        "logistic.logistic", {"pixels": "scale"}, "8-bit levels of a logistic distribution", True
    ),
    "categorical": LikelihoodEntry(
        "categorical.categorical", {"pixels": "keep", "counts": "keep"}, "any probabilities of up to 256 levels", True
    ),
    "poisson": LikelihoodEntry("poisson.poisson", {"counts": "keep"}, "counts whose variance is their mean", True),
    "negative-binomial": LikelihoodEntry(
        "negative_binomial.negative_binomial", {"counts": "keep"}, "counts that vary more than that", True
    ),
    "student-t": LikelihoodEntry("student_t.student_t", {"real": "standardize"}, "real data with outliers"),
}
"""Likelihoods by name. A new one is a line here and a file in `mcvae.models.likelihoods`."""


def likelihood_for(kind: str, shape: tuple[int, ...], levels: int) -> str:
    """The usual choice for data: that of the paper for images.

    >>> likelihood_for("pixels", (1, 28, 28), 256), likelihood_for("counts", (50,), 120)
    ('bernoulli', 'negative-binomial')
    """
    if kind == "pixels":
        return "bernoulli" if shape[0] == 1 else "gaussian"
    if kind == "counts":
        return "bernoulli" if levels <= 2 else "negative-binomial"
    return "gaussian-per-dimension"


def transform_for(likelihood: str, kind: str) -> str:
    """The transform that a likelihood needs; a ValueError if it is not for such data.

    >>> transform_for("poisson", "real")
    Traceback (most recent call last):
    ValueError: the likelihood poisson is for counts, not for real data. For real data there are: gaussian, \
gaussian-learned, gaussian-per-dimension, student-t.
    """
    check_name("likelihood", likelihood, LIKELIHOODS)
    transforms = LIKELIHOODS[likelihood].transforms
    if kind not in transforms:
        others = ", ".join(name for name, entry in LIKELIHOODS.items() if kind in entry.transforms)
        what = {"real": "real data"}.get(kind, kind)
        raise ValueError(
            f"the likelihood {likelihood} is for {' and '.join(transforms)}, not for {what}. For {what} there are: "
            f"{others}."
        )
    return transforms[kind]


def bits_of_cell(likelihood: str, transform: str) -> float | None:
    """Bits per dimension that turn a density of transformed data into a probability of the data as they are stored.

    A pixel fills a cell of 1/255 or 1/256 on the scale from 0 to 1. Real data have no cells: None.

    >>> bits_of_cell("gaussian-learned", "dequantize"), bits_of_cell("bernoulli", "binarize")
    (8.0, 0.0)
    >>> bits_of_cell("student-t", "standardize")
    """
    if likelihood in LIKELIHOODS and LIKELIHOODS[likelihood].discrete:
        return 0.0
    return {"scale": math.log2(255), "dequantize": 8.0}.get(transform)
