"""Reciprocal-rank fusion of two methods' answers (Cormack, Clarke and Büttcher 2009).

    score(i) = (1 − share) / (c + rank₁(i)) + share / (c + rank₂(i)),   ranks from 1; an item that a method does not return gets 0 from it

Knows answers. Does not know methods.

Legend: B queries, M results, D items requested from each method.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from espalier.arrays import Int64
from espalier.search import NO_ITEM

from ..retrieval.scores import empty_rows, keep_best
from ..retrieval.task import Fitted, Rank, Task
from ..retrieval.tuning import Option, Options, search

log = logging.getLogger(__name__)


GRID = (
    Option("share", (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)),
    Option("constant", (5, 10, 20, 40, 80), times=2, least=1, most=1000),
)
START: Options = {"share": 0.5, "constant": 40}
DEPTH = 200
"""Least items requested from each method."""
VALIDATION_QUERIES = 5000
"""Most queries that choose options: two methods answer each of them."""


def depth(m: int) -> int:
    """The number of items requested from each method: an item that one method ranks low may still rise to the first m."""
    return max(2 * m, DEPTH)


def rank_by_both(first: Rank, second: Rank, share: float, constant: float, queries: Sequence[Any], /, m: int, exclude_seen: bool) -> Int64:
    """int64[B, M = m]: the best of both methods, of `depth(m)` items from each. share: the weight of the second method."""
    rows = [rank(queries, depth(m), exclude_seen) for rank in (first, second)]
    return fused(rows[0], rows[1], m, share, constant)


def fused(first_BD: Int64, second_BD: Int64, m: int, share: float, constant: float) -> Int64:
    """int64[B, M = m]: the best by the formula; NO_ITEM entries count for nothing."""
    rows_BM = empty_rows(len(first_BD), m)
    gain_D = 1 / (constant + np.arange(1, 1 + max(first_BD.shape[1], second_BD.shape[1])))
    for b, (first_D, second_D) in enumerate(zip(first_BD, second_BD, strict=True)):
        items, position = np.unique(np.concatenate([first_D, second_D]), return_inverse=True)
        gains = np.concatenate([(1 - share) * gain_D[: len(first_D)], share * gain_D[: len(second_D)]])
        scores = np.where(items == NO_ITEM, -np.inf, np.bincount(position, weights=gains))
        keep_best(items, scores, len(items), rows_BM[b], np.empty(m))
    return rows_BM


def fuse(first: Fitted, second: Fitted, task: Task) -> Fitted:
    """The fusion, with share and constant chosen on validation queries. Its seconds and bytes include those of both methods."""
    begin = time.perf_counter()
    pairs = task.validation_pairs(VALIDATION_QUERIES)
    queries = [pair.query for pair in pairs]
    rows = [fitted.rank(queries, depth(task.metric.m), task.exclude_seen) for fitted in (first, second)]
    log.info("fusion: %s", "; ".join(map(str, GRID)))

    def figure(options: Options) -> float:
        return float(task.metric.of(fused(rows[0], rows[1], task.metric.m, options["share"], options["constant"]), pairs).mean())

    tuning = search(figure, [START], GRID, task.deadline())
    best = tuning.best.options
    seconds = first.seconds + second.seconds + time.perf_counter() - begin
    rank = partial(rank_by_both, first.rank, second.rank, best["share"], best["constant"])
    ended = next((f"of its parts, one ended early: {method.ended}" for method in (first, second) if method.ended), tuning.ended)
    return Fitted(rank, best, first.bytes + second.bytes, seconds, tuning.trials, ended, min(first.share, second.share))
