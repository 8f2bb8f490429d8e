"""One served version with its live items: its state, and the snapshots that its requests see.

Operations are applied by one thread at a time: the loader before the version serves, then that of `journal_thread.py`. Then the engine and
later requests get a new snapshot, as a whole. Knows operations and their placements. Does not know the journal, nor how placements are
chosen.

Legend: W rows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from espalier.arrays import Bool, Int64
from espalier.bundle import Bundle
from espalier.errors import EspalierError, InvalidData
from espalier.items import Items
from espalier.live.fields import Columns
from espalier.live.filtered import LiveFilters
from espalier.live.items import LiveItems
from espalier.live.operations import ItemBody, Operation
from espalier.live.rows import Placement
from espalier.live.state import MAX_HANDLES, Change, LiveState
from espalier.masks.filters import ItemFilters
from espalier.placement.evidence import finds_by_words, is_retitled, own_fields
from espalier.placement.parents import Search
from espalier.placement.placer import Candidates, Placer, needs_placement
from espalier.placement.slots import Slots
from espalier.queries import QueryBatch
from espalier.search import Engine, SearchParams, SearchResult

from ..errors import NotReady, ShardsMissing
from ..live.catalogue_types import ItemPlacement
from ..live.recent_puts import RecentPuts
from ..live.views import View

log = logging.getLogger(__name__)

REOPENED_AT = MAX_HANDLES // 8 * 7
"""Number of ids seen live at which the version is opened anew, which frees the handles of deleted items."""
CLOCK_S = 60.0
"""If the clock goes back by less, the version is not opened anew, and items that expired meanwhile stay away."""
Placements = tuple[Placement, ...]
TRAINED = "trained"
"""`ItemPlacement.by` of an item with the row of training."""
FIELDS = "fields"
"""`ItemPlacement.by` of an item without evidence but its fields."""


class LiveVersion:
    """See the module.

    state    the applied operations; requests do not see them before `publish`
    through  operations up to this one are in the bundle
    refused  why the version takes no live items; None: it does
    columns  of an item's fields
    newest   the view with which results are read: it has a row of every item that the engine may find
    knows_expiries  whether the expiries of the items that it holds have been read
    parents  searches the version for parents, from any thread; until the version serves, only from the loader's
    """

    def __init__(self, bundle: Bundle, engine: Engine, filters: ItemFilters) -> None:
        from espalier.engines.pipeline import Pipeline  # loads ONNX Runtime

        info = bundle.manifest.live
        self.bundle, self.through, self.columns = bundle, 0 if info is None else info.through, Columns(bundle.items)
        self._name, self.version, self.fingerprint = bundle.manifest.name, bundle.manifest.version, bundle.manifest.fingerprint
        self._engine = engine if isinstance(engine, Pipeline) and bundle.manifest.shard is None else None
        self.parents: Search = _no_parents if self._engine is None else self._engine.parents
        self._placing = threading.Lock()
        self._placer: Placer | None = None  # made with the first item
        self.refused = None if self._engine else f"version {self.version} on {engine.name} takes no live items"
        self._filters = filters
        self._lock = threading.RLock()  # held while something is applied
        self._dropped = False  # whether its engine searches no more
        self.knows_expiries = self.through == 0
        self.state = LiveState(bundle)
        trees, no_live_items = [single.tree for single in bundle.alone], LiveItems(bundle.items)
        self._live_filters = LiveFilters(trees, filters, self.state.table, self.state.touched)
        self._trained_view = View(no_live_items, self.state.overlay(), LiveFilters(trees, filters, no_live_items, self.state.touched))
        self._frozen_view = replace(self._trained_view, is_frozen=True)
        self._view = self._trained_view
        self.newest = self._trained_view  # set just before the engine has it; results are read with it, queries with `_view`
        self.state.skip_to(self.through)
        self.recent = RecentPuts(bundle.manifest.query.kind)

    # -- readers, on any thread -----------------------------------------------------------------------------------------

    def view(self, live: bool = True) -> View:
        """The view of a request that comes now. live: whether it sees live items."""
        return self._view if live or self.is_empty else self._frozen_view

    @property
    def counts_in_histories(self) -> bool:
        """Whether live items count in histories; if not, they are unknown there."""
        return self._engine is not None and self._engine.counts_live_items

    @property
    def items(self) -> Items:
        return self._view.items

    @property
    def is_empty(self) -> bool:
        """Whether answers are those of the bundle alone."""
        return self._view is self._trained_view

    @property
    def sequence(self) -> int:
        """The last operation that every later answer holds."""
        return self._view.sequence or self.through

    @property
    def applied(self) -> int:
        """The last operation that was applied, published or not."""
        return self.state.sequence

    @property
    def why_reopen(self) -> str:
        """Why it must be opened anew; empty: it need not. Either most handles are of items that are gone, or items expired too early."""
        state = self.state
        if time.time() < state.expired_until - CLOCK_S:
            return "the clock went back, and items had been taken out before their time"
        used_handles: int = state.live_items + state.tombstones + self._view.overlay.changed.shape[1]
        has_seen_many = state.table.handles >= REOPENED_AT and state.table.handles - used_handles >= REOPENED_AT // 4
        return "it has seen many items come and go" if has_seen_many else ""

    def eligible(self, rows: Int64) -> Bool:
        """bool[W]: which item rows a request without a filter may get."""
        return self._view.is_eligible(self.bundle.tree, rows)

    # -- the one writer -------------------------------------------------------------------------------------------------

    def apply(self, operations: Sequence[Operation], placements: Mapping[int, Placements]) -> None:
        """Apply operations, in their order; `publish` shows them. An operation that does not fit the version is skipped and logged.

        placements  by sequence; without items that keep their trained row
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
                of_trees = placements.get(operation.sequence, ())
                changes.append(Change.of(operation, of_trees, self.columns, now, placed_by(operation) if of_trees else TRAINED))
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
            self.recent.note(operations)

    def expire_held(self, operations: Sequence[Operation]) -> None:
        """See `LiveState`."""
        with self._lock:
            self.state.expire_held(operations, time.time())

    def skip_to(self, sequence: int) -> None:
        """Count operations up to a sequence as applied."""
        if self.refused is None and sequence > self.applied:
            with self._lock:
                self.state.skip_to(sequence)

    def needs_placements(self, operation: Operation) -> bool:
        """Whether an operation without placements needs some; see `needs_placement`."""
        is_applied_here = self.refused is None and not self._dropped
        return is_applied_here and not operation.has_expired(time.time()) and needs_placement(self.bundle, operation)

    def new_placements(self, operations: Sequence[Operation]) -> dict[int, Placements]:
        """Placements of operations by the evidence in their bodies, by sequence; without operations that cannot be placed.

        Raises ShardsMissing if shards that it must ask do not answer now: the version must wait for them.

        operations  at least one; none names the item of another
        """
        try:
            self.publish()  # their evidence may name items that were applied just before
            results = self.candidates([(operation.id, operation.body) for operation in operations])
        except ShardsMissing:  # a NotReady too, but it passes
            raise
        except NotReady:  # its engine searches no more; if the version is loaded again, it catches up
            self._dropped = True
            first = operations[0].sequence
            log.info("%s version %d: no operation from %d on: the version is being dropped", self._name, self.version, first)
            return {}
        except EspalierError as error:
            if len(operations) > 1:  # one by one, so that others do not fail with it
                return dict(pair for operation in operations for pair in self.new_placements([operation]).items())
            results = [error]
        slots, placements = Slots(self.state), dict[int, Placements]()
        for operation, candidates in zip(operations, results, strict=True):
            try:
                if isinstance(candidates, EspalierError):
                    raise candidates
                placements[operation.sequence] = slots.place(operation.id, candidates, late_sequence=operation.sequence)
            except EspalierError as error:
                log.warning("%s version %d: operation %d is left out: %s", self._name, self.version, operation.sequence, error)
        return placements

    def candidates(self, items: Sequence[tuple[str, ItemBody]]) -> list[Candidates | EspalierError]:
        """The candidates of each item, or the error of its evidence. From any thread but the event loop's."""
        with self._placing:  # one call at a time: placing computes in Python, and threads would only slow each other down
            if self._placer is None:
                self._placer = Placer(self.bundle)
            view = self._view
            bodies = [self._placer.completed(item_id, body, self.state.table) for item_id, body in items]
            return self._placer.place(bodies, view.items, view.overlay, self.parents, [item_id for item_id, _ in items])

    def warm_up(self) -> None:
        """Let the placer compute what it needs of the bundle. To be called before anything is applied."""
        if self._engine is None or not self.is_empty:
            return
        first = self.bundle.items.ids_of(np.zeros(1, np.int64))[0]
        (result,) = self.candidates([(first, ItemBody(like=(first,)))])
        if isinstance(result, EspalierError):
            log.warning("%s version %d: %r cannot be placed: %s", self._name, self.version, first, result)

    def publish(self) -> None:
        """Show the applied operations to the engine's next call and to later requests."""
        with self._lock:
            if self._engine is None or (self.is_empty and self.applied == self.through and not self.state.table.handles):
                return
            self._live_filters.update()
            overlay = self.state.overlay()
            self.newest = View(self.state.table, overlay, self._live_filters)
            self._engine.set_overlay(overlay)
            self._view = self.newest

    def expire(self, now: float) -> bool:
        """Take out the items whose time has passed, and publish that. Returns whether there were any. now: seconds since 1970."""
        with self._lock:
            expired = self.state.expire(now) > 0
            if expired:
                self.publish()
            return expired

    def next_expiry(self) -> float:
        """When an item may expire, seconds since 1970; infinite if none will."""
        with self._lock:
            return self.state.next_expiry()

    def set_removed(self, ids: Sequence[str]) -> None:
        """Replace the standing list of removed items. From any thread."""
        with self._lock:
            rows = self.bundle.items.rows_of(list(ids))
            self._filters.set_removed(rows[rows >= 0])
            self.state.set_removed(ids, self._filters.standing)
            self.publish()

    def placed(self, item_id: str) -> ItemPlacement | None:
        """The parent of an item's leaf in the last snapshot, of a forest in its first tree; None for an item without a leaf.

        From any thread: it does not wait for operations that are being applied.
        """
        view = self.newest
        entry, row = view.entry(item_id), int(view.items.rows_of([item_id])[0])
        if row < 0 or (entry is not None and entry.is_deleted):
            return None
        parent = int(view.path_of(self.bundle.tree, 0, row)[-2])
        return None if parent < 0 else ItemPlacement(self.version, parent, TRAINED if entry is None else entry.by or TRAINED)

    @property
    def takes_fields(self) -> bool:
        """Whether fields are evidence."""
        return self.bundle.manifest.content is not None or finds_by_words(self.bundle)

    def is_placed_by(self, item_id: str, fields: Mapping[str, Any]) -> bool:
        """Whether new fields place an item: because they change its own text, or it has no row yet or one by fields alone."""
        placed = self.placed(item_id)
        by_fields = not self.is_trained(item_id) if placed is None else placed.by == FIELDS
        if self.takes_fields and by_fields:
            return True
        row, entry = self.bundle.items.row_of(item_id), self._view.entry(item_id)
        before = own_fields(self.bundle, row) if row >= 0 else {} if entry is None else entry.fields or {}
        return is_retitled(self.bundle, before, fields)

    def is_as_trained(self, operation: Operation) -> bool:
        """Whether a put of a trained item, not committed yet, leaves it with the row of training, because it has the own text of training
        and no evidence that training lacked. In models with own texts; in others the row of the stored evidence stays."""
        has_new_evidence = operation.body.has_evidence and operation.body.evidence_from is None
        is_trained = finds_by_words(self.bundle) and self.is_trained(operation.id)
        return is_trained and not has_new_evidence and not needs_placement(self.bundle, operation)

    def fields_of(self, item_id: str) -> dict[str, Any]:
        """The fields of an item, without those that are null."""
        rows = self.items.rows_of([item_id])
        values = {field: self.items.values(field, rows)[0] for field in self.items.fields if field != "id"}
        return {field: value for field, value in values.items() if value is not None}

    def is_as_stored(self, stored: Operation) -> bool:
        """Whether the version has an item as its last operation in the journal says. It may not have if the bundle holds operations that
        the journal has lost, since a backup was restored or another host took over.
        """
        if stored.sequence > self.through or not self.is_trained(stored.id):
            return True
        fields = stored.body.fields
        return stored.kind == "put" and (fields is None or self.columns.fitting(fields) == self.fields_of(stored.id))

    def is_trained(self, item_id: str) -> bool:
        """Whether the bundle has an item."""
        return self.bundle.items.row_of(item_id) >= 0


def _no_parents(queries: QueryBatch, params: SearchParams) -> SearchResult:
    raise NotReady("This version takes no live items.")


def placed_by(operation: Operation) -> str:
    """The evidence that placed an item: some of `events`, `like`, `text`, joined by `+`, else `fields`."""
    body = operation.body
    evidence: Mapping[str, Any] = {"events": body.events, "like": body.like, "text": body.text}
    return "+".join(name for name, value in evidence.items() if value) or FIELDS
