"""Excluded nodes are exactly the leaves of excluded items and the inner nodes that hold nothing else."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from espalier.eligibility import NO_NODE, excluded_nodes
from espalier.search import NO_ITEM
from espalier.tree import Tree, complete_tree
from tests.builders import random_tree


def closed_by_definition(tree: Tree, excluded: set[int]) -> tuple[list[int], list[int]]:
    """(leaves, inner nodes but the root) whose items, at least one, are all excluded; by walking up from every leaf."""
    items: list[set[int]] = [set() for _ in range(tree.node_count)]
    for leaf, item in enumerate(tree.leaf_item.tolist(), start=tree.leaf_offset):
        if item != NO_ITEM:
            for node in tree.ancestors(np.array([leaf]))[0].tolist():
                items[node].add(item)
    closed = [node for node in range(1, tree.node_count) if items[node] and items[node] <= excluded]
    return [node for node in closed if node >= tree.leaf_offset], [node for node in closed if node < tree.leaf_offset]


@given(
    seed=st.integers(0, 2**32 - 1),
    branching_height=st.sampled_from([(2, 1), (2, 6), (3, 3), (4, 3), (8, 2)]),
    ragged=st.booleans(),
    empty_share=st.sampled_from([0.0, 0.3, 0.9]),
    batch=st.integers(1, 4),
    width=st.integers(0, 60),
)
def test_the_closed_nodes_are_those_of_the_definition(
    seed: int, branching_height: tuple[int, int], ragged: bool, empty_share: float, batch: int, width: int
) -> None:
    rng = np.random.default_rng(seed)
    branching, height = branching_height
    tree = random_tree(rng, height, branching, ragged, empty_share)
    exclude_BE = rng.integers(-1, tree.item_count, (batch, width))
    found = excluded_nodes(tree, exclude_BE)
    for b in range(batch):
        excluded = set(exclude_BE[b].tolist()) - {NO_ITEM}
        leaves, inner = closed_by_definition(tree, excluded)
        assert [node for node in found.leaves_BX[b].tolist() if node != NO_NODE] == leaves
        assert [node for node in found.inner_BX[b].tolist() if node != NO_NODE] == inner
        assert found.count_B[b] == len(excluded)


@given(seed=st.integers(0, 2**32 - 1), batch=st.integers(2, 5))
def test_one_query_does_not_close_nodes_of_another(seed: int, batch: int) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 3, 3, empty_share=0.2)
    exclude_BE = rng.integers(-1, tree.item_count, (batch, 6))
    together = excluded_nodes(tree, exclude_BE)
    for b in range(batch):
        alone, taken = excluded_nodes(tree, exclude_BE[b : b + 1]), together.take(np.array([b]))
        for part in ("leaves_BX", "inner_BX"):
            one, other = getattr(alone, part)[0], getattr(taken, part)[0]
            assert_array_equal(one[one != NO_NODE], other[other != NO_NODE])
        assert_array_equal(alone.count_B, taken.count_B)


def test_nothing_excluded_closes_nothing() -> None:
    found = excluded_nodes(complete_tree(np.arange(8), 2), np.full((3, 2), NO_ITEM))
    assert_array_equal(found.leaves_BX, np.full((3, 1), NO_NODE))
    assert_array_equal(found.inner_BX, np.full((3, 1), NO_NODE))
    assert_array_equal(found.count_B, [0, 0, 0])


def test_an_item_excluded_twice_counts_once() -> None:
    found = excluded_nodes(complete_tree(np.arange(4), 2), np.array([[0, 0, 1, 0]]))
    assert (found.leaves_BX.tolist(), found.inner_BX.tolist(), found.count_B.tolist()) == ([[3, 4]], [[1]], [2])


def test_excluding_everything_closes_all_but_the_root() -> None:
    tree = complete_tree(np.arange(8), 2)
    found = excluded_nodes(tree, np.arange(8)[None])
    assert_array_equal(found.leaves_BX[0], np.arange(7, 15))
    assert_array_equal(found.inner_BX[0], np.arange(1, 7))
