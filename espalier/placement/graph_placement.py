"""Places live items in a bundle of graphs: parents by the searches of their events, rows by states, neighbours and content.

    row = (n · e + l · mean of l neighbours' rows + κ · prior) / (n + l + κ)

e is what n events say: `graph_rows.py` where a score is an inner product, with the shift of that module on top of the whole row, else the
mean row of the leaves that the search of the events finds. The prior is what the item's fields say (content.onnx) where the bundle reads
fields and some are given, else the mean row of the parent's leaves; κ = 1, an event. An item with nothing but fields has a row in the
direction of theirs, a shift of its own, and the memory of the trained items with the nearest rows.

Legend: B queries, D node row.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.checks.heldout import read_heldout
from espalier.content.rows import ContentRows
from espalier.engines.stages import ParentsFound
from espalier.errors import InvalidData
from espalier.items import Items
from espalier.live.overlay import PARENT, Overlay
from espalier.live.rows import Entries, LiveRow
from espalier.manifest import InnerProductForm
from espalier.masks.eligibility import bundle_alone
from espalier.node_rows import rounded
from espalier.placement.evidence import Evidence
from espalier.placement.graph_rows import (
    NO_SHIFTS,
    Background,
    NearRows,
    RowScale,
    Shifts,
    Trial,
    Trials,
    best_parent,
    scale_of,
    trial_items,
)
from espalier.placement.memory_rows import NONE, MemoryRows, merged
from espalier.placement.parents import Parents, Search, Votes, best_first, summed, votes_of_search
from espalier.placement.popularity import Popularity
from espalier.queries import HistoryKind, QueryBatch
from espalier.search import NodeMask, SearchParams
from espalier.tree import EMPTY_LEAF

Floats = NDArray[np.float64]
Int64 = NDArray[np.int64]

PRIOR = 1.0
"""κ, in events."""
BEAM = 32
"""Beam of the events' searches: the best parents are among the first, and a wider beam costs time."""
NEAREST = 10
"""Leaves whose rows are averaged where scores are no inner products."""
BACKGROUND = 1024
"""Held-out queries that the scale of rows is taken from."""
TRIALS, TRIAL_EVENTS = 128, (0, 1, 2, 5, 12, 28, 64)
"""Trained items that are placed to find a shift, and how many events each of them has."""
MOST_SHIFTS = 32
"""Shifts by evidence and count that are kept, those used last, of half a megabyte each."""

KEPT_SHIFTS = 1024
"""Numbers that were worked out of these, by evidence and exact count."""


class Led(NamedTuple):
    """Where the events of an item led to. queries: those of the search that were its events, one at least."""

    found: ParentsFound
    queries: range

    def items_M(self, b: int, trained: int) -> Int64:
        """Rows of the trained items that an event found, best first."""
        rows: Int64 = self.found.result.item_rows_BM[b][: self.found.result.count_B[b]]
        return rows[rows < trained]


@dataclass(frozen=True, eq=False)
class ByFields:
    """An item by its fields alone: its row without a shift, votes for its parents, and the item rows that lift it with S."""

    row_D: Floats
    votes: Votes
    memory: tuple[Int64, Floats]


