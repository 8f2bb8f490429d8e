"""Interactions: who touched which item, in which order, from a log of any size.

Knows users, items, categories and order. Does not know file formats (`log_files.py`), splits, trees or models.
Memory follows the vocabulary (distinct ids), not the log: events live in files under a work folder.

How: the log is parsed once, in blocks, into codes on disk (ids numbered by first appearance); a second pass over the codes groups them
by user (counting sort); each user's events are ordered by timestamp; filters and final row numbers come last.

Legend: U users, I items, E events.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from espalier.errors import InvalidData
from training.data.log_files import Stamps, read_log
from training.data.vector_files import read_vectors, vectors_in_order, write_new
from training.specification.log_format import LogFormat, Order, TableFormat, VectorsFormat

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

EVENTS_FILE = "item_of_event.int32"
"""Name, inside the work folder, of the file behind `Interactions.item_of_event_E`."""
TIMES_FILE = "time_of_event"
"""Likewise of `Interactions.time_of_event_E`."""
VECTORS_FILE = "vector_of_user.float32"
"""Likewise of `Interactions.vectors_UF`."""

CHUNK = 1 << 22
"""Events handled at a time (a single user may have more)."""


@dataclass(frozen=True)
class Interactions:
    """A log after filtering, grouped by user.

    user_ids, item_ids   strings, sorted by their UTF-8 bytes: a row number does not depend on the order of the log. An item that passed
                         `min_item_events` stays in the catalogue even when all users who touched it were dropped.
    offset_U1            int64[U+1]: the events of user u are offset_U1[u] … offset_U1[u+1] − 1
    item_of_event_E      int32[E], a read-only memory map: item rows, oldest first inside a user
    category_of_item_I   int32[I] or None: position in `category_names`, −1 for none; the first category the log gives an item counts
    category_names       sorted
    fingerprint          SHA-256 of the log's bytes, as they are on disk
    order                as in LogFormat
    time_of_event_E      int64[E] (microseconds of a date and time) or float64[E], as the log has them, a read-only memory map; None
                         without timestamps
    vectors_UF           float32[U, F], a read-only memory map, where the log is of vectors: then a user is a query, its id a digest of its
                         vector, and its events are the items that it should lead to. Else None
    """

    user_ids: pa.Array
    item_ids: pa.Array
    offset_U1: Int64
    item_of_event_E: Int32
    category_of_item_I: Int32 | None
    category_names: tuple[str, ...]
    fingerprint: str
    order: Order
    time_of_event_E: Stamps | None = None
    vectors_UF: NDArray[np.float32] | None = None

    @property
    def user_count(self) -> int:
        return len(self.user_ids)

    @property
    def item_count(self) -> int:
        return len(self.item_ids)

    @property
    def event_count(self) -> int:
        return len(self.item_of_event_E)

    def of(self, user: int) -> Int64:
        """int64[…]: the item rows of one user, oldest first."""
        if not 0 <= user < self.user_count:
            raise InvalidData("user", user, f"a user row below {self.user_count}")
        return np.asarray(self.item_of_event_E[self.offset_U1[user] : self.offset_U1[user + 1]], np.int64)


def read_interactions(path: Path, log: LogFormat, work_dir: Path, *, block_bytes: int = 1 << 24) -> Interactions:
    """Read a log; the events stay in `work_dir` as a memory-mapped file, which must live as long as the result.

    block_bytes   how much text is parsed at a time; at least the longest line

    Raises InvalidData, naming the file, the row (1 = the first event) and the column, for a missing column, a value that cannot be
    read, an empty id, a line with too few or too many fields, an empty log, or filters that leave nothing.
    """
    if not path.is_file():
        raise InvalidData("log", str(path), "a file that exists")
    work_dir.mkdir(parents=True, exist_ok=True)
    with path.open("rb") as file:
        fingerprint = hashlib.file_digest(file, "sha256").hexdigest()
    with tempfile.TemporaryDirectory(dir=work_dir, prefix="reading-") as scratch_name:
        scratch = Path(scratch_name)
        codes = _encode(path, log, scratch, block_bytes)
        offset_U1, item_of_event_E, stamp_E = _group_by_user(codes, log, scratch)
        item_order, item_row = _kept_items(codes, item_of_event_E, log.min_item_events)
        user_order = _kept_users(codes, offset_U1, item_of_event_E, item_row, log.min_user_events)
        kept_offset_U1 = _write_events(offset_U1, item_of_event_E, stamp_E, item_row, user_order, scratch)
        # Replacing, not overwriting: an earlier result that still maps the old file stays intact.
        os.replace(scratch / EVENTS_FILE, work_dir / EVENTS_FILE)
        if stamp_E is not None:
            os.replace(scratch / TIMES_FILE, work_dir / TIMES_FILE)
        vectors_UF = None
        if isinstance(log, VectorsFormat):
            vectors_UF = vectors_in_order(scratch / VECTORS_FILE, user_order, len(codes.users), work_dir / VECTORS_FILE)
    categories, names = _categories(codes, item_order) if log.category is not None else (None, ())
    return Interactions(
        user_ids=pa.array(codes.users.ids, pa.large_string()).take(pa.array(user_order)),
        item_ids=pa.array(codes.items.ids, pa.large_string()).take(pa.array(item_order)),
        offset_U1=kept_offset_U1,
        item_of_event_E=np.memmap(work_dir / EVENTS_FILE, np.int32, mode="r"),
        category_of_item_I=categories,
        category_names=names,
        fingerprint=fingerprint,
        order=log.order,
        time_of_event_E=None if stamp_E is None else _stamps(work_dir / TIMES_FILE, log),
        vectors_UF=vectors_UF,
    )


@dataclass
class _Vocabulary:
    """Ids numbered by first appearance."""

    code_of: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.code_of)

    @property
    def ids(self) -> list[str]:
        return list(self.code_of)

    def encode(self, column: pa.Array) -> Int64:
        """int64 codes of a column of strings, −1 for null; new ids are added."""
        encoded = column.dictionary_encode()
        code_of = self.code_of
        new = np.array([code_of.setdefault(value, len(code_of)) for value in encoded.dictionary.to_pylist()] + [-1], np.int64)
        codes: Int64 = new[encoded.indices.fill_null(len(new) - 1).to_numpy(zero_copy_only=False)]
        return codes

    def sorted_codes(self) -> Int64:
        """The codes in the order of their ids' UTF-8 bytes."""
        return np.asarray(pc.sort_indices(pa.array(self.ids, pa.large_string())), np.int64)


