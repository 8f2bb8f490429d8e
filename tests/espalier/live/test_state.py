"""What operations on live items make of a version: a catalogue as dicts would keep it, in arrays that are bounded and never change."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from benchmarks.random_bundles import make_bundle, make_linear_bundle, random_memory, random_queries, random_tree, tree_over
from benchmarks.random_live import random_put, random_row, random_state
from espalier import entry_lists
from espalier.arrays import Bool
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.errors import InvalidData
from espalier.live import live_tree, memory_entries, state
from espalier.live import state as states
from espalier.live.live_tree import LEAST_ROOM
from espalier.live.masks import eligible_rows, live_mask
from espalier.live.memory_entries import MemoryEntries
from espalier.live.overlay import LiveMemory, Overlay
from espalier.live.rows import LiveRow, Placement
from espalier.live.state import Change, LiveState
from espalier.manifest import Ranking
from espalier.masks.eligibility import forest_mask, node_mask
from espalier.search import NodeMask, SearchParams, SearchResult
from espalier.tree import Tree, tree_from_children

LINEAR = Ranking(own="log_activation", gamma=1)


def graphs(folder: Path, tree: Tree | None = None) -> Bundle:
    rng = np.random.default_rng(0)
    tree = random_tree(rng, 3, 3) if tree is None else tree
    return make_bundle(folder, rng, tree, "product", 0.5, memory=random_memory(rng, tree.item_count, 5))


def forest(folder: Path) -> Bundle:
    rng = np.random.default_rng(2)
    tree = random_tree(rng, 3, 3, empty_share=0.3)
    return make_linear_bundle(folder, rng, tree, LINEAR, others=[tree_over(rng, tree.item_count, 4)])


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return graphs(tmp_path)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Bundle]:
    return [make(tmp_path_factory.mktemp("models")) for make in (graphs, forest)]


def put(state: LiveState, item_id: str, parent: int | None = None, **rest: Any) -> None:
    parents = None if parent is None else np.array([parent])
    change = random_put(np.random.default_rng(state.sequence), state, item_id, state.sequence + 1, parents=parents)
    state.apply([replace(change, **rest)])


def delete(state: LiveState, item_id: str) -> None:
    state.apply([Change(state.sequence + 1, item_id, "delete")])


# -- the catalogue as dicts -----------------------------------------------------------------------------------------------


@dataclass
class Entry:
    """What is known of an id that was put or deleted. fields: None, none were given."""

    handle: int
    fields: dict[str, str] | None = None
    has_leaf: bool = False
    valid_until: float | None = None
    is_deleted: bool = False


class Catalogue:
    """The definition: trained items by their rows, and what operations have made of ids since."""

    def __init__(self, bundle: Bundle) -> None:
        self.trained = {item_id: row for row, item_id in enumerate(bundle.items.ids_of(np.arange(len(bundle.items))))}
        self.entries: dict[str, Entry] = {}
        self.removed: set[str] = set()

    def put(self, change: Change) -> None:
        entry = self.entries.setdefault(change.id, Entry(len(self.entries)))
        fields = entry.fields if change.fields is None and not entry.is_deleted else change.fields
        leaf = bool(change.placements) or (entry.has_leaf and not entry.is_deleted and change.id not in self.trained)
        self.entries[change.id] = Entry(entry.handle, None if fields is None else dict(fields), leaf, change.valid_until)

    def delete(self, item_id: str) -> None:
        if item_id in self.trained:
            self.entries.setdefault(item_id, Entry(len(self.entries)))
        if item_id in self.entries:
            entry = self.entries[item_id]
            self.entries[item_id] = Entry(entry.handle, entry.fields, valid_until=entry.valid_until, is_deleted=True)

    def expire(self, now: float) -> int:
        over = [key for key, e in self.entries.items() if not e.is_deleted and e.valid_until is not None and e.valid_until <= now]
        for item_id in over:
            self.delete(item_id)
        return len(over)

    def is_live(self, item_id: str) -> bool:
        return item_id in self.entries and self.entries[item_id].has_leaf

    def stands(self, item_id: str) -> bool:
        """Whether a trained item's own leaf counts."""
        entry = self.entries.get(item_id)
        return item_id not in self.removed and (entry is None or not (entry.is_deleted or entry.has_leaf))

    def row(self, item_id: str) -> int:
        entry = self.entries.get(item_id)
        if item_id in self.trained:
            return self.trained[item_id]
        return -1 if entry is None or entry.is_deleted else len(self.trained) + entry.handle

    def title(self, item_id: str) -> str | None:
        entry = self.entries.get(item_id)
        if entry is None or entry.fields is None:
            return f"Title {self.trained[item_id]}" if item_id in self.trained else None
        return entry.fields["title"]


