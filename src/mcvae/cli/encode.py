"""mcvae encode."""

from dataclasses import dataclass, field
from pathlib import Path

from mcvae.runs.naming import check_range

__all__ = ["Options", "run"]


@dataclass(kw_only=True)
class Options:
    """What to write.

    Args:
        out: .npz, .parquet or .csv file; latents.npz if not given.
        states: also run annealed chains, and write this many posterior states per datum; 0 for none.
        limit: encode at most this many data, the first.
    """

    folder: str = field(metadata={"positional": "run folder"})
    data: str = field(metadata={"positional": "train, validation or test of the run's data, or a path"})
    out: str = "latents.npz"
    states: int = 0
    limit: int | None = None


def run(options: Options) -> None:
    """Write the latents of data: mean and scale of q(z|x), and states of posterior chains if asked for."""
    check_range("states", options.states, 0)
    check_range("limit", options.limit, 1)
    from mcvae.training.exports import check_export, export

    check_export(options.out)
    from mcvae.training.applying import apply_run

    arrays = apply_run(options.folder, options.data, limit=options.limit).encode(options.states)
    export(Path(options.out), arrays)
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
    print(f"{options.out}: {shapes}")
