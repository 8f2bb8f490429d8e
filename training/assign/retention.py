"""How many points of a block go down to each node of a tree: the rule of XReg's Algorithm 1, and that of the authors' code.

Legend: N nodes, H levels, I items.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from espalier.tree import Tree

Float64 = NDArray[np.float64]
SLOPE = -0.05
"""Of the share that the authors' code keeps, a level."""


@dataclass(frozen=True, eq=False)
class Retention:
    """A node gets the largest of: its share of the block, its level's share of what its parent got, and `least`, as far as there are any.

    of_block_N   float64[N]
    of_parent_H  float64[H + 1]: of the nodes of each level
    least        points; how many an item is to get
    """

    of_block_N: Float64
    of_parent_H: Float64
    least: int

    def most(self, node: int, level: int, block: int, parent: int) -> int:
        """How many points a node gets, of a block of so many, of which its parent got so many."""
        wanted = max(float(self.of_block_N[node]) * block, float(self.of_parent_H[level]) * parent, self.least)
        return min(parent, math.ceil(wanted - 1e-9))


def by_share(tree: Tree, count_I: NDArray[np.int64], points: int, factor: float, least: int) -> Retention:
    """The rule of the paper: `factor` times the node's share of training points (Algorithm 1, F · frac(n)).

    count_I  training points of each item, of `points`. A node's points are counted as the sum over its items, which is at least what the
             paper counts: a point with two items below the node
    """
    counts_N = np.zeros(tree.node_count)
    counts_N[tree.leaf_of_item] = count_I
    for level in range(tree.height, 0, -1):
        nodes = slice(tree.level(level).start, tree.level(level).stop)
        np.add.at(counts_N, tree.parent[nodes], counts_N[nodes])
    share_N = np.minimum(1, counts_N / max(points, 1))
    return Retention(np.minimum(1, factor * share_N), np.zeros(tree.height + 1), least)


def by_depth(tree: Tree, points: int, factor: float, least: int) -> Retention:
    """The rule of the authors' code: nodes of level h keep intercept + SLOPE · h of their parent's points.

    The intercept is found by bisection, so that `factor` points an item reach the last inner level of a file of so many points.
    """
    last = tree.height - 1
    target = factor * tree.item_count / tree.level_size(last) / max(points, 1)

    def kept(intercept: float) -> Float64:
        return np.clip(intercept + SLOPE * np.arange(tree.height + 1), 0, 1)

    low, high = 0.0, 1 - SLOPE * (tree.height + 1)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if kept(middle)[1 : last + 1].prod() < target else (low, middle)
    return Retention(np.zeros(tree.node_count), kept(high), least)
