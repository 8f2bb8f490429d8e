"""Which nodes a query may visit: those with an eligible item below them.

Turns eligible items into a mask over the nodes. Turns the item rows that a query excludes into nodes: the excluded leaves, and the inner
nodes whose eligible items are all excluded. The search masks these nodes instead of dropping items afterwards, so that
min(m, eligible) results come back. Knows no filters: see `filters.py`.

Legend: B queries, E excluded items, X excluded nodes, N nodes, I items, C children, R handles of live items.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from espalier.arrays import Bool, Int32, Int64, read_only
from espalier.compiled_code import compiled
from espalier.entry_lists import BORN, DIED, KEY, NEXT, OTHER_KEY, EntryArrays, entry_of
from espalier.errors import InvalidQuery
from espalier.search import NO_ITEM, NodeMask, SearchParams
from espalier.tree import Tree

NO_NODE = -1
(NO_MASK,) = read_only(np.empty(0, np.bool_))


FEW_CHILDREN = 16
"""Up to so many children, all nodes' first, second, … children are taken at once: reductions of short rows are up to ten times slower."""


def node_mask(tree: Tree, eligible_I: Bool) -> NodeMask:
    """The nodes above eligible items (bool[I], by item row).

    O(N); if few items are eligible, O(eligible · H) after one pass over `eligible_I`. Raises InvalidQuery on another shape or dtype.
    """
    if eligible_I.shape != (tree.item_count,) or eligible_I.dtype != np.bool_:
        raise InvalidQuery("eligible_I", f"{eligible_I.dtype}{list(eligible_I.shape)}", f"bool[{tree.item_count}], one per item")
    items = int(np.count_nonzero(eligible_I))
    eligible_N = np.zeros(tree.node_count, np.bool_)
    if 4 * items * tree.height < tree.node_count:
        nodes = tree.leaf_of_item[eligible_I]
        for _ in range(tree.height + 1):
            eligible_N[nodes] = True
            nodes = tree.parent[nodes]
        return NodeMask(eligible_N, items)
    eligible_N[tree.leaf_offset :] = np.append(eligible_I, False)[tree.leaf_item]  # EMPTY_LEAF, −1, takes the False at the end
    for h in range(tree.height - 1, -1, -1):
        above, below = tree.level(h), tree.level(h + 1)
        above_N, below_N = eligible_N[above.start : above.stop], eligible_N[below.start : below.stop]
        if tree.is_uniform(h) and tree.max_children[h] <= FEW_CHILDREN:
            for slot in range(tree.max_children[h]):
                above_N |= below_N[slot :: tree.max_children[h]]
        else:
            np.logical_or.reduceat(below_N, tree.first_child[above.start : above.stop] - below.start, out=above_N)
    return NodeMask(eligible_N, items)


def forest_mask(trees: Sequence[Tree], eligible_I: Bool) -> NodeMask:
    """The nodes above eligible items (bool[I]) in each tree of a forest, or in the only tree. O(N) for each.

    Callers make masks together with the filter. If an engine made them, they would block its thread, and no cache would count their bytes.
    """
    first, *others = (node_mask(tree, eligible_I) for tree in trees)
    return replace(first, others=tuple(others))


def every_item(tree: Tree) -> NodeMask:
    """The mask of a query without a filter: all nodes are eligible but those with only empty leaves below."""
    return NodeMask(tree.items_below > 0, tree.item_count)


def bundle_alone(trees: Sequence[Tree]) -> NodeMask:
    """The mask of a query that sees the bundle as it was trained, without live items."""
    first, *others = map(every_item, trees)
    return replace(first, others=tuple(others))


def unrestricted_mask(tree: Tree) -> NodeMask | None:
    """The mask of a query without a filter; None if every node is eligible."""
    mask = every_item(tree)
    return None if mask.eligible_N.all() else mask


@dataclass(frozen=True)
class ExcludedNodes:
    """Nodes that are eligible by a query's mask, but not with the items that the query excludes; NO_NODE as padding.

    leaves_BX  int64[B, X]   excluded leaves
    inner_BX   int64[B, X]   inner nodes below which every eligible item is excluded (another X)
    count_B    int64[B]      distinct excluded items that were eligible, live ones included
    handles_BX int64[B, X]   handles of excluded live items (another X)
    """

    leaves_BX: Int64
    inner_BX: Int64
    count_B: Int64
    handles_BX: Int64

    def take(self, queries: Int64) -> ExcludedNodes:
        """The nodes for the queries at some positions (int64)."""
        return ExcludedNodes(self.leaves_BX[queries], self.inner_BX[queries], self.count_B[queries], self.handles_BX[queries])


