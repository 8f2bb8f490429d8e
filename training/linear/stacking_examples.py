"""Training examples of the stacking network: candidates that trees find for points that they were not trained on.

Trees that have seen a point are too sure of it. The tables, too, are made only of the points that the trees were trained on.

Legend: B points, I items, C candidates, X features of candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array

from espalier.arrays import Float32, Int64
from espalier.chunks import TreeChunks
from espalier.engines.linear.chunk_search import BeamParams, ChunkSearch
from espalier.engines.stacker import KNOWN, Scratch, candidate_features, table_arrays
from espalier.manifest import Ranking
from espalier.search import NO_ITEM
from espalier.stacking import StackingTables

from ..data.csr import Csr, as_rows
from ..data.xmc import LabelledPoints
from ..linear.choosing import items_at
from ..linear.stacking_tables import Weighing, tables_of

BLOCK = 1024
"""Points that are searched at a time."""

Train = Callable[[LabelledPoints], Sequence[TreeChunks]]
"""Training points → trees like the model's."""


class StackingCandidates(NamedTuple):
    """The candidates of points, best first: item rows int64[B, C], −1 as padding, and ranks float32[B, C], −inf there."""

    rows_BC: Int64
    ranks_BC: Float32


@dataclass(frozen=True, eq=False)
class StackingExamples:
    """features float32[B, C, X], targets float32[B, C], item rows of candidates int64[B, C], and positions of the points int64[B]."""

    features: Float32
    targets: Float32
    rows: Int64
    points: Int64

    def take(self, positions: Int64) -> StackingExamples:
        return StackingExamples(self.features[positions], self.targets[positions], self.rows[positions], self.points[positions])


def examples_of(
    data: LabelledPoints,
    held_positions: Int64,
    training_positions: Int64,
    weighing: Weighing,
    train: Train,
    ranking: Ranking,
    depth: int,
    beam_size: int,
    points: int,
    seed: int,
) -> StackingExamples:
    """Train trees on `training` points and take their candidates for the held-out points."""
    training_points, held_out = data.take(training_positions), data.take(held_positions)
    rows_BC, ranks_BC = candidates_of(train(training_points), ranking, held_out.points, depth, beam_size)
    tables = tables_of(training_points, weighing, points, seed)
    log_count = np.log1p(np.expm1(tables.log_count.astype(np.float64)) * len(data) / len(training_points)).astype(np.float32)
    features = features_of(tables._replace(log_count=log_count), rows_BC, ranks_BC, held_out.points)
    targets = weighing.targets(held_out.labels)
    point_BC = np.broadcast_to(np.arange(len(held_positions))[:, None], rows_BC.shape)
    values = np.asarray(csr_array(targets)[point_BC.ravel(), np.maximum(rows_BC, 0).ravel()]).reshape(rows_BC.shape)
    return StackingExamples(features, np.where(rows_BC >= 0, values, 0).astype(np.float32), rows_BC, held_positions)


def candidates_of(trees: Sequence[TreeChunks], ranking: Ranking, points: Csr, depth: int, beam_size: int) -> StackingCandidates:
    """The best `depth` items by the log of the mean of the trees' scores; of a forest, among the best 4 · depth leaves of each tree."""
    searches = [ChunkSearch(tree, chunks, ranking) for tree, chunks in trees]
    try:
        blocks = [points[begin : begin + BLOCK] for begin in range(0, points.shape[0], BLOCK)]
        rows, ranks = zip(*(_candidates(trees, searches, block, depth, beam_size) for block in blocks), strict=True)
    finally:
        for search in searches:
            search.close()
    return StackingCandidates(np.concatenate(rows), np.concatenate(ranks))


def _candidates(
    trees: Sequence[TreeChunks], searches: Sequence[ChunkSearch], points: Csr, depth: int, beam_size: int
) -> StackingCandidates:
    """`candidates_of` for one block of points."""
    count, items = points.shape[0], trees[0].tree.item_count
    count_of_tree = depth if len(trees) == 1 else min(4 * depth, items)
    total: Any = csr_array((count, items))
    for (tree, _), search in zip(trees, searches, strict=True):
        result = search.search(as_rows(points), BeamParams.uniform(count, beam_size, count_of_tree))
        rows_BM = items_at(tree, result.leaves_BM)
        if len(trees) == 1:
            return StackingCandidates(rows_BM, result.ranks_BM)
        is_item = rows_BM >= 0
        indptr = np.concatenate([[0], np.cumsum(is_item.sum(1))])
        total = total + csr_array((np.exp(result.ranks_BM[is_item].astype(np.float64)), rows_BM[is_item], indptr), shape=(count, items))
    rows_BC, ranks_BC = np.full((count, depth), NO_ITEM, np.int64), np.full((count, depth), -np.inf, np.float32)
    for b in range(count):
        row = slice(total.indptr[b], total.indptr[b + 1])
        best = np.argsort(-total.data[row], kind="stable")[:depth]
        rows_BC[b, : len(best)] = total.indices[row][best]
        with np.errstate(divide="ignore"):
            ranks_BC[b, : len(best)] = np.log(total.data[row][best] / len(trees))
    return StackingCandidates(rows_BC, ranks_BC)


def features_of(tables: StackingTables, rows_BC: Int64, ranks_BC: Float32, points: Csr) -> Float32:
    """float32[B, C, X]: as the service computes them."""
    arrays, scratch = table_arrays(tables), Scratch.of(len(tables.log_count), tables.points)
    rows, out = as_rows(points), np.zeros((*rows_BC.shape, KNOWN), np.float32)
    scratch_CX = np.empty((rows_BC.shape[1], KNOWN))
    for b in range(len(out)):
        count, entries = int((rows_BC[b] >= 0).sum()), slice(rows.indptr[b], rows.indptr[b + 1])
        if count:
            candidate_features(rows_BC[b], ranks_BC[b], count, rows.indices[entries], rows.values[entries], arrays, scratch, scratch_CX)
            out[b, :count] = scratch_CX[:count]
    return out
