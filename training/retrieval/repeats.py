"""Seen items in the answers of any method: at places of their own by how long ago they came last, or left out, as validation queries say.

The tree's memory has a repeat term (`training/deep/repeats.py`). So that it does not win by that alone, every method that it is compared
with has one. Methods say no scores, so this one moves items within their answers.

Knows ranks, histories and figures. Does not know methods.

Legend: B queries, M results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
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
"""Where the method has it; nowhere."""
PLACES = (OWN, LEFT_OUT, 0, 2, 5, 10, 20, 50, 100)
"""Places that are tried, from 0. The first one that finds most is chosen."""
PASSES = 2
"""Over the buckets."""
QUERIES, LEAST_QUERIES = 2000, 30
"""Validation queries by which places are chosen: at most, and at least."""


@dataclass(frozen=True)
class SeenPlaced:
    """A method whose answers have seen items at places of their own.

    places  for each bucket of `espalier.memory`, one of PLACES
    """

    rank: Rank
    places: tuple[int, ...]

    def __call__(self, queries: Sequence[NDArray[Any]], m: int, exclude_seen: bool) -> Int64:
        """As `Rank`."""
        if exclude_seen:
            return self.rank(queries, m, exclude_seen)
        longest = max((len(query) for query in queries), default=0)
        return placed(self.rank(queries, m + longest, exclude_seen), queries, self.places, m)


def placed(rows_BN: Int64, histories: Sequence[Int64], places: Sequence[int], m: int) -> Int64:
    """int64[B, M = m]: answers whose seen items are moved."""
    rows_BM = np.full((len(rows_BN), m), NO_ITEM, np.int64)
    for row_M, row_N, history in zip(rows_BM, rows_BN.tolist(), histories, strict=True):
        newest_first = [item for item in reversed(history.tolist()) if item >= 0]
        ago = {item: place for place, item in reversed(list(enumerate(newest_first)))}
        place_of = {item: places[bucket_of(place)] for item, place in ago.items()}
        moved = {item: place for item, place in place_of.items() if place != OWN}
        row, last = [item for item in row_N if item not in moved and item != NO_ITEM], -1
        for place, _, item in sorted((place, ago[item], item) for item, place in moved.items() if place != LEFT_OUT):
            last = max(place, last + 1)
            row.insert(last, item)
        row_M[: len(row[:m])] = row[:m]
    return rows_BM


def with_seen_placed(method: Method) -> Method:
    """The method with seen items placed, where that finds more by over a standard error; as it is for vectors and few queries, and, where
    time is limited, if seen items do not count."""

    def fit(task: Task) -> Fitted:
        fitted = method(task)
        whole = replace(task, exclude_seen=False)
        if task.split.lists.vectors_UF is not None or (task.exclude_seen and task.seconds is not None):
            return fitted
        pairs = whole.validation_pairs(QUERIES)
        places = best_places(fitted.rank, pairs, task.metric, has_order=task.split.lists.order != "none")
        if set(places) == {OWN}:
            return fitted
        named = ", ".join({OWN: "as it is", LEFT_OUT: "left out"}.get(place, str(place)) for place in places)
        log.info("  seen items, last seen 0, 1, 2, 4, 8 and 16 places ago: %s", named)
        return replace(fitted, rank=SeenPlaced(fitted.rank, places), options={**fitted.options, "seen": list(places)})

    return fit


def best_places(rank: Rank, pairs: Sequence[EvaluationPair], metric: Metric, *, has_order: bool) -> tuple[int, ...]:
    """The places that find most for validation queries whose lists are whole, see `chosen_by_bucket`."""
    none = (OWN,) * BUCKETS
    if len(pairs) < LEAST_QUERIES:
        return none
    histories = [pair.query for pair in pairs]
    rows_BN = rank(histories, CUTS[-1] + max(map(len, histories)), False)

    def measured(places: tuple[int, ...]) -> Figures:
        rows_BM = placed(rows_BN, histories, places, CUTS[-1])
        return Figures(np.stack([replace(metric, m=cut).of(rows_BM, pairs) for cut in CUTS]))

    return chosen_by_bucket(PLACES, measured, has_order=has_order)


def chosen_by_bucket(values: Sequence[Any], measured: Callable[[Choice], Figures], *, has_order: bool) -> Choice:
    """A value for each bucket: one for all first, then, in lists with an order, each bucket for itself where that is better.

    values    the first one is what is without a choice, and stays unless others find more by over a standard error
    measured  the figures of a choice; called once for each
    """
    figures = cache(measured)

    def figure(choice: Choice) -> float:
        return figures(choice).figure

    def is_better(choice: Choice, than: Choice) -> bool:
        gain, error = figures(choice).gain_over(figures(than))
        return gain > error

    none = (values[0],) * BUCKETS
    best: Choice = max([(value,) * BUCKETS for value in values], key=figure)
    for step in range(PASSES * BUCKETS if has_order else 0):
        at = step % BUCKETS
        others = [(*best[:at], value, *best[at + 1 :]) for value in values]
        other = max(others, key=figure)
        if is_better(other, best):
            best = other
    return best if is_better(best, none) else none
