"""Item-based collaborative filtering (Sarwar et al. 2001), the baseline of the tree papers. By scipy.sparse: a sparse product.

    sim(i, j) = |U_i ∩ U_j| / sqrt(|U_i| · |U_j|),   score(j | history) = Σ_{i ∈ history} sim(i, j)

Neither order nor repeats count. `training.neighbours` is what an expert makes of it.

Legend: B queries, I items, M results.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from espalier.errors import InvalidConfig
from training.data.interactions import Interactions
from training.data.user_item_matrix import user_item_matrix
from training.neighbours.neighbour_lists import NeighbourLists
from training.retrieval.scores import by_popularity, keep_best
from training.retrieval.task import Fitted, Task, Trial

Int64 = NDArray[np.int64]

BLOCK = 1024
"""Items handled at a time: bounds the memory of the sparse product."""
GRID = (10, 20, 50, 100, 200, 500, 1000, 2000)
"""Neighbours an item that are tried."""


@dataclass(frozen=True)
class ItemCf:
    """Similarities, in rows of an item's most similar ones, best first, ties by the lower row."""

    neighbours: NeighbourLists

    def limited(self, most: int) -> ItemCf:
        """The same with at most so many neighbours an item."""
        if most < 1:
            raise InvalidConfig("neighbours", most, "at least 1")
        return ItemCf(self.neighbours.limited(most))

    def rank(self, histories: Sequence[Int64], m: int, exclude_seen: bool) -> Int64:
        """int64[B, M = m]: the best items, ties by the lower row; then, where fewer than m have a score, the most popular others.

        A repeated history item counts once. Without `exclude_seen`, a history item comes back where another one is similar to it.
        """
        return self.neighbours.rank([np.unique(history) for history in histories], m, exclude_seen)


def fit_item_cf(interactions: Interactions, users: Int64, neighbours: int) -> ItemCf:
    """From `users` only (pass training users): the best `neighbours` of each item, itself left out. Memory grows with I · neighbours."""
    if neighbours < 1:
        raise InvalidConfig("neighbours", neighbours, "at least 1")
    matrix = user_item_matrix(interactions, users)
    by_item = matrix.T.tocsr()
    users_of_item = np.diff(by_item.indptr)
    values, columns, lengths = [np.zeros(0, np.float32)], [np.zeros(0, np.int32)], [0]
    kept, score = np.empty(neighbours, np.int64), np.empty(neighbours)
    for start in range(0, interactions.item_count, BLOCK):
        together = (by_item[start : start + BLOCK] @ matrix).tocsr()
        for item, (first, last) in enumerate(zip(together.indptr[:-1], together.indptr[1:], strict=True), start):
            others, count = together.indices[first:last], together.data[first:last]
            similarity = np.where(others == item, -np.inf, count / np.sqrt(users_of_item[item] * users_of_item[others]))
            lengths.append(keep_best(others, similarity.astype(np.float32), last - first, kept, score))
            columns.append(kept[: lengths[-1]].astype(np.int32))
            values.append(score[: lengths[-1]].astype(np.float32))
    offset = np.cumsum(lengths).astype(np.int64)
    return ItemCf(NeighbourLists(offset, np.concatenate(columns), np.concatenate(values), by_popularity(users_of_item)))


def item_cf(task: Task) -> Fitted:
    """Choose the number of neighbours from GRID, the smaller of equals. A deadline leaves out the larger ones."""
    begin, deadline = time.perf_counter(), task.deadline()
    pairs = task.validation_pairs()
    largest = fit_item_cf(task.split.lists, task.split.train, max(GRID))
    trials: list[Trial] = []
    for neighbours in GRID:
        if trials and deadline.is_over():
            break
        trials.append(Trial({"neighbours": neighbours}, task.measured(largest.limited(neighbours).rank, pairs)))
    best = max(trials, key=lambda trial: trial.figure).options
    fitted = largest.limited(best["neighbours"])
    ended = f"the search ended at its deadline after {len(trials)} of {len(GRID)} trials" if len(trials) < len(GRID) else None
    return Fitted(fitted.rank, best, fitted.neighbours.bytes, time.perf_counter() - begin, trials, ended)
