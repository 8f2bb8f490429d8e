"""The most frequent ids in queries that the catalogue does not have. A broken feed shows here first.

Memory is bounded: COUNTERS counters a model, for this half day and the last one. Several workers exchange their counts in files. Knows ids
and counts. Does not know requests.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import orjson

COUNTERS = 1000
"""Counters a model and half day. An id with more than a COUNTERS-th of all occurrences always has one."""
BLOCK_S = 12 * 3600.0
"""Counts cover this block of time and the one before: the last 12 to 24 hours."""
PER_REQUEST = 100
"""Most ids of one request that are counted, so that counting takes at most a tenth of a millisecond."""
MAX_ID_BYTES = 512
"""Longer ids are cut."""
TOP = 50

Counts = dict[str, int]
Blocks = dict[int, dict[str, Counts]]
"""Number of a block → model → id → count."""


def add(counts: Counts, item_id: str) -> None:
    """Count one occurrence with at most COUNTERS counters, in amortised O(1) (Misra and Gries, 1982).

    An id without a counter lowers all counters by one. counts: lower bounds of how often each id occurred; exact until there are more ids
    than counters.
    """
    if item_id in counts or len(counts) < COUNTERS:
        counts[item_id] = counts.get(item_id, 0) + 1
    else:
        lowered = {other: count - 1 for other, count in counts.items() if count > 1}
        counts.clear()
        counts.update(lowered)


class UnknownIds:
    """The unknown ids of one process. For use in the event loop only. clock: seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._blocks: Blocks = {}
        self.changed = False

    def note(self, model: str, unknown: Iterable[Sequence[str]]) -> None:
        """Count the unknown ids of the queries of a request."""
        ids_left = PER_REQUEST
        for ids in unknown:
            if ids and ids_left:
                counts = self._of(model)
                for item_id in ids[:ids_left]:
                    add(counts, cut(item_id))
                ids_left -= len(ids[:ids_left])
                self.changed = True

    def counts(self) -> Blocks:
        """The counts of this block of time and the last."""
        current = block_of(self._clock())
        return {block: copy.deepcopy(models) for block, models in self._blocks.items() if block >= current - 1}

    def _of(self, model: str) -> Counts:
        block = block_of(self._clock())
        if block not in self._blocks:
            self._blocks = {last: models for last, models in self._blocks.items() if last == block - 1} | {block: {}}
        return self._blocks[block].setdefault(model, {})


def block_of(now: float) -> int:
    """The number of the block of a time in seconds since 1970."""
    return int(now // BLOCK_S)


def cut(item_id: str) -> str:
    """An id of at most MAX_ID_BYTES bytes of UTF-8."""
    if 4 * len(item_id) <= MAX_ID_BYTES:
        return item_id
    return item_id[:MAX_ID_BYTES].encode("utf-8", "replace")[:MAX_ID_BYTES].decode("utf-8", "ignore")


def most_frequent(counts_of_processes: Iterable[Blocks], model: str, now: float) -> list[tuple[str, int]]:
    """(id, count) of a model's TOP unknown ids in this block of time and the last, most frequent first; ties by id."""
    counts = Counter[str]()
    for blocks in counts_of_processes:
        for block, models in blocks.items():
            if block >= block_of(now) - 1:
                counts.update(models.get(model, {}))
    return sorted(counts.items(), key=lambda id_and_count: (-id_and_count[1], id_and_count[0]))[:TOP]


# -- several processes ----------------------------------------------------------------------------------------------------


def write(folder: Path, pid: int, blocks: Blocks) -> None:
    """Let other processes read these counts. Raises OSError."""
    path = _path(folder, pid)
    new = path.with_suffix(".new")
    new.write_bytes(orjson.dumps({str(block): models for block, models in blocks.items()}))
    new.rename(path)


def read(folder: Path, excluded_pid: int | None = None) -> list[Blocks]:
    """The counts of all processes but one; those that ended, too."""
    counts = []
    for path in sorted(folder.glob("unknown_*.json")):
        if path != _path(folder, excluded_pid):
            with suppress(FileNotFoundError):  # it was old
                document: Mapping[str, dict[str, Counts]] = orjson.loads(path.read_bytes())
                counts.append({int(block): models for block, models in document.items()})
    return counts


def drop_old(folder: Path, now: float) -> None:
    """Delete the files in which no counts of this block of time or the last can be."""
    for path in folder.glob("unknown_*.json"):
        if now - path.stat().st_mtime > 2 * BLOCK_S:
            path.unlink()


def _path(folder: Path, pid: int | None) -> Path:
    return folder / f"unknown_{pid}.json"
