"""Interactions: which user touched which item, in which order, from a log of any size.

Knows users, items, categories and order. Does not know file formats (`log_files.py`), splits, trees or models.
Memory follows the vocabulary (distinct ids), not the log: events live in files under a work folder.

The log is parsed once, in blocks, into codes on disk (`vocabulary.py`). These are sorted there by user and time (`grouping.py`). Then come
filters and final row numbers. All files are read sequentially.

Legend: U users, I items, E events.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from espalier.arrays import Bool, Float32, Int32, Int64
from espalier.bundle_files import sha256_of
from espalier.errors import InvalidData
from espalier.logs.log_values import BadRows, Stamps, warn_of_float_ids
from espalier.logs.parquet_logs import files_of, name_of

from ..data import grouping
from ..data.grouping import user_chunks
from ..data.log_files import read_as, read_log
from ..data.vector_files import read_vectors, vectors_in_order
from ..data.vocabulary import Vocabulary
from ..specification.log_format import LogFormat, Order, TableFormat, VectorsFormat

logger = logging.getLogger(__name__)

EVENTS_FILE = "item_of_event.int32"
"""Name, inside the work folder, of the file behind `Interactions.item_of_event_E`."""
TIMES_FILE = "time_of_event"
"""Likewise of `Interactions.time_of_event_E`."""
VECTORS_FILE = "vector_of_user.float32"
"""Likewise of `Interactions.vectors_UF`."""
FEWEST_EVENTS = 2
"""`min_user_events = "auto"`: a list of one event does not say what follows what."""

SORTED_LISTS, LEAST_LISTS, LEAST_SORTED, SORTED_SHARE = 10_000, 10, 3, 0.9
"""`lists_ascend`: most lists that are looked at, fewest that say something, fewest events of such a list, and the share that ascends."""


@dataclass(frozen=True)
class Interactions:
    """A log after filtering, grouped by user.

    user_ids, item_ids   strings, sorted by their UTF-8 bytes: a row number does not depend on the order of the log. An item that passed
                         `min_item_events` stays in the catalogue even when all users who touched it were dropped.
    offset_U1            int64[U+1]: the events of user u are offset_U1[u] … offset_U1[u+1] − 1
    item_of_event_E      int32[E], a read-only memory map: item rows, oldest first inside a user
    category_of_item_I   int32[I] or None: position in `category_names`, −1 for none; the first category the log gives an item counts
    category_names       sorted
    fingerprint          SHA-256 of the log's bytes, as they are on disk; of a folder, of its files' names and digests
    order                as in LogFormat
    time_of_event_E      int64[E] (microseconds of a date and time) or float64[E], as in the log, a read-only memory map; None without
                         timestamps
    vectors_UF           float32[U, F], a read-only memory map, of a log of vectors; else None. A user is then a query, its id a digest of
                         its vector, and its events are the items that it should lead to
    bad_rows             reason → how many unreadable rows were left out for it
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
    vectors_UF: Float32 | None = None
    bad_rows: Mapping[str, int] = field(default_factory=dict)

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
        return np.asarray(self.item_of_event_E[self.offset_U1[user] : self.offset_U1[user + 1]], np.int64)


