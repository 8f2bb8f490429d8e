"""Completion: items whose id or title starts with a prefix, by a scan of the item table.

Knows item tables. Does not know how scans are bounded (scans.py), nor HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from espalier.items import ItemTable
from espalier.live.items import NO_FIELDS, LiveItem, LiveItems

from ..retrieval.scans import Check

SCANNED_ROWS = 1 << 16
"""Rows that are scanned between two checks of the deadline."""
LIVE_ENTRIES = 1 << 12
"""Live items that are scanned between two checks of the deadline."""

Completion = dict[str, str | None]


def completions(items: ItemTable, live: LiveItems | None, prefix: str, limit: int, check: Check) -> list[Completion]:
    """The first `limit` items whose id or title starts with `prefix`, ignoring case. Raises DeadlinePassed.

    live  the live items, which come last, and the deleted ones
    """
    completions: list[Completion] = []
    for id_name, title in _slices(items):
        matches = pc.starts_with(id_name, prefix, ignore_case=True)
        if title is not None:
            matches = pc.or_(matches, pc.fill_null(pc.starts_with(title, prefix, ignore_case=True), False))
        matching_rows = pc.indices_nonzero(matches)
        for begin in range(0, len(matching_rows), limit):
            completions += _completions(id_name, title, matching_rows[begin : begin + limit], live)
            if len(completions) >= limit:
                return completions[:limit]
        check()
    return completions if live is None else completions + _live_completions(live, prefix, limit - len(completions), check)


def _completions(id_name: pa.ChunkedArray, title: pa.ChunkedArray | None, rows: pa.Array, live: LiveItems | None) -> list[Completion]:
    """The trained items in some rows of a slice, without those that were deleted or whose fields were replaced."""
    titles = [None] * len(rows) if title is None else title.take(rows).to_pylist()
    trained_items = [{"id": i, "title": t} for i, t in zip(id_name.take(rows).to_pylist(), titles, strict=True)]
    return trained_items if live is None else [item for item in trained_items if _is_unchanged(live.entry(item["id"]))]


def _is_unchanged(entry: LiveItem | None) -> bool:
    return entry is None or (not entry.is_deleted and entry.fields is None)


def _live_completions(live: LiveItems, prefix: str, limit: int, check: Check) -> list[Completion]:
    completions: list[Completion] = []
    start = prefix.casefold()
    for handle in range(live.handles):
        if len(completions) == limit:
            break
        if handle % LIVE_ENTRIES == 0:
            check()
        entry = live.entry_at(handle)
        if entry is None or entry.is_deleted or (entry.fields is None and entry.item_row < len(live.trained)):
            continue
        title = (entry.fields or NO_FIELDS).get("title")
        title = title if isinstance(title, str) else None
        if entry.id.casefold().startswith(start) or (title or "").casefold().startswith(start):
            completions.append({"id": entry.id, "title": title})
    return completions


def _slices(items: ItemTable) -> Iterator[tuple[pa.ChunkedArray, pa.ChunkedArray | None]]:
    ids, title = items.column("id"), None
    if "title" in items.fields and items.column("title").type in (pa.string(), pa.large_string()):
        title = items.column("title")
    for begin in range(0, len(items), SCANNED_ROWS):
        yield ids.slice(begin, SCANNED_ROWS), None if title is None else title.slice(begin, SCANNED_ROWS)
