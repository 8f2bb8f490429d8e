"""Which nodes a query may visit: those with an eligible item below them.

Turns eligible items into a mask over the nodes, and the item rows that a query excludes into nodes: the excluded leaves, and the inner
nodes below which nothing eligible is left. Masking those inside the search (instead of dropping items afterwards) is what makes
min(m, eligible) results come back. Knows no filters: see `filters.py`.

Legend: B queries, E excluded items, X excluded nodes, N nodes, I items, R handles of live items.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.compiled_code import compiled
from espalier.entry_lists import BORN, DIED, KEY, NEXT, NO_ENTRIES, OTHER_KEY, EntryArrays, entry_of
from espalier.errors import InvalidQuery
from espalier.read_only import read_only
from espalier.search import NodeMask, SearchParams
from espalier.tree import Tree

NO_NODE = -1
(NO_MASK,) = read_only(np.empty(0, np.bool_))
NO_LIVE_LEAVES = NO_ENTRIES, np.empty(0, np.int32)


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
    handle_B   int64 each    the handles of the live ones, ascending
    """

    leaves_BX: NDArray[np.int64]
    inner_BX: NDArray[np.int64]
    count_B: NDArray[np.int64]
    handle_B: tuple[NDArray[np.int64], ...]

    def take(self, queries: NDArray[np.int64]) -> ExcludedNodes:
        """Those of some queries (int64 positions)."""
        handle_B = tuple(self.handle_B[b] for b in queries.tolist())
        return ExcludedNodes(self.leaves_BX[queries], self.inner_BX[queries], self.count_B[queries], handle_B)


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


def excluded_nodes(
    tree: Tree,
    exclude_BE: NDArray[np.int64],
    mask_B: Sequence[NodeMask | None] | None = None,
    live: tuple[EntryArrays, NDArray[np.int32]] = NO_LIVE_LEAVES,
    live_BR: Sequence[NDArray[np.bool_] | None] = (),
) -> ExcludedNodes:
    """The nodes that lists of item rows (int64[B, E], NO_ITEM as padding, repeats allowed) exclude under the queries' masks.

    An inner node is excluded when all of its eligible children are, and above leaves its eligible live leaves too. O(E · levels with
    excluded nodes).

    live     the entries of live leaves, and int32[I]: the handle of each trained item that was put or deleted, −1 of others
    live_BR  as `EligibleNodes` has them
    """
    batch = len(exclude_BE)
    arrays = read_only(tree.leaf_of_item, tree.parent, tree.first_child, tree.items_below)
    rows_BE, handle_I = read_only(exclude_BE, live[1])
    parts = []
    for rows_E, mask, live_R in zip(rows_BE, mask_B or (None,) * batch, live_BR or (None,) * batch, strict=True):
        eligible_N, shown_R = read_only(NO_MASK if mask is None else mask.eligible_N, NO_MASK if live_R is None else live_R)
        parts.append(_excluded(rows_E, arrays, eligible_N, tree.height, (live[0], shown_R, handle_I)))
    leaf_B, inner_B, handle_B = zip(*parts, strict=True) if parts else ((), (), ())
    count_B = np.array([len(leaf_X) + len(handle_X) for leaf_X, handle_X in zip(leaf_B, handle_B, strict=True)], np.int64)
    return ExcludedNodes(padded_lists(leaf_B), padded_lists(inner_B), count_B, handle_B)


def padded_lists(lists: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """int64[B, X], X ≥ 1: lists of nodes or item rows, −1 behind them."""
    if len(lists) == 1 and len(lists[0]):
        return lists[0][None]
    padded = np.full((len(lists), max([1, *map(len, lists)])), NO_NODE, np.int64)
    for row, numbers in zip(padded, lists, strict=True):
        row[: len(numbers)] = numbers
    return padded


@compiled()
def _excluded(exclude_E: Any, tree: Any, eligible_N: Any, height: int, live: Any) -> Any:
    """What item rows exclude, each int64 and ascending: leaves that are eligible, inner nodes, and handles of eligible live leaves.

    tree        leaf_of_item, parent, first_child, items_below
    eligible_N  empty without a mask
    live        entries of live leaves; bool: eligible handles, later ones are not; the handle of each trained item
    """
    leaf_of_item, _, _, items_below = tree
    entries, live_R, handle_I = live
    leaf_E, handle_E, parent_E = np.empty_like(exclude_E), np.empty_like(exclude_E), np.empty_like(exclude_E)
    leaves, handles, items = 0, 0, len(leaf_of_item)
    for row in exclude_E:
        if 0 <= row < items and _is_eligible(leaf_of_item[row], items_below, eligible_N):
            leaf_E[leaves] = leaf_of_item[row]
            leaves += 1
        handle = row - items
        if row < items:
            handle = np.int64(handle_I[row]) if 0 <= row < len(handle_I) else np.int64(-1)
        if 0 <= handle < len(live_R) and live_R[handle]:
            entry = entry_of(handle, entries)
            if entry > 0:
                handle_E[handles], parent_E[handles] = handle, entries.rows[entry, KEY]
                handles += 1
    leaf_X, handle_X, parent_X = np.unique(leaf_E[:leaves]), np.unique(handle_E[:handles]), np.unique(parent_E[:handles])
    return leaf_X, _closed(leaf_X, parent_X, handle_X, tree, eligible_N, height, live), handle_X


@compiled()
def _closed(leaf_X: Any, parent_X: Any, handle_X: Any, tree: Any, eligible_N: Any, height: int, live: Any) -> Any:
    """int64, ascending: the inner nodes below which nothing eligible is left but excluded leaves and live leaves of excluded handles.

    parent_X  the parents of those live leaves
    The root is never scored, so it is not among them.
    """
    _, parent, first_child, items_below = tree
    most = len(leaf_X) + len(parent_X)
    inner_X, closed = np.empty(most * height, np.int64), 0
    below, count, beside = leaf_X, len(leaf_X), 0
    while count > 0 or beside < len(parent_X):
        above, kept, first = np.empty(most, np.int64), 0, 0
        while first < count or beside < len(parent_X):
            up, last = parent[below[first]] if first < count else parent_X[beside], first
            if beside < len(parent_X) and parent_X[beside] <= up:
                up = parent_X[beside]
                beside += 1
            while last < count and parent[below[last]] == up:
                last += 1
            eligible = 0
            for child in range(first_child[up], first_child[up + 1]):
                eligible += _is_eligible(child, items_below, eligible_N)
            if up > 0 and eligible == last - first and not _has_live_leaf(up, handle_X, live):
                above[kept], inner_X[closed] = up, up
                kept, closed = kept + 1, closed + 1
            first = last
        below, count = above, kept
    inner_X[:closed].sort()
    return inner_X[:closed]


@compiled()
def _is_eligible(node: int, items_below: Any, eligible_N: Any) -> bool:
    return bool(eligible_N[node]) if len(eligible_N) else items_below[node] > 0


@compiled()
def _has_live_leaf(node: int, handle_X: Any, live: Any) -> bool:
    """Whether an eligible live leaf hangs under a node, of another handle than some."""
    entries, live_R, _ = live
    entry = entries.first[node] if node < len(entries.first) else np.int64(0)
    while entry > 0:
        handle = entries.rows[entry, OTHER_KEY]
        if entries.rows[entry, BORN] <= entries.moment < entries.rows[entry, DIED] and handle < len(live_R) and live_R[handle]:
            at = np.searchsorted(handle_X, handle)
            if at == len(handle_X) or handle_X[at] != handle:
                return True
        entry = entries.rows[entry, NEXT]
    return False
