"""The item table: string ids, titles and attributes of the catalogue, by item row.

One Arrow IPC file, opened by mmap, so that a large catalogue costs no Python objects. A sorted column of 64-bit hashes finds an id's row.
Two bounded dictionaries cache ids in use and are ten times faster. Knows nothing of trees or searches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from espalier.arrays import Int64
from espalier.bundle_files import map_table
from espalier.errors import BundleCorrupt, InvalidData

HASH_COLUMN = "__hash"
ROW_COLUMN = "__hash_row"
MAX_ID_BYTES = 512
SHOWN = 60
"""Characters of a long id in an error message."""
CACHED_IDS = 65_536
"""Most ids that a table caches as Python strings, in each direction; a full cache is emptied."""
BLOCK = 1 << 16
"""Ids that are converted to Python strings at a time while a table is built."""
UNKNOWN_IDS = 4096
"""Most ids without an item that a table caches; a full cache is emptied."""


class Items(Protocol):
    """Items by row, as a search and its answer need them: those of a bundle, with or without live items."""

    def __len__(self) -> int: ...

    @property
    def fields(self) -> tuple[str, ...]:
        """The columns that a caller may ask for, `id` first."""
        ...

    def rows_of(self, ids: Sequence[str]) -> Int64:
        """int64[len(ids)]: the item row of each id, −1 if there is none."""
        ...

    def ids_of(self, rows: Int64) -> list[str]:
        """The ids at item rows."""
        ...

    def values(self, field: str, rows: Int64) -> list[Any]:
        """One column's Python values at item rows (int64)."""
        ...


