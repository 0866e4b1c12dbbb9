"""What a model is conditioned on: labels as indicators, covariates standardised; the coding is kept with a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcvae.data.raw import Array, is_number
from mcvae.data.splits import DataError

__all__ = ["Coding", "code", "read_codings"]

_MOST_LABELS = 100


@dataclass(frozen=True)
class Coding:
    """How one label or covariate becomes numbers.

    Args:
        name: of the column, array or folder.
        labels: those seen in training, each with an indicator of its own; empty for a covariate.
        mean: of a covariate.
        scale: of a covariate.
    """

    name: str
    labels: tuple[str, ...] = ()
    mean: float = 0.0
    scale: float = 1.0

    @classmethod
    def of(cls, name: str, values: Array) -> "Coding":
        """Words and few whole numbers are labels; other numbers are covariates.

        >>> Coding.of("batch", np.array(["b", "a", "b"])).labels
        ('a', 'b')
        >>> Coding.of("age", np.array([20.5, 40.5])).mean
        30.5
        """
        values = values[~_missing(values)]
        whole = values.dtype.kind in "biu" or (values.dtype.kind == "f" and bool((values == np.floor(values)).all()))
        words = np.unique(_words(values))
        if values.dtype.kind in "US" or (whole and len(words) <= 20):
            if len(words) > _MOST_LABELS:
                raise DataError(f"{name!r} has {len(words)} different labels to condition on; at most {_MOST_LABELS}.")
            return cls(name, tuple(words.tolist()))
        return cls(name, (), float(values.mean()), float(values.std()) or 1.0)

    @property
    def size(self) -> int:
        """How many numbers the label or covariate becomes."""
        return len(self.labels) or 1

    def __call__(self, values: Array, place: Callable[[int], str]) -> Tensor:
        """`[N]` as numbers `[N, size]`; what is missing, or was not seen in training, is named with its row."""
        missing = _missing(values)
        if missing.any():
            raise DataError(
                f"{place(int(np.argmax(missing)))}: {self.name!r}, which the model is conditioned on, is missing or "
                "not finite. Fill it in, or remove the row."
            )
        if not self.labels:
            if values.dtype.kind in "US":
                row, word = next((row, word) for row, word in enumerate(values) if not is_number(word))
                raise DataError(f"{place(row)}: {self.name} is {str(word)!r}; the training data have numbers.")
            return ((torch.from_numpy(values.astype(np.float64)) - self.mean) / self.scale).float().unsqueeze(1)
        words = _words(values)
        unknown = ~np.isin(words, self.labels)
        if unknown.any():
            row = int(np.argmax(unknown))
            known = ", ".join(self.labels[:20])
            raise DataError(f"{place(row)}: {self.name} is {str(words[row])!r}; the training data have only {known}.")
        return torch.from_numpy(words[:, None] == np.array(self.labels)[None]).float()


def _missing(values: Array) -> Array:
    """Which values are empty strings or not finite."""
    missing: Array = values == "" if values.dtype.kind in "US" else ~np.isfinite(values)
    return missing


def _words(values: Array) -> Array:
    """As text, whole numbers without a fraction: 3 and 3.0 are one label."""
    if values.dtype.kind == "f" and bool((values == np.floor(values)).all()):
        values = values.astype(np.int64)
    return values.astype(str)


def code(codings: Sequence[Coding], conditions: Mapping[str, Array], place: Callable[[int], str]) -> Tensor:
    """All conditions of some rows side by side, `[N, C]`."""
    return torch.cat([coding(conditions[coding.name], place) for coding in codings], 1)


def read_codings(content: Sequence[Mapping[str, Any]]) -> list[Coding]:
    """Codings from the fields of each, as a JSON file holds them."""
    return [Coding(str(c["name"]), tuple(map(str, c["labels"])), float(c["mean"]), float(c["scale"])) for c in content]
