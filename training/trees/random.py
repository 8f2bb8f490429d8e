"""A balanced tree over items in random order: the tree of the synthetic studies (OTM §5.1), and the floor for all others."""

from __future__ import annotations

import numpy as np

from espalier.tree import Tree
from training.trees.balanced import balanced_tree


def random_tree(items: int, branching: int, *, seed: int) -> Tree:
    """The same seed gives the same tree."""
    return balanced_tree(np.random.default_rng(seed).permutation(items).astype(np.int64), branching)
