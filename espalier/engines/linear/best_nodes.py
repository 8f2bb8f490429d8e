"""The best of a level's candidates, and results in their order, compiled by numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Array = NDArray[Any]


@njit(cache=True, nogil=True)
def keep_best(candidates: Array, ranks: Array, total: int, count: int, kept: Array, kept_ranks: Array, heap: Array) -> int:
    """Write the best `count` of `total` candidates, in the candidates' order; of equal ranks the first. Returns how many there are.

    ranks  without NaN
    heap   float32, room for `count` numbers
    """
    if total <= count:
        for c in range(total):
            kept[c] = candidates[c]
            kept_ranks[c] = ranks[c]
        return total
    for c in range(count):
        heap[c] = ranks[c]
    for root in range(count // 2 - 1, -1, -1):
        _sift_down(heap, count, root)
    for c in range(count, total):
        if ranks[c] > heap[0]:
            heap[0] = ranks[c]
            _sift_down(heap, count, np.int64(0))
    threshold = heap[0]
    ties = count
    for c in range(total):
        if ranks[c] > threshold:
            ties -= 1
    written = 0
    for c in range(total):
        if written == count:
            break
        if ranks[c] < threshold or (ranks[c] == threshold and ties == 0):
            continue
        if ranks[c] == threshold:
            ties -= 1
        kept[written] = candidates[c]
        kept_ranks[written] = ranks[c]
        written += 1
    return written


@njit(cache=True, nogil=True)
def best_first(ranks: Array, count: int) -> Array:
    """int64[count]: the positions of the first `count` ranks, best first, ties by position.

    A merge sort of our own: numba needs a second to compile NumPy's.
    """
    order, merged = np.empty(count, np.int64), np.empty(count, np.int64)
    for k in range(count):
        order[k] = k
    width = 1
    while width < count:
        for begin in range(0, count, 2 * width):
            middle, end = min(begin + width, count), min(begin + 2 * width, count)
            i, j = begin, middle
            for k in range(begin, end):
                if j == end or (i < middle and ranks[order[i]] >= ranks[order[j]]):
                    merged[k] = order[i]
                    i += 1
                else:
                    merged[k] = order[j]
                    j += 1
        order, merged = merged, order
        width *= 2
    return order


@njit(cache=True, nogil=True)
def _sift_down(heap: Array, size: int, root: Any) -> None:
    """Restore the order of a min-heap below one entry."""
    while True:
        child = 2 * root + 1
        if child >= size:
            return
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[root] <= heap[child]:
            return
        heap[root], heap[child] = heap[child], heap[root]
        root = child
