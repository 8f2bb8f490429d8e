"""Trees and masks: a tree's invariants and walks against plain Python; a node is open exactly when an eligible item lies below it, and
exclusions close exactly what a mask left open.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import date
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from benchmarks.random_bundles import random_masks, random_tree
from espalier import items as items_module
from espalier.arrays import Bool, Int64
from espalier.errors import InvalidQuery, InvalidTree, spelled
from espalier.items import ItemTable
from espalier.masks import filters as filters_module
from espalier.masks.eligibility import NO_NODE, every_item, excluded_nodes, forest_mask, node_mask, widened_beam
from espalier.masks.filters import ENTRY_BYTES, Filter, ItemFilters, cost_of
from espalier.search import NodeMask
from espalier.tree import EMPTY_LEAF, Tree, complete_tree, tree_from_children

WRAPPING = 2**63 - 1
"""Differences of int64 that pass it begin again below 0, so that a compiled search would follow such numbers out of its arrays."""
Counts = list[list[int]]
Arrays = dict[str, Int64]


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


# -- masks ----------------------------------------------------------------------------------------------------------------


trees = st.builds(
    lambda seed, branching_height, ragged, empty_share: random_tree(
        np.random.default_rng(seed), branching_height[1], branching_height[0], ragged, empty_share
    ),
    seed=st.integers(0, 2**32 - 1),
    branching_height=st.sampled_from([(2, 1), (2, 6), (3, 3), (4, 3), (8, 2), (1, 3), (20, 2)]),
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
    every = set(range(tree.item_count))
    for mask, eligible in ((node_mask(tree, eligible_I), set(np.flatnonzero(eligible_I).tolist())), (every_item(tree), every)):
        assert mask.eligible_N.tolist() == [bool(items & eligible) for items in items_of_nodes(tree)]
        assert mask.items == len(eligible)


@pytest.mark.parametrize("eligible_I", [np.ones(7, np.bool_), np.ones(8, np.int64), np.ones((8, 1), np.bool_)])
def test_a_mask_is_made_of_one_boolean_per_item(eligible_I: Bool) -> None:
    with pytest.raises(InvalidQuery, match=r"eligible_I: got .*, expected bool\[8\], one per item"):
        node_mask(complete_tree(np.arange(8), 2), eligible_I)


@given(tree=trees, seed=seeds, share=st.sampled_from([None, 0.0, 0.1, 0.5]), batch=st.integers(0, 4), width=st.integers(0, 60))
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


def test_a_beam_widens_with_the_root_of_what_a_filter_leaves() -> None:
    assert [widened_beam(100, eligible, 10_000, 4) for eligible in (10_000, 5000, 2500, 625, 400, 399, 100, 7, 0)] == [
        *(100, 141, 200, 400, 400, 399, 100, 100, 100),
    ]
    assert [widened_beam(100, 1000, 10_000, most) for most in (1, 0, 2, 100)] == [100, 100, 200, 316]


# -- filters --------------------------------------------------------------------------------------------------------------

COLUMNS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "section": (pa.string(), st.sampled_from(["games", "math", "", "ünï", "𐀀", "\uffff"])),
    "tags": (pa.list_(pa.string()), st.lists(st.none() | st.sampled_from(["a", "b", "c"]), max_size=3)),
    "year": (pa.int64(), st.sampled_from([-5, 0, 1999, 2000, 2**53, 2**53 + 1, 2**63 - 1])),
    "size": (pa.uint8(), st.integers(0, 255)),
    "price": (pa.float64(), st.floats(allow_subnormal=False) | st.sampled_from([0.0, -0.0, 0.5, math.nan])),
    "weight": (pa.float32(), st.sampled_from([0.25, 0.5, 1e6])),
    "scores": (pa.large_list(pa.float64()), st.lists(st.none() | st.sampled_from([0.0, 0.5, 2.0, math.nan]), max_size=3)),
    "pair": (pa.list_(pa.int32(), 2), st.lists(st.integers(0, 3), min_size=2, max_size=2)),
    "free": (pa.bool_(), st.booleans()),
    "flags": (pa.list_(pa.bool_()), st.lists(st.booleans(), max_size=2)),
}
NUMBERS = ("year", "size", "price", "weight", "scores", "pair")


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """A table of 1 to 12 items with every kind of column, with nulls."""
    size = draw(st.integers(1, 12))
    columns = {"id": pa.array([f"item-{i}" for i in range(size)])}
    for name, (type_, values) in COLUMNS.items():
        columns[name] = pa.array(draw(st.lists(st.none() | values, min_size=size, max_size=size)), type_)
    return pa.table(columns)


@st.composite
def filter_objects(draw: st.DrawFn, table: pa.Table) -> dict[str, object]:
    """A filter over up to three columns, mostly of values that some item has."""
    chosen = draw(st.lists(st.sampled_from(["id", *COLUMNS]), max_size=3, unique=True))
    return {name: draw(condition_objects(name, table)) for name in chosen}


def condition_objects(name: str, table: pa.Table) -> st.SearchStrategy[object]:
    there = [value for cell in table.column(name).to_pylist() for value in (cell if isinstance(cell, list) else [cell])]
    there = [value for value in there if value is not None and not (isinstance(value, float) and not math.isfinite(value))]
    if name in NUMBERS:
        number = st.sampled_from([*there, 0, 1999, 0.25]) | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
        ends = st.tuples(number, number).map(sorted)
        ranges = ends.map(lambda pair: {"min": pair[0], "max": pair[1]}) | st.fixed_dictionaries({"min": number})
        return st.lists(number, min_size=1, max_size=4) | ranges | st.fixed_dictionaries({"max": number})
    other = st.booleans() if name in ("free", "flags") else st.sampled_from(["nothing", "a", "games"])
    return st.lists(st.sampled_from(there) | other if there else other, min_size=1, max_size=4)


def has(cell: Any, condition: Any) -> bool:
    """Whether an item's cell, as Arrow gives it to Python, matches a condition, as JSON gives it: the definition, spelled out."""
    values = cell if isinstance(cell, list) else [cell]
    values = [value for value in values if value is not None]
    if isinstance(condition, dict):
        return any(condition.get("min", -math.inf) <= value <= condition.get("max", math.inf) for value in values)
    return any(value == wanted for value in values for wanted in condition)


