"""A filter lets live items pass by the fields that they have now, as a fold with these fields would."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.random_bundles import make_bundle, make_linear_bundle, random_queries, random_tree
from benchmarks.random_live import random_row
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.live import masks
from espalier.live.fields import FieldColumn
from espalier.live.filtered import LiveFilters
from espalier.live.rows import LiveRow, Placement
from espalier.live.state import Change, LiveState
from espalier.manifest import Ranking
from espalier.masks.filters import Condition, ItemFilters
from espalier.search import NodeMask, SearchParams

WIDTH = 4


class Catalogue:
    """A version with live items, and what its filters say."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle, self.state = bundle, LiveState(bundle)
        self.trained = ItemFilters([bundle.tree], bundle.items, 1 << 20)
        self.filters = LiveFilters([bundle.tree], self.trained, self.state.table, self.state.touched)
        self.parents = [*bundle.tree.level(bundle.tree.height - 1)]
        self.removed: set[str] = set()

    def put(self, item_id: str, fields: dict[str, Any] | None, placed: bool = True, valid_until: float | None = None) -> None:
        parent = self.parents[self.state.sequence % len(self.parents)]
        row = LiveRow(np.ones(WIDTH, np.float32))
        placements = (Placement(0, parent, self.state.next_slot(0, parent), row),) if placed else ()
        self.apply(Change(self.state.sequence + 1, item_id, "put", fields, placements, valid_until))

    def apply(self, change: Change) -> None:
        self.state.apply([change])
        self.filters.update()

    def remove(self, ids: list[str]) -> None:
        rows = self.bundle.items.rows_of(ids)
        self.trained.set_removed(rows[rows >= 0])
        self.state.set_removed(ids, self.trained.standing)
        self.removed = {*ids}

    def expected(self, wanted: dict[str, Any], barred: dict[str, Any]) -> set[str]:
        """The items that are there and pass, by a loop over all of them."""
        table, found = self.state.table, set()
        for item_id in {*table.ids_of(np.arange(len(table)))}:
            row = table.known_row(item_id)
            entry = table.entry(item_id)
            if item_id in self.removed or (entry.is_deleted if entry is not None else row >= self.bundle.tree.item_count):
                continue
            has = {field: table.values(field, np.array([row]))[0] for field in table.fields}
            if all(meets(has[field], wanted[field]) for field in wanted) and not any(meets(has[field], barred[field]) for field in barred):
                found.add(item_id)
        return found

    def passing(self, wanted: dict[str, Any], barred: dict[str, Any] | None = None) -> set[str]:
        """The items that a mask lets pass: trained leaves, and live ones by their handles."""
        overlay, tree = self.state.overlay(), self.bundle.tree
        mask = self.filters.mask(self.trained.parse(wanted, barred or {}), overlay)
        own = [row for row in range(tree.item_count) if mask.eligible_N[tree.leaf_of_item[row]] and row not in overlay.hidden]
        live = overlay.item_R[np.flatnonzero(live_R(mask))]
        found = self.state.table.ids_of(np.concatenate([np.array(own, np.int64), live]))
        assert mask.items == len(found) == len({*found})
        self._check_nodes(mask)
        return {*found}

    def _check_nodes(self, mask: NodeMask) -> None:
        """Every node above an eligible leaf is eligible, and no other."""
        tree, overlay = self.bundle.tree, self.state.overlay()
        leaves = overlay.trees[0]
        live = {int(parent) for parent, handle in zip(leaves.parent_X, leaves.handle_X, strict=True) if live_R(mask)[handle]}
        for node in range(tree.leaf_offset - 1, -1, -1):
            below = mask.eligible_N[tree.first_child[node] : tree.first_child[node + 1]].any()
            assert mask.eligible_N[node] == (below or node in live)


def live_R(mask: NodeMask) -> Any:
    """bool[R]; empty where nothing was ever put."""
    return np.zeros(0, np.bool_) if mask.live_R is None else mask.live_R


