"""What a version holds is bounded by its live items and the ids that it has seen, however often they change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from espalier.checks.random_bundles import make_bundle, make_linear_bundle
from espalier.live import live_tree
from espalier.live import state as states
from espalier.live.rows import LiveRow, Placement
from espalier.live.state import Change, LiveState
from espalier.manifest import Ranking
from espalier.tree import complete_tree

ITEMS = 16


@pytest.fixture
def state(tmp_path: Path) -> LiveState:
    rng = np.random.default_rng(8)
    return LiveState(make_bundle(tmp_path, rng, complete_tree(rng.permutation(ITEMS), 2)))


def put(state: LiveState, item_id: str, valid_until: float | None = None) -> None:
    parent = int(state.bundle.tree.level(state.bundle.tree.height - 1)[0])
    row = LiveRow(np.zeros(state.bundle.graph_scorer.node_dim, np.float32))
    _, slot = state.live_leaf_of(item_id) or (parent, state.next_slot(0, parent))
    placement = Placement(0, parent, slot, row)
    state.apply([Change(state.sequence + 1, item_id, "put", {"title": "x" * 100}, (placement,), valid_until)])


def put_wide(state: LiveState, item_id: str, features: int) -> None:
    parent = int(state.bundle.tree.level(state.bundle.tree.height - 1)[0])
    row = LiveRow(np.ones(features, np.float32), np.arange(features, dtype=np.int32), dense=False)
    _, slot = state.live_leaf_of(item_id) or (parent, state.next_slot(0, parent))
    state.apply([Change(state.sequence + 1, item_id, "put", None, (Placement(0, parent, slot, row),))])


def delete(state: LiveState, item_id: str) -> None:
    state.apply([Change(state.sequence + 1, item_id, "delete")])


def fields(state: LiveState, item_id: str) -> object:
    entry = state.table.entry(item_id)
    assert entry is not None
    return entry.fields


def test_only_the_items_that_were_deleted_last_keep_their_fields(state: LiveState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "KEPT_FIELDS", 3)
    for i in range(10):
        put(state, f"new-{i}")
        delete(state, f"new-{i}")
    assert [i for i in range(10) if fields(state, f"new-{i}") is not None] == [7, 8, 9]
    assert state.table.values("title", np.array([ITEMS + 6, ITEMS + 9])) == [None, "x" * 100]


def test_an_item_that_came_back_has_its_fields_whatever_is_deleted_after_it(state: LiveState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "KEPT_FIELDS", 2)
    put(state, "new")
    delete(state, "new")
    put(state, "new")
    for i in range(5):
        put(state, f"other-{i}")
        delete(state, f"other-{i}")
    assert fields(state, "new") is not None
    delete(state, "new")
    delete(state, "item-1")
    assert fields(state, "new") is not None  # it is one of the last two


def test_times_of_expiry_that_were_overtaken_do_not_pile_up(state: LiveState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "SPARE_EXPIRIES", 20)
    put(state, "early", valid_until=50.0)
    for round in range(200):
        put(state, "late", valid_until=100.0 + round)
    assert len(state._expiry) <= 2 * 2 + 20
    assert state.next_expiry() == 50.0
    assert state.expire(298.0) == 1
    assert fields(state, "late") is not None
    assert state.expire(299.0) == 1
    assert state.live_items == 0


def test_rows_that_were_replaced_do_not_pile_up_however_wide_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_tree, "UNUSED_NUMBERS", 1000)
    rng = np.random.default_rng(8)
    tree = complete_tree(rng.permutation(ITEMS), 2)
    state = LiveState(make_linear_bundle(tmp_path, rng, tree, Ranking(own="log_activation", gamma=1), width=200))
    put_wide(state, "small", 3)
    for _ in range(50):
        put_wide(state, "wide", 200)
        sparse = state.overlay().trees[0].sparse
        assert sparse is not None
        assert len(sparse.feature) <= 2 * 203 + 1000 + 200
        assert state.numbers == 203
    delete(state, "wide")
    assert state.numbers == 3
    found = state.overlay().trees[0]
    assert found.sparse is not None
    begin, end = (int(bounds_P[found.place_X[0]]) for bounds_P in (found.sparse.begin_P, found.sparse.end_P))
    assert found.sparse.feature[begin:end].tolist() == [0, 1, 2]
