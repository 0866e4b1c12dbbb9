"""What a source reads from a file: values, and a name for each row, for error messages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Raw", "Reading"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Reading:
    """How a source is to be read.

    Args:
        size: height and width of images after resizing and cropping; as they are if None.
        condition: names of what the model is conditioned on, instead of being modelled: columns, arrays or "folder".
        whole: leave the rows of a table in their order, whatever its column split says.
    """

    size: int | None = None
    condition: Sequence[str] = ()
    whole: bool = False


class Raw(NamedTuple):
    """One split of a source, or all of it, unchecked."""

    values: Array
    """`[N, ...]`."""
    place: Callable[[int], str]
    """What an error message calls row n: a file, a line, an index."""
    columns: Sequence[str] = ()
    """Names of the columns of a table, if they have any."""
    conditions: dict[str, Array] = {}  # noqa: RUF012 (never written to)
    """Labels or covariates by name, `[N]` each: numbers or words."""

    def part(self, rows: NDArray[np.intp]) -> "Raw":
        """The rows of these indices; error messages still call them what they are called in the file."""
        conditions = {name: values[rows] for name, values in self.conditions.items()}
        return Raw(self.values[rows], lambda row: self.place(int(rows[row])), self.columns, conditions)


def at_index(path: Any, key: str = "") -> Callable[[int], str]:
    """What error messages call the rows of an array.

    >>> at_index("x.npy")(3)
    'x.npy, row 3 (counted from 0)'
    """
    return lambda row: f"{path}{f', {key}' if key else ''}, row {row} (counted from 0)"


def is_number(cell: Any) -> bool:
    """Whether a cell of a table is a number, or the text of one."""
    try:
        float(cell)
    except (ValueError, TypeError):
        return False
    return True


def first_row(bad: NDArray[np.bool_]) -> int:
    """The first row with a true value in it."""
    return int(np.argmax(bad.reshape(len(bad), -1).any(1)))
