"""The training examples of each inner node's children: points with the children that are their positives.

A node gets the points with a positive below it (teacher forcing), the points whose beam over the levels above keeps it (matcher-aware
negatives), or both: XR-Linear, §3.3 of papers' product search.

Legend: B points, N nodes of the children's level, R points of one node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from espalier.arrays import Float32, Int32, Int64
from espalier.tree import Tree

from ..data.xmc import LabelledPoints
from ..specification.linear import LinearOptions


class BeamNodes(NamedTuple):
    """Each point with each node that its beam keeps: int64 arrays of one length."""

    point: Int64
    node: Int64


@dataclass(frozen=True, eq=False)
class Examples:
    """One node's points. A point is a positive of some of its children and a negative of the others.

    points          int64[R], ascending
    positive_from   int64[R + 1]: where each point's positives begin
    positive_child  int32: the children, counted from the node's first one
    positive_cost   float32: C of each positive
    positive_target float32: the target of its classifier; None: 1
    cost            float32[R]: C of each point's negatives; None: the options'
    """

    points: Int64
    positive_from: Int64
    positive_child: Int32
    positive_cost: Float32
    positive_target: Float32 | None = None
    cost: Float32 | None = None

    def of_relevance(self, relevance: Float32, cost: float, of_root: bool) -> Examples:
        """The same points with targets and costs of XReg's Eq. 5.

        relevance  float32: m_c in (0, 1], the largest relevance below each positive c

        A point visits the node n with the probability s = m_n, the largest of its positives' (the root: 1), and then the child c with
        z = m_c / m_n. Costs are in proportion to s and average `cost` over the node's points, as in the authors' code. A point
        that only its beam brings here has the mean s.
        """
        count_R = np.diff(self.positive_from)
        share_R = np.ones(len(count_R), np.float32)
        if len(relevance) and not of_root:
            visits = count_R > 0
            share_R[visits] = np.maximum.reduceat(relevance, self.positive_from[:-1][visits])
            share_R[~visits] = share_R[visits].mean()
        cost_R = (share_R * (cost / share_R.mean(dtype=np.float64))).astype(np.float32) if len(share_R) else share_R
        target = (relevance / np.repeat(share_R, count_R)).astype(np.float32)
        return Examples(self.points, self.positive_from, self.positive_child, np.repeat(cost_R, count_R), target, cost_R)


@dataclass(frozen=True, eq=False)
class Positives:
    """Points with the nodes of one level above their labels: int64, int64 and float32 of one length, each pair once, by point."""

    point: Int64
    node: Int64
    weight: Float32

    @staticmethod
    def of_leaves(data: LabelledPoints, tree: Tree, options: LinearOptions) -> Positives:
        """The labels' leaves. Weights are the labels' divided by their maximum (relevance) or mean (`weighted`), or 1."""
        labels = data.labels
        weights = np.ones(labels.nnz, np.float32)
        if labels.nnz and options.loss == "relevance":
            weights = labels.data / labels.data.max()
        elif labels.nnz and options.weighted:
            weights = labels.data / labels.data.mean()
        point = np.repeat(np.arange(len(data)), np.diff(labels.indptr))
        return _distinct(point, tree.leaf_of_item[labels.indices], weights)

    def of_parents(self, tree: Tree) -> Positives:
        """The positives of the level above; a node has the largest weight below it."""
        return _distinct(self.point, tree.parent[self.node], self.weight)


def _distinct(point: Int64, node: Int64, weight: Float32) -> Positives:
    order = np.lexsort((node, point))
    point, node = point[order], node[order]
    first = np.flatnonzero(np.append(True, (point[1:] != point[:-1]) | (node[1:] != node[:-1])))[: len(point)]
    largest = np.maximum.reduceat(weight[order], first) if len(first) else weight
    return Positives(point[first], node[first], largest)


class LevelExamples:
    """The examples of each node of a level, whose children have the given positives.

    beam_nodes  of the level; None: no matcher-aware negatives
    """

    def __init__(self, tree: Tree, level: int, positives: Positives, beam_nodes: BeamNodes | None, options: LinearOptions) -> None:
        parents = tree.level(level)
        edges = np.arange(parents.start, parents.stop + 1)
        parent = tree.parent[positives.node]
        order = np.lexsort((positives.node, positives.point, parent))
        self._tree, self._first = tree, parents.start
        self._point, self._node = positives.point[order], positives.node[order]
        self._weight, self._options, self._is_root = positives.weight[order], options, level == 0
        self._begin = np.searchsorted(parent[order], edges)
        self._beam_points: Int64 | None = None
        self._only_beam = options.negatives == "matcher"
        if beam_nodes is not None:
            order = np.lexsort((beam_nodes.point, beam_nodes.node))
            self._beam_points, self._beam_begin = beam_nodes.point[order], np.searchsorted(beam_nodes.node[order], edges)

    def of(self, p: int) -> Examples:
        k = p - self._first
        entries = slice(self._begin[k], self._begin[k + 1])
        positive, child, weight = self._point[entries], self._node[entries] - self._tree.first_child[p], self._weight[entries]
        if self._beam_points is None:
            points = np.unique(positive)
        else:
            points = self._beam_points[self._beam_begin[k] : self._beam_begin[k + 1]]
            if self._only_beam:
                in_beam = np.isin(positive, points)
                positive, child, weight = positive[in_beam], child[in_beam], weight[in_beam]
            else:
                points = np.union1d(positive, points)
        ends = np.searchsorted(positive, points, side="right")
        positive_from = np.concatenate([[0], ends]).astype(np.int64)
        examples = Examples(points, positive_from, child.astype(np.int32), (self._options.known_cost * weight).astype(np.float32))
        if self._options.loss == "relevance":
            return examples.of_relevance(weight, self._options.known_cost, self._is_root)
        return examples
