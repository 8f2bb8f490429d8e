"""Completion: items whose id or title starts with a prefix, by a scan of the item table.

A scan of a large catalogue takes a core for a while, and every client that may retrieve may request one. So few run at once, few wait, and
none runs past its deadline. Knows item tables and threads. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from espalier.items import ItemTable
from espalier.live.items import LiveItem, LiveItems
from service.errors import DeadlinePassed, QueueFull

SCANNED_ROWS = 1 << 16
"""Rows that are scanned between two checks of the number of results and the deadline."""
LIVE_ENTRIES = 1 << 12
"""Live items likewise."""
MAX_SCANS = 2
MAX_WAITING = 8

Completion = dict[str, str | None]


class Completer:
    """The scans of one process.

    timeout_s  from the request to its answer, the wait included
    clock      in seconds; tests bring their own
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s, self._clock = timeout_s, clock
        self._free = asyncio.Semaphore(MAX_SCANS)
        self._waiting = 0

    async def complete(self, items: ItemTable, prefix: str, limit: int, live: LiveItems | None = None) -> list[Completion]:
        """The first `limit` items whose id or title starts with `prefix`, in any case. Raises QueueFull, DeadlinePassed.

        live  what was put and deleted since training; live items come last
        """
        deadline = self._clock() + self._timeout_s
        await self._enter()
        scan = asyncio.ensure_future(asyncio.to_thread(_scan, items, live, prefix, limit, deadline, self._clock))
        scan.add_done_callback(self._leave)  # with the thread, not with a client that hangs up
        return await asyncio.shield(scan)

    async def _enter(self) -> None:
        if self._free.locked() and self._waiting >= MAX_WAITING:
            raise QueueFull(f"{MAX_SCANS} completions run and {MAX_WAITING} wait already.", retry_after_s=1)
        self._waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._free.acquire()
        except TimeoutError:
            raise _too_late() from None
        finally:
            self._waiting -= 1

    def _leave(self, scan: asyncio.Future[list[Completion]]) -> None:
        self._free.release()
        if not scan.cancelled():
            scan.exception()  # read, so that asyncio does not log it where the client has gone


def _scan(
    items: ItemTable, live: LiveItems | None, prefix: str, limit: int, deadline: float, clock: Callable[[], float]
) -> list[Completion]:
    found: list[Completion] = []
    for id_name, title in _slices(items):
        matches = pc.starts_with(id_name, prefix, ignore_case=True)
        if title is not None:
            matches = pc.or_(matches, pc.fill_null(pc.starts_with(title, prefix, ignore_case=True), False))
        at = pc.indices_nonzero(matches)
        for begin in range(0, len(at), limit):
            found += _completions(id_name, title, at[begin : begin + limit], live)
            if len(found) >= limit:
                return found[:limit]
        if clock() >= deadline:
            raise _too_late()
    return found if live is None else found + _live_completions(live, prefix, limit - len(found), deadline, clock)


def _completions(id_name: pa.ChunkedArray, title: pa.ChunkedArray | None, at: pa.Array, live: LiveItems | None) -> list[Completion]:
    """The trained items at some places of a slice, without those that were deleted or are others now."""
    titles = [None] * len(at) if title is None else title.take(at).to_pylist()
    found = [{"id": i, "title": t} for i, t in zip(id_name.take(at).to_pylist(), titles, strict=True)]
    return found if live is None else [one for one in found if _as_trained(live.entry(one["id"]))]


def _as_trained(entry: LiveItem | None) -> bool:
    return entry is None or (not entry.is_deleted and entry.fields is None)


def _live_completions(live: LiveItems, prefix: str, limit: int, deadline: float, clock: Callable[[], float]) -> list[Completion]:
    found: list[Completion] = []
    start = prefix.casefold()
    for handle in range(live.handles):
        if len(found) == limit:
            break
        if handle % LIVE_ENTRIES == 0 and clock() >= deadline:
            raise _too_late()
        entry = live.entry_at(handle)
        if entry is None or entry.is_deleted or entry.fields is None:
            continue
        title = entry.fields.get("title")
        title = title if isinstance(title, str) else None
        if entry.id.casefold().startswith(start) or (title or "").casefold().startswith(start):
            found.append({"id": entry.id, "title": title})
    return found


def _slices(items: ItemTable) -> Iterator[tuple[pa.ChunkedArray, pa.ChunkedArray | None]]:
    ids, titles = items.column("id"), None
    if "title" in items.fields and items.column("title").type in (pa.string(), pa.large_string()):
        titles = items.column("title")
    for begin in range(0, len(items), SCANNED_ROWS):
        yield ids.slice(begin, SCANNED_ROWS), None if titles is None else titles.slice(begin, SCANNED_ROWS)


def _too_late() -> DeadlinePassed:
    return DeadlinePassed("The catalogue was not scanned to its end in time.")
