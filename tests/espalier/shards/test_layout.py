"""Which shard holds which subtree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier.checks.random_bundles import random_tree
from espalier.errors import InvalidConfig
from espalier.shards.layout import NO_SHARD, SUBTREES, cut_level, kept_nodes, node_shards, nodes_above_items, shard_items
from espalier.tree import EMPTY_LEAF, Tree, complete_tree

SEEDS = st.integers(0, 10_000)


def a_tree(seed: int) -> Tree:
    return random_tree(np.random.default_rng(seed), 4, 5, empty_share=0.3)


@given(SEEDS, st.integers(1, 6))
def test_every_item_is_in_exactly_one_shard_and_no_shard_is_empty(seed: int, count: int) -> None:
    tree = a_tree(seed)
    items = shard_items(tree, count)
    assert len(items) == count
    assert min(map(len, items)) > 0
    assert np.array_equal(np.sort(np.concatenate(items)), np.arange(tree.item_count))
    assert all((np.diff(own) > 0).all() and own.dtype == np.int64 for own in items)


@given(SEEDS, st.integers(1, 6))
def test_subtrees_are_whole_and_a_shards_nodes_are_they_and_their_ancestors(seed: int, count: int) -> None:
    tree = a_tree(seed)
    level, shard_N = cut_level(tree, count), node_shards(tree, count)
    assert (shard_N[: tree.level_offset[level]] == NO_SHARD).all()
    below = np.arange(tree.level_offset[level + 1], tree.node_count)
    assert np.array_equal(shard_N[below], shard_N[tree.parent[below]])
    for shard in range(count):
        kept = set(kept_nodes(tree, shard_N, shard).tolist())
        paths = {int(node) for leaf in np.flatnonzero(shard_N == shard) for node in path_up(tree, int(leaf))}
        assert kept == paths


def path_up(tree: Tree, node: int) -> list[int]:
    return [node] if node == 0 else [node, *path_up(tree, int(tree.parent[node]))]


def test_neighbouring_subtrees_go_to_different_shards_in_turn() -> None:
    tree = complete_tree(np.arange(4**5), 4)
    assert cut_level(tree, 4) == 4
    assert tree.level_size(4) == SUBTREES * 4
    assert node_shards(tree, 4)[tree.level_offset[4] : tree.level_offset[5]].tolist() == [0, 1, 2, 3] * SUBTREES
    assert cut_level(tree, 1) == 3


def test_a_large_subtree_is_made_up_for_by_the_next_ones() -> None:
    leaf_item = np.full(16, EMPTY_LEAF)
    leaf_item[[0, 1, 2, 3, 4, 8, 12]] = np.arange(7)  # four subtrees of 4, 1, 1 and 1 items
    tree = complete_tree(leaf_item, 4)
    assert [items.tolist() for items in shard_items(tree, 2)] == [[0, 1, 2, 3], [4, 5, 6]]


def test_the_cut_is_above_the_leaves_where_the_tree_is_small() -> None:
    tree = complete_tree(np.arange(16), 4)
    assert [cut_level(tree, count) for count in (1, 4)] == [1, 1]
    assert [items.tolist() for items in shard_items(tree, 4)] == [[4 * i + j for j in range(4)] for i in range(4)]


@pytest.mark.parametrize("count", [0, -1, 4])
def test_a_number_of_shards_that_the_tree_cannot_fill_is_refused_with_the_largest_that_it_can(count: int) -> None:
    leaf_item = np.full(16, EMPTY_LEAF)
    leaf_item[[0, 1, 4, 8]] = np.arange(4)  # the last subtree is vacant
    with pytest.raises(InvalidConfig, match=f"shards: got {count}, expected 1 to 3, the subtrees"):
        shard_items(complete_tree(leaf_item, 4), count)


def test_a_tree_of_one_level_is_one_shard() -> None:
    tree = complete_tree(np.arange(4), 4)
    assert shard_items(tree, 1)[0].tolist() == [0, 1, 2, 3]
    with pytest.raises(InvalidConfig, match="expected 1 to 1"):
        shard_items(tree, 2)


@given(SEEDS)
def test_nodes_above_items_are_the_paths_of_their_leaves(seed: int) -> None:
    tree, rng = a_tree(seed), np.random.default_rng(seed)
    items = np.flatnonzero(rng.random(tree.item_count) < 0.2)
    expected = np.unique(tree.ancestors(tree.leaf_of_item[items]))
    assert np.array_equal(nodes_above_items(tree, items), expected)


def test_one_shard_keeps_parents_of_vacant_leaves_alone() -> None:
    tree = Tree(np.array([0, 1, 3, 7]), np.array([1, 3, 5, 7, 7, 7, 7, 7]), np.array([0, -1, -1, -1]))
    none = np.empty(0, np.int64)
    assert nodes_above_items(tree, none).tolist() == []
    assert nodes_above_items(tree, none, vacant=True).tolist() == [0, 2, 5, 6]
    assert nodes_above_items(tree, np.array([0]), vacant=True).tolist() == [0, 1, 2, 3, 5, 6]
