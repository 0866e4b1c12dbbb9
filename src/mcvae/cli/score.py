"""mcvae score."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mcvae.runs.naming import check_range

__all__ = ["Options", "run"]


@dataclass(kw_only=True)
class Options:
    """How to estimate, and what to write.

    Args:
        out: .csv, .npz or .parquet file; scores.csv if not given.
        limit: score at most this many data, the first.
        num_steps: temperatures of AIS-HMC; auto doubles them until the estimate settles.
        num_samples: chains of AIS-HMC per datum.
        show: how many of the least likely data to print.
    """

    folder: str = field(metadata={"positional": "run folder"})
    data: str = field(metadata={"positional": "train, validation or test of the run's data, or a path"})
    out: str = "scores.csv"
    limit: int | None = None
    num_steps: int | Literal["auto"] = "auto"
    num_samples: int = 64
    show: int = 5


def run(options: Options) -> None:
    """Estimate log p(x) of every datum with its standard error, least likely first on the screen.

    Of a table that was standardised it is the density of the standardised values.
    """
    check_range("num_steps", None if options.num_steps == "auto" else options.num_steps, 1)
    for name, least in {"limit": 1, "num_samples": 2, "show": 0}.items():
        check_range(name, getattr(options, name), least)
    from mcvae.training.exports import check_export, export

    check_export(options.out)
    import numpy as np

    from mcvae.evaluation import Protocol
    from mcvae.training.applying import apply_run

    applied = apply_run(options.folder, options.data, limit=options.limit)
    found = applied.score(Protocol(num_steps=options.num_steps, num_samples=options.num_samples))
    likelihood, error = (found.column(name).numpy() for name in ("log_likelihood", "standard_error"))
    doubts = np.array([row["doubts"] for row in found.table])
    places = np.array([applied.places(row) for row in range(len(likelihood))])
    columns = {"place": places, "log_likelihood": likelihood, "standard_error": error, "doubts": doubts}
    export(Path(options.out), columns)
    print(
        f"{options.out}: {len(likelihood)} data, mean log p(x) {likelihood.mean():.3f}, standard deviation "
        f"{likelihood.std():.3f}; {found.summary['verdict']}"
    )
    for row in found.worst(options.show):
        print(f"  {likelihood[row]:10.3f} ± {error[row]:.3f}  {places[row]}")