def operate(rng: np.random.Generator, state: LiveState, catalogue: Catalogue) -> None:
    """One random operation on both."""
    new = rng.random() < 0.6
    item_id, sequence = f"new-{rng.integers(8)}" if new else f"item-{rng.integers(len(catalogue.trained))}", state.sequence + 1
    what = rng.choice(["put", "put", "put", "fields", "delete", "delete", "expire", "remove"])
    until = None if rng.random() < 0.6 else float(rng.integers(1, 40))
    if what == "put" or (what == "fields" and new and not catalogue.is_live(item_id)):
        fields = {"title": f"Title of {sequence}"} if rng.random() < 0.6 else None
        change = replace(random_put(rng, state, item_id, sequence), fields=fields, valid_until=until, at=0.0)
        catalogue.put(change)
        state.apply([change, change, Change(sequence - 1, item_id, "delete")])  # what was applied before changes nothing
    elif what == "fields":
        change = Change(sequence, item_id, "put", {"title": f"Title of {sequence}"} if rng.random() < 0.5 else None, (), until)
        catalogue.put(change)
        state.apply([change])
    elif what == "delete":
        catalogue.delete(item_id)
        delete(state, item_id)
    elif what == "expire":
        now = float(rng.integers(1, 40))
        assert state.expire(now) == catalogue.expire(now)
    else:
        catalogue.removed = {f"item-{rng.integers(len(catalogue.trained))}", f"new-{rng.integers(8)}"} if rng.random() < 0.7 else set()
        kept_I = np.array([item_id not in catalogue.removed for item_id in catalogue.trained])
        state.set_removed([*catalogue.removed], None if kept_I.all() else forest_mask([alone.tree for alone in state.bundle.alone], kept_I))


@given(seed=st.integers(0, 2**32 - 1))
def test_the_state_is_that_of_a_catalogue_in_dicts(bundles: list[Bundle], seed: int) -> None:
    rng = np.random.default_rng(seed)
    for bundle in bundles:
        state, catalogue = LiveState(bundle), Catalogue(bundle)
        assert state.overlay().is_empty
        for _ in range(int(rng.integers(1, 25))):
            operate(rng, state, catalogue)
            if rng.random() < 0.2:
                assert_is(state, catalogue)
        assert_is(state, catalogue)


