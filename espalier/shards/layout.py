"""Which shard holds which subtree of a tree.

The subtrees of one level, the cut level, are dealt out in the tree's order: each goes to the shard that holds the fewest items so far.
Neighbours, which answer the same queries, thus go to different shards, and every shard searches some of them with the full beam.

A function of the tree and the number of shards alone: whoever has the tree knows the layout. What it gives must never change, since
shards on disk were cut by it. Knows no files.

Legend: N nodes, I items.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from espalier.errors import InvalidConfig
from espalier.manifest import MAX_SHARDS
from espalier.tree import EMPTY_LEAF, Tree

SUBTREES = 64
"""Subtrees for each shard, at least, where the tree has so many above its leaves."""
NO_SHARD = -1


def shard_items(tree: Tree, count: int) -> tuple[NDArray[np.int64], ...]:
    """int64: the item rows of each of `count` shards, ascending.

    tree  of a forest the first one
    Raises InvalidConfig where the tree has fewer subtrees with items than shards.
    """
    of_leaf = node_shards(tree, count)[tree.leaf_offset :]
    items = []
    for shard in range(count):
        held = tree.leaf_item[of_leaf == shard]
        items.append(np.sort(held[held != EMPTY_LEAF]))
    return tuple(items)


def node_shards(tree: Tree, count: int) -> NDArray[np.int32]:
    """int32[N]: the shard of every node from the cut level down, NO_SHARD above it. Raises as `shard_items`."""
    level = cut_level(tree, count)
    shard_N = np.full(tree.node_count, NO_SHARD, np.int32)
    nodes = tree.level(level)
    held = [(0, shard) for shard in range(count)]  # a heap: fewest items first, then the lowest number
    dealt = []
    for items in tree.items_below[nodes.start : nodes.stop].tolist():
        so_far, shard = held[0]
        heapq.heapreplace(held, (so_far + items, shard))
        dealt.append(shard)
    own = np.array(dealt, np.int32)
    shard_N[nodes.start : nodes.stop] = own
    for h in range(level, tree.height):
        above, below = tree.level(h), tree.level(h + 1)
        own = np.repeat(own, np.diff(tree.first_child[above.start : above.stop + 1]))
        shard_N[below.start : below.stop] = own
    return shard_N


def cut_level(tree: Tree, count: int) -> int:
    """The shallowest level with SUBTREES nodes that hold items for each of `count` shards, or the one above the leaves.

    Raises InvalidConfig where not even that one has a subtree with items for each shard.
    """
    most = min(_with_items(tree, tree.height - 1), MAX_SHARDS)
    if not 1 <= count <= most:
        raise InvalidConfig("shards", count, f"1 to {most}, the subtrees of this tree above its leaves that hold items")
    levels = range(tree.height - 1)
    return next((level for level in levels if _with_items(tree, level) >= SUBTREES * count), tree.height - 1)


def kept_nodes(tree: Tree, shard_N: NDArray[np.int32], shard: int) -> NDArray[np.int64]:
    """int64: the nodes of one shard's tree, ascending: its subtrees and their ancestors. shard_N: `node_shards` of the tree."""
    return with_ancestors(tree, shard_N == shard)


def nodes_above_items(tree: Tree, items: NDArray[np.int64], vacant: bool = False) -> NDArray[np.int64]:
    """int64: the leaves of some items (int64 rows) and their ancestors, ascending: what a shard keeps of a forest's other trees.

    vacant  parents of vacant leaves alone, too, under which live items may hang: for one of the shards
    """
    is_kept_N = np.zeros(tree.node_count, np.bool_)
    is_kept_N[tree.leaf_of_item[items]] = True
    if vacant:
        is_kept_N[tree.leaf_offset :] |= tree.items_below[tree.parent[tree.leaf_offset :]] == 0
    return with_ancestors(tree, is_kept_N)


def with_ancestors(tree: Tree, is_kept_N: NDArray[np.bool_]) -> NDArray[np.int64]:
    """int64: the nodes that are kept (bool[N], changed) and all above them, ascending."""
    for h in range(tree.height, 0, -1):
        nodes = tree.level(h)
        kept = np.flatnonzero(is_kept_N[nodes.start : nodes.stop]) + nodes.start
        is_kept_N[tree.parent[kept]] = True
    return np.flatnonzero(is_kept_N)


def _with_items(tree: Tree, level: int) -> int:
    """How many nodes of a level have items below them."""
    nodes = tree.level(level)
    return int(np.count_nonzero(tree.items_below[nodes.start : nodes.stop]))