class GraphPlacement:
    """See the module. What it needs to know of the bundle it finds out with the first item."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle, self._tree = bundle, bundle.tree
        self.takes_fields = bundle.manifest.content is not None
        self._is_product = isinstance(bundle.graph_scorer.form, InnerProductForm)
        self._lock = threading.Lock()
        self._known_scale: RowScale | None = None
        self._known_near: NearRows | None = None
        self._background: Background | None = None
        self._known_trials: dict[int, Trials] = {}
        self._shifts = lru_cache(MOST_SHIFTS)(self._new_shifts)
        self._shift = lru_cache(KEPT_SHIFTS)(self._new_shift)

    @cached_property
    def _content(self) -> ContentRows:
        return ContentRows(self.bundle)

    @cached_property
    def _memory(self) -> MemoryRows | None:
        memory = self.bundle.memory
        return None if memory is None else MemoryRows(memory, self._popularity)

    @cached_property
    def _popularity(self) -> Popularity:
        return Popularity(self.bundle.label_counts())

    def place(self, items: Sequence[Evidence], known: Items, overlay: Overlay, search: Search) -> list[tuple[Parents, ...]]:
        """For each item the parents that it may go to, of the one tree."""
        if not items:
            return []
        scale = self._scale(search)
        led = self._led([item.events for item in items], search)
        with_fields = [i for i, item in enumerate(items) if self.takes_fields and item.fields]
        content = dict(zip(with_fields, self._content.of([items[i].fields or {} for i in with_fields]), strict=True)) if with_fields else {}
        return [(self._parents(item, led[i], content.get(i), scale, known, overlay),) for i, item in enumerate(items)]

    def _parents(
        self, item: Evidence, led: Led | None, content_D: NDArray[np.float32] | None, scale: RowScale, known: Items, overlay: Overlay
    ) -> Parents:
        if content_D is not None and led is None and not len(item.like):
            alone = self._by_fields(content_D, scale)
            count = self._popularity.count(0, item.count)
            row_D = scale.shifted(alone.row_D, self._shift(0, count))
            fields_row = LiveRow(self._as_stored(row_D), memory_from=self._named(alone.memory, known), count=count)
            return Parents(best_first([(1.0, alone.votes)]).tolist(), lambda _: fields_row)
        events = len(item.events)
        like = [self._leaf(int(row), overlay) for row in item.like]
        parts: list[tuple[float, Votes]] = [] if led is None else [(1.0, votes_of_search(led.found.frontiers[0], [b])) for b in led.queries]
        parts += [(1.0, (np.array([parent]), np.ones(1))) for parent, _ in like]
        if content_D is not None:
            parts.append((PRIOR, self._nearest(content_D.astype(np.float64), scale)))
        count = self._popularity.count(events or len(like), item.count)
        memory = self._memory_of(item, count, known)
        sum_D = sum((row_D for _, row_D in like), np.zeros(len(scale.row_S)))
        if led is not None:
            sum_D = sum_D + events * self._row_of_events(led, scale)
        shift = self._shift(events, count) if events else 0.0
        row = partial(self._row, sum_D, events + len(like), shift, content_D, scale, memory, count)
        return Parents(best_first(parts).tolist(), row)

    def _row(
        self,
        sum_D: Floats,
        pieces: int,
        shift: float,
        content_D: NDArray[np.float32] | None,
        scale: RowScale,
        memory: tuple[Entries, Entries],
        count: float,
        parent: int,
    ) -> LiveRow:
        prior_D = self._mean_row(parent) if content_D is None else content_D.astype(np.float64)
        row_D = scale.shifted(scale.capped((sum_D + PRIOR * prior_D) / (pieces + PRIOR)), shift)
        lifting, lifted = memory
        return LiveRow(self._as_stored(row_D), memory_to=lifted, memory_from=lifting, count=count)

    def _as_stored(self, row_D: Floats) -> NDArray[np.float32]:
        """A row as a fold of the bundle will store it: what is found before it is found after it. Raises InvalidData."""
        dtype = self.bundle.stored_rows.dtype
        try:
            found_D: NDArray[np.float32] = rounded(row_D[None], dtype)[0]
        except FloatingPointError:
            raise InvalidData("row", "a number that is too large", f"numbers that {dtype} holds") from None
        return found_D

    def _row_of_events(self, led: Led, scale: RowScale) -> Floats:
        """e of the module."""
        if self._is_product:
            states_BS = _states(led.found)[led.queries.start : led.queries.stop]
            return scale.row_of_events(states_BS[0].astype(np.float64) if len(states_BS) == 1 else states_BS.mean(0, dtype=np.float64))
        items = [led.items_M(b, self._tree.item_count) for b in led.queries]
        rows = [self._rows(self._tree.leaf_of_item[items_M]).mean(0) for items_M in items if len(items_M)]
        if not rows:
            return scale.row_S
        row_D: Floats = np.stack(rows).mean(0)
        return row_D

    def _rows(self, nodes: Int64) -> Floats:
        rows: Floats = self.bundle.node_rows_ND[nodes].astype(np.float64)
        return rows

    def _mean_row(self, parent: int) -> Floats:
        """The mean row of a parent's leaves."""
        tree = self._tree
        first, after = tree.first_child[parent : parent + 2].tolist()
        held = np.flatnonzero(tree.leaf_item[first - tree.leaf_offset : after - tree.leaf_offset] != EMPTY_LEAF) + first
        mean_D: Floats = self._rows(held if len(held) else np.arange(first, after)).mean(0)
        return mean_D

    def _leaf(self, row: int, overlay: Overlay) -> tuple[int, Floats]:
        """The parent and the row of an item's leaf."""
        entry, leaves = overlay.live_leaf(row, 0), overlay.trees[0]
        if entry and leaves.rows_PD is not None:
            return int(leaves.entries.rows[entry, PARENT]), leaves.rows_PD[entry].astype(np.float64)
        leaf = self._tree.leaf_of_item[np.array([row])]
        return int(self._tree.parent[leaf[0]]), self._rows(leaf)[0]

    def _nearest(self, row_D: Floats, scale: RowScale) -> Votes:
        """The parents of the trained items with the nearest rows, each with the cosine as its vote."""
        items, cosine = self._near_rows(scale).of(row_D)
        return self._votes_of(items, cosine)

    def _votes_of(self, items: Int64, cosine: Floats) -> Votes:
        return summed([self._tree.parent[self._tree.leaf_of_item[items]]], [cosine / max(1, len(items))])

    def _near_rows(self, scale: RowScale) -> NearRows:
        if self._known_near is None:
            self._known_near = NearRows(self.bundle.node_rows_ND, self._tree.leaf_of_item, scale)
        return self._known_near

    def _by_fields(self, content_D: NDArray[np.float32], scale: RowScale, but: int = -1) -> ByFields:
        """What the fields alone make of an item; `but`: a trained item that is left out, because it is the item itself."""
        row_D = scale.row_of_content(content_D.astype(np.float64)) if self._is_product else content_D.astype(np.float64)
        items, cosine = self._near_rows(scale).of(row_D, but)
        memory = NONE if self._memory is None else self._memory.of_like(items, cosine)
        return ByFields(row_D, self._votes_of(items, cosine), memory)

    def _memory_of(self, item: Evidence, count: float, known: Items) -> tuple[Entries, Entries]:
        """What lifts an item: what its events hold, the items that it is like, and what lifts these. And what it lifts."""
        if self._memory is None or not isinstance(item.events.kind, HistoryKind):
            return (), ()
        lifting, lifted = self._memory.of(np.asarray(item.events.array, np.int64), count)
        if len(item.like):
            trained = item.like[item.like < self._tree.item_count]
            by_like = self._memory.of(item.like[:, None], count)[0], self._memory.of_like(trained, np.ones(len(trained)))
            lifting = merged([lifting, *by_like])
        return self._named(lifting, known), self._named(lifted, known)

    @staticmethod
    def _named(memory: tuple[Int64, Floats], known: Items) -> Entries:
        rows, values = memory
        return tuple(zip(known.ids_of(rows), values.tolist(), strict=True))

    # -- what is found out once -----------------------------------------------------------------------------------------

    def _scale(self, search: Search) -> RowScale:
        with self._lock:
            if self._known_scale is None:
                self._known_scale = self._new_scale(search)
            return self._known_scale

    def _new_scale(self, search: Search) -> RowScale:
        rows_ND = self.bundle.node_rows_ND
        if not self._is_product:
            return scale_of(self._tree, rows_ND, None)
        held, defaults = read_heldout(self.bundle, BACKGROUND), self.bundle.manifest.search
        if not len(held.queries):
            return scale_of(self._tree, rows_ND, None)
        found = self._searched(held.queries, search, defaults.beam_size, defaults.m)
        states_BS = _states(found)
        scale = scale_of(self._tree, rows_ND, states_BS)
        if scale.is_free_S.all() or not scale.is_free_S.any():  # no biases, or nothing but biases, which no query tells apart
            return scale
        histories = np.asarray(held.queries.array, np.int64) if isinstance(held.queries.kind, HistoryKind) else None
        self._background = Background(
            histories,
            found.frontiers[0],
            states_BS,
            found.result.item_rows_BM,
            np.where(found.result.count_B == defaults.m, found.result.keys_BM[:, -1], -np.inf),
            held.relevant,
            self.bundle.memory,
        )
        return scale

    def _new_shift(self, events: int, count: float) -> float:
        """That of an item with some events at hand, 0: with fields alone, that has had so many: between those of counts near it."""
        share, power = self._popularity.share(count), math.log2(max(count, 1.0))
        first, part = int(power), power - int(power)
        at_hand = next(most for most in TRIAL_EVENTS if events <= most or most == TRIAL_EVENTS[-1])
        counts = [2.0**exponent if at_hand else 0.0 for exponent in (first, first + 1)]  # of fields alone what lifts depends on no count
        with self._lock:
            below, above = (self._shifts(at_hand, count).of(share) for count in counts)
        return below + part * (above - below)

    def _new_shifts(self, events: int, count: float) -> Shifts:
        """Those of items with about so many events at hand. Found out when they are needed first. Holds the lock."""
        background, scale, ranking = self._background, self._known_scale, self.bundle.manifest.ranking
        if background is None or scale is None:
            return NO_SHIFTS
        if events not in self._known_trials:
            made = self._trials(background, scale, events) if events else self._trials_by_fields(background, scale)
            self._known_trials[events] = Trials.of(background, made, ranking)
        return self._known_trials[events].shifts(background, self._tree.item_count, ranking, count)

    def _trials(self, background: Background, scale: RowScale, events: int) -> list[Trial]:
        trials = []
        for item, queries in trial_items(background.relevant, TRIALS, events):
            parent, count = best_parent(background.frontier, queries), len(queries)
            if parent < 0:
                continue
            events_D = scale.row_of_events(np.mean(background.states_BS[queries], axis=0, dtype=np.float64))
            row_D = scale.capped((count * events_D + PRIOR * self._mean_row(parent)) / (count + PRIOR))
            trials.append(Trial(item, queries, row_D, parent, partial(self._lifting, background.history_BT, queries)))
        return trials

    def _lifting(self, history_BT: Int64 | None, queries: list[int], count: float) -> tuple[Int64, Floats]:
        return NONE if self._memory is None or history_BT is None else self._memory.of(history_BT[queries], count)[0]

    def _trials_by_fields(self, background: Background, scale: RowScale) -> list[Trial]:
        """Trained items as if nothing but their fields were known. No query is their evidence, so all are asked."""
        items = np.array([item for item, _ in trial_items(background.relevant, TRIALS, 1)], np.int64)
        columns = [column.name for column in self._content.features.info.columns]
        values = zip(*(self.bundle.items.values(name, items) for name in columns), strict=True)
        trials = []
        for item, content_D in zip(items.tolist(), self._content.of([dict(zip(columns, row, strict=True)) for row in values]), strict=True):
            alone = self._by_fields(content_D, scale, item)
            parents = best_first([(1.0, alone.votes)])
            if len(parents):
                trials.append(Trial(item, [], alone.row_D, int(parents[0]), partial(_whatever_its_count, alone.memory)))
        return trials

    # -- searches -------------------------------------------------------------------------------------------------------

    @cached_property
    def _trained(self) -> NodeMask:
        """Of queries that see the bundle alone: the same evidence says the same, whatever else is live."""
        return bundle_alone([self._tree])

    def _searched(self, queries: QueryBatch, search: Search, beam_size: int, m: int) -> ParentsFound:
        """Live items count for those queries alone that name some."""
        params = SearchParams.uniform(len(queries), beam_size, m, mask=self._trained)
        if isinstance(queries.kind, HistoryKind) and queries.array.max(initial=-1) >= self._tree.item_count:
            highest_B = queries.array.max(axis=1).tolist()
            params = replace(params, mask_B=tuple(self._trained if row < self._tree.item_count else None for row in highest_B))
        return search(queries, params)

    def _led(self, events: Sequence[QueryBatch], search: Search) -> list[Led | None]:
        """For each item where its events led to; None where it has none."""
        ends = [*accumulate(map(len, events))]
        if not ends[-1]:
            return [None] * len(events)
        limits = self.bundle.manifest.search
        m = min(1 if self._is_product else NEAREST, limits.max_m)
        queries = events[0] if len(events) == 1 else QueryBatch.joined(events)
        found = self._searched(queries, search, min(BEAM, limits.max_beam_size), m)
        return [Led(found, range(first, last)) if first < last else None for first, last in pairwise([0, *ends])]


def _whatever_its_count(memory: tuple[Int64, Floats], _: float) -> tuple[Int64, Floats]:
    return memory


def _states(found: ParentsFound) -> NDArray[np.float32]:
    if found.leaf_states_BS is None:
        raise ValueError("a search of graphs gives the states of the leaf level")
    return found.leaf_states_BS
