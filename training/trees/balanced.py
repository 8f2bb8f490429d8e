"""Balanced trees over items in a given order, in random order and by category. A k-means tree (kmeans.py) differs only in the order."""

from __future__ import annotations

import numpy as np

from espalier.arrays import Int32, Int64
from espalier.tree import Tree, tree_from_children


def balanced_tree(order: Int64, branching: int) -> Tree:
    """Leaves hold the items in `order` (int64[I], item rows 0 … I − 1 each once), left to right.

    The height is H = ⌈log_b I⌉, at least 1. Levels 0 … H − 1 are complete, b^h nodes on level h, and the subtrees of a level differ by at
    most one item; nodes of level H − 1 have 1 … b children, so no leaf is empty.
    """
    height = tree_height(len(order), branching)
    children = [np.full(branching**h, branching, np.int64) for h in range(height - 1)]
    children.append(np.diff(level_edges(len(order), branching ** (height - 1))))
    return tree_from_children(children, order)


def tree_height(items: int, branching: int) -> int:
    """⌈log_b I⌉ by integers (logarithms would be off by one at powers), at least 1; b is at least 2."""
    height = 1
    while branching**height < items:
        height += 1
    return height


def level_edges(items: int, nodes: int) -> Int64:
    """int64[nodes + 1]: node k of a level of `nodes` holds the positions edges[k] … edges[k+1] − 1 of the order.

    ⌊k · I / nodes⌋: sizes differ by at most one, and the edges of a level are among those of every level below it.
    """
    return np.arange(nodes + 1, dtype=np.int64) * items // nodes


def random_tree(items: int, branching: int, *, seed: int) -> Tree:
    """Items in random order: the tree of the synthetic studies (OTM §5.1), and the floor for all others. A seed gives one tree."""
    return balanced_tree(np.random.default_rng(seed).permutation(items).astype(np.int64), branching)


def category_tree(category_of_item_I: Int32, branching: int, *, seed: int) -> Tree:
    """The first tree of TDM (§3.5): the items of a category fill consecutive leaves in random order; categories are in random order.

    category_of_item_I   int32[I], −1 for an item without a category; these form one more category
    """
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(category_of_item_I)).astype(np.int64)
    position_of_category = rng.permutation(int(category_of_item_I.max()) + 2)
    return balanced_tree(shuffled[np.argsort(position_of_category[category_of_item_I[shuffled] + 1], kind="stable")], branching)