@dataclass(frozen=True, eq=False)
class EligibleNodes:
    """The nodes of a tree that each query of a search may visit: those of its mask, without those that it excludes.

    items_B   int64[B]: number of eligible items
    mask_B    each query's mask; None if every node is eligible
    excluded  None without exclusions
    live_BR   for each query bool[R], its eligible live items by handle (later handles are not eligible), or None: the query sees only the
              bundle. Empty if there are no live items
    """

    items_B: Int64
    mask_B: tuple[NodeMask | None, ...]
    excluded: ExcludedNodes | None
    live_BR: tuple[Bool | None, ...] = ()

    @property
    def groups(self) -> list[tuple[Int64, NodeMask | None]]:
        """For each mask, the positions (int64) of its queries."""
        masks = dict.fromkeys(self.mask_B)
        return [(np.flatnonzero([other is mask for other in self.mask_B]), mask) for mask in masks]

    def nodes_of(self, tree: Tree, b: int) -> Bool:
        """bool[N]: the nodes that query b may visit."""
        mask = self.mask_B[b]
        eligible_N = (every_item(tree) if mask is None else mask).eligible_N.copy()
        if self.excluded is not None:
            for nodes_X in (self.excluded.leaves_BX[b], self.excluded.inner_BX[b]):
                eligible_N[nodes_X[nodes_X != NO_NODE]] = False
        return eligible_N

    def take(self, queries: Int64) -> EligibleNodes:
        """The nodes for the queries at some positions (int64)."""
        excluded = None if self.excluded is None else self.excluded.take(queries)
        positions = queries.tolist()
        live_BR = tuple(self.live_BR[b] for b in positions) if self.live_BR else ()
        return EligibleNodes(self.items_B[queries], tuple(self.mask_B[b] for b in positions), excluded, live_BR)


def eligible_nodes(tree: Tree, params: SearchParams, unrestricted: NodeMask | None, tree_index: int = 0) -> EligibleNodes:
    """The nodes of a tree that the queries may visit. All engines use it but the reference, which shares no code.

    params        checked
    unrestricted  `unrestricted_mask` of the tree, for queries without a filter
    tree_index    the tree's index in its forest, from 0
    Raises InvalidQuery if a mask is for fewer trees or for trees of another size.
    """
    items_B, mask_B = masks_of(tree, params, unrestricted, tree_index, tree.item_count)
    if params.exclude_BE is None or not params.exclude_BE.size:
        return EligibleNodes(items_B, mask_B, None)
    excluded = excluded_nodes(tree, params.exclude_BE, mask_B)
    return EligibleNodes(items_B - excluded.count_B, mask_B, excluded)


def masks_of(
    tree: Tree, params: SearchParams, unrestricted: NodeMask | None, tree_index: int, items: int
) -> tuple[Int64, tuple[NodeMask | None, ...]]:
    """int64[B], the number of items that pass each query's mask (`items` without a filter), and the masks over one tree's nodes.

    Raises InvalidQuery as `eligible_nodes` does.
    """
    if params.mask_B is None:
        return np.full(len(params.m_B), items, np.int64), (unrestricted,) * len(params.m_B)
    items_B = np.array([items if mask is None else mask.items for mask in params.mask_B], np.int64)
    mask_B = tuple(unrestricted if mask is None else mask.of_tree(tree_index) for mask in params.mask_B)
    for nodes in {len(mask.eligible_N) for mask in mask_B if mask is not None} - {tree.node_count}:
        raise InvalidQuery("mask_B", f"bool[{nodes}]", f"bool[{tree.node_count}], as tree {1 + tree_index} has nodes")
    return items_B, mask_B


def widened_beam(beam_size: int, eligible: int, items: int, most: float) -> int:
    """The beam for a search in which `eligible` of `items` items pass the filter.

    √(items / eligible) times `beam_size`, at most `most` times, but widened to no more than `eligible`. It is never smaller than
    `beam_size`: before the search, more items may come that pass.

    The score of an inner node reflects all items below it, eligible or not. So the fewer items pass a filter, the more nodes the beam needs
    to find the best of them. The square root compensates for filters that pass from a half to a thousandth of the items
    (benchmarks/results). A beam of all eligible items prunes none, so it need not be wider.
    """
    widest = round(beam_size * min(max(most, 1.0), math.sqrt(items / max(eligible, 1))))
    return max(beam_size, min(widest, eligible))


class LiveExclusions(NamedTuple):
    """The live leaves of a tree, for lists of item rows that may have live items.

    items     I; the rows of live items are I + handle
    handle_I  int32[I]: the handle of each trained item that was put or deleted; −1 for others
    entries   the live leaves: by parent, and by handle as their second key
    """

    items: int
    handle_I: Int32
    entries: EntryArrays


def excluded_nodes(
    tree: Tree,
    exclude_BE: Int64,
    mask_B: Sequence[NodeMask | None] | None = None,
    live: LiveExclusions | None = None,
    live_BR: Sequence[Bool | None] = (),
) -> ExcludedNodes:
    """The nodes that lists of item rows (int64[B, E], NO_ITEM as padding, repeats allowed) exclude under the queries' masks.

    An inner node is excluded when all of its eligible children and live leaves are. O(E · levels with excluded nodes).
    live_BR: as `EligibleNodes` has it.
    """
    batch = len(exclude_BE)
    if not batch:
        none = np.full((0, 1), NO_NODE, np.int64)
        return ExcludedNodes(none, none, np.zeros(0, np.int64), none)
    views: list[tuple[NodeMask | None, Bool | None]] = [*zip(mask_B or (None,) * batch, live_BR or (None,) * batch, strict=True)]
    keys = [(id(mask), id(live_R)) for mask, live_R in views]
    if len(set(keys)) == 1:
        return _excluded_under(tree, exclude_BE, views[0], live)
    groups = {key: np.flatnonzero([other == key for other in keys]) for key in keys}
    groups_excluded = [
        (positions, _excluded_under(tree, exclude_BE[positions], views[positions[0]], live)) for positions in groups.values()
    ]
    leaves_BX, inner_BX, handles_BX = (
        np.full((batch, max(getattr(group, name).shape[1] for _, group in groups_excluded)), NO_NODE, np.int64)
        for name in ("leaves_BX", "inner_BX", "handles_BX")
    )
    count_B = np.empty(batch, np.int64)
    for positions, group in groups_excluded:
        leaves_BX[positions, : group.leaves_BX.shape[1]], inner_BX[positions, : group.inner_BX.shape[1]] = group.leaves_BX, group.inner_BX
        handles_BX[positions, : group.handles_BX.shape[1]], count_B[positions] = group.handles_BX, group.count_B
    return ExcludedNodes(leaves_BX, inner_BX, count_B, handles_BX)


def _excluded_under(tree: Tree, exclude_BE: Int64, view: tuple[NodeMask | None, Bool | None], live: LiveExclusions | None) -> ExcludedNodes:
    """`excluded_nodes` for queries with the same mask and the same live items (`view`)."""
    mask, live_R = view
    eligible_N = NO_MASK if mask is None else mask.eligible_N
    arrays = read_only(tree.leaf_of_item, tree.parent, tree.first_child, tree.items_below)
    live_arrays = None
    if live is not None:
        live_arrays = live.items, *read_only(live.handle_I), live.entries, *read_only(NO_MASK if live_R is None else live_R)
    return ExcludedNodes(*_excluded(*read_only(exclude_BE), arrays, *read_only(eligible_N), live_arrays, tree.height))


@compiled()
def _excluded(exclude_BE: Any, tree: Any, eligible_N: Any, live: Any, height: int) -> Any:
    """The arrays of ExcludedNodes. tree: leaf_of_item, parent, first_child, items_below. eligible_N: empty without a mask.

    live: the fields of LiveExclusions and the live items that the queries see (bool[R], empty for none); None if there are no live items.
    """
    batch, width = exclude_BE.shape
    leaf_BE, handle_BE = np.full((batch, max(width, 1)), NO_NODE), np.full((batch, 1 if live is None else max(width, 1)), NO_NODE)
    leaves_B, handles_B, inner_B = np.zeros(batch, np.int64), np.zeros(batch, np.int64), np.zeros(batch, np.int64)
    inner_X = np.empty(2 * width * height, np.int64)
    for b in range(batch):
        leaves_B[b] = _leaves(exclude_BE[b], tree, eligible_N, leaf_BE[b])
        handles_B[b] = _handles(exclude_BE[b], live, handle_BE[b])
        inner_B[b] = _close(leaf_BE[b, : leaves_B[b]], handle_BE[b, : handles_B[b]], tree, eligible_N, live, inner_X)
    inner_BX = np.full((batch, max(1, inner_B.max())), NO_NODE)
    for b in range(batch):
        if inner_B[b]:
            _close(leaf_BE[b, : leaves_B[b]], handle_BE[b, : handles_B[b]], tree, eligible_N, live, inner_X)
            inner_BX[b, : inner_B[b]] = inner_X[: inner_B[b]]
    leaves_BX, handles_BX = leaf_BE[:, : max(1, leaves_B.max())].copy(), handle_BE[:, : max(1, handles_B.max())].copy()
    return leaves_BX, inner_BX, leaves_B + handles_B, handles_BX


