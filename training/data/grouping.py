"""Groups events by user on disk: an external sort with sequential reads and writes.

Events are distributed to files of neighbouring users. Each file fits in memory and is sorted there. Memory does not grow with the log, only
with the longest list of a user, which is sorted in memory.

Knows codes of users and items. Does not know ids or filters.

Legend: U users in row order, E events.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from espalier.arrays import Array, Bool, Int32, Int64

CHUNK = 1 << 22
"""Events handled at a time (a single user may have more)."""
MOST_PARTS = 256
"""Most files of neighbouring users. Each has up to CHUNK events, or of a larger log this part, and all events of its last user."""


USER, ITEM, STAMP = "user", "item", "stamp"
"""Files of a folder, event by event: int32 codes, and timestamps where events have some."""


def group(folder: Path, stamp_type: Any, row_of_code: Int32, unique: bool) -> Int64:
    """Sort a folder's files by user row, then by timestamp if there are some; file order breaks ties.

    stamp_type   of the timestamps; None: there are none
    row_of_code  int32[U]: the row of each user code
    unique       keep an item's first event in a user's list; items of its other events become −1

    Returns int64[U + 1]: the events of user u are then offset[u] … offset[u + 1] − 1, at least one. The file USER is deleted.
    """
    count_U = np.zeros(len(row_of_code), np.int64)
    for codes in _blocks(folder / USER, np.int32):
        count_U += np.bincount(row_of_code[codes], minlength=len(count_U))
    offset_U1 = np.concatenate([[0], np.cumsum(count_U)]).astype(np.int64)
    events_of_part = max(CHUNK, -(-int(offset_U1[-1]) // MOST_PARTS))
    first_users = np.searchsorted(offset_U1[:-1], np.arange(0, offset_U1[-1], events_of_part))
    record = np.dtype([(USER, np.int32), (ITEM, np.int32), *([] if stamp_type is None else [(STAMP, stamp_type)])])
    part_files = _dealt(folder, record, row_of_code, np.unique([*first_users, len(count_U)]))
    with (folder / ITEM).open("wb") as item_file, (folder / STAMP).open("wb") as stamp_file:
        for part_file in part_files:
            records = np.fromfile(part_file, record)
            part_file.unlink()
            # Both sorts are stable: ties keep file order.
            by_user = np.argsort(records[USER], kind="stable") if stamp_type is None else np.lexsort((records[STAMP], records[USER]))
            item = records[ITEM][by_user]
            if unique:
                item = np.where(_first_of_each(records[USER][by_user], item), item, np.int32(-1))
            item.tofile(item_file)
            if stamp_type is not None:
                records[STAMP][by_user].tofile(stamp_file)
    return offset_U1


def user_chunks(offset_U1: Int64, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of users with at most `most` events together, or of one user. Every user has at least one event."""
    first, users = 0, len(offset_U1) - 1
    while first < users:
        last = max(first + 1, int(np.searchsorted(offset_U1, offset_U1[first] + most, side="right")) - 1)
        yield first, last
        first = last


def _dealt(folder: Path, record: np.dtype[Any], row_of_code: Int32, cuts: Int64) -> list[Path]:
    """Files of records: part p has the users cuts[p] … cuts[p + 1] − 1, in file order. The folder's files are deleted."""
    paths = [folder / f"part-{p}" for p in range(len(cuts) - 1)]
    names = record.names or ()
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("wb")) for path in paths]
        for user, *values in zip(*(_blocks(folder / name, record[name]) for name in names), strict=True):
            row = row_of_code[user]
            part = (np.searchsorted(cuts, row, side="right") - 1).astype(np.int16)
            by_part = np.argsort(part, kind="stable")
            records = np.empty(len(row), record)
            for name, column in zip(names, (row, *values), strict=True):
                records[name] = column[by_part]
            part_numbers, first = np.unique(part[by_part], return_index=True)
            for p, start, stop in zip(part_numbers.tolist(), first.tolist(), [*first[1:].tolist(), len(row)], strict=True):
                records[start:stop].tofile(files[p])
    for name in names:
        (folder / name).unlink()
    return paths


def _first_of_each(user: Int32, item: Int32) -> Bool:
    """Whether an event is the first of its user with its item."""
    first = np.zeros(len(user), np.bool_)
    order = np.lexsort((item, user))  # stable
    starts = np.ones(len(user), np.bool_)
    starts[1:] = (np.diff(user[order]) != 0) | (np.diff(item[order]) != 0)
    first[order[starts]] = True
    return first


def _blocks(file: Path, dtype: Any) -> Iterator[Array]:
    with file.open("rb") as stream:
        while len(block := np.fromfile(stream, dtype, CHUNK)):
            yield block
