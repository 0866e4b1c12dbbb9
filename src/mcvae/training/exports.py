"""Arrays written for other programs: .npz as they are, .csv and .parquet as columns."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mcvae._extras import needs_extra
from mcvae.data.raw import Array
from mcvae.runs.plain import write_atomically, write_rows

__all__ = ["check_export", "export"]

_SUFFIXES = (".npz", ".csv", ".parquet")


def check_export(path: str) -> None:
    """Raise a ValueError unless arrays can be written to a file of this name.

    >>> check_export("latents.xls")
    Traceback (most recent call last):
    ValueError: --out latents.xls must end in .npz, .csv or .parquet.
    """
    if Path(path).is_dir() or Path(path).suffix not in _SUFFIXES:
        raise ValueError(f"--out {path} must end in .npz, .csv or .parquet.")


def export(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays `[N, ...]`; in a table, those of more dimensions become columns such as mean_0, mean_1."""
    check_export(str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npz":
        write_atomically(path, lambda temporary: _savez(temporary, arrays))
        return
    columns = dict[str, Array]()
    for name, array in arrays.items():
        if array.ndim == 1:
            columns[name] = array
        else:
            flat = array.reshape(len(array), -1)
            columns |= {f"{name}_{place}": flat[:, place] for place in range(flat.shape[1])}
    if path.suffix == ".csv":
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        write_rows(path, list(columns), (dict(zip(columns, row, strict=True)) for row in rows))
        return
    with needs_extra("writing .parquet"):
        import pyarrow
        from pyarrow import parquet
    write_atomically(path, lambda temporary: parquet.write_table(pyarrow.table(columns), temporary))


def _savez(path: Path, arrays: Mapping[str, Array]) -> None:
    with open(path, "wb") as file:
        np.savez(file, **dict(arrays))  # type: ignore[arg-type] # a name may be any but allow_pickle