def assert_is(state: LiveState, catalogue: Catalogue) -> None:
    entries, items, overlay = catalogue.entries, len(catalogue.trained), state.overlay()
    ids = [*catalogue.trained, *(f"new-{i}" for i in range(8)), "unknown"]
    rows = state.table.rows_of(ids)
    assert rows.tolist() == [catalogue.row(item_id) for item_id in ids]
    there = [item_id for item_id in ids if catalogue.row(item_id) >= 0 and not (item_id in entries and entries[item_id].is_deleted)]
    assert state.table.ids_of(state.table.rows_of(there)) == there
    assert state.table.values("title", state.table.rows_of(there)) == [catalogue.title(item_id) for item_id in there]
    live = [item_id for item_id in entries if catalogue.is_live(item_id)]
    shown = [item_id for item_id in live if item_id not in catalogue.removed]
    standing_I = np.array([catalogue.stands(item_id) for item_id in catalogue.trained])
    assert (state.live_items, overlay.handles, overlay.eligible) == (len(live), len(entries), len(shown) + int(standing_I.sum()))
    rewritten = {item_id: e for item_id, e in entries.items() if not (e.is_deleted or e.has_leaf or e.fields is None)}
    changed = sorted((catalogue.trained[item_id], e.handle) for item_id, e in rewritten.items() if item_id in catalogue.trained)
    assert [*zip(overlay.changed[1].tolist(), overlay.changed[0].tolist(), strict=True)] == changed
    assert state.tombstones == sum(entry.is_deleted for item_id, entry in entries.items() if item_id in catalogue.trained)
    handles = {entries[item_id].handle: item_id for item_id in shown}
    assert np.flatnonzero(overlay.eligible_R).tolist() == sorted(handles)
    assert state.next_expiry() <= min((e.valid_until for e in entries.values() if e.valid_until and not e.is_deleted), default=math.inf)
    every = np.array([*range(items), *(items + entry.handle for item_id, entry in entries.items() if item_id not in catalogue.trained)])
    eligible = {items + entries[item_id].handle for item_id in shown if item_id not in catalogue.trained}
    eligible |= {row for item_id, row in catalogue.trained.items() if catalogue.stands(item_id) or item_id in shown}
    trees = [alone.tree for alone in state.bundle.alone]
    assert set(every[eligible_rows(trees[0], overlay, every)].tolist()) == eligible
    kept_I, kept_R = (np.array([item_id not in catalogue.removed for item_id in of], np.bool_) for of in (catalogue.trained, entries))
    assert_masks(trees, overlay, standing_I, live_mask(trees, overlay, forest_mask(trees, kept_I), kept_R))


def assert_masks(trees: list[Tree], overlay: Overlay, standing_I: Bool, filtered: NodeMask) -> None:
    """Kept up to date or built anew: a node is eligible if an eligible item, live or trained, lies below it."""
    for place, tree in enumerate(trees):
        expected_N = node_mask(tree, standing_I).eligible_N.copy()
        leaves = overlay.trees[place]
        for node in leaves.parent_X[overlay.eligible_R[leaves.handle_X]].tolist():
            while node >= 0:
                expected_N[node] = True
                node = int(tree.parent[node])
        assert_array_equal(filtered.of_tree(place).eligible_N, expected_N)
        assert filtered.of_tree(place).items == overlay.eligible
        if overlay.standing is None:
            assert expected_N[tree.items_below > 0].all()
        else:
            assert_array_equal(overlay.standing.of_tree(place).eligible_N, expected_N)
            assert overlay.standing.items == overlay.eligible


# -- leaves and slots -----------------------------------------------------------------------------------------------------


def test_a_later_operation_takes_out_only_the_expired_item_whose_slot_it_has(bundle: Bundle) -> None:
    state = LiveState(bundle)
    put(state, "a", valid_until=10.0)
    put(state, "b", valid_until=10.0)
    parent, slot = state.live_leaf_of("a") or (-1, -1)
    placement = Placement(0, parent, slot, LiveRow(np.zeros(bundle.node_rows_ND.shape[1], np.float32)))
    with pytest.raises(InvalidData, match="a free slot"):
        state.apply([Change(3, "c", "put", {}, (placement,), at=9.0)])
    state.apply([Change(3, "c", "put", {}, (placement,), at=11.0)])
    assert state.live_leaf_of("c") == (parent, slot)
    assert state.live_leaf_of("a") is None
    assert state.live_leaf_of("b") is not None  # whoever wrote the operation may have had a wrong clock


def test_a_parent_takes_so_many_live_leaves(bundle: Bundle) -> None:
    state = LiveState(bundle)
    parent = bundle.tree.level(bundle.tree.height - 1)[0]
    count = 0
    while state.has_room(0, parent):
        put(state, f"x-{count}", parent)
        count += 1
    assert count == LEAST_ROOM
    delete(state, "x-3")
    assert state.has_room(0, parent)
    put(state, "item-0")  # in its own place, which takes no room
    assert state.has_room(0, parent)


