"""Places live items in a bundle of graphs: parents by the searches of their events, rows by states, neighbours and content.

    row = (n · e + l · mean of l neighbours' rows + κ · prior) / (n + l + κ)

e is the row of n events. For scores that are inner products, `graph_rows.py` computes it, and a shift that is added to the whole row; else
e is the mean row of the leaves that a search with the events finds. The prior is the row by the item's fields (content.onnx) if the bundle
reads fields and the item has some, else the mean row of the parent's leaves; κ = 1, one event. An item with nothing but fields has a row in
the direction of its row by content, a shift for such items, and the memory of the trained items with the nearest rows.

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

from espalier.arrays import Float32, Float64, Int64
from espalier.bundle import Bundle
from espalier.checks.heldout import read_heldout
from espalier.content.features import ContentFeatures
from espalier.content.rows import ContentRows
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
from espalier.placement.parents import NO_PARENTS, Parents, Search, Votes, best_first, summed, votes_of_search
from espalier.placement.popularity import Popularity
from espalier.queries import HistoryKind, QueryBatch
from espalier.search import NodeMask, SearchParams, SearchResult
from espalier.tree import EMPTY_LEAF

PRIOR = 1.0
"""κ, in events."""
BEAM = 32
"""Beam of the events' searches: the best parents are among the first, and a wider beam costs time."""
NEAREST = 10
"""Leaves whose rows are averaged if scores are no inner products."""
BACKGROUND = 1024
"""Held-out queries from which the scale of rows is computed."""
TRIALS, TRIAL_EVENTS = 128, (0, 1, 2, 5, 12, 28, 64)
"""Trained items that are placed to compute a shift, and how many events each of them has."""
MOST_SHIFTS = 32
"""Size of the cache of `Shifts` by evidence and count, half a megabyte each."""
KEPT_SHIFTS = 1024
"""Size of the cache of single shifts by evidence and exact count."""


class EventSearch(NamedTuple):
    """The result of a search, and which of its queries are the events of one item, at least one."""

    beams: SearchResult
    queries: range

    @property
    def is_finite(self) -> bool:
        """Whether all scores of vectors are finite. If not, a router's search says nothing of them."""
        return self.beams.finite_B is None or bool(self.beams.finite_B[self.queries].all())

    def items_M(self, b: int, trained: int) -> Int64:
        """Rows of the trained items that an event found, best first."""
        rows: Int64 = self.beams.item_rows_BM[b][: self.beams.count_B[b]]
        return rows[rows < trained]


@dataclass(frozen=True, eq=False)
class ByFields:
    """An item by its fields alone: its row without a shift, votes for its parents, and the item rows that lift it, with S."""

    row_D: Float64
    votes: Votes
    memory: tuple[Int64, Float64]


