"""Loads and opens what live items add to a search, before the first of them comes; what is not compiled is found out here.

Knows states and searches. Does not know engines.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from espalier.bundle import Bundle
from espalier.live.overlay import Overlay
from espalier.live.rows import LiveRow, Placement
from espalier.live.state import Change, LiveState
from espalier.manifest import LinearScorer
from espalier.queries import HistoryKind, QueryBatch, blank_queries
from espalier.search import SearchParams

NEW = "\0warm-up"
"""An id that no catalogue has."""


def search_with_live_items(
    bundle: Bundle, set_overlay: Callable[[Overlay | None], None], search: Callable[[QueryBatch, SearchParams], object]
) -> None:
    """Search with a new item, with one that was deleted, in histories and excluded; nothing is live afterwards."""
    state = LiveState(bundle)
    item_ids = bundle.items.ids_of(np.arange(min(2, len(bundle.items))))
    placements = tuple(
        Placement(number, (parent := alone.tree.level(alone.tree.height - 1)[0]), state.next_slot(number, parent), _row(bundle, item_ids))
        for number, alone in enumerate(bundle.alone)
    )
    new_row = bundle.manifest.tree.items
    steps = [Change(1, NEW, "put", None, placements), Change(2, item_ids[0], "put", None, placements)]
    try:
        for change in steps if len(item_ids) < 2 else [*steps, Change(3, item_ids[1], "delete")]:
            state.apply([change])
            set_overlay(state.overlay())
            queries = blank_queries(bundle.manifest.query, 1)
            for last in (-1, 0, new_row):
                if isinstance(queries.kind, HistoryKind):
                    queries.array[:, -1] = last
                for exclude_BE in (None, np.array([[0, new_row]])):
                    search(queries, SearchParams.uniform(1, 1, 1, exclude_BE))
    finally:
        set_overlay(None)


def _row(bundle: Bundle, item_ids: list[str]) -> LiveRow:
    """A row of zeros, with a memory of an item where the bundle has one."""
    scorer = bundle.manifest.scorer
    if isinstance(scorer, LinearScorer):
        return LiveRow(np.zeros(1, np.float32), np.zeros(1, np.int32), dense=False)
    entries = () if bundle.manifest.memory is None else ((item_ids[0], 1.0),)
    return LiveRow(np.zeros(scorer.node_dim, np.float32), memory_to=entries, memory_from=entries)