@dataclass
class _Codes:
    """The parsed log: vocabularies in memory, events on disk in file order."""

    users: _Vocabulary
    items: _Vocabulary
    categories: _Vocabulary
    category_of_item: Int64
    user_E: Int32
    item_E: Int32
    stamp_E: Stamps | None


def _encode(path: Path, log: LogFormat, scratch: Path, block_bytes: int) -> _Codes:
    users, items, categories = _Vocabulary(), _Vocabulary(), _Vocabulary()
    category_of_item = np.zeros(0, np.int64)
    with ExitStack() as stack:
        names = ("user", "item", "stamp", VECTORS_FILE)
        user_file, item_file, stamp_file, vector_file = (stack.enter_context((scratch / name).open("wb")) for name in names)
        if isinstance(log, VectorsFormat):
            batches = read_vectors(path, log, scratch, block_bytes=block_bytes)
        else:
            batches = read_log(path, log, scratch, block_bytes=block_bytes)
        for batch in batches:
            known, item, user = len(users), items.encode(batch.item), users.encode(batch.user)
            user.astype(np.int32).tofile(user_file)
            if batch.vectors is not None:
                write_new(batch.vectors, user, known, vector_file)
            item.astype(np.int32).tofile(item_file)
            if batch.stamp is not None:
                batch.stamp.tofile(stamp_file)
            if batch.category is not None:
                category = categories.encode(batch.category)
                category_of_item = np.pad(category_of_item, (0, len(items) - len(category_of_item)), constant_values=-1)
                stated = np.flatnonzero(category >= 0)
                seen, first = np.unique(item[stated], return_index=True)
                new = category_of_item[seen] < 0
                category_of_item[seen[new]] = category[stated[first[new]]]
    if len(users) == 0:
        raise InvalidData(path.name, "no events", "at least one event")
    return _Codes(
        users=users,
        items=items,
        categories=categories,
        category_of_item=category_of_item,
        user_E=np.memmap(scratch / "user", np.int32, mode="r"),
        item_E=np.memmap(scratch / "item", np.int32, mode="r"),
        stamp_E=_stamps(scratch / "stamp", log) if log.timestamp is not None else None,
    )