def read_interactions(path: Path, log: LogFormat, work_dir: Path, *, block_bytes: int = 1 << 24) -> Interactions:
    """Read a log: a file, or a folder of Parquet files. The events stay in `work_dir` as a memory-mapped file, which must live as long as
    the result.

    block_bytes   how much text is parsed at a time; at least the longest line

    Raises InvalidData, naming the file, the line (of Parquet the row) and the column, for a missing column, a value that cannot be
    read, an empty id, a line with too few or too many fields, an empty log, or filters that leave nothing.
    """
    log, fingerprint = read_as(path, log), _fingerprint(path)  # before reading: rows that are added meanwhile then show
    work_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work_dir, prefix=".reading-") as scratch_name:
        scratch = Path(scratch_name)
        codes = _encode(path, log, scratch, block_bytes)
        users = codes.users.sorted_codes()
        row_of_user = np.empty(len(users), np.int32)
        row_of_user[users] = np.arange(len(users), dtype=np.int32)
        is_float = isinstance(log, TableFormat) and log.timestamp_type == "float"
        stamp_type: Any = None if log.timestamp is None else np.float64 if is_float else np.int64
        grouped_U1 = grouping.group(scratch, stamp_type, row_of_user, log.unique)
        item_order, item_row = _kept_items(codes, scratch, log.min_item_events)
        fewest = FEWEST_EVENTS if log.min_user_events == "auto" else log.min_user_events
        stays_U, offset_U1 = _write_kept(grouped_U1, item_row, fewest, scratch, stamp_type)
        user_order = users[stays_U]
        if left_out := np.count_nonzero(~stays_U):
            user, event = ("queries", "items") if isinstance(log, VectorsFormat) else ("users", "events")
            logger.info("%d of %d %s have fewer than %d %s and are left out", left_out, len(users), user, fewest, event)
        # Replacing, not overwriting: an earlier result that still maps the old file stays intact.
        os.replace(scratch / EVENTS_FILE, work_dir / EVENTS_FILE)
        if log.timestamp is not None:
            os.replace(scratch / TIMES_FILE, work_dir / TIMES_FILE)
        vectors_UF = None
        if isinstance(log, VectorsFormat):
            vectors_UF = vectors_in_order(scratch / VECTORS_FILE, user_order, len(codes.users), work_dir / VECTORS_FILE)
    categories, names = _categories(codes, item_order) if log.category is not None else (None, ())
    return Interactions(
        user_ids=codes.users.ids.take(pa.array(user_order)),
        item_ids=codes.items.ids.take(pa.array(item_order)),
        offset_U1=offset_U1,
        item_of_event_E=np.memmap(work_dir / EVENTS_FILE, np.int32, mode="r"),
        category_of_item_I=categories,
        category_names=names,
        fingerprint=fingerprint,
        order=log.order,
        time_of_event_E=None if stamp_type is None else np.memmap(work_dir / TIMES_FILE, stamp_type, mode="r"),
        vectors_UF=vectors_UF,
        bad_rows=codes.bad_rows,
    )


def lists_ascend(log: Interactions) -> bool:
    """Whether nearly all lists ascend by item id, as numbers or as texts. Their order is then that of ids, and not that of time."""
    length_U = np.diff(log.offset_U1[: SORTED_LISTS + 1])
    is_long_U = length_U >= LEAST_SORTED
    if is_long_U.sum() < LEAST_LISTS:
        return False
    rank_II = [np.arange(log.item_count)]
    if pc.all(pc.match_substring_regex(log.item_ids, "^[0-9]{1,18}$")).as_py():
        rank_II.append(log.item_ids.cast(pa.int64()).to_numpy())
    item_e = np.asarray(log.item_of_event_E[: log.offset_U1[len(length_U)]])
    for rank_I in rank_II:
        rises_e = np.append(rank_I[item_e[1:]] > rank_I[item_e[:-1]], True)
        rises_e[log.offset_U1[1 : len(length_U) + 1][length_U > 0] - 1] = True  # the last one of a list has no next one
        falls_e = np.append(0, np.cumsum(~rises_e))
        falls_U = falls_e[log.offset_U1[1 : len(length_U) + 1]] - falls_e[log.offset_U1[: len(length_U)]]
        if np.mean(falls_U[is_long_U] == 0) >= SORTED_SHARE:
            return True
    return False


def _fingerprint(path: Path) -> str:
    """SHA-256 of a file's bytes, or of a folder's names and their files' digests. Raises InvalidData for a file that cannot be read."""
    digests = []
    for file in files_of(path):
        try:
            digests.append((file.relative_to(path).as_posix(), sha256_of(file)))
        except OSError as error:
            raise InvalidData(name_of(file, path), error.strerror, "a file that can be read") from error
    return digests[0][1] if path.is_file() else hashlib.sha256(json.dumps(digests).encode()).hexdigest()


@dataclass
class _Codes:
    """The parsed log: vocabularies in memory, events on disk in file order."""

    users: Vocabulary
    items: Vocabulary
    categories: Vocabulary
    category_of_item: Int64
    bad_rows: Mapping[str, int]


