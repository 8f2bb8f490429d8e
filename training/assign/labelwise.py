"""Labelwise prediction (XReg, Algorithm 1): for every item, the points of one block that it is most relevant to.

All points start at the root. Each node passes a child the points that rank it highest; `Retention` says how many. Below the last inner
node every item keeps its best points. In a forest, a pair that some tree keeps gets the mean of all trees' scores. A tree whose last inner
node above the item did not get the point counts 0.

Legend: R points at a node, C children, F features, N nodes, H levels, I items.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from espalier.arrays import Array, Bool, Float32, Float64, Int64
from espalier.chunks import Chunks
from espalier.compiled_code import compiled
from espalier.engines.reference import ranks_of
from espalier.manifest import Ranking
from espalier.masks.eligibility import node_mask
from espalier.packed_chunks import widened
from espalier.scores import scores_of_ranks
from espalier.text.sparse_rows import SparseRows
from espalier.tree import Tree

SLOPE = -0.05
"""Change of the kept share from one level to the next, in the authors' code."""
HELD = 1 << 20
"""Pairs of a tree that may come before each point keeps its best ones."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Items with points: item int64, point int64 (its position in the block), score float32; each pair once, by item."""

    item: Int64
    point: Int64
    score: Float32

    def take(self, positions: Array) -> Pairs:
        return Pairs(self.item[positions], self.point[positions], self.score[positions])

    @staticmethod
    def concatenated(groups: Sequence[Pairs]) -> Pairs:
        return Pairs(*(np.concatenate([getattr(group, name) for group in groups]) for name in ("item", "point", "score")))


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


class ScoredTree(NamedTuple):
    """A tree with its scorers and its retention."""

    tree: Tree
    chunks: Chunks
    retention: Retention


class _Visit(NamedTuple):
    """A node with the points that reached it, ascending, and their ranks."""

    node: int
    points_R: Int64
    ranks_R: Float32


class Labelwise:
    """Predicts block after block. `eligible_I` bool[I]: whether an item passes the filter; `per_item`: most points of an item."""

    def __init__(self, trees: Sequence[ScoredTree], ranking: Ranking, eligible_I: Bool, per_item: int, threads: int = 1) -> None:
        self._trees = [tree._replace(chunks=widened(tree.chunks)) for tree in trees]
        self._ranking, self._per_item, self._threads = ranking, per_item, threads
        self._eligible = [node_mask(tree.tree, eligible_I).eligible_N for tree in trees]
        self._of_thread = threading.local()

    def predict(self, points: SparseRows, per_point: int | None = None) -> Pairs:
        """The pairs of a block: at most `per_item` for an item and tree; with `per_point`, the best of each point instead."""
        trees = range(len(self._trees))
        with ThreadPoolExecutor(self._threads) as pool:
            visits_T = [self._last_visits(t, points, pool) for t in trees]
            of_tree = None if per_point is None else per_point * len(trees)  # more than per_point: means of trees decide
            pairs_T = [
                _joined(pool.map(lambda visit, t=t: self._best_below(t, points, visit, of_tree), visits_T[t]), of_tree) for t in trees
            ]
            pairs = pairs_T[0]
            if len(trees) > 1:
                pairs = _distinct(Pairs.concatenated(pairs_T))
                total = np.zeros(len(pairs.item))
                for t in trees:
                    for positions, scores in pool.map(lambda visit, t=t: self._scores_below(t, points, visit, pairs), visits_T[t]):
                        total[positions] += scores
                pairs = Pairs(pairs.item, pairs.point, (total / len(trees)).astype(np.float32))
        return pairs if per_point is None else best_of_points(pairs, per_point)

    def _last_visits(self, t: int, points: SparseRows, pool: ThreadPoolExecutor) -> list[_Visit]:
        tree = self._trees[t].tree
        visits = [_Visit(0, np.arange(len(points)), np.zeros(len(points), np.float32))]
        for level in range(tree.height - 1):

            def passed(visit: _Visit, level: int = level) -> list[_Visit]:
                return self._passed_on(t, level + 1, points, visit)

            visits = [below for several in pool.map(passed, visits) for below in several]
        return visits

    def _passed_on(self, t: int, level: int, points: SparseRows, visit: _Visit) -> list[_Visit]:
        """The node's eligible children, each with the points that it gets."""
        children_C, ranks_RC = self._ranks(t, points, visit)
        child_visits = []
        for c, child in enumerate(children_C.tolist()):
            most = self._trees[t].retention.most(child, level, len(points), len(visit.points_R))
            positions = best_positions(ranks_RC[:, c], most)
            if len(positions):
                child_visits.append(_Visit(child, visit.points_R[positions], ranks_RC[positions, c]))
        return child_visits

    def _best_below(self, t: int, points: SparseRows, visit: _Visit, per_point: int | None) -> Pairs:
        """The best points of each item below a last inner node, or the best items of each point: at ties more."""
        leaves_C, ranks_RC = self._ranks(t, points, visit)
        if per_point is None:
            positions_C = [best_positions(ranks_RC[:, c], self._per_item) for c in range(len(leaves_C))]
            position = np.concatenate([*positions_C, np.empty(0, np.int64)])
            column = np.repeat(np.arange(len(leaves_C)), [len(rows) for rows in positions_C])
        else:
            others = max(0, len(leaves_C) - per_point)
            least_R1 = np.partition(ranks_RC, others, axis=1)[:, others : others + 1]
            position, column = np.nonzero((ranks_RC >= least_R1) & (ranks_RC > -np.inf))
        items = self._items(t, leaves_C)
        return Pairs(items[column], visit.points_R[position], scores_of_ranks(self._ranking, ranks_RC[position, column]))

    def _scores_below(self, t: int, points: SparseRows, visit: _Visit, pairs: Pairs) -> tuple[Int64, Float32]:
        """Positions and scores of the pairs with an item and a point of a last inner node. `pairs` are sorted by item, then by point."""
        leaves_C, ranks_RC = self._ranks(t, points, visit)
        items = self._items(t, leaves_C)
        begins, ends = (np.searchsorted(pairs.item, items, side) for side in ("left", "right"))
        pair_positions = np.concatenate([*map(np.arange, begins, ends), np.empty(0, np.int64)]).astype(np.int64)
        column = np.repeat(np.arange(len(items)), ends - begins)
        position = np.minimum(np.searchsorted(visit.points_R, pairs.point[pair_positions]), len(visit.points_R) - 1)
        is_present = visit.points_R[position] == pairs.point[pair_positions]
        return pair_positions[is_present], scores_of_ranks(self._ranking, ranks_RC[position[is_present], column[is_present]])

    def _items(self, t: int, leaves_C: Int64) -> Int64:
        tree = self._trees[t].tree
        return tree.leaf_item[leaves_C - tree.leaf_offset]

    def _ranks(self, t: int, points: SparseRows, visit: _Visit) -> tuple[Int64, Float32]:
        """A node's eligible children, and their ranks float32[R, C]; −inf where one is not finite."""
        tree, chunks, _ = self._trees[t]
        if not hasattr(self._of_thread, "row_of"):
            self._of_thread.row_of = np.full(chunks.width, -1, np.int32)
        begin, end = int(tree.first_child[visit.node]), int(tree.first_child[visit.node + 1])
        children = begin + np.flatnonzero(self._eligible[t][begin:end])
        rows = slice(int(chunks.chunk_row[visit.node]), int(chunks.chunk_row[visit.node + 1]))
        logits_RC = np.tile(chunks.bias[begin:end], (len(visit.points_R), 1))
        scorers = (chunks.row_feature[rows], chunks.row_entry[rows.start : rows.stop + 1], chunks.entry_child, chunks.entry_weight)
        _add_products(points.indptr, points.indices, points.values, visit.points_R, scorers, self._of_thread.row_of, logits_RC)
        ranks_RC = ranks_of(self._ranking, logits_RC[:, children - begin], visit.ranks_R[:, None])
        return children, np.where(np.isfinite(ranks_RC), ranks_RC, np.float32(-np.inf))


