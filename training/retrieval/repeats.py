"""Moves seen items in any method's answers to places that validation queries choose, or leaves them out.

An item's place depends on how long ago it came last. Items at the same place are in the order of their last occurrences, or of how often
they came, whichever is better.

The tree's memory has a repeat term (`training/deep/ranking.py`). So that this alone does not make the tree win, every compared method has
one. Methods return no scores, so this one moves items within their answers.

Knows ranks, histories and figures. Does not know methods.

Legend: B queries, M results.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.memory import BUCKETS, bucket_of
from espalier.search import NO_ITEM

from ..arrays import Int64
from ..data.splits import EvaluationPair
from ..retrieval.task import Fitted, Method, Metric, Rank, Task
from ..retrieval.tuning import CUTS, Figures

log = logging.getLogger(__name__)

Choice = tuple[Any, ...]
"""A value for each bucket."""
OWN, LEFT_OUT = -1, -2
"""Special places: the item stays where the method put it; the item is left out."""
PLACES = (OWN, LEFT_OUT, 0, 2, 5, 10, 20, 50, 100)
"""Places that are tried, positions in the answer from 0. The best is chosen, of equal ones the first."""
PASSES = 2
"""Passes over the buckets."""
QUERIES, LEAST_QUERIES = 2000, 30
"""Most and least validation queries that choose places."""


def rank_placed(rank: Rank, places: Sequence[int], by_count: bool, queries: Sequence[NDArray[Any]], /, m: int, exclude_seen: bool) -> Int64:
    """As `Rank`, with seen items at chosen places; see `placed`."""
    if exclude_seen:
        return rank(queries, m, exclude_seen)
    longest = max((len(query) for query in queries), default=0)
    return placed(rank(queries, m + longest, exclude_seen), queries, places, by_count, m)


def placed(rows_BN: Int64, histories: Sequence[Int64], places: Sequence[int], by_count: bool, m: int) -> Int64:
    """int64[B, M = m]: the answers with seen items moved to their places.

    places    for each bucket of `espalier.memory`, one of PLACES
    by_count  items at the same place are ordered by how often they came, equally frequent ones and otherwise by how long ago
    """
    rows_BM = np.full((len(rows_BN), m), NO_ITEM, np.int64)
    for row_M, row_N, history in zip(rows_BM, rows_BN.tolist(), histories, strict=True):
        newest_first = [item for item in reversed(history.tolist()) if item >= 0]
        age_of = {item: place for place, item in reversed(list(enumerate(newest_first)))}
        place_of = {item: places[bucket_of(place)] for item, place in age_of.items()}
        place_of_moved = {item: place for item, place in place_of.items() if place != OWN}
        row, last = [item for item in row_N if item not in place_of_moved and item != NO_ITEM], -1
        count_of = Counter(newest_first) if by_count else Counter[int]()
        order = [(place, -count_of[item], age_of[item], item) for item, place in place_of_moved.items() if place != LEFT_OUT]
        for place, *_, item in sorted(order):
            last = max(place, last + 1)
            row.insert(last, item)
        row_M[: len(row[:m])] = row[:m]
    return rows_BM


def with_seen_placed(method: Method) -> Method:
    """The method with seen items placed, if that gains more than a standard error. Unchanged for vectors, for few queries, and, if time is
    limited, for tasks that exclude seen items."""

    def fit(task: Task) -> Fitted:
        fitted = method(task)
        task_with_seen = replace(task, exclude_seen=False)
        if task.split.lists.vectors_UF is not None or (task.exclude_seen and task.seconds is not None):
            return fitted
        pairs = task_with_seen.validation_pairs(QUERIES)
        places, by_count = best_places(fitted.rank, pairs, task.metric, has_order=task.split.lists.order != "none")
        if set(places) == {OWN}:
            return fitted
        names = ", ".join({OWN: "as it is", LEFT_OUT: "left out"}.get(place, str(place)) for place in places)
        order = "most frequent" if by_count else "newest"
        log.info("  seen items, last seen 0, 1, 2, 4, 8 and 16 places ago: %s; %s first", names, order)
        options = {**fitted.options, "seen": list(places), "seen_order": order}
        return replace(fitted, rank=partial(rank_placed, fitted.rank, places, by_count), options=options)

    return fit


def best_places(rank: Rank, pairs: Sequence[EvaluationPair], metric: Metric, *, has_order: bool) -> tuple[tuple[int, ...], bool]:
    """The best places on validation queries with seen items relevant, too (see `chosen_by_bucket`), and whether to order by count: if
    that is better with one place for all.
    """
    if len(pairs) < LEAST_QUERIES:
        return (OWN,) * BUCKETS, False
    histories = [pair.query for pair in pairs]
    rows_BN = rank(histories, CUTS[-1] + max(map(len, histories)), False)

    @cache
    def figures_of(by_count: bool, places: tuple[int, ...]) -> Figures:
        rows_BM = placed(rows_BN, histories, places, by_count, CUTS[-1])
        return Figures(np.stack([replace(metric, m=cut).of(rows_BM, pairs) for cut in CUTS]))

    by_count = max((False, True), key=lambda order: max(figures_of(order, (place,) * BUCKETS).figure for place in PLACES))
    return chosen_by_bucket(PLACES, partial(figures_of, by_count), has_order=has_order), by_count


def chosen_by_bucket(values: Sequence[Any], figures_of: Callable[[Choice], Figures], *, has_order: bool) -> Choice:
    """A value for each bucket: first one for all, then, in lists with an order, for each bucket on its own, if that is better.

    values      the first one is the default; it stays unless the gain of others is above a standard error
    figures_of  the figures of a choice; called once for each choice
    """
    figures = cache(figures_of)

    def figure(choice: Choice) -> float:
        return figures(choice).figure

    def is_better(choice: Choice, than: Choice) -> bool:
        gain, error = figures(choice).gain_over(figures(than))
        return gain > error

    default = (values[0],) * BUCKETS
    best: Choice = max([(value,) * BUCKETS for value in values], key=figure)
    for step in range(PASSES * BUCKETS if has_order else 0):
        bucket = step % BUCKETS
        choices = [(*best[:bucket], value, *best[bucket + 1 :]) for value in values]
        choice = max(choices, key=figure)
        if is_better(choice, best):
            best = choice
    return best if is_better(best, default) else default