def test_parents_are_near_by_their_common_ancestor(tmp_path: Path) -> None:
    state = LiveState(graphs(tmp_path, tree_from_children([[2], [2, 2], [3, 2, 3, 1]], np.arange(9))))
    assert list(state.near(0, 4)) == [4, 3, 5, 6]
    assert list(state.near(0, 6)) == [6, 5, 4, 3]
    assert list(LiveState(graphs(tmp_path / "flat", tree_from_children([[4]], np.arange(4)))).near(0, 0)) == [0]


def test_vacant_leaves_are_taken_first(tmp_path: Path) -> None:
    state = LiveState(graphs(tmp_path, tree_from_children([[2], [3, 2]], np.array([0, -1, 1, 2, 3]))))
    slots = []
    for i in range(3):
        slots.append(state.next_slot(0, 1))
        put(state, f"x-{i}", 1)
    assert slots == [1, 3, 4]
    delete(state, "x-0")
    assert state.next_slot(0, 1) == 1


@pytest.mark.parametrize(
    ("parent", "slot", "width", "field"),
    [(0, 9, 4, "parent"), (4, 0, 4, "slot"), (4, -1, 4, "parent"), (4, 9, 3, "a node row of 4 numbers")],
)
def test_a_placement_that_does_not_fit_changes_nothing(bundle: Bundle, parent: int, slot: int, width: int, field: str) -> None:
    state = LiveState(bundle)
    parent = 0 if parent == 0 else bundle.tree.level(2)[0]
    with pytest.raises(InvalidData, match=field):
        state.apply([Change(1, "a", "put", None, (Placement(0, parent, slot, LiveRow(np.zeros(width, np.float32))),))])
    with pytest.raises(InvalidData, match="no row yet"):
        state.apply([Change(1, "a", "put")])
    assert state.sequence == 0
    assert state.overlay().is_empty


# -- snapshots, and what is held ------------------------------------------------------------------------------------------


def test_pools_do_not_grow_with_churn(bundle: Bundle) -> None:
    state = LiveState(bundle)
    for i in range(2500):
        put(state, f"x-{i % 20}")
    now = state.overlay().trees[0]
    assert (np.diff(now.parent_X * 1000 + now.slot_X) > 0).all()
    assert now.rows_PD is not None
    assert len(now) == 20
    assert len(now.rows_PD) < 2000


def test_rows_that_were_replaced_do_not_pile_up_however_wide_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_tree, "UNUSED_NUMBERS", 1000)
    rng = np.random.default_rng(8)
    state = LiveState(make_linear_bundle(tmp_path, rng, random_tree(rng, 3, 3), LINEAR, width=200))
    parent = int(state.bundle.tree.level(state.bundle.tree.height - 1)[0])

    def put_wide(item_id: str, features: int) -> None:
        row = LiveRow(np.ones(features, np.float32), np.arange(features, dtype=np.int32), dense=False)
        _, slot = state.live_leaf_of(item_id) or (parent, state.next_slot(0, parent))
        state.apply([Change(state.sequence + 1, item_id, "put", None, (Placement(0, parent, slot, row),))])

    put_wide("small", 3)
    for _ in range(50):
        put_wide("wide", 200)
        sparse = state.overlay().trees[0].sparse
        assert sparse is not None
        assert len(sparse.feature) <= 2 * 203 + 1000 + 200
        assert state.numbers == 203
    delete(state, "wide")
    assert state.numbers == 3
    found = state.overlay().trees[0]
    assert found.sparse is not None
    begin, end = (int(bounds_P[found.entry_X[0]]) for bounds_P in (found.sparse.begin_P, found.sparse.end_P))
    assert found.sparse.feature[begin:end].tolist() == [0, 1, 2]


def fields(state: LiveState, item_id: str) -> object:
    entry = state.table.entry(item_id)
    assert entry is not None
    return entry.fields


def test_only_the_items_that_were_deleted_last_keep_their_fields(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "KEPT_FIELDS", 3)
    state, items, title = LiveState(bundle), bundle.manifest.tree.items, {"title": "x" * 100}
    put(state, "back", fields=title)
    delete(state, "back")
    put(state, "back", fields=title)
    for i in range(10):
        put(state, f"new-{i}", fields=title)
        delete(state, f"new-{i}")
    assert [i for i in range(10) if fields(state, f"new-{i}") is not None] == [7, 8, 9]
    assert state.table.values("title", np.array([items + 7, items + 10])) == [None, "x" * 100]
    assert fields(state, "back") is not None
    delete(state, "back")
    delete(state, "item-1")
    assert fields(state, "back") is not None  # it is one of the last


