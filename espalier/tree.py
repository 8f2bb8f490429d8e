"""The tree over the catalogue: nodes numbered level by level, children contiguous.

Knows topology and the item of each leaf. Does not know node rows, scorers or searches.

Legend: N nodes, I items, L levels = H + 1 (root is level 0, leaves are level H).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from espalier.arrays import Int64
from espalier.errors import InvalidTree

EMPTY_LEAF = -1
"""Value of `leaf_item` where a leaf holds no item."""

BLOCK = 1 << 15
"""Nodes of one NumPy call that holds the interpreter's lock: a service loads trees while it answers requests."""


@dataclass(frozen=True)
class Tree:
    """A rooted tree whose leaves are all on the last level, one item each.

    level_offset  int64[H+2]   first node of each level; the last entry is N
    first_child   int64[N+1]   children of n are first_child[n] … first_child[n+1] − 1 (none for leaves)
    leaf_item     int64[#leaves]   item row of each leaf, EMPTY_LEAF where there is none

    Raises InvalidTree on construction unless: level 0 has only the root, every inner node has at least one child and
    its children are on the next level, every node but the root has exactly one parent, and the item rows are 0 … I − 1, each once.
    """

    level_offset: Int64
    first_child: Int64
    leaf_item: Int64

    def __post_init__(self) -> None:
        for name in ("level_offset", "first_child", "leaf_item"):
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != np.int64 or array.ndim != 1:
                raise InvalidTree(f"{name}: expected a one-dimensional int64 array, got {_describe(array)}")
        offset, first = self.level_offset, self.first_child
        if len(offset) < 3 or offset[0] != 0 or offset[1] != 1 or not bool(np.all(offset[1:] > offset[:-1])):  # differences could wrap
            raise InvalidTree(f"level_offset: expected 0, 1, then strictly rising with at least two levels, got {_describe(offset)}")
        if len(first) - 1 != offset[-1]:
            raise InvalidTree(f"first_child: expected {int(offset[-1]) + 1} entries (nodes + 1), got {len(first)}")
        leaves = int(offset[-2])
        if not bool(np.all(first[1 : leaves + 1] > first[:leaves])):
            raise InvalidTree("first_child: every inner node needs at least one child")
        if not np.array_equal(first[offset[:-1]], offset[1:]):
            raise InvalidTree("first_child: the children of a level must fill exactly the next level")
        if not bool(np.all(first[leaves:] == offset[-1])):
            raise InvalidTree("first_child: leaves must have no children")
        if len(self.leaf_item) != offset[-1] - offset[-2]:
            raise InvalidTree(f"leaf_item: expected {offset[-1] - offset[-2]} entries, one per leaf, got {len(self.leaf_item)}")
        items = self.leaf_item[self.leaf_item != EMPTY_LEAF]
        if len(items) == 0:
            raise InvalidTree("leaf_item: the tree holds no item")
        if items.min() < 0 or items.max() >= len(items) or bool(np.any(np.bincount(items, minlength=len(items)) != 1)):
            raise InvalidTree("leaf_item: item rows must be 0 … I − 1, each in exactly one leaf")

    @property
    def height(self) -> int:
        """H, the level of the leaves."""
        return len(self.level_offset) - 2

    @property
    def node_count(self) -> int:
        """N, root and leaves included."""
        return int(self.level_offset[-1])

    @property
    def leaf_count(self) -> int:
        return len(self.leaf_item)

    @cached_property
    def item_count(self) -> int:
        """I, the number of leaves that hold an item."""
        return int(np.count_nonzero(self.leaf_item != EMPTY_LEAF))

    @property
    def leaf_offset(self) -> int:
        """Node number of the first leaf."""
        return int(self.level_offset[-2])

    @cached_property
    def parent(self) -> Int64:
        """int64[N]: the parent of every node; −1 for the root."""
        parent = np.full(self.node_count, -1, np.int64)
        for begin in range(0, self.leaf_offset, BLOCK):
            nodes = np.arange(begin, min(begin + BLOCK, self.leaf_offset))
            first = self.first_child[begin : begin + len(nodes) + 1]
            parent[first[0] : first[-1]] = np.repeat(nodes, np.diff(first))
        return parent

    @cached_property
    def leaf_of_item(self) -> Int64:
        """int64[I]: node number of the leaf that holds each item."""
        leaf = np.empty(self.item_count, np.int64)
        slots = np.flatnonzero(self.leaf_item != EMPTY_LEAF)
        for begin in range(0, len(slots), BLOCK):
            block = slots[begin : begin + BLOCK]
            leaf[self.leaf_item[block]] = block + self.leaf_offset
        return leaf

    @cached_property
    def items_below(self) -> Int64:
        """int64[N]: the number of items in each node's subtree."""
        count = np.zeros(self.node_count, np.int64)
        count[self.leaf_offset :] = self.leaf_item != EMPTY_LEAF
        for level in range(self.height - 1, -1, -1):
            nodes = self.level(level)
            below = count[: self.level_offset[level + 2]]
            count[nodes.start : nodes.stop] = np.add.reduceat(below, self.first_child[nodes.start : nodes.stop])
        return count

    @cached_property
    def max_children(self) -> tuple[int, ...]:
        """The largest number of children on each of the levels 0 … H − 1."""
        children = np.diff(self.first_child)
        return tuple(int(children[self.level(h).start : self.level(h).stop].max()) for h in range(self.height))

    def level(self, h: int) -> range:
        """The node numbers of level h."""
        return range(int(self.level_offset[h]), int(self.level_offset[h + 1]))

    def level_size(self, h: int) -> int:
        return int(self.level_offset[h + 1] - self.level_offset[h])

    def is_uniform(self, h: int) -> bool:
        """True when all nodes of level h have the same number of children, so that child numbers are arithmetic."""
        return self.level_size(h) * self.max_children[h] == self.level_size(h + 1)

    def children(self, nodes: Int64) -> tuple[Int64, Int64]:
        """int64[C] and int64[C]: the children of some nodes (int64[K]), node after node, and each one's parent as a position 0 … K − 1."""
        first, count = self.first_child[nodes], self.first_child[nodes + 1] - self.first_child[nodes]
        slot = np.repeat(np.arange(len(nodes)), count)
        return np.arange(len(slot)) - np.repeat(np.cumsum(count) - count, count) + first[slot], slot

    def ancestors(self, leaf: Int64) -> Int64:
        """int64[..., H+1]: the path root … leaf of leaf node numbers; negative entries (padding) give −1 on every level."""
        path = np.empty((*leaf.shape, self.height + 1), np.int64)
        node = leaf
        for h in range(self.height, -1, -1):
            path[..., h] = node
            node = np.where(node >= 0, self.parent[node], -1)
        return path

    def start_level(self, beam_size: int) -> int:
        """The first level with more nodes than the beam, or H when there is none: no level above it needs pruning."""
        return int(self.start_levels(np.array(beam_size)))

    def start_levels(self, beam_sizes: Int64) -> Int64:
        """int64, same shape: see `start_level`."""
        levels: Int64 = 1 + np.searchsorted(np.diff(self.level_offset)[1:-1], beam_sizes, "right")  # levels never shrink
        return levels


