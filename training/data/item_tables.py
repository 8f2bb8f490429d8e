"""Item tables: the columns of a Parquet file for the items of a log."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
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
