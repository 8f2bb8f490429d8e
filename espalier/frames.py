"""Data frames in and out: pandas, polars, Arrow and files become Arrow's tables, and tables become what people work with.

Knows columns. Does not know models.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from espalier.errors import InvalidInput

Frame = Literal["pandas", "polars", "arrow"]
"""Which library's data frames answers are."""
LIBRARIES: tuple[Literal["pandas", "polars"], ...] = ("pandas", "polars")


def installed_frame() -> Frame:
    """pandas or polars where one is installed."""
    for name in LIBRARIES:
        if importlib.util.find_spec(name) is not None:
            return name
    return "arrow"


def frame_like(data: Any) -> Frame:
    """The library whose data frames some data is; where it is a file, the installed one."""
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


def as_table(field: str, data: Any) -> pa.Table:
    """A data frame, or a CSV or Parquet file, as a table of Arrow. Raises InvalidInput, naming the argument, for anything else."""
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, str | Path):
        file = Path(data)
        if not file.exists():
            raise InvalidInput(field, str(file), "a file that exists")
        return pc.read_csv(file) if file.name.endswith((".csv", ".csv.gz")) else pq.read_table(file)
    module = type(data).__module__.partition(".")[0]
    if module == "polars" and hasattr(data, "to_arrow"):
        return data.to_arrow()
    if module == "pandas" and hasattr(data, "columns"):
        return pa.Table.from_pandas(data, preserve_index=False)
    expected = "a data frame of pandas or polars, a table of Arrow, or the path of a CSV or Parquet file"
    raise InvalidInput(field, type(data).__name__, expected)


def column_of(table: pa.Table, field: str, name: str) -> pa.ChunkedArray:
    """A column by its name. Raises InvalidInput, naming the argument that named it."""
    if name not in table.column_names:
        raise InvalidInput(field, name, f"one of the columns {', '.join(table.column_names)}")
    return table.column(name)


def lists_of(table: pa.Table, user: str, item: str, time: str | None) -> dict[Any, list[str]]:
    """By user the items, oldest first: by a column of times, else in the order of the rows. Raises InvalidInput."""
    users, items = column_of(table, "user", user), column_of(table, "item", item)
    order: NDArray[np.int64] = np.arange(len(table))
    if time is not None:
        order = np.argsort(column_of(table, "time", time).to_numpy(zero_copy_only=False), kind="stable")
    taken = pa.array(order)
    lists: dict[Any, list[str]] = {}
    for owner, one in zip(users.take(taken).to_pylist(), items.take(taken).to_pylist(), strict=True):
        if owner is not None and one is not None:
            lists.setdefault(owner, []).append(str(one))
    return lists