def test_times_of_expiry_that_were_overtaken_do_not_pile_up(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "SPARE_EXPIRIES", 20)
    state = LiveState(bundle)
    put(state, "early", valid_until=50.0)
    for number in range(200):
        put(state, "late", valid_until=100.0 + number)
    assert len(state._expiry) <= 2 * 2 + 20
    assert [state.next_expiry(), state.expire(49.9), state.expire(50.0), state.expire(298.0), state.expire(299.0)] == [50, 0, 1, 0, 1]
    assert (state.live_items, state.expired_until) == (0, 299.0)


# -- rows -----------------------------------------------------------------------------------------------------------------


def test_rows_survive_as_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    linear = make_linear_bundle(tmp_path, rng, random_tree(rng, 2, 3), LINEAR)
    dense = LiveRow(np.array([1.5, -2], np.float32), memory_to=(("ä", 1.25),), memory_from=(("b", 2.0), ("c", 0.0)), count=3.25)
    for row in (random_row(rng, linear), random_row(rng, linear, integer=False, in_tail=True), dense, LiveRow(np.zeros(0, np.float32))):
        again = LiveRow.from_bytes(row.to_bytes())
        for name in ("values", "feature", "tail_feature", "tail_value"):
            assert_array_equal(getattr(again, name), getattr(row, name), strict=True)
        for name in ("bias", "dense", "memory_to", "memory_from", "count"):
            assert getattr(again, name) == getattr(row, name)


def tail(feature: list[int], value: list[float]) -> dict[str, Any]:
    return {"dense": False, "tail_feature": np.array(feature, np.int32), "tail_value": np.array(value, np.float32)}


@pytest.mark.parametrize(
    ("values", "rest", "said"),
    [
        ([np.nan], {}, "finite"),
        ([0], {"memory_to": (("a", np.nan),)}, "finite"),
        ([0], {"memory_from": (("a", np.inf),)}, "finite"),
        ([0], {"memory_to": (("a", -1.0),)}, "a number below 0"),
        ([0], {"count": -1.0}, "row.count"),
        ([0], {"count": np.nan}, "row.count"),
        ([], tail([2, 1], [0.6, 0.8]), "row.tail.*ascending"),
        ([], tail([-1], [1]), "row.tail.*ascending"),
        ([], tail([1], [0.9]), "row.tail.*length 1"),
        ([], tail([1], [np.nan]), "row.tail.*length 1"),
        ([], tail([1, 2], [1]), "row.tail.*by"),
    ],
)
def test_a_row_that_cannot_be_is_refused(values: list[float], rest: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidData, match=said):
        LiveRow(np.array(values, np.float32), **rest)


def test_a_row_of_features_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    state = LiveState(make_linear_bundle(tmp_path, rng, random_tree(rng, 2, 3), LINEAR))
    parent, one = state.bundle.tree.level(1)[0], np.ones(1, np.float32)
    for row, said in (
        (LiveRow(one, np.array([20], np.int32), dense=False), "feature: got 20, expected feature numbers below 20"),
        (LiveRow(one, np.array([19], np.int32), **tail([3], [1])), "the model has no tail"),
    ):
        with pytest.raises(InvalidData, match=said):
            state.apply([Change(1, "a", "put", None, (Placement(0, parent, state.next_slot(0, parent), row),))])
    assert state.overlay().is_empty
    last = LiveRow(one, np.array([19], np.int32), dense=False)
    state.apply([Change(1, "a", "put", None, (Placement(0, parent, state.next_slot(0, parent), last),))])
    assert state.live_items == 1


# -- entries of a memory: each counts once, whatever the order of operations ----------------------------------------------


ROWS = {"a": 0, "b": 1, "x": 10, "y": 11}
HANDLES = {"x": 0, "y": 1}


