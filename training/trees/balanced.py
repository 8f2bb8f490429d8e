"""The balanced tree over items in a given order. Random, category and k-means trees differ in the order alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from espalier.errors import InvalidConfig
from espalier.tree import Tree, tree_from_children

Int64 = NDArray[np.int64]


def balanced_tree(order: Int64, branching: int) -> Tree:
    """Leaves hold the items in `order` (int64[I], item rows 0 … I − 1 each once), left to right.

    The height is H = ⌈log_b I⌉, at least 1. Levels 0 … H − 1 are complete, b^h nodes on level h, and the subtrees of a level differ by at
    most one item; nodes of level H − 1 have 1 … b children, so no leaf is empty. Raises InvalidConfig for a branching below 2.
    """
    height = tree_height(len(order), branching)
    children = [np.full(branching**h, branching, np.int64) for h in range(height - 1)]
    children.append(np.diff(level_edges(len(order), branching ** (height - 1))))
    return tree_from_children(children, order)


def tree_height(items: int, branching: int) -> int:
    """⌈log_b I⌉ by integers (logarithms would be off by one at powers), at least 1."""
    if branching < 2:
        raise InvalidConfig("branching", branching, "at least 2")
    if items < 1:
        raise InvalidConfig("items", items, "at least 1")
    height = 1
    while branching**height < items:
        height += 1
    return height


def level_edges(items: int, nodes: int) -> Int64:
    """int64[nodes + 1]: node k of a level of `nodes` holds the places edges[k] … edges[k+1] − 1 of the order.

    ⌊k · I / nodes⌋: sizes differ by at most one, and the edges of a level are among those of every level below it.
    """
    return np.arange(nodes + 1, dtype=np.int64) * items // nodes
