"""The tree's invariants and walks, against plain Python on ragged trees of any shape."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from numpy.typing import NDArray

from espalier.errors import InvalidTree
from espalier.tree import EMPTY_LEAF, Tree, complete_tree, tree_from_children

WRAPPING = 2**63 - 1
"""Differences of int64 that pass it begin again below 0, so that a compiled search would follow such numbers out of its arrays."""
Counts = list[list[int]]
Arrays = dict[str, NDArray[np.int64]]


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Counts, list[int]]:
    """Child counts of every level of a ragged tree, and the items of its leaves, some of them empty."""
    children: Counts = []
    size = 1
    for _ in range(draw(st.integers(1, 4))):
        children.append(draw(st.lists(st.integers(1, 4), min_size=size, max_size=size)))
        size = sum(children[-1])
    filled = draw(st.lists(st.booleans(), min_size=size, max_size=size).filter(any))
    rows = iter(draw(st.permutations(range(sum(filled)))))
    return children, [next(rows) if full else EMPTY_LEAF for full in filled]


def build(shape: tuple[Counts, list[int]]) -> Tree:
    return tree_from_children(shape[0], np.array(shape[1]))


def children_of(shape: tuple[Counts, list[int]]) -> list[list[int]]:
    """The children of every node by counting, level by level."""
    found: list[list[int]] = []
    following = 1
    for level in shape[0]:
        for count in level:
            found.append(list(range(following, following + count)))
            following += count
    return found + [[] for _ in shape[1]]


@given(drawn())
def test_a_tree_from_child_counts_is_what_counting_says(shape: tuple[Counts, list[int]]) -> None:
    """Children, parents, levels, leaves, and the items below each node."""
    tree, children = build(shape), children_of(shape)
    assert tree.node_count == len(children)
    assert [list(range(tree.first_child[n], tree.first_child[n + 1])) for n in range(tree.node_count)] == children
    parent, below = [-1] * len(children), [0] * len(children)
    for node in reversed(range(len(children))):
        for child in children[node]:
            parent[child] = node
        below[node] = sum(below[child] for child in children[node])
        if node >= tree.leaf_offset:
            below[node] = int(shape[1][node - tree.leaf_offset] != EMPTY_LEAF)
    assert_array_equal(tree.parent, parent)
    assert_array_equal(tree.items_below, below)
    assert [tree.level_size(h) for h in range(tree.height + 1)] == [1, *(sum(level) for level in shape[0])]
    assert [node for h in range(tree.height + 1) for node in tree.level(h)] == list(range(tree.node_count))
    assert [tree.is_uniform(h) for h in range(tree.height)] == [len(set(level)) == 1 for level in shape[0]]
    assert tree.max_children == tuple(max(level) for level in shape[0])
    assert (tree.leaf_count, tree.leaf_offset) == (len(shape[1]), len(children) - len(shape[1]))
    assert tree.leaf_of_item.tolist() == [tree.leaf_offset + shape[1].index(item) for item in range(below[0])]


@given(drawn(), st.data())
def test_ancestors_are_the_path_from_the_root_and_padding_stays_padding(shape: tuple[Counts, list[int]], data: st.DataObject) -> None:
    tree = build(shape)
    leaves = data.draw(st.lists(st.one_of(st.just(-1), st.integers(tree.leaf_offset, tree.node_count - 1)), min_size=1, max_size=6))
    paths = tree.ancestors(np.array(leaves))
    assert paths.shape == (len(leaves), tree.height + 1)
    for leaf, path in zip(leaves, paths.tolist(), strict=True):
        if leaf < 0:
            assert path == [-1] * (tree.height + 1)
            continue
        assert (path[0], path[-1]) == (0, leaf)
        assert all(child in children_of(shape)[node] for node, child in pairwise(path))
    assert_array_equal(tree.ancestors(np.array([leaves, leaves]))[1], paths)


@given(drawn(), st.integers(1, 300))
def test_the_start_level_is_the_first_that_a_beam_cannot_hold(shape: tuple[Counts, list[int]], beam: int) -> None:
    sizes = [sum(level) for level in shape[0]]
    too_large = [h for h, size in enumerate(sizes, start=1) if size > beam]
    assert build(shape).start_level(beam) == min([*too_large, len(sizes)])


@given(st.sampled_from([(2, 1), (2, 5), (3, 3), (7, 2)]), st.integers(0, 2**32 - 1))
def test_a_complete_tree_has_arithmetic_children(branching_height: tuple[int, int], seed: int) -> None:
    branching, height = branching_height
    leaf_item = np.random.default_rng(seed).permutation(branching**height)
    tree = complete_tree(leaf_item, branching)
    assert tree.height == height
    inner = np.arange(tree.leaf_offset)
    assert_array_equal(tree.first_child[inner], inner * branching + 1)
    assert all(tree.is_uniform(h) for h in range(height))
    assert_array_equal(tree.leaf_item, leaf_item)


@pytest.mark.parametrize(("leaves", "branching"), [(6, 2), (12, 3), (9, 2), (1, 2), (0, 2)])
def test_a_complete_tree_needs_a_power_of_its_branching(leaves: int, branching: int) -> None:
    with pytest.raises(InvalidTree):
        complete_tree(np.arange(leaves), branching)


def test_child_counts_must_be_one_per_node() -> None:
    with pytest.raises(InvalidTree, match="children: expected 2 counts on level 1, got 1"):
        tree_from_children([[2], [3]], np.arange(3))


def arrays(**changed: object) -> Arrays:
    """A root with two children of two leaves and one leaf; items 1 and 0 and an empty leaf between them."""
    valid: dict[str, object] = {
        "level_offset": np.array([0, 1, 3, 6]),
        "first_child": np.array([1, 3, 5, 6, 6, 6, 6]),
        "leaf_item": np.array([1, EMPTY_LEAF, 0]),
    }
    return valid | changed  # type: ignore[return-value]  # bad values are the point


def test_the_tree_that_the_bad_ones_are_made_from_is_good() -> None:
    assert_array_equal(Tree(**arrays()).items_below, [2, 1, 1, 1, 0, 1])


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "32-bit offsets": ({"level_offset": np.array([0, 1, 3, 6], np.int32)}, "level_offset: .*int64.*int32"),
    "other byte order": ({"level_offset": np.array([0, 1, 3, 6], ">i8")}, "level_offset: .*int64"),
    "fractional children": ({"first_child": np.array([1, 3, 5, 6, 6, 6, 6.0])}, "first_child: .*int64.*float64"),
    "leaves in rows": ({"leaf_item": np.array([[1, -1, 0]])}, r"leaf_item: .*one-dimensional.*\[1, 3\]"),
    "a list": ({"leaf_item": [1, -1, 0]}, "leaf_item: .*array, got list"),
    "a single level": ({"level_offset": np.array([0, 1])}, "level_offset: .*two levels"),
    "a late start": ({"level_offset": np.array([1, 2, 4, 6])}, "level_offset: expected 0, 1"),
    "an empty level": ({"level_offset": np.array([0, 1, 1, 6])}, "level_offset: .*strictly rising"),
    "levels whose differences wrap": ({"level_offset": np.array([0, 1, WRAPPING, -2])}, "level_offset: .*strictly rising"),
    "too few nodes": ({"first_child": np.array([1, 3, 5, 6, 6, 6])}, "first_child: expected 7 entries .*got 6"),
    "a childless inner node": ({"first_child": np.array([1, 3, 3, 6, 6, 6, 6])}, "every inner node needs at least one child"),
    "children whose differences wrap": ({"first_child": np.array([1, WRAPPING, -2, 6, 6, 6, 6])}, "every inner node needs"),
    "a child from the same level": ({"first_child": np.array([1, 2, 5, 6, 6, 6, 6])}, "fill exactly the next level"),
    "a leaf with a child": ({"first_child": np.array([1, 3, 4, 6, 6, 6, 7])}, "leaves must have no children"),
    "a leaf too few": ({"leaf_item": np.array([0, 1])}, "leaf_item: expected 3 entries, one per leaf, got 2"),
    "no items": ({"leaf_item": np.array([-1, -1, -1])}, "the tree holds no item"),
    "a negative item": ({"leaf_item": np.array([0, -2, 1])}, "item rows must be 0 … I − 1"),
    "an item twice": ({"leaf_item": np.array([0, 1, 1])}, "item rows must be 0 … I − 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_arrays_that_are_no_tree_are_refused_with_the_reason(case: str) -> None:
    changed, message = BAD[case]
    with pytest.raises(InvalidTree, match=message):
        Tree(**arrays(**changed))


@given(drawn(), st.data())
def test_a_tree_is_accepted_exactly_when_it_is_one(shape: tuple[Counts, list[int]], data: st.DataObject) -> None:
    tree = build(shape)
    changed = {name: getattr(tree, name).copy() for name in ("level_offset", "first_child", "leaf_item")}
    for _ in range(data.draw(st.integers(1, 2))):
        array = changed[data.draw(st.sampled_from(sorted(changed)))]
        array[data.draw(st.integers(0, len(array) - 1))] += data.draw(st.sampled_from([-2, -1, 1, 2]))
    if is_tree(**{name: array.tolist() for name, array in changed.items()}):
        Tree(**changed)
    else:
        with pytest.raises(InvalidTree):
            Tree(**changed)


def is_tree(level_offset: list[int], first_child: list[int], leaf_item: list[int]) -> bool:
    """The definition, read off the docstring with sets."""
    if level_offset[:2] != [0, 1] or sorted(set(level_offset)) != level_offset or len(first_child) != level_offset[-1] + 1:
        return False
    levels = [set(range(a, b)) for a, b in pairwise(level_offset)]
    seen: list[int] = []
    for level, following in zip(levels, [*levels[1:], set()], strict=True):
        for node in level:
            below = list(range(first_child[node], first_child[node + 1]))
            if first_child[node] > first_child[node + 1] or not set(below) <= following or bool(below) != bool(following):
                return False
            seen += below
    items = sorted(item for item in leaf_item if item != EMPTY_LEAF)
    ends = all(entry == level_offset[-1] for entry in first_child[level_offset[-2] :])
    return ends and sorted(seen) == list(range(1, level_offset[-1])) and items == list(range(len(items))) and bool(items)
