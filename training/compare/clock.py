"""Milliseconds of one query: single queries, one thread, warm."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from training.retrieval.task import Rank

ROUNDS = 3
MOST_QUERIES = 200
MOST_S = 4.0
"""Seconds that timing one method should take, warm-up aside."""


def ms_per_query(rank: Rank, queries: Sequence[NDArray[Any]], m: int, exclude_seen: bool) -> float:
    """The mean over queries of each one's median over rounds, so that what else the machine did in between hardly counts.

    At least three and at most 200 queries, the first of `queries`, as many as fit a few seconds.
    """
    with one_thread():
        for sample in queries[:3]:
            rank([sample], m, exclude_seen)  # compiles, maps files, fills caches
        begin = time.perf_counter()
        for sample in queries[:3]:
            rank([sample], m, exclude_seen)
        each_s = (time.perf_counter() - begin) / len(queries[:3])
        timed = queries[: max(3, min(MOST_QUERIES, int(MOST_S / ROUNDS / each_s)))]
        ms_RQ = np.zeros((ROUNDS, len(timed)))
        for ms_Q in ms_RQ:
            for query, sample in enumerate(timed):
                begin = time.perf_counter()
                rank([sample], m, exclude_seen)
                ms_Q[query] = (time.perf_counter() - begin) * 1e3
    return float(np.median(ms_RQ, axis=0).mean())


@contextmanager
def one_thread() -> Iterator[None]:
    """NumPy, torch and numba use one thread inside."""
    torch_threads, numba_threads = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(torch_threads)
        numba.set_num_threads(numba_threads)
