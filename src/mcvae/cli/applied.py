"""What `encode`, `reconstruct` and `score` share: a trained run, data for it, and a file to write."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcvae.runs.naming import check_range

if TYPE_CHECKING:
    from mcvae.training.applying import AppliedRun

__all__ = ["AppliedOptions"]


@dataclass(kw_only=True)
class AppliedOptions:
    """A run and data for it.

    Args:
        limit: use at most this many data, the first.
    """

    folder: str = field(metadata={"positional": "run folder"})
    data: str = field(metadata={"positional": "train, validation or test of the run's data, or a path"})
    out: str
    limit: int | None = None

    def apply(self) -> "AppliedRun":
        """Check these options before torch is imported; then load the run and the data."""
        check_range("limit", self.limit, 1)
        from mcvae.training.exports import check_export

        check_export(self.out)
        from mcvae.training.applying import apply_run

        return apply_run(self.folder, self.data, limit=self.limit)

    def write(self, arrays: Mapping[str, Any]) -> None:
        """Write arrays, a row per datum, to the file."""
        from mcvae.training.exports import export

        export(Path(self.out), arrays)
