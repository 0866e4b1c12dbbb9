"""mcvae encode."""

from dataclasses import dataclass

from mcvae.cli.applied import AppliedOptions
from mcvae.runs.naming import check_range

__all__ = ["Options", "run"]


@dataclass(kw_only=True)
class Options(AppliedOptions):
    """What to write.

    Args:
        out: .npz, .parquet or .csv file; latents.npz if not given.
        states: also run annealed chains, and write this many posterior states per datum; 0 for none.
    """

    out: str = "latents.npz"
    states: int = 0


def run(options: Options) -> None:
    """Write the latents of data: mean and scale of q(z|x), and states of posterior chains if asked for."""
    check_range("states", options.states, 0)
    arrays = options.apply().encode(options.states)
    options.write(arrays)
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
    print(f"{options.out}: {shapes}")
