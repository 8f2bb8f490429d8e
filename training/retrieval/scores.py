"""From scores to answers: the best m items of each query, the same for every method.

Knows scores, histories and popularity. Does not know where scores come from.

Order: by descending score, ties by the lower item row. Items without a finite score are never returned, nor are seen items if these are
left out. NO_ITEM fills short rows; `filled` replaces it by popular items.

Legend: B queries, I items, M results, N scored items.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from espalier.arrays import Array, Float32, Int64
from espalier.compiled_code import compiled
from espalier.search import NO_ITEM

BLOCK = 256
"""Most queries whose scores over all items are in memory at a time."""
BLOCK_SCORES = 1 << 24
"""Most scores in memory at a time, 64 MiB; a single query may have more."""


def best_of_all(scores: Callable[[Sequence[Int64]], Float32], items: int, histories: Sequence[Int64], m: int, exclude_seen: bool) -> Int64:
    """int64[B, M = m]: the best items of methods that score the whole catalogue.

    scores  histories → float32[b, I], a new array for at most `BLOCK` of them; −inf or NaN for an item that must not be returned
    """
    rows_BM = empty_rows(len(histories), m)
    all_I = np.arange(items)
    step = min(BLOCK, max(1, BLOCK_SCORES // max(items, 1)))
    for start in range(0, len(histories), step):
        part = histories[start : start + step]
        for b, (score_I, history) in enumerate(zip(scores(part), part, strict=True), start):
            if exclude_seen:
                score_I[history[history >= 0]] = -np.inf
            keep_best(all_I, score_I, items, rows_BM[b], np.empty(m))
    return rows_BM


def best_then_popular(
    scores: Callable[[Sequence[Int64]], Float32], popular_I: Int64, histories: Sequence[Int64], m: int, exclude_seen: bool
) -> Int64:
    """int64[B, M = m]: as `best_of_all`; if fewer items have a score, then popular ones (`filled`).

    histories  entries below 0 (unknown items) are skipped
    """
    known_histories = [np.asarray(history, np.int64)[np.asarray(history) >= 0] for history in histories]
    return filled(best_of_all(scores, len(popular_I), known_histories, m, exclude_seen), known_histories, popular_I, exclude_seen)


def empty_rows(queries: int, m: int) -> Int64:
    """int64[queries, m] of NO_ITEM."""
    return np.full((queries, m), NO_ITEM, np.int64)


def by_popularity(count_I: Array) -> Int64:
    """int64[I]: item rows, the largest count first, ties by the lower row."""
    return np.argsort(-count_I, kind="stable").astype(np.int64)


def filled(rows_BM: Int64, histories: Sequence[Int64], popular_I: Int64, exclude_seen: bool) -> Int64:
    """The same array, with NO_ITEM entries replaced by the most popular items that are not in the row.

    A product shows something even if a history leads to no item. Full rows cost nothing.

    popular_I  int64[I]: all item rows, most popular first
    """
    m = rows_BM.shape[1]
    for row, history in zip(rows_BM, histories, strict=True):
        count = int(np.count_nonzero(row != NO_ITEM))
        if count == m:
            continue
        excluded = np.concatenate([row[:count], history]) if exclude_seen else row[:count]
        fill = popular_I[: m + len(excluded)]
        fill = fill[~np.isin(fill, excluded)][: m - count]
        row[count : count + len(fill)] = fill
    return rows_BM


@compiled()
def keep_best(items: Array, scores: Array, count: int, kept_M: Array, score_M: Array) -> int:
    """Writes the best M of the first `count` items to kept_M, best first, and their scores to score_M; returns how many there were.

    Items whose score is −inf or NaN are left out. The rest of both arrays is not meaningful, but kept_M beyond the result stays as it was.
    A heap of M numbers whose root is the worst kept: most items cost one comparison.
    """
    most, size = len(kept_M), 0
    for n in range(count):
        item, score = items[n], scores[n]
        if not score > -np.inf:
            continue
        if size < most:
            place = size
            size += 1
            while place > 0:
                parent = (place - 1) // 2
                if score_M[parent] < score or (score_M[parent] == score and kept_M[parent] > item):
                    break
                kept_M[place], score_M[place] = kept_M[parent], score_M[parent]
                place = parent
            kept_M[place], score_M[place] = item, score
        elif score > score_M[0] or (score == score_M[0] and item < kept_M[0]):
            _sink(kept_M, score_M, size, item, score)
    for last in range(size - 1, 0, -1):
        item, score = kept_M[last], score_M[last]
        kept_M[last], score_M[last] = kept_M[0], score_M[0]
        _sink(kept_M, score_M, last, item, score)
    return size


@compiled()
def _sink(kept_M: Array, score_M: Array, size: int, item: Any, score: Any) -> None:
    """Put an item in the place of the root of a heap whose root is the worst."""
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        other = child + 1
        if other < size and (score_M[other] < score_M[child] or (score_M[other] == score_M[child] and kept_M[other] > kept_M[child])):
            child = other
        if score < score_M[child] or (score == score_M[child] and item > kept_M[child]):
            break
        kept_M[place], score_M[place] = kept_M[child], score_M[child]
        place = child
    kept_M[place], score_M[place] = item, score
