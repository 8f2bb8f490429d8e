"""A bundle with live items in it: where leaves go, that rows, weights and tables go with them, and that engines open it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from benchmarks.engine_comparison import differences, wrong_beams
from benchmarks.random_bundles import (
    make_bundle,
    make_linear_bundle,
    random_memory,
    random_queries,
    random_tree,
    tree_over,
)
from benchmarks.random_live import random_state
from espalier.bundle import Bundle
from espalier.bundle_writer import GraphContent, LinearContent, write_bundle
from espalier.chunks import Chunks
from espalier.engines import open_engine
from espalier.engines.reference import ReferenceEngine
from espalier.entry_lists import EntryLists
from espalier.errors import InvalidData
from espalier.label_counts import LabelCounts
from espalier.live import folded_tables
from espalier.live.fold import content_of, fold_draft, folded, write_fold
from espalier.live.folded_tables import FoldedRows
from espalier.live.items import LiveItem, LiveItems
from espalier.live.overlay import DELETED, MOVED, LiveLeaves, LiveMemory, Overlay, SparsePool
from espalier.manifest import Ranking
from espalier.node_rows import rows_of
from espalier.packed_chunks import rounded
from espalier.search import NodeMask, SearchParams
from espalier.tree import EMPTY_LEAF, Tree
from tests.espalier.second_stages import with_stacking, with_tail

PATHS = Ranking(own="log_activation", gamma=1.0)
Leaf = tuple[int, int]
"""The parent and the slot of a leaf."""


class Hand:
    """An overlay made by hand: new items with a leaf in every tree, deleted trained items, and trained items with other rows."""

    def __init__(self, bundle: Bundle, rng: np.random.Generator) -> None:
        self.bundle, self.rng, self.table = bundle, rng, LiveItems(bundle.items)
        self.trees: list[list[tuple[int, int, int]]] = [[] for _ in bundle.alone]
        self.item_of: list[int] = []
        self.hidden: list[int] = []

    @property
    def items(self) -> int:
        return len(self.bundle.items)

    def put(self, item_id: str, leaves: Sequence[Leaf], **fields: Any) -> int:
        handle = self.table.handle_for(item_id)
        self.item_of.append(self.items + handle)
        self._hang(handle, leaves)
        self.table.write(LiveItem(item_id, handle, self.items + handle, fields, handle + 1, 0.0))
        return handle

    def change(self, row: int, **fields: Any) -> int:
        item_id = self.bundle.items.ids_of(np.array([row]))[0]
        handle = self.table.handle_for(item_id)
        self.item_of.append(row)
        self.hidden.append(row)
        leaves = []
        for tree in (alone.tree for alone in self.bundle.alone):
            leaf = int(tree.leaf_of_item[row])
            parent = int(tree.parent[leaf])
            leaves.append((parent, leaf - int(tree.first_child[parent])))
        self._hang(handle, leaves)
        self.table.write(LiveItem(item_id, handle, row, fields, handle + 1, 0.0))
        return handle

    def delete(self, row: int) -> None:
        self.hidden.append(row)

    def _hang(self, handle: int, leaves: Sequence[Leaf]) -> None:
        for tree, (parent, slot) in zip(self.trees, leaves, strict=True):
            tree.append((parent, slot, handle))

    def overlay(self, entries: Sequence[tuple[int, int, float]] = ()) -> Overlay:
        """entries: of the memory, (source, target, value), by item rows."""
        item_R, trained = np.array(self.item_of, np.int64), EntryLists(4, 1)
        handle_I = np.full(self.items, -1, np.int32)
        for handle, row in enumerate(self.item_of):
            if row < self.items:
                handle_I[row] = handle
        for row in self.hidden:
            trained.add(0, (handle_I[row], 0, MOVED, row) if handle_I[row] >= 0 else (len(item_R) + row, 0, DELETED, row))
        memory, value = EntryLists(3, 1), np.zeros(1 + len(entries), np.float32)
        for source, target, number in entries:
            value[memory.add(0, (source, 0, target))] = number
        return Overlay(
            sequence=len(item_R), items=self.items, handles=len(item_R), item_R=item_R, handle_I=handle_I,
            shown_R=np.ones(len(item_R), np.bool_), removed=None, trees=tuple(self._leaves(leaves) for leaves in self.trees),
            trained=trained.snapshot(0), moved=int(np.count_nonzero(handle_I >= 0)), eligible=0, is_open=True,
            memory=None if self.bundle.memory is None else LiveMemory(memory.snapshot(0), value), touched=0, mask_of=_no_mask,
        )  # fmt: skip

    def _leaves(self, leaves: list[tuple[int, int, int]]) -> LiveLeaves:
        """In random order, behind one that is gone again."""
        lists, count = EntryLists(5, 1, 1), 2 + len(leaves)
        lists.close(lists.add(0, (1, 0, 0, 0, 0)), 0)
        for parent, slot, handle in self.rng.permutation(np.array(leaves, np.int64).reshape(-1, 3)).tolist():
            lists.add(0, (parent, 0, handle, 0, slot))
        rows_PD, sparse = None, None
        if self.bundle.manifest.scorer.kind == "graphs":
            rows_PD = self.rng.integers(-2, 3, (count, self.bundle.graph_scorer.node_dim)).astype(np.float32)
        else:
            weights = [np.flatnonzero(self.rng.random(self.bundle.manifest.scorer.features) < 0.4) for _ in range(count)]
            end = np.cumsum([len(features) for features in weights]).astype(np.int64)
            feature = np.concatenate(weights).astype(np.int32)
            values = self.rng.choice([-2.0, -1.0, 1.0, 2.0], len(feature)).astype(np.float32)
            bias = self.rng.integers(-2, 3, count).astype(np.float32)
            begin = np.append(0, end)[:-1].astype(np.int64)
            sparse = SparsePool(begin, end, bias, feature, values, begin, begin, np.empty(0, np.int32), np.empty(0, np.float32))
        return LiveLeaves(lists.snapshot(0), len(leaves), rows_PD, sparse)


def _no_mask(overlay: Overlay) -> NodeMask:
    raise AssertionError("a fold needs no mask")


def free_slots(tree: Tree, parent: int) -> list[int]:
    """The vacant leaves of a parent, then as many slots behind its children as it has children."""
    count = int(tree.first_child[parent + 1] - tree.first_child[parent])
    held = tree.leaf_item[tree.first_child[parent] - tree.leaf_offset :][:count]
    return [*np.flatnonzero(held == EMPTY_LEAF).tolist(), *range(count, 2 * count)]


def random_overlay(bundle: Bundle, rng: np.random.Generator) -> Hand:
    """Some new items anywhere, some trained items deleted, some with other rows."""
    hand = Hand(bundle, rng)
    trees = [alone.tree for alone in bundle.alone]
    free = [[(p, slot) for p in tree.level(tree.height - 1) for slot in free_slots(tree, p)] for tree in trees]
    for leaves in free:
        rng.shuffle(leaves)
    touched = rng.permutation(len(bundle.items))[: min(6, len(bundle.items) - 1)]
    for k in range(int(rng.integers(0, 1 + min(8, *map(len, free))))):
        hand.put(f"new-{k}", [leaves[k] for leaves in free], title=f"New {k}")
    for row in touched[::2].tolist():
        hand.delete(row)
    for row in touched[1::2].tolist():
        hand.change(row, title=f"Changed {row}")
    return hand


def leaves_of(tree: Tree, hidden: set[int], live: LiveLeaves) -> list[tuple[int, int, tuple[str, int]]]:
    """(parent, slot, what) of all leaves with an item that counts: a trained leaf's number, or a live one's place in the pool."""
    found: list[tuple[int, int, tuple[str, int]]] = []
    for leaf, item in enumerate(tree.leaf_item.tolist(), start=tree.leaf_offset):
        if item != EMPTY_LEAF and item not in hidden:
            parent = int(tree.parent[leaf])
            found.append((parent, leaf - int(tree.first_child[parent]), ("trained", leaf)))
    places = zip(live.parent_X.tolist(), live.slot_X.tolist(), live.entry_X.tolist(), strict=True)
    return sorted([*found, *((parent, slot, ("live", place)) for parent, slot, place in places)])


def held_leaves(tree: Tree) -> list[tuple[int, int]]:
    """(parent, node) of the leaves with an item."""
    nodes = tree.leaf_offset + np.flatnonzero(tree.leaf_item != EMPTY_LEAF)
    return list(zip(tree.parent[nodes].tolist(), nodes.tolist(), strict=True))


seeds = st.integers(0, 2**32 - 1)


@given(seed=seeds, height=st.integers(1, 4), branching=st.sampled_from([2, 3, 8]), empty_share=st.sampled_from([0.0, 0.4]))
def test_leaves_are_in_the_order_of_parent_and_slot(
    tmp_path_factory: pytest.TempPathFactory, seed: int, height: int, branching: int, empty_share: float
) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, height, branching, empty_share=empty_share)
    bundle = make_bundle(tmp_path_factory.mktemp("b"), rng, tree, width=3)
    hand = random_overlay(bundle, rng)
    overlay = hand.overlay()
    fold = folded(bundle, overlay, hand.table)
    expected = leaves_of(tree, set(hand.hidden), overlay.trees[0])
    after = fold.content.tree
    assert [parent for parent, _ in held_leaves(after)] == [parent for parent, _, _ in expected]
    assert_array_equal(after.level_offset[:-1], tree.level_offset[:-1])
    rows_ND = np.asarray(fold.content.stored_rows)  # type: ignore[union-attr]  # of graphs
    assert_array_equal(rows_ND[: tree.leaf_offset], bundle.node_rows_ND[: tree.leaf_offset])
    pool_PD = overlay.trees[0].rows_PD
    assert pool_PD is not None
    for (_, node), (_, _, (kind, at)) in zip(held_leaves(after), expected, strict=True):
        assert_array_equal(rows_ND[node], bundle.node_rows_ND[at] if kind == "trained" else pool_PD[at])


def weights_of_leaf(tree: Tree, chunks: Chunks, node: int) -> Any:
    features = np.arange(chunks.width, dtype=np.int32)
    return np.append(chunks.weights_of(tree, node, features), chunks.bias[node])


@given(seed=seeds, height=st.integers(1, 3), branching=st.sampled_from([2, 5]), trees=st.sampled_from([1, 3]), narrow=st.booleans())
def test_weights_go_with_their_leaves(
    tmp_path_factory: pytest.TempPathFactory, seed: int, height: int, branching: int, trees: int, narrow: bool
) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, height, branching, empty_share=0.2)
    others = [tree_over(rng, tree.item_count, branching) for _ in range(trees - 1)]
    bundle = make_linear_bundle(tmp_path_factory.mktemp("b"), rng, tree, PATHS, width=9, others=others)
    content = content_of(bundle)
    assert isinstance(content, LinearContent)
    if narrow:
        packed = rounded(content.chunks)
        assert packed is not None
        bundle = write_bundle(
            bundle.path.with_name("2"), fold_draft(bundle, bundle.path.with_name("2"), 0), replace(content, chunks=packed)
        )
    hand = random_overlay(bundle, rng)
    overlay = hand.overlay()
    fold = folded(bundle, overlay, hand.table).content
    assert isinstance(fold, LinearContent)
    assert fold.chunks.entry_weight.dtype == (np.float16 if narrow else np.float32)
    found = [(fold.tree, fold.chunks), *fold.others]
    for (after, chunks), (before, trained), live in zip(found, bundle.trees, overlay.trees, strict=True):
        chunks.check(after)
        expected = leaves_of(before, set(hand.hidden), live)
        for (_, node), (_, _, (kind, at)) in zip(held_leaves(after), expected, strict=True):
            if kind == "trained":
                wanted = weights_of_leaf(before, trained, at)
            else:
                wanted = np.zeros(chunks.width + 1)
                assert live.sparse is not None
                mine = slice(live.sparse.begin_P[at], live.sparse.end_P[at])
                wanted[live.sparse.feature[mine]] = live.sparse.weight[mine]
                wanted[-1] = live.sparse.bias_P[at]
            assert_array_equal(weights_of_leaf(after, chunks, node), wanted)
        for node in range(1, before.leaf_offset):
            assert_array_equal(weights_of_leaf(after, chunks, node), weights_of_leaf(before, trained, node))


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """36 items in six parents of six leaves, with numbers and lists as columns, and a memory."""
    rng = np.random.default_rng(3)
    tree = random_tree(rng, 2, 6, ragged=False)
    columns = {"price": pa.array(range(36), pa.int32()), "tags": pa.array([["a"]] * 36)}
    return make_bundle(tmp_path, rng, tree, memory=random_memory(rng, 36, 3), columns=columns)


def test_items_are_counted_anew_and_carry_their_fields(bundle: Bundle) -> None:
    hand = Hand(bundle, np.random.default_rng(0))
    hand.delete(4)
    hand.change(7, title="Other", price=70)
    hand.put("new-a", [(3, 6)], title="New", tags=["b", "c"])
    hand.put("new-b", [(3, 7)])
    overlay = hand.overlay()
    fold = folded(bundle, overlay, hand.table)
    items = fold.content.items
    rows = {item_id: row for row, item_id in enumerate(items.column("id").to_pylist())}
    assert len(items) == 37 == fold.content.tree.item_count
    assert "item-4" not in rows
    assert (rows["item-3"], rows["item-5"], rows["item-35"], rows["new-a"], rows["new-b"]) == (3, 4, 34, 35, 36)
    table = items.to_table().to_pylist()
    assert table[rows["item-7"]] == {"id": "item-7", "title": "Other", "price": 70, "tags": None}
    assert table[rows["new-a"]] == {"id": "new-a", "title": "New", "price": None, "tags": ["b", "c"]}
    assert table[rows["new-b"]] == {"id": "new-b", "title": None, "price": None, "tags": None}
    assert table[rows["item-8"]] == {"id": "item-8", "title": "Title 8", "price": 8, "tags": ["a"]}
    assert items.column("price").type == pa.int32()
    assert fold.rows.row_I[[3, 4, 5]].tolist() == [3, -1, 4]
    assert fold.rows.row_R.tolist() == [rows["item-7"], 35, 36]
    assert fold.rows.of_rows(np.array([35, 4, -1, 36, 37, 38])).tolist() == [34, -1, -1, rows["item-7"], 35, 36]


def test_a_deleted_live_item_is_not_in_the_fold(bundle: Bundle) -> None:
    hand = Hand(bundle, np.random.default_rng(0))
    hand.put("new-a", [(3, 6)])
    hand.put("new-b", [(3, 7)])
    del hand.trees[0][0]
    overlay = hand.overlay()
    fold = folded(bundle, overlay, hand.table)
    assert fold.content.items.column("id").to_pylist()[36:] == ["new-b"]
    assert fold.rows.row_R.tolist() == [-1, 36]


def test_memory_has_rows_and_columns_of_live_items_and_none_of_gone_ones(bundle: Bundle) -> None:
    before = bundle.memory
    assert before is not None
    hand = Hand(bundle, np.random.default_rng(0))
    hand.delete(0)
    new = len(bundle.items) + hand.put("new", [(3, 6)])
    fold = folded(bundle, hand.overlay([(new, 5, 2.0), (9, new, 3.0), (new, 0, 4.0), (9, 0, 5.0)]), hand.table)
    memory = fold.content.memory  # type: ignore[union-attr]  # of graphs
    assert memory is not None
    memory.check(36)
    dense = np.zeros((36, 36), np.float32)
    for a in range(36):
        mine = slice(memory.offset[a], memory.offset[a + 1])
        dense[a, memory.item[mine]] = memory.value[mine]
    expected = np.zeros((37, 37), np.float32)
    for a in range(36):
        mine = slice(before.offset[a], before.offset[a + 1])
        expected[a, before.item[mine]] = before.value[mine]
    expected[36, 5], expected[9, 36] = 2, 3
    assert_array_equal(dense, expected[1:, 1:])


def test_a_row_of_the_memory_that_is_too_long_for_a_bundle_keeps_its_largest_entries(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = Hand(bundle, np.random.default_rng(0))
    new = len(bundle.items) + hand.put("new", [(3, 6)])
    overlay = hand.overlay([(new, item, float(item % 7 + 1)) for item in range(30)])
    monkeypatch.setattr(folded_tables, "MAX_ROW", 20)
    memory = folded(bundle, overlay, hand.table).content.memory  # type: ignore[union-attr]  # of graphs
    assert memory is not None
    assert np.diff(memory.offset).max() == 20
    largest = sorted(range(30), key=lambda item: (-(item % 7), item))[:20]
    assert memory.item[memory.offset[36] :].tolist() == sorted(largest)
    assert memory.value[memory.offset[36] :].tolist() == [item % 7 + 1 for item in sorted(largest)]


@pytest.mark.parametrize(("leaf", "what"), [((3, 0), "slot"), ((2, 0), "slot"), ((0, 3), "parent"), ((43, 0), "parent"), ((3, -1), "slot")])
def test_a_leaf_that_does_not_fit_is_refused(bundle: Bundle, leaf: Leaf, what: str) -> None:
    hand = Hand(bundle, np.random.default_rng(0))
    hand.put("new", [leaf])
    with pytest.raises(InvalidData, match=what):
        folded(bundle, hand.overlay(), hand.table)


def test_two_leaves_in_one_slot_are_refused(bundle: Bundle) -> None:
    hand = Hand(bundle, np.random.default_rng(0))
    hand.put("new-a", [(3, 8)])
    hand.put("new-b", [(3, 8)])
    with pytest.raises(InvalidData, match="slot 8"):
        folded(bundle, hand.overlay(), hand.table)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_a_live_row_is_stored_as_the_others_are(tmp_path: Path, dtype: Literal["float16", "int8"]) -> None:
    rng = np.random.default_rng(0)
    bundle = make_bundle(tmp_path, rng, random_tree(rng, 2, 4), dtype=dtype)
    hand = Hand(bundle, rng)
    hand.put("new", [(1, free_slots(bundle.tree, 1)[0])])
    overlay = hand.overlay()
    fold = folded(bundle, overlay, hand.table)
    content, (tree,), (leaves,) = fold.content, fold.trees, overlay.trees
    assert isinstance(content, GraphContent)
    assert content.stored_rows.dtype == dtype
    assert leaves.rows_PD is not None
    (at,) = tree.tree.leaf_offset + np.flatnonzero(tree.live)
    assert_array_equal(rows_of(np.asarray(content.stored_rows))[at], leaves.rows_PD[int(leaves.entry_X[0])])


def test_stacking_and_counts_know_the_items_of_the_fold(tmp_path: Path) -> None:
    bundle, _ = with_stacking(tmp_path, 5)
    stacking = bundle.stacking
    assert stacking is not None
    hand = Hand(bundle, np.random.default_rng(0))
    hand.delete(0)
    hand.put("new", [(p := bundle.tree.level(bundle.tree.height - 1)[0], free_slots(bundle.tree, p)[-1])])
    content = content_of(bundle)
    assert isinstance(content, LinearContent)
    path = bundle.path.with_name("9")
    counts = LabelCounts(np.arange(len(bundle.items)), 100)
    bundle = write_bundle(path, fold_draft(bundle, path, 0), replace(content, counts=counts))
    hand.bundle = bundle
    fold = folded(bundle, hand.overlay(), hand.table).content
    assert isinstance(fold, LinearContent)
    assert fold.stacking is not None
    assert fold.counts is not None
    fold.stacking.check(len(bundle.items), bundle.chunks.width)
    assert fold.counts.counts_I.tolist() == [*range(1, len(bundle.items)), 0]
    assert_array_equal(fold.stacking.tables.log_count, np.append(stacking.tables.log_count[1:], 0))
    for begin, item, value in (("label_begin", "label", "label_value"), ("beside_begin", "beside", "beside_share")):
        was, now = (
            [
                {int(getattr(tables, item)[e]): float(getattr(tables, value)[e]) for e in range(a, b)}
                for a, b in zip(getattr(tables, begin)[:-1].tolist(), getattr(tables, begin)[1:].tolist(), strict=True)
            ]
            for tables in (stacking.tables, fold.stacking.tables)
        )
        lists = was if begin == "label_begin" else [*was[1:], {}]
        assert now == [{i - 1: share for i, share in entries.items() if i} for entries in lists]


def test_items_with_a_live_leaf_have_the_tail_that_came_with_it(tmp_path: Path) -> None:
    bundle, _ = with_tail(tmp_path, 5)
    rng = np.random.default_rng(5)
    state = random_state(rng, bundle, integer=False)
    overlay, before = state.overlay(), bundle.tail
    fold = write_fold(bundle.path.parent / "2", bundle, overlay, state.table)
    assert before is not None
    assert fold.tail is not None
    rows, leaves = FoldedRows.of(overlay), overlay.trees[0]
    assert leaves.sparse is not None
    pool, expected = leaves.sparse, {}
    for row, folded_row in enumerate(rows.row_I.tolist()):
        own = slice(before.row_begin[row], before.row_begin[row + 1])
        expected[folded_row] = (before.feature[own].tolist(), before.value[own].tolist())
    for handle, place in zip(leaves.handle_X, leaves.entry_X, strict=True):
        own = slice(pool.tail_begin_P[place], pool.tail_end_P[place])
        expected[int(rows.row_R[handle])] = (pool.tail_feature[own].tolist(), pool.tail_value[own].tolist())
    for row in range(rows.items):
        own = slice(fold.tail.row_begin[row], fold.tail.row_begin[row + 1])
        assert (fold.tail.feature[own].tolist(), fold.tail.value[own].tolist()) == expected[row]
    assert any(len(expected[int(rows.row_I[row])][0]) for row in overlay.row_W)


@pytest.mark.parametrize("kind", ["history", "product", "vector", "linear", "forest"])
def test_every_engine_opens_a_fold_and_searches_it_as_the_reference_does(tmp_path: Path, kind: Any) -> None:
    rng = np.random.default_rng(11)
    tree = random_tree(rng, 3, 4, empty_share=0.2)
    names = {"product": ["onnx-cpu", "compiled-cpu"], "linear": ["sparse-cpu"], "forest": ["sparse-cpu"]}.get(kind, ["onnx-cpu"])
    if kind in ("linear", "forest"):
        others = [tree_over(rng, tree.item_count, 3)] if kind == "forest" else []
        bundle = make_linear_bundle(tmp_path, rng, tree, PATHS, others=others)
    else:
        bundle = make_bundle(tmp_path, rng, tree, kind, memory=random_memory(rng, tree.item_count, 3) if kind == "product" else None)
    hand = random_overlay(bundle, rng)
    fold = write_fold(bundle.path.with_name("2"), bundle, hand.overlay(), hand.table)
    live = fold.manifest.live
    assert live is not None
    assert (live.through, live.folded_from) == (len(hand.item_of), 1)
    queries, params = random_queries(rng, fold, 16), SearchParams.uniform(16, 5, 20)
    for name in names:
        engine = open_engine(fold, "cpu", name)
        found = engine.search(queries, params)
        assert wrong_beams(engine, fold, queries, params) == []
        assert np.isin(FoldedRows.of(hand.overlay()).row_R, found.item_rows_BM).all()
        if kind not in ("linear", "forest"):
            assert differences(found, ReferenceEngine(fold).search(queries, params)) == []


def test_a_fold_without_live_items_is_the_bundle(bundle: Bundle) -> None:
    hand = Hand(bundle, np.random.default_rng(0))
    fold = write_fold(bundle.path.with_name("2"), bundle, hand.overlay(), hand.table)
    for name in ("tree.safetensors", "nodes.safetensors", "memory.safetensors", "items.arrow", "query.onnx"):
        assert (fold.path / name).read_bytes() == (bundle.path / name).read_bytes()


def test_a_manifest_without_live_items_does_not_mention_them(bundle: Bundle) -> None:
    assert "live" not in (bundle.path / "manifest.json").read_text()


def test_rows_of_a_fold_without_live_items_are_those_of_the_bundle(bundle: Bundle) -> None:
    rows = FoldedRows.of(Hand(bundle, np.random.default_rng(0)).overlay())
    assert_array_equal(rows.row_I, np.arange(36))
    assert rows.items == 36