def meets(value: Any, condition: Any) -> bool:
    if isinstance(value, list):
        return any(meets(one, condition) for one in value)
    if value is None or value != value:
        return False
    if isinstance(condition, dict):
        return bool(condition.get("min", value) <= value <= condition.get("max", value))
    return value in condition


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    rng = np.random.default_rng(0)
    tree = random_tree(rng, 3, 3)
    count = tree.item_count
    columns = {"colour": ["red", "blue"] * (count // 2) + ["red"] * (count % 2), "price": np.arange(count, dtype=np.float32)}
    columns |= {
        "tags": [["a", "b"]] * count,
        "count": list(range(count)),
        "sizes": [[36.5, 38.0]] * count,
        "hash": np.arange(count, dtype=np.uint64),
        "sold": [True, False, None] * (count // 3) + [None] * (count % 3),
    }
    return Catalogue(make_bundle(tmp_path, rng, tree, columns=columns, width=WIDTH))


def test_an_item_that_may_be_found_again_is_found_though_a_mask_was_made_of_the_snapshot_before(catalogue: Catalogue) -> None:
    """A request that came before the list was changed makes its mask after that, and before the next snapshot."""
    catalogue.put("new", {"colour": "violet"})
    catalogue.remove(["new"])
    violet = catalogue.trained.parse({"colour": ["violet"]}, {})
    before = catalogue.state.overlay()
    catalogue.remove([])
    assert not catalogue.filters.mask(violet, before).items
    assert catalogue.passing({"colour": ["violet"]}) == {"new"}


@pytest.mark.parametrize("other", [{"price": {"min": 1e6}}, {"id": ["old", "new"]}])
@pytest.mark.parametrize("barred", [False, True])
def test_an_item_that_comes_while_a_filter_is_applied_is_left_to_the_next(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any], barred: bool
) -> None:
    """Another thread puts it, between the filter's first column and its second."""
    catalogue.put("old", {"colour": "green", "price": 1e6})
    matching, overlay = FieldColumn.matching, catalogue.state.overlay()

    def put_after(column: FieldColumn, condition: Condition) -> Any:
        found = matching(column, condition)
        if catalogue.state.table.entry("new") is None:
            parent = catalogue.parents[1]
            placement = Placement(0, parent, catalogue.state.next_slot(0, parent), LiveRow(np.ones(WIDTH, np.float32)))
            catalogue.state.apply([Change(2, "new", "put", {"colour": "green", "price": 1e6}, (placement,))])
        return found

    monkeypatch.setattr(FieldColumn, "matching", put_after)
    conditions = {"colour": ["green"], **other}
    mask = catalogue.filters.mask(catalogue.trained.parse({}, conditions) if barred else catalogue.trained.parse(conditions, {}), overlay)
    assert mask.live_R is not None
    assert mask.live_R.tolist() == [not barred]
    catalogue.filters.update()
    assert catalogue.passing(conditions) == {"old", "new"}


@pytest.mark.parametrize("trees", [1, 2])
def test_an_item_that_moves_after_the_filter_was_applied_is_found_where_it_is(tmp_path: Path, trees: int) -> None:
    """A request's mask is of the catalogue with which it came; the engine searches the newest one."""
    rng = np.random.default_rng(trees)
    tree = random_tree(rng, 3, 3)
    others = [tree] * (trees - 1)
    columns = {"colour": ["red"] * tree.item_count}
    bundle = make_linear_bundle(tmp_path, rng, tree, Ranking(own="log_activation", gamma=1), others=others, columns=columns)
    state, passing = LiveState(bundle), ItemFilters([alone.tree for alone in bundle.alone], bundle.items, 1 << 20)
    filters = LiveFilters([alone.tree for alone in bundle.alone], passing, state.table, state.touched)
    engine = open_engine(bundle, "cpu")

    def put(item_id: str, colour: str, child: int) -> None:
        """Under a parent of its own in each tree: the first, or the last."""
        parents = [alone.tree.level(alone.tree.height - 1)[child] for alone in bundle.alone]
        placements = tuple(Placement(t, parent, state.next_slot(t, parent), random_row(rng, bundle)) for t, parent in enumerate(parents))
        state.apply([Change(state.sequence + 1, item_id, "put", {"colour": colour}, placements, None)])
        filters.update()

    put("moves", "blue", 0)
    mask = filters.mask(passing.parse({"colour": ["blue"]}, {}), state.overlay())
    put("moves", "blue", -1)
    put("comes", "blue", -1)
    put("other", "red", -1)
    engine.set_overlay(state.overlay())
    found = engine.search(random_queries(rng, bundle, 1), replace(SearchParams.uniform(1, 100, 5), mask_B=(mask,)))
    assert {*state.table.ids_of(found.item_rows_BM[0, : found.count_B[0]])} == {"moves", "comes"}
    assert found.complete_B.tolist() == [True]


def test_a_mask_is_kept_until_something_is_put(catalogue: Catalogue) -> None:
    filter = catalogue.trained.parse({"colour": ["red"]}, {})
    catalogue.passing({"colour": ["red"]})
    catalogue.put("new", {"colour": "red"})
    assert catalogue.filters.cached(filter, catalogue.state.overlay()) is None
    catalogue.passing({"colour": ["red"]})
    kept = catalogue.filters.cached(filter, catalogue.state.overlay())
    assert kept is not None
    assert kept is catalogue.filters.cached(filter, catalogue.state.overlay())


def test_a_mask_is_brought_forward_by_what_was_put_since(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    recompute = masks.recompute

    def counted(tree: Any, eligible_N: Any, touched_P: Any, open_P: Any) -> None:
        looked.append(len(touched_P))
        recompute(tree, eligible_N, touched_P, open_P)

    monkeypatch.setattr(masks, "recompute", counted)
    for i in range(4 * len(catalogue.parents)):
        catalogue.put(f"new-{i}", {"colour": "red"})
    found = catalogue.passing({"colour": ["red"]})
    looked.clear()
    catalogue.put("new-1", {"colour": "blue"}, placed=False)
    assert catalogue.passing({"colour": ["red"]}) == found - {"new-1"}
    assert looked == [1]


@pytest.mark.parametrize("seed", range(2))
def test_masks_of_any_history_are_those_of_a_loop_over_all_items(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Whatever was put, deleted, expired and removed, and however long a filter was not asked for."""
    monkeypatch.setattr("espalier.live.masks.LONGEST", 40)
    monkeypatch.setattr("espalier.live.fields.UNUSED", 4)
    rng = np.random.default_rng(seed)
    ids = [f"item-{i}" for i in range(catalogue.bundle.tree.item_count)] + [f"new-{i}" for i in range(30)]
    filters: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"colour": ["red", "green"]}, {}),
        ({"price": {"min": 2, "max": 2**70}}, {"colour": ["blue"]}),
        ({"price": [3, 0.1, 2**60 + 1]}, {}),
        ({}, {"tags": ["a", "c"]}),
        ({"tags": ["b"], "count": {"min": 2**53 + 1}}, {"id": ["new-3", "item-2"]}),
        ({"count": [2**53, 7.0]}, {}),
        ({"sold": [True]}, {"price": {"max": -(10**400)}}),
        ({"sizes": {"min": 38}}, {"sizes": [40]}),
        ({"hash": {"min": 2**63}}, {"hash": [2**64 - 1]}),
    ]
    for step in range(120):
        item_id = ids[int(rng.integers(len(ids)))]
        entry, now = catalogue.state.table.entry(item_id), float(step)
        is_known = item_id.startswith("item") or (entry is not None and not entry.is_deleted)
        match int(rng.integers(10)):
            case 0 | 1 if is_known:
                catalogue.apply(Change(catalogue.state.sequence + 1, item_id, "delete", at=now))
            case 2 if is_known:
                catalogue.put(item_id, random_fields(rng), placed=False)
            case 3:
                catalogue.state.expire(now)
            case 4:
                catalogue.remove([ids[i] for i in rng.choice(len(ids), 4)])
            case _:
                until = now + 20 if rng.random() < 0.3 else None
                catalogue.put(item_id, None if rng.random() < 0.1 and is_known else random_fields(rng), valid_until=until)
        for wanted, barred in filters if rng.random() < 0.3 else filters[:1]:
            assert catalogue.passing(wanted, barred) == catalogue.expected(wanted, barred), (step, wanted, barred)


def test_items_that_are_gone_leave_no_fields_behind(catalogue: Catalogue) -> None:
    column = catalogue.filters._columns["colour"]
    catalogue.put("new", {"colour": "green"})
    catalogue.put("short", {"colour": "green"}, valid_until=5.0)
    catalogue.put("item-1", {"colour": "green"}, placed=False)
    assert len(column._span_of) == 3
    for item_id in ("new", "item-1"):
        catalogue.apply(Change(catalogue.state.sequence + 1, item_id, "delete"))
    catalogue.state.expire(5.0)
    catalogue.filters.update()
    assert len(column._span_of) == 1
    trained = catalogue.bundle.items.values("colour", np.array([1]))
    assert catalogue.filters.matches(catalogue.trained.parse({"colour": trained}, {}), np.array([1])).all()  # it counts as it was trained


def random_fields(rng: np.random.Generator) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "colour": str(rng.choice(["red", "green", "blue", "odd"])),
        "price": float(rng.choice([0.5, 2.0, 3.0, np.nan, np.inf, float(np.float32(0.1))])),
        "tags": [str(tag) for tag in rng.choice(["a", "b", "c"], int(rng.integers(3)))],
        "count": int(rng.choice([7, 2**53, 2**53 + 1, -(2**62)])),
        "sold": bool(rng.integers(2)),
        "sizes": [float(size) for size in rng.choice([36.5, 38.0, 40.0], int(rng.integers(3)))],
        "hash": int(rng.choice(np.array([7, 2**63, 2**64 - 1], np.uint64))),
    }
    return {name: value for name, value in fields.items() if rng.random() < 0.8}


def test_masks_take_no_more_than_those_of_trained_items_may_and_keep_no_old_overlay(catalogue: Catalogue) -> None:
    catalogue.put("new", {"colour": "red"})
    catalogue.passing({"colour": ["red"]})
    one = catalogue.filters._bytes
    catalogue.trained.max_bytes = 5 * one // 2
    before = weakref.ref(catalogue.state.overlay())
    for i in range(10):
        catalogue.passing({"price": {"min": float(i)}})
        assert 0 < catalogue.filters._bytes <= catalogue.trained.max_bytes
    catalogue.put("newer", {"colour": "red"})
    catalogue.state.overlay()
    assert before() is None
    catalogue.trained.max_bytes = one // 2
    assert "newer" in catalogue.passing({"colour": ["red"]})  # built again each time
    assert catalogue.filters._bytes == 0
