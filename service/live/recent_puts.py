"""The items that were put last and the queries that led to them. The probe asks these queries again (live_replay.py).

Knows operations. Does not know placements.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from espalier.live.journal import Journal
from espalier.live.operations import Operation

RECENT = 64
"""Most items. The one that was put first is dropped first."""


class RecentPuts:
    """Written by the thread that applies operations, read by the probe's.

    erasures  of the journal, when the queries were last read from it
    """

    def __init__(self, query_kind: str) -> None:
        self.erasures = 0
        self._texts = query_kind == "text"
        self._queries: OrderedDict[str, tuple[object, ...]] = OrderedDict()  # item id → its events, or its text
        self._last_index = -1
        self._lock = threading.Lock()  # guards both

    def note(self, operations: Iterable[Operation]) -> None:
        """Note operations, in the order of their sequence. A put without evidence leaves its item's queries."""
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
                elif body.has_evidence:  # placed by evidence without queries
                    self._queries.pop(operation.id, None)
                while len(self._queries) > RECENT:
                    self._queries.popitem(last=False)

    def read_again(self, journal: Journal, erasures: int) -> None:
        """Replace the queries by those that an erasure of a person's events left in the journal. Raises JournalError."""
        operations = journal.read([*self._queries]).values()
        with self._lock:
            self._queries.clear()
        self.note(sorted(operations, key=lambda operation: operation.sequence))
        self.erasures = erasures

    def __len__(self) -> int:
        return len(self._queries)

    def next(self) -> tuple[str, tuple[object, ...]] | None:
        """The id and the queries of the next item, in turn; None if there is no item."""
        with self._lock:
            if not self._queries:
                return None
            self._last_index = (self._last_index + 1) % len(self._queries)
            item_id = list(self._queries)[self._last_index]
            return item_id, self._queries[item_id]
