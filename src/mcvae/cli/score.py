"""mcvae score."""

from dataclasses import dataclass
from typing import Literal

from mcvae.cli.applied import AppliedOptions
from mcvae.runs.naming import check_range

__all__ = ["Options", "run"]


@dataclass(kw_only=True)
class Options(AppliedOptions):
    """How to estimate, and what to write.

    Args:
        out: .csv, .npz or .parquet file; scores.csv if not given.
        num_steps: temperatures of AIS-HMC; auto doubles them until the estimate settles.
        num_samples: chains of AIS-HMC per datum.
        show: how many of the least likely data to print.
    """

    out: str = "scores.csv"
    num_steps: int | Literal["auto"] = "auto"
    num_samples: int = 64
    show: int = 5


def run(options: Options) -> None:
    """Estimate log p(x) of every datum with its standard error, least likely first on the screen.

    If a table was standardised, this is the density of the standardised values.
    """
    check_range("num_steps", None if options.num_steps == "auto" else options.num_steps, 1)
    check_range("num_samples", options.num_samples, 2)
    check_range("show", options.show, 0)
    applied = options.apply()
    import numpy as np

    from mcvae.evaluation import Protocol

    found = applied.score(Protocol(num_steps=options.num_steps, num_samples=options.num_samples))
    likelihood, error = (found.column(name).numpy() for name in ("log_likelihood", "standard_error"))
    doubts = np.array([row["doubts"] for row in found.table])
    places = np.array([applied.places(row) for row in range(len(likelihood))])
    options.write({"place": places, "log_likelihood": likelihood, "standard_error": error, "doubts": doubts})
    with np.errstate(invalid="ignore"):  # a row without likelihood, −inf, leaves no standard deviation
        print(
            f"{options.out}: {len(likelihood)} data, mean log p(x) {likelihood.mean():.3f}, standard deviation "
            f"{likelihood.std():.3f}; {found.summary['verdict']}"
        )
    for row in found.worst(options.show):
        print(f"  {likelihood[row]:10.3f} ± {error[row]:.3f}  {places[row]}")
