"""What operations on live items make of a version."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from espalier.bundle import Bundle
from espalier.checks.random_bundles import make_bundle, make_linear_bundle, random_tree
from espalier.checks.random_live import random_put, random_row, random_state
from espalier.errors import InvalidData
from espalier.live.live_tree import LEAST_ROOM
from espalier.live.masks import live_mask
from espalier.live.rows import LiveRow, Placement
from espalier.live.state import Change, LiveState
from espalier.manifest import Ranking
from espalier.masks.eligibility import forest_mask, node_mask
from espalier.tree import tree_from_children


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return make_bundle(tmp_path, np.random.default_rng(0), random_tree(np.random.default_rng(0), 3, 3), "product")


def put(state: LiveState, item_id: str, parent: int | None = None, **rest: object) -> None:
    change = random_put(
        np.random.default_rng(state.sequence), state, item_id, state.sequence + 1, parents=None if parent is None else np.array([parent])
    )
    state.apply([Change(**{**vars(change), **rest})])


def delete(state: LiveState, item_id: str) -> None:
    state.apply([Change(state.sequence + 1, item_id, "delete")])


def test_a_new_item_has_the_row_after_the_trained_ones_and_keeps_it(bundle: Bundle) -> None:
    state, items = LiveState(bundle), bundle.manifest.tree.items
    put(state, "a")
    put(state, "b")
    assert state.table.rows_of(["a", "b", "item-0", "c"]).tolist() == [items, items + 1, 0, -1]
    assert state.table.ids_of(np.array([items + 1, 0, items])) == ["b", "item-0", "a"]
    delete(state, "a")
    assert state.table.rows_of(["a", "b"]).tolist() == [-1, items + 1]
    put(state, "a")
    assert state.table.rows_of(["a"]).tolist() == [items]
    assert state.live_items == 2


def test_values_are_those_that_were_put(bundle: Bundle) -> None:
    state, items = LiveState(bundle), bundle.manifest.tree.items
    put(state, "a", fields={"title": "New"})
    state.apply([Change(2, "item-1", "put", {"title": "Changed"})])
    assert state.table.values("title", np.array([items, 1, 0])) == ["New", "Changed", "Title 0"]
    put(state, "a", fields=None)  # its row changes, its fields stay
    assert state.table.values("title", np.array([items])) == ["New"]


def test_snapshots_stay_as_they_are(bundle: Bundle) -> None:
    state = LiveState(bundle)
    put(state, "a")
    before = state.overlay()
    leaves = before.trees[0]
    assert leaves.rows_PD is not None
    rows = leaves.rows_PD[leaves.place_X].copy()
    for i in range(600):
        put(state, f"x-{i % 40}")
        if i % 3 == 0:
            delete(state, f"x-{i % 40}")
    np.testing.assert_array_equal(leaves.rows_PD[leaves.place_X], rows)
    assert before.handles == 1
    assert before.sequence == 1
    assert state.overlay().handles == 41


def test_leaves_are_sorted_and_pools_do_not_grow_with_churn(bundle: Bundle) -> None:
    state = LiveState(bundle)
    for i in range(5000):
        put(state, f"x-{i % 20}")
    leaves = state.overlay().trees[0]
    key = leaves.parent_X * 1000 + leaves.slot_X
    assert (np.diff(key) > 0).all()
    assert len(leaves) == 20
    assert leaves.rows_PD is not None
    assert len(leaves.rows_PD) < 3000


def test_operations_that_were_applied_change_nothing(bundle: Bundle) -> None:
    state = LiveState(bundle)
    change = random_put(np.random.default_rng(0), state, "a", 7)
    state.apply([change, change, Change(6, "a", "delete")])
    assert state.live_items == 1
    assert state.sequence == 7


def test_a_changed_trained_item_keeps_its_place(bundle: Bundle) -> None:
    state = LiveState(bundle)
    place = state.leaf_of("item-2")
    put(state, "item-2")
    assert state.leaf_of("item-2") == place
    overlay = state.overlay()
    assert overlay.item_R.tolist() == [2]
    assert overlay.hidden.tolist() == [2]
    assert overlay.handles_of(np.array([2, 1])).tolist() == [0, -1]
    assert overlay.eligible == bundle.manifest.tree.items
    delete(state, "item-2")
    assert state.overlay().eligible == bundle.manifest.tree.items - 1
    assert state.tombstones == 1
    state.apply([Change(state.sequence + 1, "item-2", "put")])  # back as it was trained
    assert state.overlay().hidden.tolist() == []
    assert state.overlay().standing is None
    assert state.tombstones == 0


def test_a_later_operation_takes_out_only_the_expired_item_whose_slot_it_has(bundle: Bundle) -> None:
    state = LiveState(bundle)
    put(state, "a", valid_until=10.0)
    put(state, "b", valid_until=10.0)
    parent, slot = state.leaf_of("a") or (-1, -1)
    row = LiveRow(np.zeros(bundle.node_rows_ND.shape[1], np.float32))
    with pytest.raises(InvalidData, match="a free slot"):
        state.apply([Change(3, "c", "put", {}, (Placement(0, parent, slot, row),), at=9.0)])
    state.apply([Change(3, "c", "put", {}, (Placement(0, parent, slot, row),), at=11.0)])
    assert state.leaf_of("c") == (parent, slot)
    assert state.leaf_of("a") is None
    assert state.leaf_of("b") is not None  # whoever wrote the operation may have had a wrong clock


def test_expired_items_are_gone(bundle: Bundle) -> None:
    state = LiveState(bundle)
    put(state, "a", valid_until=10.0)
    state.apply([Change(2, "item-0", "put", {"title": "x"}, valid_until=20.0)])
    assert state.next_expiry() == 10.0
    assert state.expire(9.9) == 0
    assert state.expire(10.0) == 1
    assert state.table.rows_of(["a"]).tolist() == [-1]
    assert state.expire(30.0) == 1
    assert state.overlay().hidden.tolist() == [0]
    put(state, "a", valid_until=None)
    assert state.expire(1e12) == 0
    assert state.live_items == 1


def test_the_standing_list_takes_live_items_too(bundle: Bundle) -> None:
    state = LiveState(bundle)
    state.set_removed(["a", "item-0"])
    put(state, "a")
    put(state, "b")
    overlay = state.overlay()
    assert overlay.eligible_R.tolist() == [False, True]
    assert overlay.eligible == bundle.manifest.tree.items
    state.set_removed([])
    assert state.overlay().eligible_R.tolist() == [True, True]
    assert state.overlay().eligible == bundle.manifest.tree.items + 2


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
    tree = tree_from_children([[2], [2, 2], [3, 2, 3, 1]], np.arange(9))
    state = LiveState(make_bundle(tmp_path, np.random.default_rng(0), tree, "product"))
    assert list(state.near(0, 4)) == [4, 3, 5, 6]
    assert list(state.near(0, 6)) == [6, 5, 4, 3]
    flat = LiveState(make_bundle(tmp_path / "flat", np.random.default_rng(0), tree_from_children([[4]], np.arange(4)), "product"))
    assert list(flat.near(0, 0)) == [0]


def test_vacant_leaves_are_taken_first(tmp_path: Path) -> None:
    tree = tree_from_children([[2], [3, 2]], np.array([0, -1, 1, 2, 3]))
    state = LiveState(make_bundle(tmp_path, np.random.default_rng(0), tree, "product"))
    slots = []
    for i in range(3):
        slots.append(state.next_slot(0, 1))
        put(state, f"x-{i}", 1)
    assert slots == [1, 3, 4]
    delete(state, "x-0")
    assert state.next_slot(0, 1) == 1


@pytest.mark.parametrize(
    ("parent", "slot", "width", "field"), [(0, 9, 4, "parent"), (4, 0, 4, "slot"), (4, -1, 4, "parent"), (4, 9, 3, "row")]
)
def test_a_placement_that_does_not_fit_changes_nothing(bundle: Bundle, parent: int, slot: int, width: int, field: str) -> None:
    state = LiveState(bundle)
    level = bundle.tree.level(2)
    parent = 0 if parent == 0 else level[0]
    with pytest.raises(InvalidData, match=field):
        state.apply([Change(1, "a", "put", None, (Placement(0, parent, slot, LiveRow(np.zeros(width, np.float32))),))])
    with pytest.raises(InvalidData, match="no row yet"):
        state.apply([Change(1, "a", "put")])
    assert state.sequence == 0
    assert state.overlay().is_empty


@pytest.mark.parametrize("seed", range(12))
def test_masks_are_those_of_the_items_that_are_eligible(tmp_path: Path, seed: int) -> None:
    """Kept up to date or built anew, of one tree or a forest: a node is eligible if an eligible item, live or trained, lies below it."""
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, 3, 3, empty_share=0.3 * (seed % 2))]
    if seed % 3 == 2:
        items = trees[0].item_count
        trees.append(tree_from_children([[2], [items // 2, items - items // 2]], rng.permutation(items)))
        ranking = Ranking(own="log_activation", activation="sigmoid", gamma=1)
        state = LiveState(make_linear_bundle(tmp_path, rng, trees[0], ranking, others=trees[1:]))
    else:
        state = LiveState(make_bundle(tmp_path, rng, trees[0], "product"))
    sequence, removed = 0, np.empty(0, np.int64)
    for _ in range(6):
        for _ in range(rng.integers(1, 8)):
            sequence += 1
            item_id = f"new-{rng.integers(8)}" if rng.random() < 0.6 else f"item-{rng.integers(trees[0].item_count)}"
            if rng.random() < 0.5:
                state.apply([Change(sequence, item_id, "delete")])
            else:
                state.apply([random_put(rng, state, item_id, sequence)])
        if rng.random() < 0.3:
            removed = rng.integers(trees[0].item_count, size=1)
            state.set_removed([f"item-{removed[0]}", f"new-{rng.integers(8)}"])
        overlay = state.overlay()
        kept_I = np.ones(trees[0].item_count, np.bool_)
        kept_I[removed] = False
        gone_I = ~kept_I
        gone_I[overlay.hidden] = True
        filtered = live_mask(trees, overlay, forest_mask(trees, kept_I), np.ones(overlay.handles, np.bool_))
        for place, tree in enumerate(trees):
            expected_N = node_mask(tree, ~gone_I).eligible_N.copy()
            leaves = overlay.trees[place]
            for parent in leaves.parent_X[overlay.eligible_R[leaves.handle_X]].tolist():
                node = parent
                while node >= 0:
                    expected_N[node] = True
                    node = int(tree.parent[node])
            if overlay.standing is not None:
                np.testing.assert_array_equal(overlay.standing.of_tree(place).eligible_N, expected_N)
                assert overlay.standing.items == overlay.eligible
            else:
                assert expected_N[tree.items_below > 0].all()
            np.testing.assert_array_equal(filtered.of_tree(place).eligible_N, expected_N)
            assert filtered.of_tree(place).items == overlay.eligible


def test_rows_survive_as_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tree = random_tree(rng, 2, 3)
    linear = make_linear_bundle(tmp_path, rng, tree, Ranking(own="log_activation", activation="sigmoid", gamma=1))
    dense = LiveRow(np.array([1.5, -2], np.float32), memory_to=(("ä", 1.25),), memory_from=(("b", 2.0), ("c", 0.0)))
    for row in (random_row(rng, linear), random_row(rng, linear, integer=False, in_tail=True), dense, LiveRow(np.zeros(0, np.float32))):
        again = LiveRow.from_bytes(row.to_bytes())
        for name in ("values", "feature", "tail_feature", "tail_value"):
            np.testing.assert_array_equal(getattr(again, name), getattr(row, name))
            assert getattr(again, name).dtype == getattr(row, name).dtype
        assert (again.bias, again.dense, again.memory_to, again.memory_from) == (row.bias, row.dense, row.memory_to, row.memory_from)
        with pytest.raises(InvalidData, match="row"):
            LiveRow.from_bytes(row.to_bytes() + b"x")
        with pytest.raises(InvalidData, match="row"):
            LiveRow.from_bytes(row.to_bytes()[:5])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_are_finite(value: float) -> None:
    with pytest.raises(InvalidData, match="finite"):
        LiveRow(np.array([value], np.float32))
    with pytest.raises(InvalidData, match="finite"):
        LiveRow(np.zeros(1, np.float32), memory_to=(("a", value),))


@pytest.mark.parametrize(
    ("feature", "value", "what"),
    [
        ([2, 1], [0.6, 0.8], "ascending"),
        ([-1], [1], "ascending"),
        ([1], [0.9], "length 1"),
        ([1], [np.nan], "length 1"),
        ([1, 2], [1], "by"),
    ],
)
def test_a_row_of_a_tail_has_ascending_features_and_length_1(feature: list[int], value: list[float], what: str) -> None:
    with pytest.raises(InvalidData, match=rf"row.tail.*{what}"):
        LiveRow(np.zeros(0, np.float32), dense=False, tail_feature=np.array(feature, np.int32), tail_value=np.array(value, np.float32))


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (LiveRow(np.ones(1, np.float32), np.array([20], np.int32), dense=False), "feature: got 20, expected feature numbers below 20"),
        (
            LiveRow(
                np.ones(1, np.float32),
                np.array([19], np.int32),
                dense=False,
                tail_feature=np.array([3], np.int32),
                tail_value=np.ones(1, np.float32),
            ),
            "the model has no tail",
        ),
    ],
)
def test_a_row_of_features_that_the_model_lacks_is_refused(tmp_path: Path, row: LiveRow, field: str) -> None:
    rng = np.random.default_rng(0)
    state = LiveState(make_linear_bundle(tmp_path, rng, random_tree(rng, 2, 3), Ranking(own="log_activation", gamma=1)))
    parent = state.bundle.tree.level(1)[0]
    with pytest.raises(InvalidData, match=field):
        state.apply([Change(1, "a", "put", None, (Placement(0, parent, state.next_slot(0, parent), row),))])
    assert state.overlay().is_empty


def test_random_states_have_all_kinds_of_items(bundle: Bundle) -> None:
    state = random_state(np.random.default_rng(1), bundle)
    overlay = state.overlay()
    assert overlay.handles > 12
    assert len(overlay.row_W) == 3
    assert len(overlay.hidden) == 7
    assert 0 < np.count_nonzero(overlay.leaf_R) < overlay.handles
