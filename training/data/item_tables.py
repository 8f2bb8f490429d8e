"""Item tables: the columns of a Parquet, CSV or TSV file for the items of a log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt

from espalier.errors import InvalidConfig, InvalidData
from espalier.items import ItemTable
from espalier.logs.log_columns import position_of
from espalier.logs.log_values import BadRows, RowSource, empty_rows, table_row
from espalier.logs.parquet_logs import is_parquet
from espalier.logs.text_files import other_separator, whole_table
from espalier.masks.filters import is_list
from espalier.wording import configured, either

from ..specification.log_format import TextTable

log = logging.getLogger(__name__)

WHOLE = "0|[1-9][0-9]*"
"""A number without leading zeros: 007 is a code."""
FORMS = {
    pa.int64(): f"^-?(?:{WHOLE})$",
    pa.float64(): f"^-?(?:{WHOLE})(?:\\.[0-9]+)?(?:[eE][+-]?[0-9]+)?$",
    pa.bool_(): "^(?i:true|false)$",
}
"""Type of a text column → pattern of all its values."""


def item_table(file: Path, ids: pa.Array | None, form: TextTable, id_column: str = "id") -> ItemTable:
    """The table of these items, with the columns of a file. Items that the file lacks are null.

    ids        None: those of the file
    form       format of a text file
    id_column  the file's column of ids, `id` in the table

    Text columns become integers, floats or booleans if all their values can, else strings. Empty fields are null.
    """
    if not file.is_file():
        raise _refused(str(file), "a Parquet, CSV or TSV file that exists")
    try:
        table, position = (pq.read_table(file), table_row) if is_parquet(file) else _read_text(file, form, id_column)
    except (pa.ArrowException, OSError) as error:
        expected = f"a readable Parquet file ({str(error).splitlines()[0]})"
        raise _refused(str(file), expected) from error
    column = position_of(table.column_names, id_column)
    if column is None:
        separator_hint = "" if is_parquet(file) else other_separator(form.file(file), table.column_names)
        key = configured(", or data.items_id = the name of that of the ids")
        raise _refused(table.column_names, f"a column named {id_column!r}{key}{separator_hint}")
    table = _with_ids(table, column)
    file_ids = RowSource(file.name, {"id": id_column}, position).strings("id", table.column("id").combine_chunks()).cast(pa.large_string())
    if not len(file_ids):
        raise _refused("no rows", "at least one item")
    if len(empty := empty_rows(file_ids)):
        row = int(empty[0])
        without = f"{len(empty):,} of {len(file_ids):,} rows have none"
        field = f"{file.name}: {position(row)}, column {id_column}"
        raise InvalidData(field, file_ids[row].as_py(), f"an id in column {id_column!r}; {without}")
    counts = pc.value_counts(file_ids)
    if len(counts) != len(file_ids):
        repeated = counts.filter(pc.greater(counts.field("counts"), 1))[0].as_py()["values"]
        rows = pc.indices_nonzero(pc.equal(file_ids, repeated)).to_pylist()
        expected = f"each id once; {position(rows[0])} has it, too"
        raise InvalidData(f"{file.name}: {position(rows[1])}, column {id_column}", repeated, expected)
    if ids is None:
        ids, rows = file_ids, pa.array(np.arange(len(file_ids)))
    else:
        rows = _rows_of(file.name, ids, file_ids)
    columns = [ids if name == "id" else as_json(column).take(rows) for name, column in zip(table.column_names, table.columns, strict=True)]
    return ItemTable.build(pa.table(columns, names=table.column_names))


def _with_ids(table: pa.Table, position: int) -> pa.Table:
    """The table whose column at a position is named `id`. Another column of that name is left out."""
    other = position_of(table.column_names, "id")
    names = ["id" if column == position else name for column, name in enumerate(table.column_names)]
    table = table.rename_columns(names)
    if other in (None, position):
        return table
    log.info("ids are in another column than 'id', which is left out")
    return table.remove_column(other)


def as_json(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column whose values are as JSON has them: requests filter by them and return them, and writes of live items set them."""
    return pa.chunked_array([_as_json(chunk) for chunk in column.chunks])