class Remembered:
    """Trained items a and b; x and y are live once they came."""

    def __init__(self) -> None:
        self.entries, self.there, self.moment = MemoryEntries(4), {"a", "b"}, 0

    def put(self, item: str, to: Any = (), of: Any = ()) -> None:
        self.moment += 1
        if item not in self.there:
            self.there.add(item)
            self.entries.arrived(self.moment, item, ROWS[item])
        self.entries.put(self.moment, HANDLES[item], ROWS[item], to, of, lambda other: ROWS[other] if other in self.there else -1)

    def drop(self, item: str) -> None:
        self.moment += 1
        self.entries.drop(self.moment, HANDLES[item])

    def snapshot(self) -> LiveMemory:
        return self.entries.snapshot(self.moment)

    @property
    def found(self) -> dict[tuple[int, int], float]:
        columns = self.snapshot().all
        return {(int(source), int(target)): float(value) for source, target, value in zip(*columns, strict=True)}


entries = st.lists(st.tuples(st.sampled_from(["a", "b", "x", "y"]), st.sampled_from([0.0, -0.0, 1.0, 2.0, 3.0])), max_size=3)


@given(st.lists(st.tuples(st.sampled_from(["x", "y"]), st.none() | st.tuples(entries, entries)), max_size=8))
def test_entries_are_those_of_the_last_puts_between_ids_that_ever_were_there(operations: list[Any]) -> None:
    """The largest of a pair; one that names an id which comes later waits for it. No entries: a delete."""
    catalogue, last = Remembered(), dict[str, Any]()
    for item, named in operations:
        last.pop(item, None)
        if named is None:
            catalogue.drop(item)
        else:
            catalogue.put(item, *named)
            last[item] = named
        expected: dict[tuple[int, int], float] = {}
        for owner, (to, of) in last.items():
            pairs = [(owner, other, value) for other, value in to] + [(other, owner, value) for other, value in of]
            for source, target, value in pairs:
                if value and {source, target} <= catalogue.there:
                    pair = ROWS[source], ROWS[target]
                    expected[pair] = max(value, expected.get(pair, 0.0))
        assert catalogue.found == expected


def test_entries_that_nothing_refers_to_are_dropped_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_entries, "UNUSED", 8)
    catalogue = Remembered()
    for value in range(100):
        catalogue.put("x", to=(("a", float(value + 1)), ("b", 1.0)))
        assert len(catalogue.snapshot().entries.rows) <= 256


def test_entries_are_found_by_their_source() -> None:
    catalogue = Remembered()
    catalogue.put("x", to=(("b", 2.0), ("a", 1.0)), of=(("a", 3.0),))
    memory = catalogue.snapshot()
    found = {source: [array.tolist() for array in memory.of(source)] for source in (0, 1, 10, 99)}
    assert found == {0: [[10], [3.0]], 1: [[], []], 10: [[0, 1], [1.0, 2.0]], 99: [[], []]}


# -- searches beside a writer ---------------------------------------------------------------------------------------------


READERS, WRITES = 3, 400


def write(rng: np.random.Generator, live: LiveState) -> None:
    """Put or delete a trained item, or one of those that come and go."""
    sequence = live.sequence + 1
    item_id = f"new-{rng.integers(20)}" if rng.random() < 0.8 else f"item-{rng.integers(4)}"
    if rng.random() < 0.3:
        live.apply([Change(sequence, item_id, "delete")])
    else:
        live.apply([random_put(rng, live, item_id, sequence)])