def by_share(tree: Tree, count_I: Int64, points: int, factor: float, least: int) -> Retention:
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


def best_of_points(pairs: Pairs, per_point: int) -> Pairs:
    """The pairs with the `per_point` best items of each point. At ties the lower item row wins."""
    order = np.lexsort((pairs.item, -pairs.score, pairs.point))
    is_best = np.zeros(len(order), np.bool_)
    point = pairs.point[order]
    is_best[order] = np.arange(len(order)) - np.searchsorted(point, point) < per_point
    return pairs.take(is_best)


def best_positions(ranks_R: Float32, most: int) -> Int64:
    """Ascending positions of the `most` (at least 1) highest ranks, without −inf. At ties the lower position wins."""
    finite = np.flatnonzero(ranks_R > -np.inf)
    if len(finite) <= most:
        return finite
    ranks_F = ranks_R[finite]
    cut = np.partition(ranks_F, len(finite) - most)[len(finite) - most]
    is_best_F = ranks_F > cut
    is_best_F[np.flatnonzero(ranks_F == cut)[: most - int(is_best_F.sum())]] = True
    best: Int64 = finite[is_best_F]
    return best


def _joined(groups: Iterable[Pairs], per_point: int | None) -> Pairs:
    """The pairs of one tree by item, then by point; of more than HELD the `per_point` best of each point."""
    held, count, most = [Pairs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))], 0, HELD
    for group in groups:
        held.append(group)
        count += len(group.item)
        if per_point is not None and count > most:
            held = [best_of_points(Pairs.concatenated(held), per_point)]
            count = len(held[0].item)
            most = max(HELD, 2 * count)
    return _distinct(Pairs.concatenated(held))


def _distinct(pairs: Pairs) -> Pairs:
    """Each pair once, by item, then by point, with one of its scores."""
    order = np.lexsort((pairs.point, pairs.item))
    item, point = pairs.item[order], pairs.point[order]
    return pairs.take(order[(np.diff(item, prepend=-1) != 0) | (np.diff(point, prepend=-1) != 0)])


@compiled(fastmath={"reassoc", "contract", "arcp", "nsz"})
def _add_products(indptr: Array, indices: Array, values: Array, points_R: Array, scorers: Any, row_of: Array, logits_RC: Array) -> None:
    """Add the products of some points with the scorers of a node's children to the logits.

    scorers  the node's part of Chunks: row_feature, row_entry, and the entries
    row_of   int32[F] of −1, scratch
    """
    row_feature, row_entry, entry_child, entry_weight = scorers
    for row in range(len(row_feature)):
        row_of[row_feature[row]] = row
    for r in range(len(points_R)):
        for j in range(indptr[points_R[r]], indptr[points_R[r] + 1]):
            row = row_of[indices[j]]
            if row >= 0:
                for e in range(row_entry[row], row_entry[row + 1]):
                    logits_RC[r, entry_child[e]] += values[j] * entry_weight[e]
    for row in range(len(row_feature)):
        row_of[row_feature[row]] = -1