class GraphPlacement:
    """See the module. Properties of the bundle are computed when the first item needs them."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle, self._tree = bundle, bundle.tree
        self.takes_fields = bundle.manifest.content is not None
        self._is_product = isinstance(bundle.graph_scorer.form, InnerProductForm)
        self._lock = threading.Lock()
        self._cached_scale: RowScale | None = None
        self._cached_near: NearRows | None = None
        self._background: Background | None = None
        self._trials_by_events: dict[int, Trials] = {}
        self._shifts = lru_cache(MOST_SHIFTS)(self._new_shifts)
        self._shift = lru_cache(KEPT_SHIFTS)(self._new_shift)

    @cached_property
    def _content(self) -> ContentRows:
        return ContentRows(self.bundle)

    @property
    def content(self) -> ContentFeatures | None:
        """What rows are made of by fields; None if fields are no evidence."""
        return self._content.features if self.takes_fields else None

    @cached_property
    def _memory(self) -> MemoryRows | None:
        memory = self.bundle.memory
        return None if memory is None else MemoryRows(memory, self._popularity)

    @cached_property
    def _popularity(self) -> Popularity:
        return Popularity(self.bundle.label_counts())

    def place(self, items: Sequence[Evidence], catalogue: Items, overlay: Overlay, search: Search) -> list[tuple[Parents, ...]]:
        """The candidate parents of each item in the one tree."""
        if not items:
            return []
        scale = self._scale(search)
        searches = self._search_events([item.events for item in items], search)
        with_fields = [i for i, item in enumerate(items) if self.takes_fields and item.fields]
        content = dict(zip(with_fields, self._content.of([items[i].fields or {} for i in with_fields]), strict=True)) if with_fields else {}
        return [(self._parents(item, searches[i], content.get(i), scale, catalogue, overlay),) for i, item in enumerate(items)]

    def _parents(
        self, item: Evidence, searched: EventSearch | None, content_D: Float32 | None, scale: RowScale, catalogue: Items, overlay: Overlay
    ) -> Parents:
        if content_D is not None and searched is None and not len(item.like):
            by_fields = self._by_fields(content_D, scale)
            count = self._popularity.count(0, item.count)
            row_D = scale.shifted(by_fields.row_D, self._shift(0, count))
            fields_row = LiveRow(self._as_stored(row_D), memory_from=self._with_ids(by_fields.memory, catalogue), count=count)
            return Parents(best_first([(1.0, by_fields.votes)]).tolist(), lambda _: fields_row)
        if searched is not None and not searched.is_finite:
            return NO_PARENTS
        events = len(item.events)
        like = [self._leaf(int(row), overlay) for row in item.like]
        votes = [] if searched is None else [(1.0, votes_of_search(searched.beams.frontiers[0], [b])) for b in searched.queries]
        votes += [(1.0, (np.array([parent]), np.ones(1))) for parent, _ in like]
        if content_D is not None:
            votes.append((PRIOR, self._nearest(content_D.astype(np.float64), scale)))
        count = self._popularity.count(events or len(like), item.count)
        memory = self._memory_of(item, count, catalogue)
        sum_D = sum((row_D for _, row_D in like), np.zeros(len(scale.row_S)))
        if searched is not None:
            sum_D = sum_D + events * self._row_of_events(searched, scale)
        shift = self._shift(events, count) if events else 0.0
        row = partial(self._row, sum_D, events + len(like), shift, content_D, scale, memory, count)
        return Parents(best_first(votes).tolist(), row)

    def _row(
        self,
        sum_D: Float64,
        summands: int,
        shift: float,
        content_D: Float32 | None,
        scale: RowScale,
        memory: tuple[Entries, Entries],
        count: float,
        parent: int,
    ) -> LiveRow:
        prior_D = self._mean_row(parent) if content_D is None else content_D.astype(np.float64)
        row_D = scale.shifted(scale.capped((sum_D + PRIOR * prior_D) / (summands + PRIOR)), shift)
        lifting, lifted = memory
        return LiveRow(self._as_stored(row_D), memory_to=lifted, memory_from=lifting, count=count)

    def _as_stored(self, row_D: Float64) -> Float32:
        """A row rounded as a fold of the bundle will store it, so that a fold changes no answer. Raises InvalidData."""
        dtype = self.bundle.stored_rows.dtype
        try:
            stored_D: Float32 = rounded(row_D[None], dtype)[0]
        except FloatingPointError:
            raise InvalidData("row", "a number that is too large", f"numbers that {dtype} holds") from None
        return stored_D

    def _row_of_events(self, searched: EventSearch, scale: RowScale) -> Float64:
        """e of the module."""
        if self._is_product:
            states_BS = _states(searched.beams)[searched.queries.start : searched.queries.stop]
            return scale.row_of_events(states_BS[0].astype(np.float64) if len(states_BS) == 1 else states_BS.mean(0, dtype=np.float64))
        items = [searched.items_M(b, self._tree.item_count) for b in searched.queries]
        rows = [self._rows(self._tree.leaf_of_item[items_M]).mean(0) for items_M in items if len(items_M)]
        if not rows:
            return scale.row_S
        row_D: Float64 = np.stack(rows).mean(0)
        return row_D

    def _rows(self, nodes: Int64) -> Float64:
        rows: Float64 = self.bundle.node_rows_ND[nodes].astype(np.float64)
        return rows

    def _mean_row(self, parent: int) -> Float64:
        tree = self._tree
        first, after = tree.first_child[parent : parent + 2].tolist()
        occupied = np.flatnonzero(tree.leaf_item[first - tree.leaf_offset : after - tree.leaf_offset] != EMPTY_LEAF) + first
        mean_D: Float64 = self._rows(occupied if len(occupied) else np.arange(first, after)).mean(0)
        return mean_D

    def _leaf(self, row: int, overlay: Overlay) -> tuple[int, Float64]:
        entry, leaves = overlay.live_leaf(row, 0), overlay.trees[0]
        if entry and leaves.rows_PD is not None:
            return int(leaves.entries.rows[entry, PARENT]), leaves.rows_PD[entry].astype(np.float64)
        leaf = self._tree.leaf_of_item[np.array([row])]
        return int(self._tree.parent[leaf[0]]), self._rows(leaf)[0]

    def _nearest(self, row_D: Float64, scale: RowScale) -> Votes:
        """Votes for the parents of the trained items with the nearest rows: their cosines."""
        items, cosine = self._near_rows(scale).of(row_D)
        return self._votes_of(items, cosine)

    def _votes_of(self, items: Int64, cosine: Float64) -> Votes:
        return summed([self._tree.parent[self._tree.leaf_of_item[items]]], [cosine / max(1, len(items))])

    def _near_rows(self, scale: RowScale) -> NearRows:
        if self._cached_near is None:
            self._cached_near = NearRows(self.bundle.node_rows_ND, self._tree.leaf_of_item, scale)
        return self._cached_near

    def _by_fields(self, content_D: Float32, scale: RowScale, exclude: int = -1) -> ByFields:
        """An item by its fields alone. exclude: the item row of a trained item, so that it is not its own neighbour."""
        row_D = scale.row_of_content(content_D.astype(np.float64)) if self._is_product else content_D.astype(np.float64)
        items, cosine = self._near_rows(scale).of(row_D, exclude)
        memory = NONE if self._memory is None else self._memory.of_like(items, cosine)
        return ByFields(row_D, self._votes_of(items, cosine), memory)

    def _memory_of(self, item: Evidence, count: float, catalogue: Items) -> tuple[Entries, Entries]:
        """The items that lift an item (those of its events, those of `like`, and what lifts these), and the items that it lifts."""
        if self._memory is None or not isinstance(item.events.kind, HistoryKind):
            return (), ()
        lifting, lifted = self._memory.of(np.asarray(item.events.array, np.int64), count)
        if len(item.like):
            trained = item.like[item.like < self._tree.item_count]
            by_like = self._memory.of(item.like[:, None], count)[0], self._memory.of_like(trained, np.ones(len(trained)))
            lifting = merged([lifting, *by_like])
        return self._with_ids(lifting, catalogue), self._with_ids(lifted, catalogue)

    @staticmethod
    def _with_ids(memory: tuple[Int64, Float64], catalogue: Items) -> Entries:
        rows, values = memory
        return tuple(zip(catalogue.ids_of(rows), values.tolist(), strict=True))

    # -- computed once --------------------------------------------------------------------------------------------------

    def _scale(self, search: Search) -> RowScale:
        with self._lock:
            if self._cached_scale is None:
                self._cached_scale = self._new_scale(search)
            return self._cached_scale

    def _new_scale(self, search: Search) -> RowScale:
        rows_ND = self.bundle.node_rows_ND
        if not self._is_product:
            return scale_of(self._tree, rows_ND, None)
        heldout, defaults = read_heldout(self.bundle, BACKGROUND), self.bundle.manifest.search
        if not len(heldout.queries):
            return scale_of(self._tree, rows_ND, None)
        beams = self._searched(heldout.queries, search, defaults.beam_size, defaults.m)
        states_BS = _states(beams)
        scale = scale_of(self._tree, rows_ND, states_BS)
        if scale.is_free_S.all() or not scale.is_free_S.any():  # no biases; or only biases: no query distinguishes items
            return scale
        histories = np.asarray(heldout.queries.array, np.int64) if isinstance(heldout.queries.kind, HistoryKind) else None
        self._background = Background(
            histories,
            beams.frontiers[0],
            states_BS,
            beams.item_rows_BM,
            np.where(beams.count_B == defaults.m, beams.keys_BM[:, -1], -np.inf),
            heldout.relevant,
            self.bundle.memory,
        )
        return scale

    def _new_shift(self, events: int, count: float) -> float:
        """The shift of an item with some events at hand (0: fields alone) that has had `count`: interpolated between powers of 2."""
        share, power = self._popularity.share(count), math.log2(max(count, 1.0))
        exponent, fraction = int(power), power - int(power)
        at_hand = next(most for most in TRIAL_EVENTS if events <= most or most == TRIAL_EVENTS[-1])
        counts = [2.0**e if at_hand else 0.0 for e in (exponent, exponent + 1)]  # the memory by fields alone depends on no count
        with self._lock:
            below, above = (self._shifts(at_hand, count).of(share) for count in counts)
        return below + fraction * (above - below)

    def _new_shifts(self, events: int, count: float) -> Shifts:
        """The shifts of items with about so many events at hand. Holds the lock."""
        background, scale, ranking = self._background, self._cached_scale, self.bundle.manifest.ranking
        if background is None or scale is None:
            return NO_SHIFTS
        if events not in self._trials_by_events:
            trials = self._trials(background, scale, events) if events else self._trials_by_fields(background, scale)
            self._trials_by_events[events] = Trials.of(background, trials, ranking)
        return self._trials_by_events[events].shifts(background, self._tree.item_count, ranking, count)

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

    def _lifting(self, history_BT: Int64 | None, queries: list[int], count: float) -> tuple[Int64, Float64]:
        return NONE if self._memory is None or history_BT is None else self._memory.of(history_BT[queries], count)[0]

    def _trials_by_fields(self, background: Background, scale: RowScale) -> list[Trial]:
        """Trained items as if nothing but their fields were known. No query is their evidence, so all queries test them."""
        items = np.array([item for item, _ in trial_items(background.relevant, TRIALS, 1)], np.int64)
        columns = [column.name for column in self._content.features.info.columns]
        values = zip(*(self.bundle.items.values(name, items) for name in columns), strict=True)
        trials = []
        for item, content_D in zip(items.tolist(), self._content.of([dict(zip(columns, row, strict=True)) for row in values]), strict=True):
            by_fields = self._by_fields(content_D, scale, item)
            parents = best_first([(1.0, by_fields.votes)])
            if len(parents):
                trials.append(Trial(item, [], by_fields.row_D, int(parents[0]), partial(lambda memory, _: memory, by_fields.memory)))
        return trials

    # -- searches -------------------------------------------------------------------------------------------------------

    @cached_property
    def _trained(self) -> NodeMask:
        """The mask of queries that see only trained items, so that placements do not depend on other live items."""
        return bundle_alone([self._tree])

    def _searched(self, queries: QueryBatch, search: Search, beam_size: int, m: int) -> SearchResult:
        """Only queries whose histories name live items see live items."""
        params = SearchParams.uniform(len(queries), beam_size, m, mask=self._trained)
        if isinstance(queries.kind, HistoryKind) and queries.array.max(initial=-1) >= self._tree.item_count:
            highest_B = queries.array.max(axis=1).tolist()
            params = replace(params, mask_B=tuple(self._trained if row < self._tree.item_count else None for row in highest_B))
        return search(queries, params)

    def _search_events(self, events: Sequence[QueryBatch], search: Search) -> list[EventSearch | None]:
        """For each item the search of its events; None for an item without events."""
        ends = [*accumulate(map(len, events))]
        if not ends[-1]:
            return [None] * len(events)
        limits = self.bundle.manifest.search
        m = min(1 if self._is_product else NEAREST, limits.max_m)
        queries = events[0] if len(events) == 1 else QueryBatch.joined(events)
        beams = self._searched(queries, search, min(BEAM, limits.max_beam_size), m)
        return [EventSearch(beams, range(first, last)) if first < last else None for first, last in pairwise([0, *ends])]


def _states(beams: SearchResult) -> Float32:
    if beams.leaf_states_BS is None:
        raise ValueError("a search of graphs gives the states of the leaf level")
    return beams.leaf_states_BS