@pytest.fixture
def small_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays are replaced every few writes."""
    monkeypatch.setattr(entry_lists, "FIRST", 4)
    for module in (live_tree, memory_entries, state):
        monkeypatch.setattr(module, "UNUSED", 4)


@pytest.mark.usefixtures("small_arrays")
@pytest.mark.parametrize("make", [graphs, forest])
def test_searches_beside_a_writer_find_what_their_snapshot_shows(tmp_path: Path, make: Callable[[Path], Bundle]) -> None:
    """Every search is repeated when nothing is written any more, in the snapshot that it had."""
    rng, bundle = np.random.default_rng(3), make(tmp_path)
    live = random_state(rng, bundle)
    queries, params = random_queries(rng, bundle, 4), SearchParams.uniform(4, 6, 20)
    newest, ended = [live.overlay()], threading.Event()

    def read() -> list[tuple[Overlay, SearchResult]]:
        searched = open_engine(bundle)
        found: list[tuple[Overlay, SearchResult]] = []
        while not ended.is_set() or not found:
            overlay = newest[0]
            searched.set_overlay(overlay)
            found.append((overlay, searched.search(queries, params)))
        return found

    with ThreadPoolExecutor(READERS) as threads:
        readers = [threads.submit(read) for _ in range(READERS)]
        try:
            for _ in range(WRITES):
                write(rng, live)
                newest[0] = live.overlay()
        finally:
            ended.set()
        searched = open_engine(bundle)
        for overlay, found in (one for reader in readers for one in reader.result()):
            searched.set_overlay(overlay)
            expected = searched.search(queries, params)
            for name in ("item_rows_BM", "ranks_BM", "keys_BM", "count_B", "complete_B"):
                assert_array_equal(getattr(found, name), getattr(expected, name), name)
    assert live.sequence > WRITES


def shown(overlay: Overlay, bundle: Bundle) -> list[list[object]]:
    """All that a snapshot says."""
    every = np.arange(overlay.items + overlay.handles)
    rows: list[np.ndarray] = [overlay.item_R, overlay.hidden, overlay.row_W, overlay.leaf_R, overlay.handles_of(every)]
    for leaves in overlay.trees:
        rows += [leaves.entry_X, leaves.parent_X, leaves.slot_X, leaves.handle_X]
        rows += [leaves.of_handles(np.arange(overlay.handles)), *leaves.under(np.unique(leaves.parent_X))]
        if leaves.rows_PD is not None:
            rows.append(leaves.rows_PD[leaves.entry_X])
        if leaves.sparse is not None:
            rows += [leaves.sparse.bias_P[leaves.entry_X], leaves.sparse.end_P[leaves.entry_X] - leaves.sparse.begin_P[leaves.entry_X]]
    if overlay.memory is not None:
        rows += [*overlay.memory.all]
    mask = live_mask([alone.tree for alone in bundle.alone], overlay, None, overlay.shown_R)
    rows += [mask.of_tree(tree).eligible_N for tree in range(len(overlay.trees))]
    return [array.tolist() for array in rows]


@pytest.mark.usefixtures("small_arrays")
@pytest.mark.parametrize("make", [graphs, forest])
def test_a_snapshot_says_the_same_after_any_writes(tmp_path: Path, make: Callable[[Path], Bundle]) -> None:
    rng, bundle = np.random.default_rng(2), make(tmp_path)
    live = random_state(rng, bundle)
    kept = []
    for number in range(120):
        overlay = live.overlay()
        if number % 3 == 0:  # the others are first asked at the end
            kept.append((overlay, shown(overlay, bundle)))
            for worked_out in (overlay, *overlay.trees):  # what it has worked out is worked out again
                for name in ("open", "entry_X", "parent_X", "slot_X", "handle_X", "leaf_R", "eligible_R", "hidden", "changed"):
                    vars(worked_out).pop(name, None)
        write(rng, live)
    for overlay, before in kept:
        assert shown(overlay, bundle) == before


def test_a_changed_trained_item_keeps_its_leaf(bundle: Bundle) -> None:
    state = LiveState(bundle)
    put(state, "item-2")
    assert state.live_leaf_of("item-2") in (None, state.trained_leaf_of("item-2"))
    overlay = state.overlay()
    assert (overlay.item_R.tolist(), overlay.hidden.tolist(), overlay.handles_of(np.array([2, 1])).tolist()) == ([2], [2], [0, -1])
    state.apply([Change(2, "item-2", "delete"), Change(3, "item-2", "put")])  # back as it was trained
    assert state.overlay().hidden.tolist() == []
    assert state.overlay().standing is None