def passing(table: pa.Table, wanted: Mapping[str, object], barred: Mapping[str, object]) -> Bool:
    rows = table.to_pylist()
    return np.array(
        [
            all(has(row[name], condition) for name, condition in wanted.items())
            and not any(has(row[name], condition) for name, condition in barred.items())
            for row in rows
        ]
    )


def tree_over(items: int, seed: int = 0) -> Tree:
    """A random tree of that many items, with empty leaves."""
    rng = np.random.default_rng(seed)
    while True:
        tree = random_tree(rng, 4, 3)
        if tree.leaf_count >= items:
            leaf_item = np.full(tree.leaf_count, -1)
            leaf_item[rng.permutation(tree.leaf_count)[:items]] = rng.permutation(items)
            return Tree(tree.level_offset, tree.first_child, leaf_item)


def assert_same(mask: NodeMask, expected: NodeMask) -> None:
    assert_array_equal(mask.eligible_N, expected.eligible_N)
    assert mask.items == expected.items


@given(data=st.data(), table=tables(), seed=st.integers(0, 2**32 - 1))
def test_a_mask_is_that_of_the_items_which_pass_by_definition(data: st.DataObject, table: pa.Table, seed: int) -> None:
    wanted, barred = data.draw(filter_objects(table)), data.draw(filter_objects(table))
    removed = data.draw(st.lists(st.integers(0, len(table) - 1), max_size=4))
    tree = tree_over(len(table), seed)
    filters = ItemFilters([tree], ItemTable.build(table), max_bytes=1 << 20)
    filters.set_removed(np.array(removed, np.int64))
    parsed, expected_I = filters.parse(wanted, barred), passing(table, wanted, barred)
    assert_array_equal(filters.matches(parsed, np.arange(len(table))), expected_I)
    expected_I[removed] = False
    assert_same(filters.mask(parsed), node_mask(tree, expected_I))


SHOP = pa.table(
    {
        "id": ["a", "b", "c", "d"],
        "section": ["games", "math", "games", None],
        "year": [1990, 2000, 2000, None],
        "price": [0.5, 1.5, math.nan, 2.5],
        "free": [True, False, None, True],
        "tags": [["x", "y"], ["y"], [], None],
        "added": [date(2026, 1, 1)] * 4,
    }
)


def shop(max_bytes: int = 1 << 20) -> ItemFilters:
    return ItemFilters([tree_over(4)], ItemTable.build(SHOP), max_bytes)


def items_of(mask: NodeMask | None) -> list[str]:
    assert mask is not None
    return [SHOP.column("id")[row].as_py() for row in np.flatnonzero(mask.eligible_N[tree_over(4).leaf_of_item])]


