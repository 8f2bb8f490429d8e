"""Completion: items whose id or title starts with a prefix, by a scan of the item table.

Knows item tables. Does not know how scans are bounded (scans.py), nor HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from espalier.items import ItemTable
from espalier.live.items import LiveItem, LiveItems

from ..retrieval.scans import Check

SCANNED_ROWS = 1 << 16
"""Rows that are scanned between two checks of the number of results and the deadline."""
LIVE_ENTRIES = 1 << 12
"""Live items likewise."""

Completion = dict[str, str | None]


def completions(items: ItemTable, live: LiveItems | None, prefix: str, limit: int, check: Check) -> list[Completion]:
    """The first `limit` items whose id or title starts with `prefix`, in any case. Raises DeadlinePassed.

    live  what was put and deleted since training; live items come last
    """
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
        check()
    return found if live is None else found + _live_completions(live, prefix, limit - len(found), check)


def _completions(id_name: pa.ChunkedArray, title: pa.ChunkedArray | None, at: pa.Array, live: LiveItems | None) -> list[Completion]:
    """The trained items at some places of a slice, without those that were deleted or are others now."""
    titles = [None] * len(at) if title is None else title.take(at).to_pylist()
    found = [{"id": i, "title": t} for i, t in zip(id_name.take(at).to_pylist(), titles, strict=True)]
    return found if live is None else [one for one in found if _as_trained(live.entry(one["id"]))]


def _as_trained(entry: LiveItem | None) -> bool:
    return entry is None or (not entry.is_deleted and entry.fields is None)


def _live_completions(live: LiveItems, prefix: str, limit: int, check: Check) -> list[Completion]:
    found: list[Completion] = []
    start = prefix.casefold()
    for handle in range(live.handles):
        if len(found) == limit:
            break
        if handle % LIVE_ENTRIES == 0:
            check()
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
