"""AnnData files (.h5ad) of counts: cells by genes, as single-cell tools save them."""

from pathlib import Path
from typing import Any

import numpy as np

from mcvae.data.raw import Array, Raw, Reading, at_index
from mcvae.data.splits import DataError

__all__ = ["read_h5ad"]


def read_h5ad(path: Path, reading: Reading) -> dict[str, Raw]:
    """The counts of an AnnData file: `layers["counts"]` if there are, else `X`, dense or sparse.

    `condition=["batch"]` is the column `obs["batch"]`. Only the file format is read, by h5py: anndata is not needed.
    """
    import h5py

    try:
        with h5py.File(path) as file:
            layers = file.get("layers")
            source = layers["counts"] if layers is not None and "counts" in layers else file.get("X")
            if source is None:
                raise DataError(f'{path} has neither X nor layers["counts"].')
            values = _matrix(path, source)
            conditions = {name: _column(path, file, name) for name in reading.condition}
            genes = _names(file)
    except OSError as error:
        raise DataError(f"{path} cannot be read as an .h5ad file: {error}.") from error
    return {"all": Raw(values, at_index(path), genes, conditions)}


def _matrix(path: Path, source: Any) -> Array:
    """`[N, P]` from a dense matrix, or from compressed rows or columns."""
    if not hasattr(source, "keys"):
        return np.asarray(source)
    kind = str(source.attrs.get("encoding-type", ""))
    if kind not in ("csr_matrix", "csc_matrix"):
        raise DataError(
            f"{path}: expected a dense matrix, csr_matrix or csc_matrix, got {kind or 'an unknown format'}."
        )
    rows, columns = (int(size) for size in source.attrs["shape"])
    data, indices, starts = (np.asarray(source[name]) for name in ("data", "indices", "indptr"))
    dense = np.zeros((rows, columns), data.dtype)
    major = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    dense[(major, indices) if kind == "csr_matrix" else (indices, major)] = data
    return dense


def _column(path: Path, file: Any, name: str) -> Array:
    """A column of obs; of a categorical one, the names of the categories."""
    table = file.get("obs")
    if table is None or name not in table:
        raise DataError(f"{path} has no obs[{name!r}] to condition on; it has {', '.join(table or [])}.")
    column = table[name]
    if hasattr(column, "keys"):  # a categorical: codes and categories
        codes: Array = np.asarray(column["codes"])
        categories = _decoded(np.asarray(column["categories"]))
        missing = "" if categories.dtype.kind == "U" else np.nan
        return np.take(np.append(categories, missing), codes)  # -1, the last, is the code of what is missing
    return _decoded(np.asarray(column))


def _names(file: Any) -> list[str]:
    table = file.get("var")
    index = table.attrs.get("_index") if table is not None else None
    return [str(name) for name in _decoded(np.asarray(table[index]))] if index is not None else []


def _decoded(values: Array) -> Array:
    return np.char.decode(values.astype(bytes), "utf-8") if values.dtype.kind in "OS" else values
