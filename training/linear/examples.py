"""What each inner node's children learn from: points with the children that are their positives.

A node gets the points with a positive below it (teacher forcing), the points whose beam over the levels above keeps it (matcher-aware
negatives), or both: XR-Linear, §3.3 of papers' product search.

Legend: B points, N nodes of the children's level, R points of one node.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from espalier.tree import Tree
from training.data.xmc import LabelledPoints
from training.specification.linear import LinearOptions

Int64 = NDArray[np.int64]
Kept = tuple[Int64, Int64]
"""Points and nodes: each point with a node that its beam keeps."""


@dataclass(frozen=True, eq=False)
class Examples:
    """One node's points. A point is a positive of some of its children and a negative of the others.

    points          int64[R], ascending
    positive_from   int64[R + 1]: where each point's positives begin
    positive_child  int32: the children, counted from the node's first one
    positive_cost   float32: C of each positive; the cost of negatives is the options'
    """

    points: Int64
    positive_from: Int64
    positive_child: NDArray[np.int32]
    positive_cost: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Positives:
    """Points with the nodes of one level above their labels: int64, int64 and float32 of one length, each pair once, by point."""

    point: Int64
    node: Int64
    weight: NDArray[np.float32]

    @staticmethod
    def of_leaves(data: LabelledPoints, tree: Tree, weighted: bool) -> Positives:
        """The labels' leaves. Weights are 1, or the labels' divided by their mean."""
        labels = data.labels
        weights = labels.data / labels.data.mean() if weighted and labels.nnz else np.ones(labels.nnz, np.float32)
        point = np.repeat(np.arange(len(data)), np.diff(labels.indptr))
        return _distinct(point, tree.leaf_of_item[labels.indices], weights)

    def of_parents(self, tree: Tree) -> Positives:
        """Those of the level above; a node has the largest weight below it."""
        return _distinct(self.point, tree.parent[self.node], self.weight)


def _distinct(point: Int64, node: Int64, weight: NDArray[np.float32]) -> Positives:
    order = np.lexsort((node, point))
    point, node = point[order], node[order]
    first = np.flatnonzero(np.append(True, (point[1:] != point[:-1]) | (node[1:] != node[:-1])))[: len(point)]
    largest = np.maximum.reduceat(weight[order], first) if len(first) else weight
    return Positives(point[first], node[first], largest)


class LevelExamples:
    """The examples of each node of a level, whose children have the given positives.

    kept  points and nodes of the level that beams keep; None: none
    """

    def __init__(self, tree: Tree, level: int, positives: Positives, kept: Kept | None, options: LinearOptions) -> None:
        parents = tree.level(level)
        edges = np.arange(parents.start, parents.stop + 1)
        parent = tree.parent[positives.node]
        order = np.lexsort((positives.node, positives.point, parent))
        self._tree, self._first = tree, parents.start
        self._point, self._node = positives.point[order], positives.node[order]
        self._cost = (options.cost * positives.weight[order]).astype(np.float32)
        self._begin = np.searchsorted(parent[order], edges)
        self._kept: Int64 | None = None
        self._only_kept = options.negatives == "matcher"
        if kept is not None:
            point, node = kept
            order = np.lexsort((point, node))
            self._kept, self._kept_begin = point[order], np.searchsorted(node[order], edges)

    def of(self, p: int) -> Examples:
        """The examples of node p."""
        k = p - self._first
        own = slice(self._begin[k], self._begin[k + 1])
        positive, child, cost = self._point[own], self._node[own] - self._tree.first_child[p], self._cost[own]
        if self._kept is None:
            points = np.unique(positive)
        else:
            points = self._kept[self._kept_begin[k] : self._kept_begin[k + 1]]
            if self._only_kept:
                among = np.isin(positive, points)
                positive, child, cost = positive[among], child[among], cost[among]
            else:
                points = np.union1d(positive, points)
        ends = np.searchsorted(positive, points, side="right")
        positive_from = np.concatenate([[0], ends]).astype(np.int64)
        return Examples(points, positive_from, child.astype(np.int32), cost)
