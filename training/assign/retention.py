"""How many points of a block each node of a tree gets: by the rule of XReg's Algorithm 1, or by that of the authors' code.

Legend: N nodes, H levels, I items.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from espalier.tree import Tree

from ..arrays import Float64

SLOPE = -0.05
"""Change of the kept share from one level to the next, in the authors' code."""


@dataclass(frozen=True, eq=False)
class Retention:
    """A node gets the largest of its share of the block, its level's share of its parent's points, and `least`; at most all of them.

    of_block_N   float64[N]: share of the block
    of_parent_H  float64[H + 1]: share of the parent's points, of the nodes of each level
    least        points; the number that an item is to get
    """

    of_block_N: Float64
    of_parent_H: Float64
    least: int

    def most(self, node: int, level: int, block: int, parent: int) -> int:
        """How many points a node gets from a block of `block` points, of which its parent got `parent`."""
        count = max(float(self.of_block_N[node]) * block, float(self.of_parent_H[level]) * parent, self.least)
        return min(parent, math.ceil(count - 1e-9))


def by_share(tree: Tree, count_I: NDArray[np.int64], points: int, factor: float, least: int) -> Retention:
    """The rule of the paper: `factor` times the node's share of training points (Algorithm 1, F · frac(n)).

    count_I  int64[I]: training points of each item, of `points` in all. A node's points are the sum over its items. The paper counts a
             point with two items below the node once, the sum counts it twice
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

    Bisection finds the intercept with which `factor` points an item of a file of `points` points reach the last inner level.
    """
    last = tree.height - 1
    target = factor * tree.item_count / tree.level_size(last) / max(points, 1)

    def kept_shares(intercept: float) -> Float64:
        return np.clip(intercept + SLOPE * np.arange(tree.height + 1), 0, 1)

    low, high = 0.0, 1 - SLOPE * (tree.height + 1)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if kept_shares(middle)[1 : last + 1].prod() < target else (low, middle)
    return Retention(np.zeros(tree.node_count), kept_shares(high), least)
