"""Item-based collaborative filtering (Sarwar et al. 2001), the baseline of the tree papers. By scipy.sparse: two sparse products.

Legend: B queries, I items, M results, N neighbours kept per item.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from espalier.errors import InvalidConfig, InvalidData
from espalier.metrics import precision_recall_f
from espalier.search import NO_ITEM
from training.data.interactions import Interactions
from training.data.splits import EvaluationPair
from training.data.user_item_matrix import history_matrix, user_item_matrix

Int64 = NDArray[np.int64]
Csr = sparse.csr_array[np.float64]

BLOCK = 1024
"""Items, or queries, handled at a time: bounds the memory of a sparse product."""


@dataclass(frozen=True)
class ItemCf:
    """neighbours_II: float64[I, I] sparse; row i holds the items most similar to i, best first, ties by the lower row."""

    neighbours_II: Csr

    def limited(self, neighbours: int) -> ItemCf:
        """The same with at most `neighbours` per item."""
        if neighbours < 1:
            raise InvalidConfig("neighbours", neighbours, "at least 1")
        length = np.diff(self.neighbours_II.indptr)
        kept = np.arange(self.neighbours_II.nnz) - np.repeat(self.neighbours_II.indptr[:-1], length) < neighbours
        offset = np.concatenate([[0], np.cumsum(np.minimum(length, neighbours))])
        return ItemCf(_csr(self.neighbours_II.data[kept], self.neighbours_II.indices[kept], offset, self.neighbours_II.shape[1]))

    def rank(self, histories: list[Int64], m: int, exclude_seen: bool) -> Int64:
        """int64[B, M = m]: items by score(j) = Σ_{i ∈ history} sim(i, j), ties by the lower row.

        A repeated history item counts once. Without `exclude_seen`, a history item comes back where another one is similar to it.
        Items that no history item is a neighbour of have no score and never come back: NO_ITEM fills the row.
        """
        if m < 1:
            raise InvalidConfig("m", m, "at least 1")
        rows_BM = np.full((len(histories), m), NO_ITEM, np.int64)
        for start in range(0, len(histories), BLOCK):
            history = history_matrix(histories[start : start + BLOCK], self.neighbours_II.shape[0])
            score = (history @ self.neighbours_II).tocsr()
            for b in range(history.shape[0]):
                items, scores = _row(score, b)
                if exclude_seen:
                    unseen = ~np.isin(items, _row(history, b)[0])
                    items, scores = items[unseen], scores[unseen]
                best = items[_best(items, scores, m)]
                rows_BM[start + b, : len(best)] = best
        return rows_BM


def fit_item_cf(interactions: Interactions, users: Int64, neighbours: int) -> ItemCf:
    """From `users` only (pass training users): sim(i, j) = |U_i ∩ U_j| / sqrt(|U_i| · |U_j|), the best `neighbours` of each item.

    An item is not its own neighbour. Memory grows with I · neighbours.
    """
    if neighbours < 1:
        raise InvalidConfig("neighbours", neighbours, "at least 1")
    matrix = user_item_matrix(interactions, users)
    by_item = matrix.T.tocsr()
    users_of_item = np.diff(by_item.indptr)
    values, columns, lengths = [np.zeros(0)], [np.zeros(0, np.int64)], []
    for start in range(0, interactions.item_count, BLOCK):
        together = (by_item[start : start + BLOCK] @ matrix).tocsr()
        for b in range(together.shape[0]):
            items, count = _row(together, b)
            others = items != start + b
            items, count = items[others], count[others]
            similarity = count / np.sqrt(users_of_item[start + b] * users_of_item[items])
            best = _best(items, similarity, neighbours)
            values.append(similarity[best])
            columns.append(items[best])
            lengths.append(len(best))
    offset = np.concatenate([[0], np.cumsum(lengths)])
    return ItemCf(_csr(np.concatenate(values), np.concatenate(columns), offset, interactions.item_count))


def tune_neighbours(
    interactions: Interactions,
    users: Int64,
    pairs: Sequence[EvaluationPair],
    *,
    m: int,
    exclude_seen: bool,
    grid: Sequence[int] = (10, 20, 50, 100, 200, 500, 1000, 2000),
) -> tuple[ItemCf, dict[int, float]]:
    """The Item-CF with the best mean recall@m on validation `pairs`, and the recall of every N of the grid; ties go to the smaller N."""
    if not pairs:
        raise InvalidData("pairs", [], "at least one validation pair")
    if not grid:
        raise InvalidConfig("grid", grid, "at least one number of neighbours")
    largest = fit_item_cf(interactions, users, max(grid))
    histories, relevant = [pair.history for pair in pairs], [pair.relevant for pair in pairs]
    recall = {}
    for neighbours in sorted(set(grid)):
        rows_BM = largest.limited(neighbours).rank(histories, m, exclude_seen)
        recall[neighbours] = float(precision_recall_f(rows_BM, relevant, m)[1].mean())
    return largest.limited(max(recall, key=lambda neighbours: recall[neighbours])), recall


def _row(matrix: Csr, row: int) -> tuple[Int64, NDArray[np.float64]]:
    start, stop = matrix.indptr[row], matrix.indptr[row + 1]
    return matrix.indices[start:stop].astype(np.int64), matrix.data[start:stop]


def _best(items: Int64, scores: NDArray[np.float64], count: int) -> Int64:
    """Places of the best `count` scores, best first, ties by the lower item row."""
    if len(scores) <= count:
        return np.lexsort((items, -scores))
    threshold = np.partition(scores, len(scores) - count)[len(scores) - count]
    contenders = np.flatnonzero(scores >= threshold)
    return contenders[np.lexsort((items[contenders], -scores[contenders]))][:count]


def _csr(values: NDArray[np.float64], columns: NDArray[np.integer], offset: NDArray[np.integer], items: int) -> Csr:
    return sparse.csr_array((values, columns, offset), shape=(len(offset) - 1, items))
