"""Converts data frames: pandas, polars, Arrow and files to Arrow's tables, and tables to data frames.

Knows columns. Does not know models.
"""

from __future__ import annotations

import importlib
import importlib.util
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from espalier.errors import InvalidInput
from espalier.logs.log_events import read_table

Frame = Literal["pandas", "polars", "arrow"]
"""The library of the data frames that answers are returned as."""
FRAME = "data frame"
"""The file of a data frame, named as messages about it name it."""
LIBRARIES: tuple[Literal["pandas", "polars"], ...] = ("pandas", "polars")
WHOLE = 2**53
"""Floats hold every whole number below this one."""
IDS = 'strings or whole numbers below 2^53: make all ids strings, in pandas with .astype("string"), in polars with .cast(pl.String)'
"""The expected values of a column of ids."""
UNWRITABLE = "columns of types that Parquet can hold: drop the others"
"""The expected columns where one cannot be stored."""


def installed_frame() -> Frame:
    """pandas or polars if one is installed, else Arrow."""
    for name in LIBRARIES:
        if importlib.util.find_spec(name) is not None:
            return name
    return "arrow"


def frame_like(data: Any) -> Frame:
    """The library of a data frame; for a file, the installed library."""
    for name in LIBRARIES:
        if type(data).__module__.partition(".")[0] == name:
            return name
    return "arrow" if isinstance(data, pa.Table) else installed_frame()


def as_frame(table: pa.Table, frame: Frame) -> Any:
    """A table of Arrow as a data frame."""
    if frame == "pandas":
        return table.to_pandas()
    if frame == "polars":
        return importlib.import_module("polars").from_arrow(table)
    return table


def as_table(field: str, data: Any, columns: Sequence[str] = ()) -> pa.Table:
    """A data frame, or a file of text or Parquet, as a table of Arrow. Raises InvalidInput, naming the argument, for anything else.

    columns  as in `read_table`
    """
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, str | Path):
        if not Path(data).exists():
            raise InvalidInput(field, str(data), "a file that exists")
        return read_table(Path(data), columns)
    module = type(data).__module__.partition(".")[0]
    if module == "polars" and hasattr(data, "get_columns"):
        return _from_polars(field, data)
    if module == "pandas" and hasattr(data, "columns"):
        return _from_pandas(field, data)
    expected = "a data frame of pandas or polars, a table of Arrow, or the path of a CSV, TSV or Parquet file"
    raise InvalidInput(field, type(data).__name__, expected)


def as_file(field: str, data: Any, folder: Path, name: str = FRAME) -> Path:
    """A file, or a data frame that is written into a folder under a name. Raises InvalidInput as `as_table` does."""
    if isinstance(data, str | Path):
        return Path(data)
    table = as_table(field, data)
    try:
        pq.write_table(table, folder / name)
    except pa.ArrowException as error:
        raise InvalidInput(field, str(error), UNWRITABLE) from error
    return folder / name


def _from_polars(field: str, data: Any) -> pa.Table:
    """Raises InvalidInput, which names the column, for a type that Arrow lacks."""
    columns = {}
    for name in data.columns:
        try:
            columns[name] = data[name].to_arrow()
        except pa.ArrowException as error:
            raise InvalidInput(f"{field}[{name!r}]", str(data[name].dtype), UNWRITABLE) from error
    return pa.table(columns)


def _from_pandas(field: str, data: Any) -> pa.Table:
    """Raises InvalidInput, which names the column and the first value that does not fit those before it."""
    names = [str(name) for name in data.columns]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise InvalidInput(field, repeated, "each column once")
    columns = {}
    for name in data.columns:
        try:
            columns[str(name)] = pa.Array.from_pandas(data[name])
        except (pa.ArrowException, OverflowError) as error:
            values = np.asarray(data[name], object)
            row = bisect_left(range(len(values) - 1), True, key=partial(_is_mixed, values))
            expected = f'a value of one type with those above it; {field}[{name!r}].astype("string") makes all of them strings'
            raise InvalidInput(f"{field}[{name!r}], row {row} (from 0)", values[row], expected) from error
    return pa.table(columns)


def _is_mixed(values: NDArray[np.object_], last: int) -> bool:
    """Whether Arrow cannot hold the values up to the last one in one column."""
    try:
        pa.Array.from_pandas(values[: last + 1])
    except (pa.ArrowException, OverflowError):
        return True
    return False
