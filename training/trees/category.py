"""The first tree of TDM (§3.5): categories in random order, the items of a category next to each other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from espalier.errors import InvalidData
from espalier.tree import Tree
from training.trees.balanced import balanced_tree


def category_tree(category_of_item_I: NDArray[np.int32], branching: int, *, seed: int) -> Tree:
    """Items of one category fill consecutive leaves, in random order inside; the categories' order is random too.

    category_of_item_I   int32[I], −1 for an item without a category; those form one category of their own
    """
    if category_of_item_I.ndim != 1 or len(category_of_item_I) == 0 or category_of_item_I.min() < -1:
        raise InvalidData("category_of_item_I", category_of_item_I, "int32[I], at least one item, each −1 or more")
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(category_of_item_I)).astype(np.int64)
    place_of_category = rng.permutation(int(category_of_item_I.max()) + 2)
    return balanced_tree(shuffled[np.argsort(place_of_category[category_of_item_I[shuffled] + 1], kind="stable")], branching)
