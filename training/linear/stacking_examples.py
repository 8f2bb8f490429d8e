"""What the network of a bundle's stacking learns from: candidates that trees find for points that they were not trained on.

Trees that have seen a point are too sure of it. The tables are made of the trees' points alone, too.

Legend: B points, I items, C candidates, X features of candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from espalier.chunks import TreeChunks
from espalier.engines.linear.chunk_search import BeamParams, ChunkSearch
from espalier.engines.stacked_keys import KNOWN, Scratch, candidate_features, table_arrays
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
"""Trees as the model has them, learned from some points."""


Candidates = tuple[NDArray[np.int64], NDArray[np.float32]]
"""What a search found for points, best first: rows int64[B, C], −1 as padding, and ranks float32[B, C], −inf there."""


@dataclass(frozen=True, eq=False)
class Examples:
    """What the network learns from: features float32[B, C, X], targets float32[B, C], candidates' rows int64[B, C] and the points' own."""

    features: NDArray[np.float32]
    targets: NDArray[np.float32]
    rows: NDArray[np.int64]
    points: NDArray[np.int64]

    def take(self, places: NDArray[np.int64]) -> Examples:
        return Examples(self.features[places], self.targets[places], self.rows[places], self.points[places])


def examples_of(
    data: LabelledPoints,
    held: NDArray[np.int64],
    kept: NDArray[np.int64],
    weighing: Weighing,
    train: Train,
    ranking: Ranking,
    depth: int,
    beam_size: int,
    points: int,
    seed: int,
) -> Examples:
    """What trees of the kept points find for those held out."""
    part, queries = data.take(kept), data.take(held)
    rows_BC, ranks_BC = candidates_of(train(part), ranking, queries.points, depth, beam_size)
    tables = tables_of(part, weighing, points, seed)
    log_count = np.log1p(np.expm1(tables.log_count.astype(np.float64)) * len(data) / len(part)).astype(np.float32)
    features = features_of(tables._replace(log_count=log_count), rows_BC, ranks_BC, queries.points)
    targets = weighing.targets(queries.labels)
    point_BC = np.broadcast_to(np.arange(len(held))[:, None], rows_BC.shape)
    values = np.asarray(csr_array(targets)[point_BC.ravel(), np.maximum(rows_BC, 0).ravel()]).reshape(rows_BC.shape)
    return Examples(features, np.where(rows_BC >= 0, values, 0).astype(np.float32), rows_BC, held)


def candidates_of(trees: Sequence[TreeChunks], ranking: Ranking, points: Csr, depth: int, beam_size: int) -> Candidates:
    """The best `depth` items by the log of the mean of the trees' scores; of a forest, among the best 4 · depth leaves of each tree."""
    searches = [ChunkSearch(tree, chunks, ranking) for tree, chunks in trees]
    try:
        blocks = [points[begin : begin + BLOCK] for begin in range(0, points.shape[0], BLOCK)]
        rows, ranks = zip(*(_candidates(trees, searches, block, depth, beam_size) for block in blocks), strict=True)
    finally:
        for search in searches:
            search.close()
    return np.concatenate(rows), np.concatenate(ranks)


def _candidates(trees: Sequence[TreeChunks], searches: Sequence[ChunkSearch], points: Csr, depth: int, beam_size: int) -> Candidates:
    """Those of a block of points."""
    count, items = points.shape[0], trees[0].tree.item_count
    wanted = depth if len(trees) == 1 else min(4 * depth, items)
    total: Any = csr_array((count, items))
    for (tree, _), search in zip(trees, searches, strict=True):
        found = search.search(as_rows(points), BeamParams.uniform(count, beam_size, wanted))
        rows_BM = items_at(tree, found.leaves_BM)
        if len(trees) == 1:
            return rows_BM, found.ranks_BM
        real = rows_BM >= 0
        indptr = np.concatenate([[0], np.cumsum(real.sum(1))])
        total = total + csr_array((np.exp(found.ranks_BM[real].astype(np.float64)), rows_BM[real], indptr), shape=(count, items))
    rows_BC, ranks_BC = np.full((count, depth), NO_ITEM, np.int64), np.full((count, depth), -np.inf, np.float32)
    for b in range(count):
        own = slice(total.indptr[b], total.indptr[b + 1])
        best = np.argsort(-total.data[own], kind="stable")[:depth]
        rows_BC[b, : len(best)] = total.indices[own][best]
        with np.errstate(divide="ignore"):
            ranks_BC[b, : len(best)] = np.log(total.data[own][best] / len(trees))
    return rows_BC, ranks_BC


def features_of(tables: StackingTables, rows_BC: NDArray[np.int64], ranks_BC: NDArray[np.float32], points: Csr) -> NDArray[np.float32]:
    """float32[B, C, X]: as the service computes them."""
    arrays, scratch = table_arrays(tables), Scratch.of(len(tables.log_count), tables.points)
    rows, out = as_rows(points), np.zeros((*rows_BC.shape, KNOWN), np.float32)
    wide_CX = np.empty((rows_BC.shape[1], KNOWN))
    for b in range(len(out)):
        count, own = int((rows_BC[b] >= 0).sum()), slice(rows.indptr[b], rows.indptr[b + 1])
        if count:
            candidate_features(rows_BC[b], ranks_BC[b], count, rows.indices[own], rows.values[own], arrays, scratch, wide_CX)
            out[b, :count] = wide_CX[:count]
    return out
