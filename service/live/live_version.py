"""One served version with its live items: what was applied to it, and what its requests see.

Operations are applied by one thread at a time: the loader before the version serves, then that of `journal_thread.py`. Each time the
engine and later requests get a new snapshot, as a whole. Knows operations and their places. Does not know the journal, nor how a place is
found.

Legend: W rows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.engines.stages import ParentsFound, StagedEngine
from espalier.errors import EspalierError, InvalidData
from espalier.items import Items
from espalier.label_counts import LabelCounts
from espalier.live.fields import Columns
from espalier.live.filtered import LiveFilters
from espalier.live.items import LiveItems
from espalier.live.operations import ItemBody, Operation
from espalier.live.rows import Placement
from espalier.live.state import MAX_HANDLES, Change, LiveState
from espalier.masks.filters import ItemFilters
from espalier.placement.evidence import finds_by_words
from espalier.placement.parents import Search
from espalier.placement.placer import Candidates, Placer
from espalier.queries import QueryBatch
from espalier.search import Engine, SearchParams

from ..errors import NotReady
from ..live.catalogue_types import Placed
from ..live.recent_puts import RecentPuts
from ..live.slots import Slots
from ..live.views import View

log = logging.getLogger(__name__)

REOPENED_AT = MAX_HANDLES // 8 * 7
"""Ids seen live from which on the version is opened anew, which gives the handles of deleted items back."""
CLOCK_S = 60.0
"""A clock that goes back by less is no reason to open a version anew: items that expired meanwhile stay away."""
Placements = tuple[Placement, ...]
TRAINED = "trained"
"""What placed an item whose row is that of training."""
FIELDS = "fields"
"""What placed an item of which nothing else says where it belongs."""


class LiveVersion:
    """See the module.

    state    what was applied; requests do not see it before `publish`
    through  operations up to this one are in the bundle
    refused  why the version takes no live items; None where it does
    columns  what fields an item may have
    parents  where queries lead to in the version, from any thread; until it serves only from the loader's
    """

    def __init__(self, bundle: Bundle, engine: Engine, filters: ItemFilters) -> None:
        info = bundle.manifest.live
        self.bundle, self.through, self.columns = bundle, 0 if info is None else info.through, Columns(bundle.items)
        self._name, self.version = bundle.manifest.name, bundle.manifest.version
        self._engine = engine if isinstance(engine, StagedEngine) and bundle.manifest.shard is None else None
        self.parents: Search = _no_parents if self._engine is None else self._engine.parents
        self._placing = threading.Lock()
        self._placer: Placer | None = None  # made with the first item
        self.refused = None if self._engine else f"version {self.version} on {engine.name} takes no live items"
        self._filters = filters
        self._lock = threading.RLock()  # held while something is applied
        self._dropped = False  # its engine searches no more
        self.state = LiveState(bundle)
        trees, nothing = [alone.tree for alone in bundle.alone], LiveItems(bundle.items)
        self._live_filters = LiveFilters(trees, filters, self.state.table, self.state.touched)
        self._trained = View(nothing, self.state.overlay(), LiveFilters(trees, filters, nothing, self.state.touched))
        self._frozen = replace(self._trained, is_frozen=True)
        self._view = self._trained
        self._newest = self._trained  # a moment before the engine has it: results are read by it, queries by `_view`
        self.state.skip_to(self.through)
        self.recent = RecentPuts(bundle.manifest.query.kind)

    # -- readers, on any thread -----------------------------------------------------------------------------------------

    def view(self, live: bool = True) -> View:
        """What a request sees that comes now. live: whether it sees live items."""
        return self._view if live or self.is_empty else self._frozen

    def newest(self) -> View:
        """What results are read by: every item that the engine may have found has a row in it."""
        return self._newest

    @property
    def items(self) -> Items:
        return self._view.items

    @property
    def is_empty(self) -> bool:
        """Whether answers are those of the bundle alone."""
        return self._view is self._trained

    @property
    def sequence(self) -> int:
        """The last operation that every later answer holds."""
        return self._view.sequence or self.through

    @property
    def applied(self) -> int:
        """The last operation that was applied, shown or not."""
        return self.state.sequence

    @property
    def why_reopen(self) -> str:
        """Why it must be opened anew; empty: it need not. Many ids that it has seen live are gone, or items went before their time."""
        state = self.state
        if time.time() < state.expired_until - CLOCK_S:
            return "the clock went back, and items had been taken out before their time"
        there: int = state.live_items + state.tombstones + self._view.overlay.changed.shape[1]
        has_seen_many = state.table.handles >= REOPENED_AT and state.table.handles - there >= REOPENED_AT // 4
        return "it has seen many items come and go" if has_seen_many else ""

    def eligible(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool[W]: which item rows a request without a filter may get."""
        return self._view.is_eligible(self.bundle.tree, rows)

    # -- the one writer -------------------------------------------------------------------------------------------------

    def apply(self, operations: Sequence[Operation], placements: Mapping[int, Placements]) -> None:
        """Apply operations, in their order; `publish` shows them. One that does not fit the version is left out of it, and logged.

        placements  their leaves, by sequence; none where an item's row is the trained one
        """
        operations = [operation for operation in operations if operation.sequence > self.applied]
        if self.refused is not None or not operations:
            return
        if self._dropped:
            self.skip_to(operations[-1].sequence)
            return
        with self._lock:
            state, now = self.state, time.time()
            changes = []
            for operation in operations:
                own = placements.get(operation.sequence, ())
                changes.append(Change.of(operation, own, self.columns, now, placed_by(operation) if own else TRAINED))
            left_out: list[str] = []
            while changes:
                try:
                    state.apply(changes)
                    break
                except InvalidData as error:
                    changes = [change for change in changes if change.sequence > state.sequence]
                    left_out.append(f"operation {changes[0].sequence}: {error}")
                    state.skip_to(changes[0].sequence)
            if left_out:
                log.warning("%s version %d: %d operations are left out; first %s", self._name, self.version, len(left_out), left_out[0])
            for operation in operations:
                self._live_filters.touch(operation.id)
            self.recent.note(operations)

    def skip_to(self, sequence: int) -> None:
        """Count operations up to a sequence as applied."""
        if self.refused is None and sequence > self.applied:
            with self._lock:
                self.state.skip_to(sequence)

    def lacks_places(self, operation: Operation) -> bool:
        """Whether an operation without places needs some.

        Not by what was applied before it: who follows the journal has seen the item's earlier operations, who begins with the last ones has
        not, and both must have the same places. A trained item keeps its row where the evidence may be older than the version: training
        knew more.
        """
        if operation.kind != "put" or self.refused is not None or self._dropped or operation.has_expired(time.time()):
            return False
        if self.is_trained(operation.id):
            manifest = self.bundle.manifest
            is_newer = manifest.live is not None or operation.at >= manifest.created.timestamp()
            return is_newer and operation.body.has_evidence
        return True

    def places(self, operations: Sequence[Operation]) -> dict[int, Placements]:
        """Places of operations by all that is known of their items, by sequence; without those of which that says nothing.

        operations  at least one; none names the item of another
        """
        try:
            self.publish()  # they may have been placed by items that came just before them
            found = self.where([(operation.id, operation.body) for operation in operations])
        except NotReady:  # its engine searches no more; where the version is loaded again, it catches up
            self._dropped = True
            first = operations[0].sequence
            log.info("%s version %d: no operation from %d on: the version is being dropped", self._name, self.version, first)
            return {}
        except EspalierError as error:
            if len(operations) > 1:  # so that it fails nobody else's
                return {sequence: own for operation in operations for sequence, own in self.places([operation]).items()}
            found = [error]
        slots, placements = Slots(self.state), dict[int, Placements]()
        for operation, candidates in zip(operations, found, strict=True):
            try:
                if isinstance(candidates, EspalierError):
                    raise candidates
                placements[operation.sequence] = slots.place(operation.id, candidates, late=operation.sequence)
            except EspalierError as error:
                log.warning("%s version %d: operation %d is left out: %s", self._name, self.version, operation.sequence, error)
        return placements

    def where(self, items: Sequence[tuple[str, ItemBody]]) -> list[Candidates | EspalierError]:
        """Where items may go, by their evidence; an error for one whose evidence says nothing. From any thread but the event loop's."""
        with self._placing:  # one call at a time: placing is numbers in Python, and threads would only slow each other down
            if self._placer is None:
                self._placer = Placer(self.bundle)
            view = self._view
            known = [self._known(item_id, body) for item_id, body in items]
            return self._placer.place(known, view.items, view.overlay, self.parents)

    def _known(self, item_id: str, body: ItemBody) -> ItemBody:
        """A body with the fields that the item has now, and how many events training saw of it, where it gives none."""
        entry = self.state.table.entry(item_id)
        if body.fields is None and entry is not None and not entry.is_deleted:
            body = replace(body, fields=entry.fields)
        count = body.count if body.count is not None else self._trained_count(item_id)
        return body if count == body.count else replace(body, count=count)

    def _trained_count(self, item_id: str) -> int | None:
        row = self.bundle.items.row_of(item_id)
        return None if self._counts is None or row < 0 else int(self._counts.counts_I[row])

    @cached_property
    def _counts(self) -> LabelCounts | None:
        return self.bundle.label_counts()

    def warm_up(self) -> None:
        """Let the placer find out what it needs to know of the bundle. Before anything is applied."""
        if self._engine is None or not self.is_empty:
            return
        first = self.bundle.items.ids_of(np.zeros(1, np.int64))[0]
        (where,) = self.where([(first, ItemBody(like=(first,)))])
        if isinstance(where, EspalierError):
            log.warning("%s version %d: %r cannot be placed: %s", self._name, self.version, first, where)

    def publish(self) -> None:
        """Show what was applied to the engine's next call and to later requests."""
        with self._lock:
            if self._engine is None or (self.is_empty and self.applied == self.through):
                return
            overlay = self.state.overlay()
            self._newest = View(self.state.table, overlay, self._live_filters)
            self._engine.set_overlay(overlay)
            self._view = self._newest

    def expire(self, now: float) -> None:
        """Take out and show the items whose time has passed. now: seconds since 1970."""
        with self._lock:
            if self.state.expire(now):
                self.publish()

    def next_expiry(self) -> float:
        """When an item may expire, seconds since 1970; infinite where none will."""
        with self._lock:
            return self.state.next_expiry()

    def set_removed(self, ids: Sequence[str]) -> None:
        """The standing list of removed items, instead of the one before. From any thread."""
        with self._lock:
            rows = self.bundle.items.rows_of(list(ids))
            self._filters.set_removed(rows[rows >= 0])
            self.state.set_removed(ids, self._filters.standing)
            self.publish()

    def placed(self, item_id: str) -> Placed | None:
        """Where an item's leaf hangs in the last snapshot, of a forest in its first tree; None where it has none, or was deleted.

        From any thread: it does not wait for what is being applied.
        """
        view = self._newest
        entry, row = view.entry(item_id), int(view.items.rows_of([item_id])[0])
        if row < 0 or (entry is not None and entry.is_deleted):
            return None
        parent = int(view.path_of(self.bundle.tree, 0, row)[-2])
        return None if parent < 0 else Placed(self.version, parent, TRAINED if entry is None else entry.by)

    @property
    def takes_fields(self) -> bool:
        """Whether fields alone say where an item belongs."""
        return self.bundle.manifest.content is not None or finds_by_words(self.bundle)

    def fields_of(self, item_id: str) -> dict[str, Any]:
        """The fields of an item that is there, those that are null left out."""
        rows = self.items.rows_of([item_id])
        found = {field: self.items.values(field, rows)[0] for field in self.items.fields if field != "id"}
        return {field: value for field, value in found.items() if value is not None}

    def is_trained(self, item_id: str) -> bool:
        """Whether the bundle has an item."""
        return self.bundle.items.row_of(item_id) >= 0


def _no_parents(queries: QueryBatch, params: SearchParams) -> ParentsFound:
    raise NotReady("This version takes no live items.")


def placed_by(operation: Operation) -> str:
    """Which evidence placed an item, in words: some of `events`, `like`, `text`, joined by `+`, else `fields`."""
    body = operation.body
    given: Mapping[str, Any] = {"events": body.events, "like": body.like, "text": body.text}
    return "+".join(name for name, value in given.items() if value) or FIELDS
