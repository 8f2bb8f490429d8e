"""Item-based collaborative filtering (Sarwar et al. 2001), the baseline of the tree papers.

    sim(i, j) = |U_i ∩ U_j| / sqrt(|U_i| · |U_j|),   score(j | history) = Σ_{i ∈ history} sim(i, j)

Order and repeats do not count; all users do. Pairs and memory are as in `training.neighbours.cooccurrence`. `training.neighbours` is the
tuned version of this method, which is one setting of its options.

Legend: B queries, M results.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import numpy as np

from espalier.arrays import Int64

from ..data.interactions import Interactions
from ..neighbours.cooccurrence import LONGEST, count_pairs, lists_of
from ..neighbours.fit import scored_pairs
from ..neighbours.neighbour_lists import NeighbourLists
from ..retrieval.task import Fitted, Task, Trial
from ..retrieval.tuning import Options

GRID = (10, 20, 50, 100, 200, 500, 1000, 2000)
"""Numbers of neighbours an item that are tried."""
COSINE: Options = {"row": 0.5, "column": 0.5, "shrink": 0.0, "power": 1.0, "back": 1.0}


def rank(similar: NeighbourLists, histories: Sequence[Int64], m: int, exclude_seen: bool) -> Int64:
    """int64[B, M = m]: the best items, ties by the lower row; if fewer than m have a score, then the most popular others.

    A repeated history item counts once. Without `exclude_seen`, a history item comes back if another one is similar to it.
    """
    return similar.rank([np.unique(history) for history in histories], m, exclude_seen)


def fit_item_cf(interactions: Interactions, users: Int64, neighbours: int) -> NeighbourLists:
    """The most similar `neighbours` of each item, without itself, from `users` only (pass training users); ties by the lower row."""
    lists = lists_of(interactions, users, distinct=True)
    counts = count_pairs(lists, np.ones(LONGEST), damping=0.5)
    return scored_pairs(counts, lists.events_I, COSINE).limited(neighbours)


def item_cf(task: Task) -> Fitted:
    """Choose the number of neighbours from GRID; the smaller wins ties. A deadline leaves out the larger numbers."""
    begin, deadline = time.perf_counter(), task.deadline()
    pairs = task.validation_pairs()
    largest = fit_item_cf(task.split.lists, task.split.train, max(GRID))
    trials: list[Trial] = []
    for neighbours in GRID:
        if trials and deadline.is_over():
            break
        trials.append(Trial({"neighbours": neighbours}, task.measured(partial(rank, largest.limited(neighbours)), pairs)))
    best = max(trials, key=lambda trial: trial.figure).options
    fitted = largest.limited(best["neighbours"])
    ended = f"the search ended at its deadline after {len(trials)} of {len(GRID)} trials" if len(trials) < len(GRID) else None
    return Fitted(partial(rank, fitted), best, fitted.bytes, time.perf_counter() - begin, trials, ended)