def _stamps(file: Path, log: LogFormat) -> Stamps:
    if isinstance(log, TableFormat) and log.timestamp_type == "float":
        return np.memmap(file, np.float64, mode="r")
    return np.memmap(file, np.int64, mode="r")


def _group_by_user(codes: _Codes, log: LogFormat, scratch: Path) -> tuple[Int64, Int32, Stamps | None]:
    """Offsets, item codes and timestamps grouped by user, in the log's stated order; code −1 where `unique` drops an event."""
    events, users, items = len(codes.user_E), len(codes.users), len(codes.items)
    count_U = np.zeros(users, np.int64)
    for start in range(0, events, CHUNK):
        count_U += np.bincount(codes.user_E[start : start + CHUNK], minlength=users)
    offset_U1 = np.concatenate([[0], np.cumsum(count_U)]).astype(np.int64)

    item_E = np.memmap(scratch / "grouped-item", np.int32, mode="w+", shape=(events,))
    stamp_E = None if codes.stamp_E is None else _like(codes.stamp_E, scratch / "grouped-stamp")
    cursor_U = offset_U1[:-1].copy()
    for start in range(0, events, CHUNK):
        user = np.asarray(codes.user_E[start : start + CHUNK])
        by_user = np.argsort(user, kind="stable")
        run_user, run_start, run_length = np.unique(user[by_user], return_index=True, return_counts=True)
        place = np.arange(len(user)) + np.repeat(cursor_U[run_user] - run_start, run_length)
        cursor_U[run_user] += run_length
        item_E[place] = codes.item_E[start : start + CHUNK][by_user]
        if stamp_E is not None and codes.stamp_E is not None:
            stamp_E[place] = codes.stamp_E[start : start + CHUNK][by_user]

    if stamp_E is None and not log.unique:
        return offset_U1, item_E, None
    for first, last in _user_chunks(offset_U1):
        start, stop = int(offset_U1[first]), int(offset_U1[last])
        user = np.repeat(np.arange(last - first), count_U[first:last])
        item = np.asarray(item_E[start:stop])
        if stamp_E is not None:
            by_time = np.lexsort((stamp_E[start:stop], user))  # lexsort is stable: ties keep file order
            item, stamp_E[start:stop] = item[by_time], stamp_E[start:stop][by_time]
        if log.unique:
            kept = np.unique(user * items + item, return_index=True)[1]
            repeated = np.ones(len(item), np.bool_)
            repeated[kept] = False
            item = np.where(repeated, np.int32(-1), item)
        item_E[start:stop] = item
    return offset_U1, item_E, stamp_E


def _like(stamp_E: Stamps, file: Path) -> Stamps:
    """An array of the same shape and type in a new file."""
    if stamp_E.dtype == np.float64:
        return np.memmap(file, np.float64, mode="w+", shape=stamp_E.shape)
    return np.memmap(file, np.int64, mode="w+", shape=stamp_E.shape)


