"""Converts data frames: pandas, polars, Arrow and files to Arrow's tables, and tables to data frames.

Knows columns. Does not know models.
"""

from __future__ import annotations

import gzip
import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq

from espalier.errors import InvalidInput

Frame = Literal["pandas", "polars", "arrow"]
"""The library of the data frames that answers are returned as."""
DELIMITERS, HEADER_BYTES = (",", ";", "\t", "|"), 1 << 20
LIBRARIES: tuple[Literal["pandas", "polars"], ...] = ("pandas", "polars")


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


def as_table(field: str, data: Any, id_columns: Sequence[str | None] = ()) -> pa.Table:
    """A data frame, or a CSV, TSV or Parquet file, as a table of Arrow. Raises InvalidInput, naming the argument, for anything else.

    id_columns  read as text from a text file, so that leading zeros stay. The delimiter of a .csv is a comma, or the first of `;`, tab and
                `|` that gives its first line all these columns
    """
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, str | Path):
        file = Path(data)
        if not file.is_file():
            raise InvalidInput(field, str(file), "a file that exists")
        name = file.name.removesuffix(".gz")
        if name.endswith((".csv", ".tsv")):
            kinds = {text: pa.string() for text in id_columns if text is not None}
            convert = csv.ConvertOptions(column_types=kinds, strings_can_be_null=True, null_values=[""])  # "NA" may be an id
            try:
                parse = csv.ParseOptions(delimiter="\t" if name.endswith(".tsv") else _delimiter(file, list(kinds)))
                return csv.read_csv(file, parse_options=parse, convert_options=convert)
            except (OSError, EOFError, pa.ArrowInvalid) as error:  # not gzip, truncated, or without columns
                raise InvalidInput(field, str(file), f"a text file with a line of columns first ({error})") from error
        try:
            return pq.read_table(file)
        except pa.ArrowInvalid as error:
            raise InvalidInput(field, str(file), f"a file that ends in .csv or .tsv, gzipped or not, or Parquet ({error})") from error
    module = type(data).__module__.partition(".")[0]
    if module == "polars" and hasattr(data, "to_arrow"):
        return data.to_arrow()
    if module == "pandas" and hasattr(data, "columns"):
        return pa.Table.from_pandas(data, preserve_index=False)
    expected = "a data frame of pandas or polars, a table of Arrow, or the path of a CSV, TSV or Parquet file"
    raise InvalidInput(field, type(data).__name__, expected)


def _delimiter(file: Path, columns: Sequence[str]) -> str:
    """The first of DELIMITERS that gives the first line of a file all these columns; a comma if there is none."""
    with gzip.open(file, "rb") if file.name.endswith(".gz") else file.open("rb") as opened:
        line = opened.readline(HEADER_BYTES).decode("utf-8", "replace").removeprefix("\ufeff").strip()
    signs = (sign for sign in DELIMITERS if {*columns} <= {name.strip().strip('"') for name in line.split(sign)})
    return next(signs, ",")


def column_of(table: pa.Table, field: str, name: str) -> pa.ChunkedArray:
    """A column by its name. Raises InvalidInput, which names the argument (`field`)."""
    if name not in table.column_names:
        raise InvalidInput(field, name, f"one of the columns {', '.join(table.column_names)}")
    return table.column(name)


def lists_of(table: pa.Table, user: str, item: str, time: str | None) -> dict[Any, list[str]]:
    """User → items, oldest first by the column of times, or in the order of the rows without one. Raises InvalidInput."""
    users, items = column_of(table, "user", user), column_of(table, "item", item)
    for field, column in (("user", users), ("item", items)):
        if pa.types.is_floating(column.type):
            raise InvalidInput(field, str(column.type), "a column of texts or whole numbers: 1.0 is no id")
    order = pa.array(np.arange(len(table)))
    if time is not None:
        times = column_of(table, "time", time)
        if not (pa.types.is_temporal(times.type) or pa.types.is_integer(times.type) or pa.types.is_floating(times.type)):
            first = next((value for value in times.to_pylist() if value), None)
            raise InvalidInput("time", f"{time}: {first}", "a column of numbers, or of times as ISO 8601 has them (2026-03-08 07:24)")
        order = pc.array_sort_indices(times.combine_chunks())  # stable, nulls last
    lists: dict[Any, list[str]] = {}
    for owner, item_id in zip(users.take(order).to_pylist(), items.take(order).to_pylist(), strict=True):
        if owner is not None and item_id is not None:
            lists.setdefault(owner, []).append(str(item_id))
    return lists
