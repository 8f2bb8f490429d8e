"""Logs of query vectors: Parquet with a vector and the ids of its items in each row, as checked columns, and the vectors on disk.

Knows files, columns and values. A query's id is a digest of its vector. So rows with equal vectors are one query, and no split separates
them.

Legend: R rows of a block, F numbers of a vector, E events (a query with one of its items), U queries.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from espalier.arrays import Float32, Int64
from espalier.errors import InvalidData
from espalier.logs.log_events import LogBatch
from espalier.logs.log_values import RowSource, empty_rows
from espalier.logs.parquet_logs import parquet_batches
from espalier.queries import MAX_VECTOR_WIDTH

from ..specification.log_format import VectorsFormat

log = logging.getLogger(__name__)


LARGEST = float(np.finfo(np.float32).max)


def read_vectors(path: Path, log_format: VectorsFormat, scratch: Path, *, block_bytes: int) -> Iterator[LogBatch]:
    """The events of a file of vectors in file order, about `block_bytes` of vectors at a time. Rows without an item are left out.

    scratch  a folder for the unzipped copy of a gzipped file

    Raises InvalidData, naming the file, the row (1 = the first) and the column, for a missing column, a missing vector, one with another
    length than the first or more than MAX_VECTOR_WIDTH numbers, a number that is not finite in 32 bits, and an empty id.
    """
    with closing(parquet_batches(path, {"vector": log_format.vector}, scratch, 1)) as batches:
        width = next((len(_lists(batch.column(0), source)[0]) for source, batch in batches if len(batch)), None)
    if width is None:
        return
    if not 1 <= width <= MAX_VECTOR_WIDTH:
        raise InvalidData(
            f"{path.name}: column vector", f"{width} numbers", f"1 to {MAX_VECTOR_WIDTH} in each list of column {log_format.vector!r}"
        )
    rows, rows_without_items = 0, 0
    for source, batch in parquet_batches(path, log_format.columns, scratch, max(1, block_bytes // (4 * width))):
        vectors_RF = _vectors(batch.column(0), width, source)
        item, row_of_event_E = _items(batch.column(1), source)
        digest = [hashlib.blake2b(vector, digest_size=16).hexdigest() for vector in vectors_RF]
        user = pa.array(digest, pa.string()).take(pa.array(row_of_event_E))
        rows += batch.num_rows
        rows_without_items += batch.num_rows - len(np.unique(row_of_event_E))
        yield LogBatch(user, item, vectors_RF=vectors_RF, row_of_event_E=row_of_event_E)
    if rows_without_items:
        log.warning("%s: %d of %d vectors have no items; they are left out", path.name, rows_without_items, rows)


def vectors_in_order(source: Path, order_U: Int64, count: int, target: Path) -> Float32:
    """float32[U, F]: write the vectors at `order_U`, of the `count` vectors of `source`, to `target`; a read-only memory map of it."""
    stored = np.memmap(source, np.float32, mode="r").reshape(count, -1)
    size = max(1, (1 << 26) // (4 * stored.shape[1]))
    part = target.with_suffix(".part")
    with part.open("wb") as file:
        for start in range(0, len(order_U), size):
            stored[order_U[start : start + size]].tofile(file)
    part.replace(target)  # replacing: an earlier result that still maps the old file stays intact
    return np.memmap(target, np.float32, mode="r").reshape(len(order_U), -1)


def _vectors(column: pa.Array, width: int, source: RowSource) -> Float32:
    lists = _lists(column, source)
    lengths = np.asarray(pc.list_value_length(lists), np.int64)
    wrong_rows = np.flatnonzero(lengths != width)
    if len(wrong_rows):
        row = int(wrong_rows[0])
        raise source.problem("vector", row, f"{lengths[row]} numbers", f"{width} numbers, as in the first row,")
    flat = lists.flatten()
    if not (pa.types.is_floating(flat.type) or pa.types.is_integer(flat.type)):
        raise InvalidData(f"{source.file}: column vector", str(flat.type), f"numbers in column {source.columns['vector']!r}")
    wide_RF = np.asarray(flat.cast(pa.float64(), safe=False).fill_null(np.nan), np.float64).reshape(len(lists), width)
    is_wrong = ~(np.abs(wide_RF) <= LARGEST)  # also where one is NaN
    if is_wrong.any():
        row = int(is_wrong.any(axis=1).argmax())
        raise source.problem("vector", row, float(wide_RF[row][is_wrong[row]][0]), "finite 32-bit numbers")
    return wide_RF.astype(np.float32) + np.float32(0)  # −0 becomes 0: equal vectors have equal bytes


def _lists(column: pa.Array, source: RowSource) -> pa.Array:
    """The column, checked to hold lists without nulls. Raises InvalidData."""
    if not isinstance(column, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        raise InvalidData(f"{source.file}: column vector", str(column.type), f"lists of numbers in column {source.columns['vector']!r}")
    if column.null_count:
        row = int(np.flatnonzero(np.asarray(column.is_null()))[0])
        raise source.problem("vector", row, None, "a list of numbers")
    return column


def _items(column: pa.Array, source: RowSource) -> tuple[pa.Array, Int64]:
    """The ids of all rows, concatenated, and int64[E]: the row of each id."""
    if isinstance(column, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        rows, values = np.asarray(pc.list_parent_indices(column), np.int64), pc.list_flatten(column)
    else:
        rows, values = np.arange(len(column)), column
    ids = source.strings("items", values)
    missing = empty_rows(ids)
    if len(missing):
        raise source.problem("items", int(rows[missing[0]]), ids[int(missing[0])].as_py(), "ids")
    return ids, rows
