"""The events of a log, block by block, and the histories of its users.

Knows events. Does not know catalogues or models.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from espalier.arrays import Float32, Int64
from espalier.logs.log_columns import check_unit
from espalier.logs.log_layout import SEPARATORS, look
from espalier.logs.log_values import BadRows, RowSource, Stamps, Timestamps, empty_rows
from espalier.logs.parquet_logs import is_parquet
from espalier.logs.text_files import TextTableFile, encoding_of, first_record, separator_of, whole_table
from espalier.wording import without_configuration


@dataclass(frozen=True)
class LogBatch:
    """Some consecutive events: string arrays without nulls or empty ids; category null where there is none.

    vectors_RF      where users are queries: float32[R, F], finite
    row_of_event_E  int64[E], in these vectors: the row of each event's user
    """

    user: pa.Array
    item: pa.Array
    stamp: Stamps | None = None
    category: pa.Array | None = None
    vectors_RF: Float32 | None = None
    row_of_event_E: Int64 | None = None

    def __len__(self) -> int:
        return len(self.user)


def events_of(source: RowSource, batch: pa.RecordBatch, timestamps: Timestamps, bad_rows: BadRows) -> LogBatch:
    """The rows of a block with readable ids and times, which are added to `bad_rows.rows_read`."""
    roles = batch.schema.names
    for role in ("user", "item"):
        wrong_rows = empty_rows(source.strings(role, batch.column(role)))
        source, batch = source.without(batch, role, wrong_rows, bad_rows, f"no {role}", "an id")
    if "timestamp" in roles:
        values = batch.column("timestamp")
        wrong_rows = timestamps.unreadable(values, bad_rows.most)
        expected = timestamps.expected(values.take(pa.array(wrong_rows[:1]))) if len(wrong_rows) else ""
        source, batch = source.without(batch, "timestamp", wrong_rows, bad_rows, "unreadable timestamp", expected)
    bad_rows.rows_read += len(batch)
    return LogBatch(
        source.strings("user", batch.column("user")),
        source.strings("item", batch.column("item")),
        timestamps.read(batch.column("timestamp")) if "timestamp" in roles else None,
        source.categories(batch.column("category")) if "category" in roles else None,
    )


class Histories(NamedTuple):
    """User → items, oldest first; and the users, which are whole numbers if the log has them as numbers."""

    lists: dict[str, list[str]]
    users: pa.Array


@without_configuration()
def histories(log: Path, user: str, item: str, time: str | None = None) -> Histories:
    """The histories of a log's users, ordered by a column of times, or in the order of the rows without one.

    Rows without a user, an item or a readable time are left out with a warning. Raises InvalidData, also if they are more than the others.

    time  None, `file` or `none`: no column
    """
    bad_rows, types, blocks = BadRows("skip", "data"), set[pa.DataType](), list[LogBatch]()
    with tempfile.TemporaryDirectory() as folder:
        layout = look(log, {"user": user, "item": item, "time": time or "file"}, Path(folder))
        times = layout.time([])
        columns = {role: layout.column(role) for role in ("user", "item")} | {"timestamp": times.get("timestamp")}
        kind = times.get("timestamp_type", "float")
        # Of any unit, and whole or not: only their order counts, and whether all have the same unit.
        timestamps = Timestamps("datetime" if kind == "datetime" else "float", layout.form.get("decimal", "."), times.get("time_format"))
        for source, batch in layout.batches({role: name for role, name in columns.items() if name is not None}, bad_rows, Path(folder)):
            types.add(batch.column("user").type)
            blocks.append(events_of(source, batch, timestamps, bad_rows))
    bad_rows.finish()
    users, items = (pa.chunked_array([getattr(block, role) for block in blocks], pa.string()) for role in ("user", "item"))
    stamps = [block.stamp for block in blocks if block.stamp is not None]
    if stamps:
        stamp_E = np.concatenate(stamps)
        if kind != "datetime":
            check_unit(f"{log.name}: column {times['timestamp']!r}", stamp_E)
        oldest_first = pa.array(np.argsort(stamp_E, kind="stable"))
        users, items = users.take(oldest_first), items.take(oldest_first)
    lists: dict[str, list[str]] = {}
    for user_id, item_id in zip(users.to_pylist(), items.to_pylist(), strict=True):
        lists.setdefault(user_id, []).append(item_id)
    return Histories(lists, pa.array([*lists], pa.string()).cast(_id_type(types)))


def _id_type(types: set[pa.DataType]) -> pa.DataType:
    """The type of ids that are stored with some types: integers stay, whole floats become integers, all others are strings."""
    if not types or not all(pa.types.is_integer(each) or pa.types.is_floating(each) for each in types):
        return pa.string()
    first, *others = types
    return first if pa.types.is_integer(first) and not others else pa.int64()


@without_configuration()
def read_table(file: Path, columns: Sequence[str] = ()) -> pa.Table:
    """All columns of a file, or of a folder of Parquet. Raises InvalidData.

    The first line of text names its columns. They are strings, with null for empty fields.

    columns  by which the separator of text is recognised
    """
    bad_rows = BadRows("refuse", "data")
    if file.is_file() and not is_parquet(file):
        encoding = encoding_of(file)
        tables = [TextTableFile(file, separator, encoding=encoding) for separator in (separator_of(file), *SEPARATORS)]
        table = next((table for table in tables if {*columns} <= {*first_record(table)}), tables[0])
        return whole_table(table, None, bad_rows)[0]
    with tempfile.TemporaryDirectory() as folder:
        layout = look(file, {}, Path(folder))
        all_columns = {str(name): name for name in layout.values}
        blocks = [pa.Table.from_batches([batch]) for _, batch in layout.batches(all_columns, bad_rows, Path(folder))]
        return pa.concat_tables(blocks, promote_options="permissive")