class ItemTable:
    """Items by row. Columns: `id`, optionally `title`, and any attributes (string, list of strings, number)."""

    def __init__(self, table: pa.Table) -> None:
        for name, expected_type in (("id", pa.large_string()), (HASH_COLUMN, pa.uint64()), (ROW_COLUMN, pa.int64())):
            if name not in table.column_names or table.schema.field(name).type != expected_type:
                raise BundleCorrupt(f"items: expected a column {name!r} of type {expected_type}")
        self._table = table
        self._ids = table.column("id")
        if any(table.column(name).null_count for name in ("id", HASH_COLUMN, ROW_COLUMN)):
            raise BundleCorrupt("items: an id or its place in the index is missing")
        self._hash_I = np.asarray(one_array(table.column(HASH_COLUMN)))
        self._row_I = np.asarray(one_array(table.column(ROW_COLUMN)))
        if len(self._row_I) and (self._row_I.min() < 0 or self._row_I.max() >= len(table)):
            raise BundleCorrupt(f"items: the index has rows outside 0 … {len(table) - 1}")
        # Shared by threads without a lock: single operations on a dict are atomic, and every cached entry is right.
        self._row_of_id: dict[str, int] = {}
        self._id_of_row: dict[int, str] = {}
        self._unknown_ids: dict[str, None] = {}  # ids without an item in the table, such as those of live items

    @staticmethod
    def build(table: pa.Table) -> ItemTable:
        """Index a table with a string column `id`. Raises InvalidData on a missing, empty, repeated or over-long id."""
        if "id" not in table.column_names:
            raise InvalidData("items", table.column_names, "a column named 'id'")
        ids = table.column("id").cast(pa.large_string())
        if ids.null_count:
            raise InvalidData("items.id", None, "a non-empty string in every row")
        blocks = (ids.slice(start, BLOCK).to_pylist() for start in range(0, len(ids), BLOCK))
        hash_I = np.fromiter((_hash(item_id) for block in blocks for item_id in block), np.uint64, len(ids))
        lengths = pc.binary_length(ids)
        wrong = pc.indices_nonzero(pc.or_(pc.equal(lengths, 0), pc.greater(lengths, MAX_ID_BYTES)))
        if len(wrong):
            row = wrong[0].as_py()
            value = f"{ids[row].as_py()[:SHOWN]}… ({lengths[row]} bytes)" if lengths[row].as_py() else ""
            raise InvalidData("items.id", value, f"ids of 1 to {MAX_ID_BYTES} bytes")
        return ItemTable._indexed(table.set_column(table.column_names.index("id"), "id", ids), hash_I)

    @staticmethod
    def _indexed(table: pa.Table, hash_I: NDArray[np.uint64]) -> ItemTable:
        """A table with its index, from the hash of each row's id. Raises InvalidData if there is no id, or one is repeated."""
        if len(table) == 0:
            raise InvalidData("items.id", "no ids", "at least one id")
        order = np.argsort(hash_I, kind="stable")
        is_equal = np.diff(hash_I[order]) == 0
        rows = np.sort(order[np.append(is_equal, False) | np.append(False, is_equal)])  # only ids with the same hash can be the same
        counts = pc.value_counts(table.column("id").take(pa.array(rows)))
        if len(counts) != len(rows):
            repeated = next(entry["values"] for entry in counts.to_pylist() if entry["counts"] > 1)
            raise InvalidData("items.id", repeated, "each id once")
        index = {HASH_COLUMN: pa.array(hash_I[order]), ROW_COLUMN: pa.array(order.astype(np.int64))}
        columns = {name: table.column(name) for name in table.column_names if name not in index}
        return ItemTable(pa.table(columns | index).combine_chunks())

    def take(self, rows: Int64) -> ItemTable:
        """The items at some rows (int64)."""
        return ItemTable._indexed(self.to_table().take(pa.array(rows)), self._row_hashes()[rows])

    @staticmethod
    def joined(tables: Sequence[ItemTable], rows: Sequence[Int64]) -> ItemTable:
        """One table with the items of several tables, which have the same columns and no item in common.

        rows  for each table int64: its items' rows in the joined table, together 0, 1, 2, … in any order
        Raises InvalidData if the columns differ.
        """
        arrow_tables = [table.to_table() for table in tables]
        for arrow_table in arrow_tables[1:]:
            if arrow_table.schema != arrow_tables[0].schema:
                expected = f"the columns {arrow_tables[0].schema.names}, of the same types, in all tables"
                raise InvalidData("items", arrow_table.schema.names, expected)
        order = np.argsort(np.concatenate(rows))
        hashes = np.concatenate([table._row_hashes() for table in tables])[order]
        return ItemTable._indexed(pa.concat_tables(arrow_tables).take(pa.array(order)), hashes)

    @staticmethod
    def open(path: Path) -> ItemTable:
        """Map a file that `write` made. Raises BundleCorrupt if it is no Arrow file, or has offsets outside its buffers.

        Reads the whole file to check the offsets: answers contain the ids and titles that they point to.
        """
        try:
            table = map_table(path)
            table.validate(full=True)
            return ItemTable(table)
        except (pa.ArrowException, OSError, ValueError) as error:  # an id need not be UTF-8
            raise BundleCorrupt(f"{path.name}: not a readable Arrow file ({error})") from error

    def write(self, path: Path) -> None:
        """Write as one Arrow IPC record batch, uncompressed, so that it can be mapped."""
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, self._table.schema) as writer:
            writer.write_table(self._table, max_chunksize=max(1, len(self._table)))

    def __len__(self) -> int:
        return len(self._table)

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The columns that a caller may ask for, `id` first."""
        return tuple(name for name in self._table.column_names if name not in (HASH_COLUMN, ROW_COLUMN))

    def rows_of(self, ids: Sequence[str]) -> Int64:
        """int64[len(ids)]: the item row of each id, −1 if there is none."""
        if len(ids) == 1:
            return np.array([self.row_of(ids[0])], np.int64)
        cached_rows = [self._row_of_id.get(item_id, -1) for item_id in ids]
        if -1 not in cached_rows:
            return np.array(cached_rows, np.int64)
        new_ids = list({item_id for item_id, row in zip(ids, cached_rows, strict=True) if row < 0 and item_id not in self._unknown_ids})
        if not new_ids:
            return np.array(cached_rows, np.int64)
        new_rows = self._cache(dict(zip(new_ids, self._find(new_ids).tolist(), strict=True)))
        return np.array([row if row >= 0 else new_rows.get(item_id, -1) for item_id, row in zip(ids, cached_rows, strict=True)], np.int64)

    def _cache(self, rows_of_ids: Mapping[str, int]) -> dict[str, int]:
        """Cache the rows of ids that were looked up (−1: no item). Returns those with an item."""
        known_rows = {item_id: row for item_id, row in rows_of_ids.items() if row >= 0}
        _remember(self._row_of_id, known_rows, CACHED_IDS)
        _remember(self._id_of_row, {row: item_id for item_id, row in known_rows.items()}, CACHED_IDS)
        unknown_ids: dict[str, None] = {
            item_id: None for item_id in rows_of_ids if item_id not in known_rows and len(item_id) <= MAX_ID_BYTES
        }
        _remember(self._unknown_ids, unknown_ids, UNKNOWN_IDS)
        return known_rows

    def row_of(self, item_id: str) -> int:
        """The item row of an id, −1 if there is none."""
        row = self._row_of_id.get(item_id, -1)
        if row < 0 and item_id not in self._unknown_ids:
            row = self._find_one(item_id)
            self._cache({item_id: row})
        return row

    def ids_of(self, rows: Int64) -> list[str]:
        """The ids at item rows."""
        numbers = rows.tolist()
        cached_ids = [self._id_of_row.get(row, "") for row in numbers]  # no id is empty
        if "" not in cached_ids:
            return cached_ids
        ids: list[str] = self.values("id", rows)
        _remember(self._id_of_row, dict(zip(numbers, ids, strict=True)), CACHED_IDS)
        return ids

    def _find(self, ids: Sequence[str]) -> Int64:
        """`rows_of` by the hash column."""
        rows = np.full(len(ids), -1, np.int64)
        hashes = np.fromiter((_hash(item_id) for item_id in ids), np.uint64, len(ids))
        slots = np.minimum(np.searchsorted(self._hash_I, hashes), len(self) - 1)
        positions = np.flatnonzero(self._hash_I[slots] == hashes)
        if not len(positions):
            return rows  # usual for live items: no strings need to be compared
        candidates = self._row_I[slots[positions]]
        for i, candidate, candidate_id in zip(positions.tolist(), candidates.tolist(), self.values("id", candidates), strict=True):
            rows[i] = candidate if candidate_id == ids[i] else self._find_one(ids[i])  # two ids with the same hash
        return rows

    def _find_one(self, item_id: str) -> int:
        """`row_of` by the hash column: for one id, arrays take longer than the search."""
        hashed = np.uint64(_hash(item_id))
        slot = int(self._hash_I.searchsorted(hashed))
        while slot < len(self) and self._hash_I[slot] == hashed:
            row = int(self._row_I[slot])
            if self._ids[row].as_py() == item_id:
                return row
            slot += 1
        return -1

    def values(self, field: str, rows: Int64) -> list[Any]:
        """One column's Python values (strings, numbers or lists, as the column has them) at item rows (int64)."""
        values: list[Any] = self._table.column(field).take(pa.array(rows)).to_pylist()
        return values

    def _row_hashes(self) -> NDArray[np.uint64]:
        """uint64[I]: the hash of each row's id, from the index."""
        hash_I = np.zeros(len(self), np.uint64)
        hash_I[self._row_I] = self._hash_I
        return hash_I

    def column(self, field: str) -> pa.ChunkedArray:
        """A whole column."""
        return self._table.column(field)

    def to_table(self) -> pa.Table:
        """The columns without the index, as `build` takes them."""
        return self._table.select(list(self.fields))


def _hash(item_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(item_id.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _remember(cache: dict[Any, Any], entries: dict[Any, Any], max_entries: int) -> None:
    if len(cache) + len(entries) > max_entries:
        cache.clear()
    cache.update(islice(entries.items(), max_entries))


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array, which is not copied if it is one already."""
    combined = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined
