"""Which nodes a query may visit: those with an eligible item below them.

Turns eligible items into a mask over the nodes, and the item rows that a query excludes into nodes: the excluded leaves, and the inner
nodes below which nothing eligible is left. Masking those inside the search (instead of dropping items afterwards) is what makes
min(m, eligible) results come back. Knows no filters: see `filters.py`.

Legend: B queries, E excluded items, X excluded nodes, N nodes, I items, C children, R handles of live items.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.compiled_code import compiled
from espalier.errors import InvalidQuery
from espalier.read_only import read_only
from espalier.search import NO_ITEM, NodeMask, SearchParams
from espalier.tree import Tree

NO_NODE = -1
(NO_MASK,) = read_only(np.empty(0, np.bool_))


def node_mask(tree: Tree, eligible_I: NDArray[np.bool_]) -> NodeMask:
    """The nodes above eligible items (bool[I], by item row).

    O(N); where few items are eligible, O(those · H) after one pass over `eligible_I`. Raises InvalidQuery on another shape or dtype.
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
        up, down = eligible_N[above.start : above.stop], eligible_N[below.start : below.stop]
        if tree.is_uniform(h):
            for slot in range(tree.max_children[h]):  # a reduction over a short last axis is ten times slower
                up |= down[slot :: tree.max_children[h]]
        else:
            np.logical_or.reduceat(down, tree.first_child[above.start : above.stop] - below.start, out=up)
    return NodeMask(eligible_N, items)


def forest_mask(trees: Sequence[Tree], eligible_I: NDArray[np.bool_]) -> NodeMask:
    """The nodes above eligible items (bool[I]) in each tree of a forest, or in the only tree. O(N) for each.

    Made where a filter is: made by an engine, masks would hold up its thread, and the cache would not count their bytes.
    """
    first, *others = (node_mask(tree, eligible_I) for tree in trees)
    return replace(first, others=tuple(others))


def every_item(tree: Tree) -> NodeMask:
    """The mask of a query without a filter: only nodes above nothing but empty leaves are not eligible."""
    return NodeMask(tree.items_below > 0, tree.item_count)


def bundle_alone(trees: Sequence[Tree]) -> NodeMask:
    """The mask of a query that sees the bundle as it was trained, whatever else is live."""
    first, *others = map(every_item, trees)
    return replace(first, others=tuple(others))


def unrestricted_mask(tree: Tree) -> NodeMask | None:
    """The mask of a query without a filter; None where every node is eligible."""
    mask = every_item(tree)
    return None if mask.eligible_N.all() else mask


@dataclass(frozen=True)
class ExcludedNodes:
    """Nodes that are eligible by a query's mask and no longer are because of the items that it excludes; NO_NODE as padding.

    leaves_BX  int64[B, X]   excluded leaves
    inner_BX   int64[B, X]   inner nodes below which every eligible item is excluded (another X)
    count_B    int64[B]      distinct excluded items that were eligible, live ones included
    """

    leaves_BX: NDArray[np.int64]
    inner_BX: NDArray[np.int64]
    count_B: NDArray[np.int64]

    def take(self, queries: NDArray[np.int64]) -> ExcludedNodes:
        """Those of some queries (int64 positions)."""
        return ExcludedNodes(self.leaves_BX[queries], self.inner_BX[queries], self.count_B[queries])


@dataclass(frozen=True, eq=False)
class EligibleNodes:
    """What the queries of one search may visit of a tree: the nodes of their masks, without those that they exclude.

    items_B   int64[B]: how many items are eligible
    mask_B    each query's mask, None where every node is eligible
    excluded  None without exclusions
    live_BR   bool[R] of each query: its eligible live items by handle, later handles are not; None: the query sees the bundle alone.
              Empty where nothing is live
    """

    items_B: NDArray[np.int64]
    mask_B: tuple[NodeMask | None, ...]
    excluded: ExcludedNodes | None
    live_BR: tuple[NDArray[np.bool_] | None, ...] = ()

    @property
    def groups(self) -> list[tuple[NDArray[np.int64], NodeMask | None]]:
        """The queries (int64 positions) of each mask."""
        masks = dict.fromkeys(self.mask_B)
        return [(np.flatnonzero([other is mask for other in self.mask_B]), mask) for mask in masks]

    def take(self, queries: NDArray[np.int64]) -> EligibleNodes:
        """Those of some queries (int64 positions)."""
        excluded = None if self.excluded is None else self.excluded.take(queries)
        chosen = queries.tolist()
        live_BR = tuple(self.live_BR[b] for b in chosen) if self.live_BR else ()
        return EligibleNodes(self.items_B[queries], tuple(self.mask_B[b] for b in chosen), excluded, live_BR)


def eligible_nodes(tree: Tree, params: SearchParams, unrestricted: NodeMask | None, place: int = 0) -> EligibleNodes:
    """What the queries of a search may visit of a tree. Every engine searches by it but the reference, which shares no code.

    params        checked
    unrestricted  `unrestricted_mask` of the tree, for queries without a filter
    place         which tree of a forest it is, from 0
    Raises InvalidQuery where a mask was made for fewer trees or for others.
    """
    items_B, mask_B = masks_of(tree, params, unrestricted, place, tree.item_count)
    if params.exclude_BE is None or not params.exclude_BE.size:
        return EligibleNodes(items_B, mask_B, None)
    excluded = excluded_nodes(tree, params.exclude_BE, mask_B)
    return EligibleNodes(items_B - excluded.count_B, mask_B, excluded)


def masks_of(
    tree: Tree, params: SearchParams, unrestricted: NodeMask | None, place: int, items: int
) -> tuple[NDArray[np.int64], tuple[NodeMask | None, ...]]:
    """int64[B], how many items each query's mask lets pass (`items` without a filter), and its mask over one tree's nodes.

    Raises InvalidQuery as `eligible_nodes` does.
    """
    if params.mask_B is None:
        return np.full(len(params.m_B), items, np.int64), (unrestricted,) * len(params.m_B)
    items_B = np.array([items if mask is None else mask.items for mask in params.mask_B], np.int64)
    mask_B = tuple(unrestricted if mask is None else mask.of_tree(place) for mask in params.mask_B)
    for nodes in {len(mask.eligible_N) for mask in mask_B if mask is not None} - {tree.node_count}:
        raise InvalidQuery("mask_B", f"bool[{nodes}]", f"bool[{tree.node_count}], as tree {1 + place} has nodes")
    return items_B, mask_B


def widened_beam(beam_size: int, eligible: int, items: int, most: float) -> int:
    """The beam for a search in which a filter leaves `eligible` of `items` items.

    √(items / eligible) times `beam_size`, at most `most` times, and at most `eligible`.

    The score of an inner node reflects all items below it, eligible or not. So the fewer items a filter leaves, the more nodes must be kept
    to find the best of them. The square root compensates for filters that leave from a half to a thousandth of the items
    (benchmarks/results). A beam of all eligible items prunes none, so it need not be wider.
    """
    if eligible == 0:
        return 1
    return min(round(beam_size * min(max(most, 1.0), math.sqrt(items / eligible))), eligible)


def excluded_nodes(tree: Tree, exclude_BE: NDArray[np.int64], mask_B: Sequence[NodeMask | None] | None = None) -> ExcludedNodes:
    """The nodes that lists of item rows (int64[B, E], NO_ITEM as padding, repeats allowed) exclude under the queries' masks.

    An inner node is excluded when all of its eligible children are. O(E · levels with excluded nodes).
    """
    if not len(exclude_BE):
        none = np.full((0, 1), NO_NODE, np.int64)
        return ExcludedNodes(none, none, np.zeros(0, np.int64))
    if mask_B is None or len(set(map(id, mask_B))) == 1:
        return _excluded_under(tree, exclude_BE, None if mask_B is None else mask_B[0])
    groups = {id(mask): np.flatnonzero([other is mask for other in mask_B]) for mask in mask_B}
    parts = [(own, _excluded_under(tree, exclude_BE[own], mask_B[own[0]])) for own in groups.values()]
    leaves_BX, inner_BX = (
        np.full((len(exclude_BE), max(getattr(part, name).shape[1] for _, part in parts)), NO_NODE, np.int64)
        for name in ("leaves_BX", "inner_BX")
    )
    count_B = np.empty(len(exclude_BE), np.int64)
    for own, part in parts:
        leaves_BX[own, : part.leaves_BX.shape[1]], inner_BX[own, : part.inner_BX.shape[1]] = part.leaves_BX, part.inner_BX
        count_B[own] = part.count_B
    return ExcludedNodes(leaves_BX, inner_BX, count_B)


def _excluded_under(tree: Tree, exclude_BE: NDArray[np.int64], mask: NodeMask | None) -> ExcludedNodes:
    """Of queries with the same mask."""
    eligible_N = NO_MASK if mask is None else mask.eligible_N
    arrays = read_only(tree.leaf_of_item, tree.parent, tree.first_child, tree.items_below)
    return ExcludedNodes(*_excluded(*read_only(exclude_BE), arrays, *read_only(eligible_N), tree.height))


@compiled()
def _excluded(exclude_BE: Any, tree: Any, eligible_N: Any, height: int) -> Any:
    """The arrays of ExcludedNodes. tree: leaf_of_item, parent, first_child, items_below; without a mask, eligible_N is empty."""
    batch, width = exclude_BE.shape
    leaf_BE, count_B = np.full((batch, max(width, 1)), NO_NODE), np.zeros(batch, np.int64)
    inner_X, inner_B = np.empty(width * height, np.int64), np.zeros(batch, np.int64)
    for b in range(batch):
        count_B[b] = _leaves(exclude_BE[b], tree, eligible_N, leaf_BE[b])
        inner_B[b] = _close(leaf_BE[b, : count_B[b]].copy(), tree, eligible_N, inner_X)
    inner_BX = np.full((batch, max(1, inner_B.max())), NO_NODE)
    for b in range(batch):
        if inner_B[b]:
            _close(leaf_BE[b, : count_B[b]].copy(), tree, eligible_N, inner_X)
            inner_BX[b, : inner_B[b]] = inner_X[: inner_B[b]]
    return leaf_BE[:, : max(1, count_B.max())].copy(), inner_BX, count_B


@compiled()
def _leaves(exclude_E: Any, tree: Any, eligible_N: Any, leaf_E: Any) -> int:
    """Fills in the eligible leaves of some items, ascending and each once; returns how many."""
    leaf_of_item, _, _, items_below = tree
    found = 0
    for row in exclude_E:
        if row != NO_ITEM and _is_eligible(leaf_of_item[row], items_below, eligible_N):
            leaf_E[found] = leaf_of_item[row]
            found += 1
    leaf_E[:found].sort()
    kept = 0
    for e in range(found):
        if e == 0 or leaf_E[e] != leaf_E[kept - 1]:
            leaf_E[kept] = leaf_E[e]
            kept += 1
    leaf_E[kept:found] = NO_NODE
    return kept


@compiled()
def _close(below: Any, tree: Any, eligible_N: Any, inner_X: Any) -> int:
    """Fills in the inner nodes, ascending, all of whose eligible children are among `below` (ascending) or filled in; returns how many.

    The root is never scored, so it is not among them.
    """
    _, parent, first_child, items_below = tree
    closed, count = 0, len(below)
    while count:
        above, first = 0, 0
        while first < count:
            up, last = parent[below[first]], first
            while last < count and parent[below[last]] == up:
                last += 1
            eligible = 0
            for child in range(first_child[up], first_child[up + 1]):
                eligible += _is_eligible(child, items_below, eligible_N)
            if eligible == last - first and up > 0:
                below[above], inner_X[closed] = up, up
                above, closed = above + 1, closed + 1
            first = last
        count = above
    inner_X[:closed].sort()
    return closed


@compiled()
def _is_eligible(node: int, items_below: Any, eligible_N: Any) -> bool:
    return bool(eligible_N[node]) if len(eligible_N) else items_below[node] > 0


def eligible_leaves(tree: Tree, query: NDArray[np.int64], rows: NDArray[np.int64], mask_B: Sequence[NodeMask | None]) -> NDArray[np.int64]:
    """int64, ascending, each once: query · N + leaf of the pairs of a query and an item row whose leaf is eligible."""
    key = np.unique(query * tree.node_count + tree.leaf_of_item[rows])
    eligible: NDArray[np.int64] = key[_eligible(tree, mask_B, *np.divmod(key, tree.node_count))]
    return eligible


def parents_of(tree: Tree, key: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The parents of nodes (query · N + node, ascending), ascending, each once; and how many of the nodes each has."""
    query, node = np.divmod(key, tree.node_count)
    up = query * tree.node_count + tree.parent[node]  # sorted as `key` is, since children are contiguous
    first = np.flatnonzero(np.append(True, up[1:] != up[:-1])) if len(up) else np.empty(0, np.int64)
    return up[first], np.diff(np.append(first, len(up)))


def closed_nodes(
    tree: Tree,
    mask_B: Sequence[NodeMask | None],
    up: NDArray[np.int64],
    excluded: NDArray[np.int64],
    more: NDArray[np.int64] | int = 0,
) -> NDArray[np.int64]:
    """int64, ascending: the inner nodes (query · N + node) below which nothing eligible is left, the root aside.

    up, excluded  nodes above leaves, and how many of their eligible leaves are excluded; more: how many they have besides children
    """
    closed = [np.empty(0, np.int64)]
    while len(up):
        query, node = np.divmod(up, tree.node_count)
        children_C, of_C = tree.children(node)
        eligible = np.bincount(of_C[_eligible(tree, mask_B, query[of_C], children_C)], minlength=len(up))
        key = up[(excluded == eligible + more) & (node > 0)]  # the root is never scored
        closed.append(key)
        up, excluded = parents_of(tree, key)
        more = 0
    return np.sort(np.concatenate(closed))


def _eligible(tree: Tree, mask_B: Sequence[NodeMask | None], query: NDArray[np.int64], node: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each (query, node) pair is eligible before exclusions."""
    masks = list(dict.fromkeys(mask_B))
    is_eligible: NDArray[np.bool_] = tree.items_below[node] > 0 if masks[0] is None else masks[0].eligible_N[node]
    if len(masks) > 1:
        of_mask = np.array([masks.index(mask) for mask in mask_B])[query]
        for f, mask in enumerate(masks[1:], start=1):
            mine = of_mask == f
            is_eligible[mine] = tree.items_below[node[mine]] > 0 if mask is None else mask.eligible_N[node[mine]]
    return is_eligible


def padded_nodes(batch: int, nodes: int, key: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64[B, X] from sorted (query, node) keys; X ≥ 1."""
    query = key // nodes
    count = np.bincount(query, minlength=batch)
    padded = np.full((batch, max(1, int(count.max(initial=0)))), NO_NODE, np.int64)
    slot = np.arange(len(key)) - np.repeat(np.cumsum(count) - count, count)
    padded[query, slot] = key % nodes
    return padded