@pytest.mark.parametrize(
    ("given", "field", "value", "expected"),
    [
        ({"colour": ["red"]}, "filter.colour", '"colour"', "a column that can be filtered: id, section, year, price, free, tags"),
        ({"added": ["2026-01-01"]}, "filter.added", '"added"', "a column that can be filtered: id, section, year, price, free, tags"),
        ({"section": []}, "filter.section", "[]", "a list of at least one string"),
        ({"section": "games"}, "filter.section", '"games"', "a list of at least one string"),
        ({"section": {"min": 1}}, "filter.section", '{"min": 1}', "a list of at least one string"),
        ({"section": ["games", 3]}, "filter.section[1]", "3", "a string"),
        ({"tags": ["x", None]}, "filter.tags[1]", "null", "a string"),
        ({"free": [1]}, "filter.free[0]", "1", "a boolean"),
        ({"free": {"max": 1}}, "filter.free", '{"max": 1}', "a list of at least one boolean"),
        ({"year": 2000}, "filter.year", "2000", 'a list of at least one number, or a range {"min": …, "max": …}'),
        ({"year": ["2000"]}, "filter.year[0]", '"2000"', "a finite number"),
        ({"year": [2000, True]}, "filter.year[1]", "true", "a finite number"),
        ({"price": [math.nan]}, "filter.price[0]", "NaN", "a finite number"),
        ({"price": {"min": math.inf}}, "filter.price.min", "Infinity", "a finite number"),
        ({"price": {"min": None, "max": 3}}, "filter.price.min", "null", "a finite number"),
        ({"year": {}}, "filter.year", "{}", "a range with min, max or both"),
        ({"year": {"min": 1, "most": 2}}, "filter.year.most", "2", "no more than min and max in a range"),
        ({"year": {"min": 2, "max": 1}}, "filter.year", '{"min": 2, "max": 1}', "min to be at most max"),
    ],
)
def test_a_wrong_filter_is_refused_with_where_and_why(given: dict[str, object], field: str, value: str, expected: str) -> None:
    for wanted, barred, path in ((given, {}, field), ({}, given, f"exclude_{field}")):
        with pytest.raises(InvalidQuery) as raised:
            shop().parse(wanted, barred)
        assert (raised.value.field, spelled(raised.value.value), raised.value.expected) == (path, value, expected)


def test_equal_filters_share_one_mask() -> None:
    filters = shop()
    one = filters.parse({"year": [2000, 1990], "section": ["math", "games", "math"]}, {"price": {"min": 1}})
    other = filters.parse({"section": ("games", "math"), "year": [1990.0, 2000, 2000]}, {"price": {"min": 1.0}})
    assert one == other
    assert filters.cached(one) is None
    assert filters.cached(one) is None  # asking does not build
    assert filters.mask(one) is filters.mask(other) is filters.cached(one)
    assert bool(one)
    assert not filters.parse({}, {})
    assert one != filters.parse({"year": [2000, 1990], "section": ["math", "games"], "price": {"min": 1}}, {})


class Builds:
    """`forest_mask`, counted. The next build waits for `hold` and raises `failure`, where a test has put one there."""

    def __init__(self) -> None:
        self.count = 0
        self.started = threading.Event()
        self.hold: threading.Event | None = None
        self.failure: Exception | None = None

    def __call__(self, trees: Sequence[Tree], eligible_I: Bool) -> NodeMask:
        self.count += 1
        hold, self.hold = self.hold, None
        failure, self.failure = self.failure, None
        self.started.set()
        assert hold is None or hold.wait(10), "the test forgot to let the build go"
        if failure is not None:
            raise failure
        return forest_mask(trees, eligible_I)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Builds:
    counted = Builds()
    monkeypatch.setattr(filters_module, "forest_mask", counted)
    return counted


@contextmanager
def begun(builds: Builds, filters: ItemFilters, parsed: Filter) -> Iterator[tuple[ThreadPoolExecutor, Future[NodeMask], threading.Event]]:
    """Threads, of which one is free, a build that is under way, and what lets it go on."""
    builds.hold = go = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        building = pool.submit(filters.mask, parsed)
        assert builds.started.wait(10)
        yield pool, building, go


def test_threads_that_ask_for_one_filter_build_it_once_and_a_build_that_fails_is_tried_again(builds: Builds) -> None:
    filters = shop()
    parsed = filters.parse({"section": ["games"]}, {})
    builds.failure = MemoryError("no room")
    with pytest.raises(MemoryError, match="no room"):
        filters.mask(parsed)
    builds.started.clear()
    with begun(builds, filters, parsed) as (pool, first, go):
        second = pool.submit(filters.mask, parsed)
        assert not wait([second], 0.05).done, "it did not wait for the build that was under way"
        go.set()
        assert first.result(10) is second.result(10)
    assert builds.count == 2
    assert items_of(filters.mask(parsed)) == ["a", "c"]


