"""Figures of a method on test queries: one for each query, means with standard errors, paired differences, and the time of an answer.

Knows answers, queries and metrics. Does not know methods, logs or files.

Legend: B queries, M results, U users; in timing R rounds, Q queries.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from espalier.arrays import Float64, Int64
from espalier.errors import InvalidData

from ..retrieval.task import Metric, Question, Rank

BLOCK = 4096
"""Queries answered in one call. This bounds a method's memory."""
Z95 = 1.96
"""Standard errors from a mean to the ends of its 95 % interval."""
ROUNDS = 3
MOST_TIMED = 200
MOST_S = 4.0
"""Seconds for timing one method, without its warm-up."""


@dataclass(frozen=True, eq=False)
class Figures:
    """The figures of a method's answers to some queries.

    user_B    int64[B]: the user of each query; a user may have several
    values    metric → float64[B]
    """

    user_B: Int64
    values: dict[Metric, Float64]

    def mean(self, metric: Metric) -> float:
        return float(self.values[metric].mean())

    def standard_error(self, metric: Metric) -> float:
        """Over queries; 0 for a single one."""
        return standard_error(self.values[metric])


@dataclass(frozen=True)
class Difference:
    """The mean difference between two methods' figures, over users, and its 95 % interval."""

    mean: float
    low: float
    high: float
    queries: int


def answered(rank: Rank, pairs: Sequence[Question], m: int, exclude_seen: bool) -> Int64:
    """int64[B, M = m]: the answers to all queries, a block at a time."""
    blocks = [rank([pair.query for pair in pairs[start : start + BLOCK]], m, exclude_seen) for start in range(0, len(pairs), BLOCK)]
    return np.concatenate([np.zeros((0, m), np.int64), *blocks])


def figures_of(found_BM: Int64, pairs: Sequence[Question], metrics: Sequence[Metric]) -> Figures:
    """The figures of the answers to `pairs`."""
    return Figures(np.array([pair.user for pair in pairs], np.int64), {metric: metric.of(found_BM, pairs) for metric in metrics})


def standard_error(values_B: Float64) -> float:
    """Of a mean: the sample standard deviation over √B."""
    return float(values_B.std(ddof=1) / len(values_B) ** 0.5) if len(values_B) > 1 else 0.0


def paired(first: Sequence[Figures], second: Sequence[Figures], metric: Metric) -> Difference:
    """The first method's figures minus the second's.

    first, second  figures by seed; both methods answer the same queries

    Differences of one user are not independent, so they are averaged first, over queries and seeds. The interval is the mean over users
    ± 1.96 standard errors. Raises InvalidData if the queries differ.
    """
    if len(first) != len(second) or any(not np.array_equal(ours.user_B, theirs.user_B) for ours, theirs in zip(first, second, strict=True)):
        raise InvalidData("figures", "of other queries", "both methods' figures over the same queries and seeds")
    user_B = np.concatenate([figures.user_B for figures in first])
    difference_B = np.concatenate([ours.values[metric] - theirs.values[metric] for ours, theirs in zip(first, second, strict=True)])
    _, user_position_B = np.unique(user_B, return_inverse=True)
    difference_U = np.bincount(user_position_B, weights=difference_B) / np.bincount(user_position_B)
    mean, error = float(difference_U.mean()), standard_error(difference_U)
    return Difference(mean, mean - Z95 * error, mean + Z95 * error, len(difference_U))


def ms_per_query(rank: Rank, queries: Sequence[Any], m: int, exclude_seen: bool) -> float:
    """Milliseconds a query: the mean over queries of each one's median over rounds. The median excludes most disturbance by other programs.

    Times the first 3 to 200 of `queries`, as many as fit in a few seconds.
    """
    with one_thread():
        for sample in queries[:3]:
            rank([sample], m, exclude_seen)  # compiles, maps files, fills caches
        begin = time.perf_counter()
        for sample in queries[:3]:
            rank([sample], m, exclude_seen)
        each_s = (time.perf_counter() - begin) / len(queries[:3])
        timed = queries[: max(3, min(MOST_TIMED, int(MOST_S / ROUNDS / each_s)))]
        ms_RQ = np.zeros((ROUNDS, len(timed)))
        for ms_Q in ms_RQ:
            for query, sample in enumerate(timed):
                begin = time.perf_counter()
                rank([sample], m, exclude_seen)
                ms_Q[query] = (time.perf_counter() - begin) * 1e3
    return float(np.median(ms_RQ, axis=0).mean())


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, NumPy and torch use one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(threads)