def complete_tree(leaf_item: Int64, branching: int) -> Tree:
    """The complete tree of the given branching over `leaf_item` (int64, a power of `branching` long; EMPTY_LEAF allowed)."""
    if branching < 2:
        raise InvalidTree(f"branching: expected at least 2, got {branching}")
    sizes = [len(leaf_item)]
    while sizes[-1] > 1:
        if sizes[-1] % branching:
            raise InvalidTree(f"leaf_item: expected a power of {branching} leaves, got {len(leaf_item)}")
        sizes.append(sizes[-1] // branching)
    children = [[branching] * size for size in reversed(sizes[1:])]
    return tree_from_children(children, leaf_item)


def tree_from_children(children: Sequence[Sequence[int] | Int64], leaf_item: Int64) -> Tree:
    """A tree from the number of children of every inner node.

    children    for each level 0 … H − 1, the child counts of its nodes in order
    leaf_item   int64[#leaves]: the item row of each leaf
    """
    counts = [np.asarray(level, np.int64) for level in children]
    sizes = [1, *(int(level.sum()) for level in counts)]
    for h, level in enumerate(counts):
        if len(level) != sizes[h]:
            raise InvalidTree(f"children: expected {sizes[h]} counts on level {h}, got {len(level)}")
    offset = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    inner = np.concatenate([[1], 1 + np.cumsum(np.concatenate(counts))]) if counts else np.ones(1)
    first = np.concatenate([inner, np.full(int(offset[-1] - offset[-2]), offset[-1])]).astype(np.int64)
    return Tree(offset, first, np.ascontiguousarray(leaf_item, np.int64))


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        head = np.array2string(value[:4], separator=", ")
        return f"{value.dtype}{list(value.shape)} {head}"
    return type(value).__name__
