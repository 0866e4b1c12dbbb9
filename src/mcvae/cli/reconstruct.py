"""mcvae reconstruct."""

from dataclasses import dataclass

from mcvae.cli.applied import AppliedOptions

__all__ = ["Options", "run"]


@dataclass(kw_only=True)
class Options(AppliedOptions):
    """What to write.

    Args:
        out: .npz, .parquet or .csv file; reconstructions.npz if not given.
    """

    out: str = "reconstructions.npz"


def run(options: Options) -> None:
    """Write data as the model sees them, and the mean of p(x|z) at the mean of q(z|x); tables in their own units."""
    arrays = options.apply().reconstruct()
    options.write(arrays)
    error = float(((arrays["data"].astype(float) - arrays["reconstruction"]) ** 2).mean() ** 0.5)
    print(f"{options.out}: {len(arrays['data'])} data and their reconstructions, root mean square error {error:.4g}")
