"""The paper's published numbers, and where to look them up."""

import csv
from functools import cache
from importlib.resources import files
from typing import Literal

__all__ = ["paper_value", "paper_values"]


@cache
def paper_values() -> dict[tuple[str, str, str, int, str], tuple[float, float]]:
    """Value and deviation over seeds by (table, data set, method, epoch, metric).

    Tables are "main" (Tables 1 to 3, where L-MCVAE and A-MCVAE have no schedule in their name) and "full" (supplement).
    They differ in places: CelebA's RealNVP has other numbers in each. The constants that the captions ask to add,
    11400 and 2800, are added.
    """
    with files("mcvae.experiments").joinpath("paper.csv").open() as file:
        return {
            (row["table"], row["dataset"], row["method"], int(row["epoch"]), row["metric"]): (
                float(row["value"]),
                float(row["deviation"]),
            )
            for row in csv.DictReader(file)
        }


def paper_value(
    dataset: str, method: str, epoch: int | None, metric: str, table: Literal["main", "full"] = "full"
) -> tuple[float | None, float | None]:
    """Value and deviation, or None twice where the paper has none.

    >>> paper_value("mnist", "vae", 10, "nll")
    (89.83, 0.59)
    >>> paper_value("digits", "vae", 10, "nll")
    (None, None)
    """
    if epoch is None:
        return None, None
    return paper_values().get((table, dataset, method, epoch, metric), (None, None))