def _as_json(column: pa.Array) -> pa.Array:
    """Decimals as floats, float32 as the float64 of the same shortest text (so that .1 is found by .1), categories as their values, dates
    and times as ISO 8601 (in UTC if they have a zone); also those in lists."""
    kind = column.type
    if is_list(kind):
        values = _as_json(pc.list_flatten(column))
        if values.type == kind.value_type:
            return column
        ends = pa.array(np.cumsum(pc.fill_null(pc.list_value_length(column), 0), dtype=np.int64))
        return pa.LargeListArray.from_arrays(pa.concat_arrays([pa.array([0], pa.int64()), ends]), values, mask=column.is_null())
    if pt.is_dictionary(kind):
        return _as_json(column.cast(kind.value_type))
    if pt.is_decimal(kind) or pt.is_float32(kind):
        return column.cast(pa.string()).cast(pa.float64())  # Arrow casts 19.99 itself to 19.990000000000002
    if pt.is_timestamp(kind) or pt.is_date(kind) or pt.is_time(kind):
        in_utc = column.cast(pa.timestamp(kind.unit, "UTC")) if pt.is_timestamp(kind) and kind.tz else column
        exact = pc.replace_substring_regex(in_utc.cast(pa.string()), r"\.0+(Z?)$", r"\1")
        return pc.replace_substring(exact, " ", "T")
    return column.cast(pa.string()) if pt.is_string_view(kind) else column


def _rows_of(name: str, ids: pa.Array, file_ids: pa.ChunkedArray) -> pa.Array:
    """The row of each item in a file, null for items that it lacks. Logs how many it has: ids of another form match none, or a few by
    accident. Raises InvalidConfig if it has none.
    """
    rows = pc.index_in(ids.cast(pa.large_string()), file_ids)
    if rows.null_count == len(rows):
        raise _refused(file_ids.slice(0, 3).to_pylist(), f"ids of the log's items, such as {ids[0].as_py()!r}")
    matches = len(rows) - rows.null_count
    counts = f"{name}: rows for {matches:,} of {len(rows):,} items; {len(file_ids) - matches:,} unused rows"
    if 2 * matches >= len(rows):
        log.info(counts)
        return rows
    unused = file_ids.filter(pc.invert(pc.is_in(file_ids, ids.cast(file_ids.type))))
    item, example = ids.filter(pc.is_null(rows))[0].as_py(), (unused if len(unused) else file_ids)[0].as_py()
    log.warning("WARNING: %s. Item %r has none, for example; ids there are such as %r", counts, item, example)
    return rows


def _refused(value: object, expected: str) -> InvalidConfig:
    return InvalidConfig(either("data.items", "items"), value, expected)


def _read_text(file: Path, form: TextTable, id_column: str) -> tuple[pa.Table, Callable[[int], str]]:
    """The table, its ids being strings, and the line of each row in words."""
    bad_rows = BadRows(form.bad_rows, form.SECTION)
    table, source = whole_table(form.file(file), None, bad_rows)
    bad_rows.rows_read += len(table)
    bad_rows.finish()
    ids = position_of(table.column_names, id_column)
    columns = [column if position == ids else _typed(column, form) for position, column in enumerate(table.columns)]
    return pa.table(columns, names=table.column_names), source.position


def _typed(column: pa.ChunkedArray, form: TextTable) -> pa.ChunkedArray:
    """A column of strings as numbers or booleans, if all values can be converted without loss."""
    if column.null_count == len(column):
        return column
    for kind, pattern in FORMS.items():
        values = pc.replace_substring(column, form.decimal, ".") if kind == pa.float64() and form.decimal != "." else column
        if pc.all(pc.match_substring_regex(values, pattern)).as_py():
            try:
                return values.cast(kind)
            except pa.ArrowInvalid:  # more digits than int64 has
                return column
    return column
