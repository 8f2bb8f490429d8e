"""Item tables: the columns of a Parquet, CSV or TSV file for the items of a log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from espalier.errors import InvalidConfig
from espalier.items import ItemTable

if TYPE_CHECKING:
    import polars as pl

TEXT_NAMES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
"""How names of tables that are text end."""

WHOLE = "0|[1-9][0-9]*"
"""A number as it is written again: 007 is a code."""
FORMS = {
    "Int64": f"^-?(?:{WHOLE})$",
    "Float64": f"^-?(?:{WHOLE})(?:\\.[0-9]+)?(?:[eE][+-]?[0-9]+)?$",
    "Boolean": "^(?:true|false)$",
}
"""Polars' types of columns of text, by what all their values look like."""


def is_text(file: Path) -> bool:
    """Whether a table is CSV or TSV."""
    return file.name.endswith(TEXT_NAMES)


def separator_of(file: Path) -> str:
    return "\t" if file.name.removesuffix(".gz").endswith(".tsv") else ","


def item_table(file: Path | None, ids: pa.Array) -> ItemTable:
    """The table of these items: its columns from a file with a column `id`, null where the file lacks an item.

    Columns of text are whole numbers, fractions or `true` and `false` where all their values are, else strings; empty fields are null.
    """
    if file is None:
        return ItemTable.build(pa.table({"id": ids}))
    if not file.is_file():
        raise InvalidConfig("data.items", str(file), "a Parquet, CSV or TSV file that exists")
    try:
        table = _read_text(file) if is_text(file) else pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(file, error) from error
    if "id" not in table.column_names:
        raise InvalidConfig("data.items", table.column_names, "a column named 'id'")
    try:
        known = table.column("id").cast(pa.large_string())
    except pa.ArrowException as error:
        raise InvalidConfig("data.items", f"ids of type {table.column('id').type}", "strings or numbers") from error
    counts = pc.value_counts(known)
    if len(counts) != len(known):
        repeated = counts.filter(pc.greater(counts.field("counts"), 1))[0].as_py()["values"]
        raise InvalidConfig("data.items", repeated, "each id once")
    rows = pc.index_in(ids.cast(pa.large_string()), known)
    if rows.null_count == len(rows):
        raise InvalidConfig("data.items", known.slice(0, 3).to_pylist(), f"ids of the log's items, such as {ids[0].as_py()!r}")
    return ItemTable.build(table.take(rows).set_column(table.column_names.index("id"), "id", ids))


def _read_text(file: Path) -> pa.Table:
    import polars as pl  # histories train without it, where it is not installed

    try:
        frame = pl.read_csv(file, separator=separator_of(file), infer_schema=False)
    except pl.exceptions.PolarsError as error:
        raise _unreadable(file, error) from error
    frame = frame.with_columns(_typed(column) for column in frame if column.name != "id")
    return frame.to_arrow(compat_level=pl.CompatLevel.oldest())


def _typed(column: pl.Series) -> pl.Series:
    """A column of strings as numbers or truth values where all of them are some, and none is lost."""
    import polars as pl

    for name, form in FORMS.items():
        if column.str.contains(form).all() and column.null_count() < len(column):
            if name == "Boolean":
                return column == "true"
            typed = column.cast(getattr(pl, name), strict=False)
            return typed if typed.null_count() == column.null_count() else column
    return column


def _unreadable(file: Path, error: Exception) -> InvalidConfig:
    return InvalidConfig("data.items", str(file), f"a Parquet file, or text named .csv or .tsv ({str(error).splitlines()[0]})")
