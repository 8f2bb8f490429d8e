"""The items that were put in last and the queries that led to them, which the probe asks again (live_replay.py).

Knows operations. Does not know where an item was placed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from espalier.live.operations import Operation

RECENT = 64
"""Items that are kept; the one that was put first goes first."""


class RecentPuts:
    """Noted by the thread that applies operations, read by the probe's."""

    def __init__(self, query_kind: str) -> None:
        self._texts = query_kind == "text"
        self._queries: OrderedDict[str, tuple[object, ...]] = OrderedDict()  # item id → its events, or its text
        self._asked = -1
        self._lock = threading.Lock()  # guards both

    def note(self, operations: Iterable[Operation]) -> None:
        """Operations in the order of their sequence. A put without evidence leaves what is known of its item."""
        with self._lock:
            for operation in operations:
                if operation.kind == "delete":
                    self._queries.pop(operation.id, None)
                    continue
                body = operation.body
                queries = body.events or ((body.text,) if self._texts and body.text else ())
                if queries:
                    self._queries[operation.id] = queries
                    self._queries.move_to_end(operation.id)
                elif body.has_evidence:  # placed anew, by what is no query
                    self._queries.pop(operation.id, None)
                while len(self._queries) > RECENT:
                    self._queries.popitem(last=False)

    def __len__(self) -> int:
        return len(self._queries)

    def next(self) -> tuple[str, tuple[object, ...]] | None:
        """An item's id and its queries, in turns; None where there is none."""
        with self._lock:
            if not self._queries:
                return None
            self._asked = (self._asked + 1) % len(self._queries)
            item_id = list(self._queries)[self._asked]
            return item_id, self._queries[item_id]
