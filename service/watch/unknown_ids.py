"""Ids that queries asked for most and that the catalogue does not have: a broken feed shows there first.

Counted in little memory whatever comes: with COUNTERS counters a model, for this half day and for the last one. Several workers exchange
their counts in files. Knows ids and counts. Does not know requests.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import orjson

log = logging.getLogger(__name__)

COUNTERS = 1000
"""Counters a model and half day. An id that has more than a COUNTERS-th of all occurrences has one for certain."""
BLOCK_S = 12 * 3600.0
"""Counts are those of this block of time and the one before: of the last 12 to 24 hours."""
PER_REQUEST = 100
"""Ids of one request that are counted, so that no request costs more than a tenth of a millisecond here."""
MAX_ID_BYTES = 512
"""Longer ids are cut."""
TOP = 50
ENDED = 0
"""In place of a process id: the sums of processes that have ended."""

Counts = dict[str, int]
Blocks = dict[int, dict[str, Counts]]
"""Number of a block → model → id → count."""


class MostFrequent:
    """The ids that occurred most, in at most `counters` counters (Misra and Gries, 1982).

    counts  how often each id occurred at least; exact as long as there were no more ids than counters
    """

    def __init__(self, counters: int = COUNTERS) -> None:
        self._most = counters
        self.counts: Counts = {}

    def add(self, item_id: str) -> None:
        """Count one occurrence; amortised O(1): an id without a counter takes one from each of the others."""
        if item_id in self.counts or len(self.counts) < self._most:
            self.counts[item_id] = self.counts.get(item_id, 0) + 1
        else:
            self.counts = {other: count - 1 for other, count in self.counts.items() if count > 1}


class UnknownIds:
    """Those of one process. Used by the event loop alone. clock: seconds since 1970; tests bring their own."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._blocks: dict[int, dict[str, MostFrequent]] = {}
        self.changed = False

    def note(self, model: str, unknown: Iterable[Sequence[str]]) -> None:
        """Count the unknown ids of the queries of a request."""
        left = PER_REQUEST
        for ids in unknown:
            if ids and left:
                found = self._of(model)
                for item_id in ids[:left]:
                    found.add(cut(item_id))
                left -= len(ids[:left])
                self.changed = True

    def counts(self) -> Blocks:
        """What was counted in this block of time and the last."""
        current = block_of(self._clock())
        return {
            block: {model: dict(found.counts) for model, found in models.items()}
            for block, models in self._blocks.items()
            if block >= current - 1
        }

    def _of(self, model: str) -> MostFrequent:
        block = block_of(self._clock())
        if block not in self._blocks:
            self._blocks = {kept: models for kept, models in self._blocks.items() if kept == block - 1} | {block: {}}
        return self._blocks[block].setdefault(model, MostFrequent())


def block_of(now: float) -> int:
    """The number of the block of a time in seconds since 1970."""
    return int(now // BLOCK_S)


def cut(item_id: str) -> str:
    """An id of at most MAX_ID_BYTES bytes of UTF-8."""
    if 4 * len(item_id) <= MAX_ID_BYTES:
        return item_id
    return item_id[:MAX_ID_BYTES].encode("utf-8", "replace")[:MAX_ID_BYTES].decode("utf-8", "ignore")


def summed(several: Iterable[Blocks], most: int = COUNTERS) -> Blocks:
    """The sums of counts; of each model and block at most so many ids."""
    sums: dict[int, dict[str, Counter[str]]] = {}
    for blocks in several:
        for block, models in blocks.items():
            for model, counts in models.items():
                sums.setdefault(block, {}).setdefault(model, Counter()).update(counts)
    return {block: {model: dict(counts.most_common(most)) for model, counts in models.items()} for block, models in sums.items()}


def most_asked(blocks: Blocks, model: str, now: float, top: int = TOP) -> list[tuple[str, int]]:
    """(id, count) of a model's unknown ids in this block of time and the last, most asked first; ties by id."""
    counts = Counter[str]()
    for block, models in blocks.items():
        if block >= block_of(now) - 1:
            counts.update(models.get(model, {}))
    return sorted(counts.items(), key=lambda one: (-one[1], one[0]))[:top]


# -- several processes ----------------------------------------------------------------------------------------------------


def write(folder: Path, pid: int, blocks: Blocks) -> None:
    """Let other processes read these counts. Raises OSError."""
    path = _path(folder, pid)
    new = path.with_suffix(".new")
    new.write_bytes(orjson.dumps({str(block): models for block, models in blocks.items()}))
    new.rename(path)


def read(folder: Path, but: int | None = None) -> list[Blocks]:
    """The counts of all processes, without those of process `but`."""
    while True:
        try:
            return [_read(path) for path in sorted(folder.glob("unknown_*.json")) if path != _path(folder, but)]
        except FileNotFoundError:  # the counts of a process that has ended have just moved to the sums
            continue


def sum_ended(folder: Path, living: Sequence[int], now: float) -> None:
    """Move the counts of processes that have ended to their sums, so that there are few files. One process at a time does this."""
    ended = [path for path in folder.glob("unknown_*.json") if int(path.stem.partition("_")[2]) not in (*living, ENDED)]
    if not ended:
        return
    sums = [_path(folder, ENDED)] if _path(folder, ENDED).exists() else []
    found = summed([_read(path) for path in (*ended, *sums)])
    write(folder, ENDED, {block: models for block, models in found.items() if block >= block_of(now) - 1})
    for path in ended:
        path.unlink()


def _path(folder: Path, pid: int | None) -> Path:
    return folder / f"unknown_{pid}.json"


def _read(path: Path) -> Blocks:
    found: Mapping[str, dict[str, Counts]] = orjson.loads(path.read_bytes())
    return {int(block): models for block, models in found.items()}