def _kept_items(codes: _Codes, item_of_event_E: Int32, minimum: int) -> tuple[Int64, Int32]:
    """The codes of the items that stay, in row order, and the row of every code (−1 if dropped); the last entry is for event code −1."""
    count = np.zeros(len(codes.items) + 1, np.int64)
    for start in range(0, len(item_of_event_E), CHUNK):
        count += np.bincount(np.asarray(item_of_event_E[start : start + CHUNK], np.int64) + 1, minlength=len(count))
    order = codes.items.sorted_codes()
    order = order[count[1:][order] >= minimum]
    row = np.full(len(count), -1, np.int32)
    row[order] = np.arange(len(order), dtype=np.int32)
    if len(order) == 0:
        raise InvalidData("min_item_events", minimum, f"a filter that leaves an item; the most frequent one has {count[1:].max()} events")
    return order, row


def _kept_users(codes: _Codes, offset_U1: Int64, item_of_event_E: Int32, item_row: Int32, minimum: int) -> Int64:
    """The codes of the users that stay, in row order."""
    count_U = np.zeros(len(offset_U1) - 1, np.int64)
    for first, last in _user_chunks(offset_U1):
        kept = item_row[item_of_event_E[offset_U1[first] : offset_U1[last]]] >= 0
        count_U[first:last] = np.add.reduceat(kept, offset_U1[first:last] - offset_U1[first], dtype=np.int64)
    order = codes.users.sorted_codes()
    order = order[count_U[order] >= minimum]
    if len(order) == 0:
        raise InvalidData("min_user_events", minimum, f"a filter that leaves a user; the longest list has {count_U.max()} events")
    return order


def _write_events(
    offset_U1: Int64, item_of_event_E: Int32, stamp_E: Stamps | None, item_row: Int32, user_order: Int64, folder: Path
) -> Int64:
    """Write the kept events of the kept users, and their timestamps, in row order; returns their offsets."""
    length = (offset_U1[1:] - offset_U1[:-1])[user_order]
    source_U1 = np.concatenate([[0], np.cumsum(length)]).astype(np.int64)
    kept_length = np.zeros(len(user_order), np.int64)
    with (folder / EVENTS_FILE).open("wb") as file, (folder / TIMES_FILE).open("wb") as times:
        for first, last in _user_chunks(source_U1):
            part = length[first:last]
            within = np.arange(part.sum()) - np.repeat(source_U1[first:last] - source_U1[first], part)
            event = np.repeat(offset_U1[user_order[first:last]], part) + within
            row = item_row[item_of_event_E[event]]
            kept_length[first:last] = np.add.reduceat(row >= 0, source_U1[first:last] - source_U1[first], dtype=np.int64)
            row[row >= 0].tofile(file)
            if stamp_E is not None:
                stamp_E[event[row >= 0]].tofile(times)
    return np.concatenate([[0], np.cumsum(kept_length)]).astype(np.int64)


def _user_chunks(offset_U1: Int64) -> Iterator[tuple[int, int]]:
    """Ranges of users with about CHUNK events together; every user has at least one event."""
    first, users = 0, len(offset_U1) - 1
    while first < users:
        last = max(first + 1, int(np.searchsorted(offset_U1, offset_U1[first] + CHUNK, side="right")) - 1)
        yield first, last
        first = last


def _categories(codes: _Codes, item_order: Int64) -> tuple[Int32, tuple[str, ...]]:
    """Category of each item row and the sorted names of the categories that have an item."""
    category = codes.category_of_item[item_order]
    ids = codes.categories.ids
    used = sorted(set(category[category >= 0].tolist()), key=lambda code: ids[code].encode())
    row = np.full(len(ids) + 1, -1, np.int32)
    row[used] = np.arange(len(used), dtype=np.int32)
    return row[category], tuple(ids[code] for code in used)
