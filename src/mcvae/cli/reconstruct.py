"""mcvae reconstruct."""

from dataclasses import dataclass, field
from pathlib import Path

from mcvae.runs.naming import check_range

__all__ = ["Options", "run"]


@dataclass(kw_only=True)
class Options:
    """What to write.

    Args:
        out: .npz, .parquet or .csv file; reconstructions.npz if not given.
        limit: reconstruct at most this many data, the first.
    """

    folder: str = field(metadata={"positional": "run folder"})
    data: str = field(metadata={"positional": "train, validation or test of the run's data, or a path"})
    out: str = "reconstructions.npz"
    limit: int | None = None


def run(options: Options) -> None:
    """Write data as the model sees them, and the mean of p(x|z) at the mean of q(z|x); tables in their own units."""
    check_range("limit", options.limit, 1)
    from mcvae.training.exports import check_export, export

    check_export(options.out)
    from mcvae.training.applying import apply_run

    arrays = apply_run(options.folder, options.data, limit=options.limit).reconstruct()
    export(Path(options.out), arrays)
    error = float(((arrays["data"] - arrays["reconstruction"]) ** 2).mean() ** 0.5)
    print(f"{options.out}: {len(arrays['data'])} data and their reconstructions, root mean square error {error:.4g}")
