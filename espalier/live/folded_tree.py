"""A tree with live leaves in it: where each leaf of the folded tree comes from.

Inner levels stay. A live leaf whose slot is that of a trained leaf takes its place, which must be vacant; others follow behind the trained
children of their parent, in ascending order of their slots. So leaves of both are in the order of (parent, slot).

Legend: N nodes, I items of the bundle, n live leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from espalier.errors import InvalidData
from espalier.tree import EMPTY_LEAF, Tree, tree_from_children

Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class FoldedTree:
    """A folded tree.

    source  int64[#leaves]: the trained leaf that a leaf was, counted from the first one, or −1 − k for the k-th live leaf
    """

    tree: Tree
    source: Int64

    @property
    def live(self) -> NDArray[np.bool_]:
        """bool[#leaves]: which leaves are live ones."""
        return self.source < 0


def folded_tree(tree: Tree, row_I: Int64, parent_n: Int64, slot_n: Int64, row_n: Int64) -> FoldedTree:
    """The tree with live leaves at their slots.

    row_I     each trained item's row in the fold; −1 where its leaf becomes vacant
    parent_n  nodes of the level above the leaves · slot_n: positions among their children · row_n: the live leaves' item rows

    Raises InvalidData where a live leaf's parent has no leaves, or its slot is taken.
    """
    span = tree.level(tree.height - 1)
    outside = np.flatnonzero((parent_n < span.start) | (parent_n >= span.stop) | (slot_n < 0))
    if len(outside):
        k = int(outside[0])
        expected = f"a parent from {span.start} to {span.stop - 1} and a slot of at least 0"
        raise InvalidData("placement", f"parent {parent_n[k]}, slot {slot_n[k]}", expected)
    leaf_item = np.append(row_I, EMPTY_LEAF)[tree.leaf_item]  # EMPTY_LEAF, −1, takes the last
    source = np.arange(tree.leaf_count)
    count_n = tree.first_child[parent_n + 1] - tree.first_child[parent_n]
    inside = np.flatnonzero(slot_n < count_n)
    at = tree.first_child[parent_n[inside]] - tree.leaf_offset + slot_n[inside]
    taken = np.flatnonzero(leaf_item[at] != EMPTY_LEAF)
    order = np.lexsort((slot_n, parent_n))
    twice = np.flatnonzero((np.diff(parent_n[order]) == 0) & (np.diff(slot_n[order]) == 0))
    if len(taken) or len(twice):
        k = int(inside[taken[0]]) if len(taken) else int(order[twice[0]])
        raise InvalidData("placement", f"parent {parent_n[k]}, slot {slot_n[k]}", "a slot that no other leaf has")
    leaf_item[at], source[at] = row_n[inside], -1 - inside
    behind = order[slot_n[order] >= count_n[order]]
    end = tree.first_child[parent_n[behind] + 1] - tree.leaf_offset
    counts = [np.diff(tree.first_child[tree.level(h).start : tree.level(h).stop + 1]) for h in range(tree.height)]
    counts[-1] = counts[-1] + np.bincount(parent_n[behind] - span.start, minlength=len(span))
    return FoldedTree(tree_from_children(counts, np.insert(leaf_item, end, row_n[behind])), np.insert(source, end, -1 - behind))
