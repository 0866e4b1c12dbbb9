"""Tables of numbers: CSV and Parquet."""

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mcvae.data.raw import Array, Raw, Reading, is_number
from mcvae.data.splits import SPLITS, DataError

__all__ = ["read_csv", "read_parquet"]


def read_csv(path: Path, reading: Reading) -> dict[str, Raw]:
    """A table of numbers separated by commas, semicolons or tabs, with or without a line of names.

    A column called split, with the words train, validation and test, says where a row belongs. A first column whose
    name is empty holds the names of rows, as pandas and R write them, and is left out.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            sample = file.read(1 << 16)
            delimiter = max(",;\t", key=sample.split("\n", 1)[0].count)
            file.seek(0)
            reader = csv.reader(file, delimiter=delimiter)
            rows = [(reader.line_num, row) for row in reader if any(row)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a text table: {error}. Save it as CSV in UTF-8.") from error
    if not rows:
        raise DataError(f"{path} is empty. A table needs a line of numbers for every datum.")
    names = [f"column {number}" for number in range(1, len(rows[0][1]) + 1)]
    indexed = not rows[0][1][0].strip()
    if not all(is_number(cell) for cell in rows[0][1]):
        names = [name.strip() or names[place] for place, name in enumerate(rows.pop(0)[1])]
    if not rows:
        raise DataError(f"{path} has a line of names and no line of numbers.")
    for number, row in rows:
        if len(row) != len(names):
            raise DataError(
                f"{path}, line {number}: expected {len(names)} values, as in the first line, got {len(row)}."
            )
    columns = {name: np.array([row[place] for _, row in rows]) for place, name in enumerate(names)}
    if len(columns) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path} has two columns called {twice!r}. Rename one.")
    if indexed:
        del columns[names[0]]
    return _parts(path, columns, reading, lambda row: f"{path}, line {rows[row][0]}")


def read_parquet(path: Path, reading: Reading) -> dict[str, Raw]:
    """A Parquet file of numeric columns; a column called split as for `read_csv`."""
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.read_table(path)
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {' '.join(str(error).split())}.") from error
    if not table.num_rows:
        raise DataError(f"{path} is empty. A table needs a row for every datum.")
    named = [name for name in table.column_names if not name.startswith("__index_level_")]  # by which pandas keeps rows
    columns = {name: table.column(name).to_numpy() for name in named}
    return _parts(path, columns, reading, lambda row: f"{path}, row {row} (counted from 0)")


def _parts(path: Path, columns: dict[str, Array], reading: Reading, place: Callable[[int], str]) -> dict[str, Raw]:
    for name in reading.condition:
        if name not in columns:
            raise DataError(f"{path} has no column {name!r} to condition on; it has {', '.join(list(columns)[:20])}.")
    conditions = {name: _maybe_numbers(columns[name]) for name in reading.condition}
    split = columns.get("split")
    modelled = [name for name in columns if name not in reading.condition and name != "split"]
    if not modelled:
        raise DataError(f"{path} has no column left to model.")
    values = np.stack([_numbers(name, columns[name], place) for name in modelled], 1)
    every = Raw(values, place, modelled, conditions)
    if split is None or reading.whole:
        return {"all": every}
    words = np.array([str(word).strip() for word in split])
    for row, word in enumerate(words):
        if word not in SPLITS:
            raise DataError(f"{place(row)}: the column split must say train, validation or test, got {str(word)!r}.")
    return {name: every.part(np.flatnonzero(words == name)) for name in dict.fromkeys(words.tolist())}


def _numbers(name: str, column: Array, place: Callable[[int], str]) -> Array:
    """A column as float64; whatever is not a number is named."""
    try:
        return _plain(column).astype(np.float64)
    except (ValueError, TypeError):
        row = next(row for row, cell in enumerate(_plain(column)) if not is_number(cell))
        cell = str(column[row])
        advice = (
            "Write decimals with a point."
            if is_number(cell.replace(",", ".", 1))
            else f"Fill it in or remove the row; or, if it is a label, condition on it: --data.condition [{name}]."
        )
        raise DataError(f"{place(row)}, column {name!r}: expected a number, got {cell[:40]!r}. {advice}") from None


def _maybe_numbers(column: Array) -> Array:
    try:
        return _plain(column).astype(np.float64)
    except (ValueError, TypeError):
        return np.array(["" if cell is None else str(cell) for cell in column])


def _plain(column: Array) -> Array:
    """Dates as text: NumPy would convert them to numbers."""
    return column.astype(str) if column.dtype.kind in "mM" else column