def _encode(path: Path, log: LogFormat, scratch: Path, block_bytes: int) -> _Codes:
    users, items, categories = Vocabulary(), Vocabulary(), Vocabulary()
    category_of_item = np.zeros(0, np.int64)
    bad_rows = BadRows("refuse" if isinstance(log, VectorsFormat) else log.bad_rows, "data.format")
    with ExitStack() as stack:
        names = (grouping.USER, grouping.ITEM, grouping.STAMP, VECTORS_FILE)
        user_file, item_file, stamp_file, vector_file = (stack.enter_context((scratch / name).open("wb")) for name in names)
        if isinstance(log, VectorsFormat):
            batches = read_vectors(path, log, scratch, block_bytes=block_bytes)
        else:
            batches = read_log(path, log, scratch, bad_rows, block_bytes=block_bytes)
        for batch in batches:
            known_users, item, user = len(users), items.encode(batch.item), users.encode(batch.user)
            user.tofile(user_file)
            if batch.vectors_RF is not None and batch.row_of_event_E is not None:
                _, first = np.unique(user, return_index=True)
                new_E = first[user[first] >= known_users]  # the first event of each user that is new, in the order of their codes
                batch.vectors_RF[batch.row_of_event_E[new_E]].tofile(vector_file)
            item.tofile(item_file)
            if batch.stamp is not None:
                batch.stamp.tofile(stamp_file)
            if batch.category is not None:
                category = categories.encode(batch.category)
                category_of_item = np.pad(category_of_item, (0, len(items) - len(category_of_item)), constant_values=-1)
                stated = np.flatnonzero(category >= 0)
                stated_items, first = np.unique(item[stated], return_index=True)
                is_new = category_of_item[stated_items] < 0
                category_of_item[stated_items[is_new]] = category[stated[first[is_new]]]
    bad_rows.finish()
    if len(users) == 0:
        raise InvalidData(path.name, "no events", "at least one event")
    if isinstance(log, TableFormat):
        warn_of_float_ids(path.name, log.item, items.ids)
    return _Codes(users, items, categories, category_of_item, bad_rows.counts)


def _kept_items(codes: _Codes, folder: Path, minimum: int) -> tuple[Int64, Int32]:
    """The codes of the items that stay, in row order, and the row of every code (−1 if dropped). The last row is for event code −1."""
    count = np.zeros(len(codes.items) + 1, np.int64)
    with (folder / grouping.ITEM).open("rb") as file:
        while len(block := np.fromfile(file, np.int32, grouping.CHUNK)):
            count += np.bincount(block.astype(np.int64) + 1, minlength=len(count))
    order = codes.items.sorted_codes()
    order = order[count[1:][order] >= minimum]
    row = np.full(len(count), -1, np.int32)
    row[order] = np.arange(len(order), dtype=np.int32)
    if len(order) == 0:
        raise InvalidData("min_item_events", minimum, f"a filter that leaves an item; the most frequent one has {count[1:].max()} events")
    return order, row


def _write_kept(offset_U1: Int64, item_row: Int32, minimum: int, folder: Path, stamp_type: Any) -> tuple[Bool, Int64]:
    """Write the kept events of the users that stay, and their timestamps. Returns bool[U], whether a user stays, and their offsets."""
    count_U = np.zeros(len(offset_U1) - 1, np.int64)
    with ExitStack() as stack:
        file, times = (stack.enter_context((folder / name).open("wb")) for name in (EVENTS_FILE, TIMES_FILE))
        source, stamps = (stack.enter_context((folder / name).open("rb")) for name in (grouping.ITEM, grouping.STAMP))
        for first, last in user_chunks(offset_U1, grouping.CHUNK):
            size = int(offset_U1[last] - offset_U1[first])
            row_E = item_row[np.fromfile(source, np.int32, size)]
            count_U[first:last] = np.add.reduceat(row_E >= 0, offset_U1[first:last] - offset_U1[first], dtype=np.int64)
            kept_E = (row_E >= 0) & np.repeat(count_U[first:last] >= minimum, np.diff(offset_U1[first : last + 1]))
            row_E[kept_E].tofile(file)
            if stamp_type is not None:
                np.fromfile(stamps, stamp_type, size)[kept_E].tofile(times)
    stays_U = count_U >= minimum
    if not stays_U.any():
        expected = f"users with at least {minimum} events (min_user_events)"
        raise InvalidData("log", f"lists of at most {count_U.max()} events", expected)
    return stays_U, np.concatenate([[0], np.cumsum(count_U[stays_U])]).astype(np.int64)


def _categories(codes: _Codes, item_order: Int64) -> tuple[Int32, tuple[str, ...]]:
    """The category of each item row, and the sorted names of the categories that have an item."""
    category = codes.category_of_item[item_order]
    ids: list[str] = codes.categories.ids.to_pylist()
    used_codes = sorted(set(category[category >= 0].tolist()), key=lambda code: ids[code].encode())
    row = np.full(len(ids) + 1, -1, np.int32)
    row[used_codes] = np.arange(len(used_codes), dtype=np.int32)
    return row[category], tuple(ids[code] for code in used_codes)
