"""A node is open exactly when an eligible item lies below it; exclusions close exactly what the mask left open."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from espalier.checks.random_bundles import random_masks, random_tree
from espalier.errors import InvalidQuery
from espalier.masks.eligibility import NO_NODE, every_item, excluded_nodes, node_mask, widened_beam
from espalier.search import NO_ITEM
from espalier.tree import EMPTY_LEAF, Tree, complete_tree

trees = st.builds(
    lambda seed, branching_height, ragged, empty_share: random_tree(
        np.random.default_rng(seed), branching_height[1], branching_height[0], ragged, empty_share
    ),
    seed=st.integers(0, 2**32 - 1),
    branching_height=st.sampled_from([(2, 1), (2, 6), (3, 3), (4, 3), (8, 2), (1, 3)]),
    ragged=st.booleans(),
    empty_share=st.sampled_from([0.0, 0.3, 0.9]),
)
seeds = st.integers(0, 2**32 - 1)


def items_of_nodes(tree: Tree) -> list[set[int]]:
    """The items below each node, by walking up from every leaf."""
    items: list[set[int]] = [set() for _ in range(tree.node_count)]
    for leaf, item in enumerate(tree.leaf_item.tolist(), start=tree.leaf_offset):
        if item != EMPTY_LEAF:
            for node in tree.ancestors(np.array([leaf]))[0].tolist():
                items[node].add(item)
    return items


@given(tree=trees, seed=seeds, share=st.sampled_from([0.0, 0.02, 0.5, 1.0]))
def test_a_mask_opens_the_nodes_above_eligible_items(tree: Tree, seed: int, share: float) -> None:
    eligible_I = np.random.default_rng(seed).random(tree.item_count) < share
    mask, eligible = node_mask(tree, eligible_I), set(np.flatnonzero(eligible_I).tolist())
    assert mask.eligible_N.tolist() == [bool(items & eligible) for items in items_of_nodes(tree)]
    assert mask.items == len(eligible)


@given(tree=trees)
def test_without_a_filter_only_nodes_above_nothing_but_empty_leaves_are_shut(tree: Tree) -> None:
    mask = every_item(tree)
    assert_array_equal(mask.eligible_N, node_mask(tree, np.ones(tree.item_count, np.bool_)).eligible_N)
    assert mask.items == tree.item_count


@pytest.mark.parametrize("eligible_I", [np.ones(7, np.bool_), np.ones(8, np.int64), np.ones((8, 1), np.bool_)])
def test_a_mask_is_made_of_one_boolean_per_item(eligible_I: NDArray[np.bool_]) -> None:
    with pytest.raises(InvalidQuery, match=r"eligible_I: got .*, expected bool\[8\], one per item"):
        node_mask(complete_tree(np.arange(8), 2), eligible_I)


@given(tree=trees, seed=seeds, share=st.sampled_from([None, 0.0, 0.1, 0.5]), batch=st.integers(1, 4), width=st.integers(0, 60))
def test_the_closed_nodes_are_those_of_the_definition(tree: Tree, seed: int, share: float | None, batch: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    exclude_BE = rng.integers(-1, tree.item_count, (batch, width))
    mask_B = None if share is None else random_masks(rng, tree, batch, share)
    found, items = excluded_nodes(tree, exclude_BE, mask_B), items_of_nodes(tree)
    for b in range(batch):
        mask = None if mask_B is None else mask_B[b]
        eligible = {item for item in items[0] if mask is None or mask.eligible_N[tree.leaf_of_item[item]]}
        excluded = eligible & set(exclude_BE[b].tolist())
        closed = [node for node in range(1, tree.node_count) if items[node] & eligible and items[node] & eligible <= excluded]
        assert [node for node in found.leaves_BX[b].tolist() if node != NO_NODE] == [node for node in closed if node >= tree.leaf_offset]
        assert [node for node in found.inner_BX[b].tolist() if node != NO_NODE] == [node for node in closed if node < tree.leaf_offset]
        assert found.count_B[b] == len(excluded)


@given(seed=seeds, batch=st.integers(2, 5), masked=st.booleans())
def test_one_query_does_not_close_nodes_of_another(seed: int, batch: int, masked: bool) -> None:
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 3, 3, empty_share=0.2)
    exclude_BE = rng.integers(-1, tree.item_count, (batch, 6))
    mask_B = random_masks(rng, tree, batch, 0.5) if masked else None
    together = excluded_nodes(tree, exclude_BE, mask_B)
    for b in range(batch):
        alone, taken = excluded_nodes(tree, exclude_BE[b : b + 1], mask_B and mask_B[b : b + 1]), together.take(np.array([b]))
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


def test_excluding_the_last_item_that_a_filter_left_closes_what_held_it() -> None:
    tree = complete_tree(np.arange(8), 2)
    mask = node_mask(tree, np.arange(8) == 2)
    found = excluded_nodes(tree, np.array([[2, 3]]), (mask,))  # the filter has shut item 3 already
    assert (found.leaves_BX.tolist(), found.inner_BX.tolist(), found.count_B.tolist()) == ([[9]], [[1, 4]], [1])


def test_excluding_everything_closes_all_but_the_root() -> None:
    tree = complete_tree(np.arange(8), 2)
    found = excluded_nodes(tree, np.arange(8)[None])
    assert_array_equal(found.leaves_BX[0], np.arange(7, 15))
    assert_array_equal(found.inner_BX[0], np.arange(1, 7))


def test_a_beam_widens_with_the_root_of_what_a_filter_leaves() -> None:
    assert [widened_beam(100, eligible, 10_000, 4) for eligible in (10_000, 5000, 2500, 625, 400, 399, 100, 7, 0)] == [
        *(100, 141, 200, 400, 400, 399, 100, 7, 1),
    ]
    assert [widened_beam(100, 1000, 10_000, most) for most in (1, 0, 2, 100)] == [100, 100, 200, 316]
