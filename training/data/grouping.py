"""Events in file order → events by user, on disk: an external sort that reads and writes files from their beginning to their end.

Events are dealt to files of neighbouring users, each of which fits in memory and is sorted there. Memory does not grow with the log, but
for the longest list of one user, which is sorted in memory too.

Knows codes of users and items. Does not know ids or filters.

Legend: U users in row order, E events.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

CHUNK = 1 << 22
"""Events handled at a time (a single user may have more)."""
MOST_PARTS = 256
"""Files that events are dealt to, at most. Each has up to CHUNK events, or of a larger log this part, and the rest of its last user's."""


@dataclass(frozen=True)
class EventFiles:
    """Files of int32 codes, and of timestamps of a type, event by event.

    stamp  None: there are none
    """

    user: Path
    item: Path
    stamp: Path | None
    stamp_type: Any


@dataclass(frozen=True)
class GroupedFiles:
    """Events by user, in the log's stated order: those of user u are offset_U1[u] … offset_U1[u + 1] − 1, at least one.

    item  int32 item codes, −1 where `unique` drops an event
    """

    offset_U1: Int64
    item: Path
    stamp: Path | None
    stamp_type: Any


def grouped(events: EventFiles, row_of_code: Int32, unique: bool, scratch: Path) -> GroupedFiles:
    """Sort by user row, then by timestamp where there is one, else and at ties in file order. The files of `events` are used up.

    row_of_code  int32[U]: the row of each user code
    unique       an item counts once in a user's list, the first time
    """
    count_U = np.zeros(len(row_of_code), np.int64)
    for codes in _blocks(events.user, np.int32):
        count_U += np.bincount(row_of_code[codes], minlength=len(count_U))
    offset_U1 = np.concatenate([[0], np.cumsum(count_U)]).astype(np.int64)
    events_of_part = max(CHUNK, -(-int(offset_U1[-1]) // MOST_PARTS))
    first_users = np.searchsorted(offset_U1[:-1], np.arange(0, offset_U1[-1], events_of_part))
    parts = _dealt(events, row_of_code, np.unique([*first_users, len(count_U)]), scratch)
    result = GroupedFiles(
        offset_U1, scratch / "grouped-item", None if events.stamp is None else scratch / "grouped-stamp", events.stamp_type
    )
    with ExitStack() as stack:
        item_file = stack.enter_context(result.item.open("wb"))
        stamp_file = None if result.stamp is None else stack.enter_context(result.stamp.open("wb"))
        for part in parts:
            records = np.fromfile(part, _record(events))
            part.unlink()
            # Both sorts are stable: ties keep file order.
            by_user = np.argsort(records["user"], kind="stable") if stamp_file is None else np.lexsort((records["stamp"], records["user"]))
            item = records["item"][by_user]
            if unique:
                item = np.where(_first_of_each(records["user"][by_user], item), item, np.int32(-1))
            item.tofile(item_file)
            if stamp_file is not None:
                records["stamp"][by_user].tofile(stamp_file)
    return result


def user_chunks(offset_U1: Int64, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of users with at most so many events together, or of one user; every user has at least one event."""
    first, users = 0, len(offset_U1) - 1
    while first < users:
        last = max(first + 1, int(np.searchsorted(offset_U1, offset_U1[first] + most, side="right")) - 1)
        yield first, last
        first = last


def _record(events: EventFiles) -> np.dtype[Any]:
    stamp = [] if events.stamp is None else [("stamp", events.stamp_type)]
    return np.dtype([("user", np.int32), ("item", np.int32), *stamp])


def _dealt(events: EventFiles, row_of_code: Int32, cuts: Int64, scratch: Path) -> list[Path]:
    """Files of records: part p has the users cuts[p] … cuts[p + 1] − 1, in file order."""
    paths = [scratch / f"part-{p}" for p in range(len(cuts) - 1)]
    sources = [_blocks(events.user, np.int32), _blocks(events.item, np.int32)]
    if events.stamp is not None:
        sources.append(_blocks(events.stamp, events.stamp_type))
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("wb")) for path in paths]
        for user, *values in zip(*sources, strict=True):
            row = row_of_code[user]
            part = (np.searchsorted(cuts, row, side="right") - 1).astype(np.int16)
            by_part = np.argsort(part, kind="stable")
            records = np.empty(len(row), _record(events))
            for name, column in zip(records.dtype.names or (), (row, *values), strict=True):
                records[name] = column[by_part]
            found, first = np.unique(part[by_part], return_index=True)
            for p, start, stop in zip(found.tolist(), first.tolist(), [*first[1:].tolist(), len(row)], strict=True):
                records[start:stop].tofile(files[p])
    for path in (events.user, events.item, events.stamp):
        if path is not None:
            path.unlink()
    return paths


def _first_of_each(user: Int32, item: Int32) -> NDArray[np.bool_]:
    """Whether an event is the first of its user with its item."""
    first = np.zeros(len(user), np.bool_)
    order = np.lexsort((item, user))  # stable
    starts = np.ones(len(user), np.bool_)
    starts[1:] = (np.diff(user[order]) != 0) | (np.diff(item[order]) != 0)
    first[order[starts]] = True
    return first


def _blocks(file: Path, dtype: Any) -> Iterator[NDArray[Any]]:
    with file.open("rb") as stream:
        while len(block := np.fromfile(stream, dtype, CHUNK)):
            yield block