def test_the_least_recently_used_masks_are_dropped_beyond_the_bound_and_a_larger_one_is_not_kept(builds: Builds) -> None:
    names = ["games", "math", "other"]
    small = shop()
    cost = small.mask(small.parse({"section": names[:1]}, {})).eligible_N.nbytes + sys.getsizeof("other") + ENTRY_BYTES
    filters = shop(max_bytes=2 * cost)
    games, maths, others = (filters.parse({"section": [name]}, {}) for name in names)
    for parsed in (games, maths, games, others):
        filters.mask(parsed)
    assert [filters.cached(parsed) is not None for parsed in (games, maths, others)] == [True, False, True]
    before, tiny = builds.count, shop(max_bytes=3)
    assert items_of(tiny.mask(games)) == items_of(tiny.mask(games)) == ["a", "c"]
    assert tiny.cached(games) is None
    assert builds.count == before + 2


def test_a_range_that_is_open_at_one_end_has_all_values_on_that_side() -> None:
    filters = shop()
    for year in ({"max": 2000}, {"min": 1990}):
        assert items_of(filters.mask(filters.parse({"year": year}, {}))) == ["a", "b", "c"]


def test_removed_items_pass_no_filter_until_the_next_set() -> None:
    """Only items of the catalogue can be removed."""
    filters = shop()
    parsed, rows = filters.parse({"section": ["games"]}, {}), np.arange(4)
    for row in (-1, 4):
        with pytest.raises(InvalidQuery, match=f"removed: got {row}, expected item rows from 0 to 3"):
            filters.set_removed(np.array([1, row]))
    for removed, passing, standing in (([], "ac", None), ([0, 1, 0], "c", "cd"), ([2], "a", "abd"), ([], "ac", None)):
        filters.set_removed(np.array(removed, np.int64))
        assert items_of(filters.mask(parsed)) == list(passing)
        assert (None if filters.standing is None else items_of(filters.standing)) == (standing and list(standing))
        assert items_of(filters.mask(Filter())) == list(standing or "abcd")
        assert np.flatnonzero(filters.is_removed(rows)).tolist() == sorted(set(removed))
        assert_array_equal(filters.matches(parsed, rows), [True, False, True, False])  # by the filter alone


def test_a_mask_that_was_begun_before_a_removal_is_not_kept(builds: Builds) -> None:
    filters = shop()
    parsed = filters.parse({"section": ["games"]}, {})
    with begun(builds, filters, parsed) as (pool, before, go):
        filters.set_removed(np.array([0]))
        after = pool.submit(filters.mask, parsed).result(10)
        go.set()
        assert items_of(before.result(10)) == ["a", "c"]
    assert items_of(after) == ["c"]
    assert filters.cached(parsed) is after


def test_a_mask_that_two_threads_build_around_a_removal_counts_once(builds: Builds) -> None:
    small = shop()
    parsed = small.parse({"section": ["games"]}, {})
    filters = shop(max_bytes=3 * cost_of(parsed, small.mask(parsed)) // 2)
    builds.started.clear()
    with begun(builds, filters, parsed) as (pool, first, go), ThreadPoolExecutor(1) as other:
        second = pool.submit(filters.mask, parsed)
        assert not wait([second], 0.05).done, "it did not wait for the build that was under way"
        filters.set_removed(np.array([0]))
        builds.started.clear()
        builds.hold = let_third = threading.Event()
        third = other.submit(filters.mask, parsed)
        assert builds.started.wait(10)
        go.set()
        assert [items_of(mask.result(10)) for mask in (first, second)] == [["a", "c"], ["c"]]
        let_third.set()
        assert items_of(third.result(10)) == ["c"]
    assert filters.cached(parsed) is second.result()


# -- ids, which a filter on `id` looks up -------------------------------------------------------------------------------


@given(rounds=st.lists(st.lists(st.sampled_from([*"abcd", "no", ""]), max_size=8), min_size=1, max_size=6), room=st.integers(0, 5))
def test_ids_are_found_whatever_was_asked_for_before(rounds: list[list[str]], room: int) -> None:
    items = ItemTable.build(SHOP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(items_module, "CACHED_IDS", room)
        patch.setattr(items_module, "UNKNOWN_IDS", room)
        for ids in rounds:
            rows = items.rows_of(ids)
            assert rows.tolist() == ["abcd".find(item_id) if item_id else -1 for item_id in ids]
            assert items.ids_of(rows[rows >= 0]) == [item_id for item_id in ids if item_id in {*"abcd"}]
            assert len(items._row_of_id) <= room
            assert len(items._id_of_row) <= room
            assert len(items._unknown_ids) <= room
            assert {"no", ""}.isdisjoint(items._row_of_id)
