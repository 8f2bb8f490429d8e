"""Nodes with too many children, split so that a tree of graphs may be written.

Live items crowd under some parents, and beams are padded to the largest of them: more than twice a level's nodes is refused
(`bundle_writer`). A node of too many children becomes several, next to each other, with its row and equal shares of its children in their
order. They have one rank, so the nodes below keep their scores. They all take places in a beam, so a search finds a little less at the
same beam size. The root is never split: it is alone on its level.

Legend: N nodes, c children.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from espalier.arrays import Int64
from espalier.tree import Tree, tree_from_children


@dataclass(frozen=True, eq=False)
class SplitTree:
    """source_N: int64[N], the node of the original tree that each node comes from; split_count: how many nodes were split."""

    tree: Tree
    source_N: Int64
    split_count: int


def split_for_padding(tree: Tree) -> SplitTree:
    """Split as few nodes as padding demands; if none, the result holds the same tree."""
    counts = [np.diff(tree.first_child[tree.level(h).start : tree.level(h).stop + 1]) for h in range(tree.height)]
    sources = [np.arange(tree.level(h).start, tree.level(h).stop) for h in range(tree.height + 1)]
    split_count = 0
    for h in range(tree.height - 1, 0, -1):  # splits widen the level above
        pieces = -(-counts[h] // most_children(counts[h]))
        node = np.repeat(np.arange(len(pieces)), pieces)
        piece = np.arange(len(node)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        quotient, remainder = np.divmod(counts[h], pieces)
        split_count += int(np.count_nonzero(pieces > 1))
        counts[h - 1] = np.add.reduceat(pieces, np.cumsum(counts[h - 1]) - counts[h - 1])
        counts[h] = quotient[node] + (piece < remainder[node])
        sources[h] = sources[h][node]
    if not split_count:
        return SplitTree(tree, np.concatenate(sources), 0)
    return SplitTree(tree_from_children(counts, tree.leaf_item), np.concatenate(sources), split_count)


def most_children(count: Int64) -> int:
    """The largest number of children c such that padding stays allowed once the nodes of a level have at most c each.

    count  int64: the children of the level's nodes, at least 1
    """
    children = int(count.sum())
    nodes_of = np.bincount(count)
    sizes = np.flatnonzero(nodes_of)
    for most in range(int(count.max()), 1, -1):
        pieces = -(-sizes // most)
        largest = int((-(-sizes // pieces)).max())
        if int(pieces @ nodes_of[sizes]) * largest <= 2 * children:
            return most
    return 1