@compiled()
def _leaves(exclude_E: Any, tree: Any, eligible_N: Any, leaf_E: Any) -> Any:
    """Write the eligible leaves of some items into `leaf_E`, ascending, each once. Returns their number."""
    leaf_of_item, _, _, items_below = tree
    count = 0
    for row in exclude_E:
        if row != NO_ITEM and row < len(leaf_of_item) and _is_eligible(leaf_of_item[row], items_below, eligible_N):
            leaf_E[count] = leaf_of_item[row]
            count += 1
    return _distinct(leaf_E, count)


@compiled()
def _handles(exclude_E: Any, live: Any, handle_E: Any) -> Any:
    """Write the handles of items with an eligible live leaf into `handle_E`, ascending, each once. Returns their number."""
    if live is None:
        return 0
    items, handle_I, entries, live_R = live
    count = 0
    for row in exclude_E:
        handle = row - items if row >= items else np.int64(handle_I[row]) if 0 <= row < len(handle_I) else np.int64(NO_NODE)
        if 0 <= handle < len(live_R) and live_R[handle] and entry_of(handle, entries) > 0:
            handle_E[count] = handle
            count += 1
    return _distinct(handle_E, count)


@compiled()
def _distinct(value_E: Any, count: int) -> int:
    """Sort the first `count` values, keep each once and write NO_NODE behind them. Returns their number."""
    value_E[:count].sort()
    distinct = 0
    for e in range(count):
        if e == 0 or value_E[e] != value_E[distinct - 1]:
            value_E[distinct] = value_E[e]
            distinct += 1
    value_E[distinct:count] = NO_NODE
    return distinct


@compiled()
def _close(leaves: Any, handles: Any, tree: Any, eligible_N: Any, live: Any, inner_X: Any) -> int:
    """Write the inner nodes whose eligible children and live leaves are all excluded into `inner_X`, ascending. Returns their number.

    The root is never scored, so it is left out.
    """
    _, parent, first_child, items_below = tree
    parents, closed_count = np.empty(len(leaves) + len(handles), np.int64), 0
    for e in range(len(leaves)):
        parents[e] = parent[leaves[e]]
    if live is not None:
        for e in range(len(handles)):
            parents[len(leaves) + e] = live[2].rows[entry_of(handles[e], live[2]), KEY]
    parents.sort()
    count = len(parents)
    while count:  # `parents` has a node once for each excluded child or live leaf
        next_count, first = 0, 0
        while first < count:
            node, last = parents[first], first
            while last < count and parents[last] == node:
                last += 1
            eligible = _live_under(node, live)
            for child in range(first_child[node], first_child[node + 1]):
                eligible += _is_eligible(child, items_below, eligible_N)
            if eligible == last - first and node > 0:
                parents[next_count], inner_X[closed_count] = parent[node], node
                next_count, closed_count = next_count + 1, closed_count + 1
            first = last
        count = next_count
    inner_X[:closed_count].sort()
    return closed_count


@compiled()
def _live_under(node: int, live: Any) -> int:
    """The number of eligible live leaves of a node."""
    if live is None:
        return 0
    _, _, entries, live_R = live
    eligible = 0
    entry = entries.first[node] if node < len(entries.first) else np.int64(0)
    while entry > 0:
        handle = entries.rows[entry, OTHER_KEY]
        if entries.rows[entry, BORN] <= entries.moment < entries.rows[entry, DIED] and handle < len(live_R) and live_R[handle]:
            eligible += 1
        entry = entries.rows[entry, NEXT]
    return eligible


@compiled()
def _is_eligible(node: int, items_below: Any, eligible_N: Any) -> bool:
    return bool(eligible_N[node]) if len(eligible_N) else items_below[node] > 0
