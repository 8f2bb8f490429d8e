"""Which shard holds which subtree of a tree.

The subtrees of one level, the cut level, are assigned in the tree's order: each goes to the shard with the fewest items so far.
Neighbouring subtrees answer the same queries. They go to different shards, and every shard searches its subtrees with the full beam.

The layout depends only on the tree and the number of shards. It must never change, since shards on disk were cut by it. Knows no files.

Legend: N nodes, I items.
"""

from __future__ import annotations

import heapq

import numpy as np

from espalier.arrays import Bool, Int32, Int64
from espalier.errors import InvalidConfig
from espalier.manifest import MAX_SHARDS
from espalier.tree import EMPTY_LEAF, Tree

SUBTREES = 64
"""Least number of subtrees a shard, if the tree has that many above its leaves."""
NO_SHARD = -1


def shard_items(tree: Tree, count: int) -> tuple[Int64, ...]:
    """int64: the item rows of each of `count` shards, ascending.

    tree  of a forest the first one
    Raises InvalidConfig if the tree has fewer subtrees with items than shards.
    """
    shard_of_leaf = node_shards(tree, count)[tree.leaf_offset :]
    items = []
    for shard in range(count):
        leaf_items = tree.leaf_item[shard_of_leaf == shard]
        items.append(np.sort(leaf_items[leaf_items != EMPTY_LEAF]))
    return tuple(items)


def node_shards(tree: Tree, count: int) -> Int32:
    """int32[N]: the shard of every node from the cut level down, NO_SHARD above it. Raises as `shard_items`."""
    level = cut_level(tree, count)
    shard_N = np.full(tree.node_count, NO_SHARD, np.int32)
    nodes = tree.level(level)
    shard_sizes = [(0, shard) for shard in range(count)]  # a heap: fewest items first, then the lowest number
    shards = []
    for items in tree.items_below[nodes.start : nodes.stop].tolist():
        items_so_far, shard = shard_sizes[0]
        heapq.heapreplace(shard_sizes, (items_so_far + items, shard))
        shards.append(shard)
    shard_of_level = np.array(shards, np.int32)
    shard_N[nodes.start : nodes.stop] = shard_of_level
    for h in range(level, tree.height):
        above, below = tree.level(h), tree.level(h + 1)
        shard_of_level = np.repeat(shard_of_level, np.diff(tree.first_child[above.start : above.stop + 1]))
        shard_N[below.start : below.stop] = shard_of_level
    return shard_N


def cut_level(tree: Tree, count: int) -> int:
    """The shallowest level that has, for each of `count` shards, SUBTREES nodes with items below; else the level above the leaves.

    Raises InvalidConfig if the level above the leaves has fewer nodes with items below than shards.
    """
    most = min(_with_items(tree, tree.height - 1), MAX_SHARDS)
    if not 1 <= count <= most:
        raise InvalidConfig("shards", count, f"1 to {most}, the subtrees of this tree above its leaves that hold items")
    levels = range(tree.height - 1)
    return next((level for level in levels if _with_items(tree, level) >= SUBTREES * count), tree.height - 1)


def nodes_above_items(tree: Tree, items: Int64, vacant: bool = False) -> Int64:
    """int64: the leaves of some items (int64 rows) and their ancestors, ascending: a shard's nodes in a forest's later trees.

    vacant  add the parents whose leaves are all vacant, where live items may go; done for one of the shards
    """
    is_kept_N = np.zeros(tree.node_count, np.bool_)
    is_kept_N[tree.leaf_of_item[items]] = True
    if vacant:
        is_kept_N[tree.leaf_offset :] |= tree.items_below[tree.parent[tree.leaf_offset :]] == 0
    return with_ancestors(tree, is_kept_N)


def with_ancestors(tree: Tree, is_kept_N: Bool) -> Int64:
    """int64: the nodes that are kept (bool[N], changed) and all above them, ascending."""
    for h in range(tree.height, 0, -1):
        nodes = tree.level(h)
        kept_nodes_of_level = np.flatnonzero(is_kept_N[nodes.start : nodes.stop]) + nodes.start
        is_kept_N[tree.parent[kept_nodes_of_level]] = True
    return np.flatnonzero(is_kept_N)


def _with_items(tree: Tree, level: int) -> int:
    nodes = tree.level(level)
    return int(np.count_nonzero(tree.items_below[nodes.start : nodes.stop]))
