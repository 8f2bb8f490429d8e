"""Item tables: the columns of a Parquet file for the items of a log."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from espalier.errors import InvalidConfig
from espalier.items import ItemTable


def item_table(file: Path | None, ids: pa.Array) -> ItemTable:
    """The table of these items: its columns from a Parquet file with a column `id`, null where the file lacks an item."""
    if file is None:
        return ItemTable.build(pa.table({"id": ids}))
    if not file.is_file():
        raise InvalidConfig("data.items", str(file), "a Parquet file that exists")
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise InvalidConfig("data.items", str(file), f"a Parquet file ({error})") from error
    if "id" not in table.column_names:
        raise InvalidConfig("data.items", table.column_names, "a column named 'id'")
    try:
        known = table.column("id").cast(pa.large_string()).to_pylist()
    except pa.ArrowException as error:
        raise InvalidConfig("data.items", f"ids of type {table.column('id').type}", "strings or numbers") from error
    row_of = {item_id: row for row, item_id in enumerate(known)}
    if len(row_of) != len(known):
        repeated = next(item_id for row, item_id in enumerate(known) if row_of[item_id] != row)
        raise InvalidConfig("data.items", repeated, "each id once")
    rows = pa.array([row_of.get(item_id) for item_id in ids.to_pylist()], pa.int64())
    if rows.null_count == len(rows):
        raise InvalidConfig("data.items", known[:3], f"ids of the log's items, such as {ids[0].as_py()!r}")
    return ItemTable.build(table.take(rows).set_column(table.column_names.index("id"), "id", ids))
