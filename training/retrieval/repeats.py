"""Moves seen items in any method's answers to places that validation queries choose, or leaves them out.

An item's place depends on how long ago it came last. Items at the same place are in one of ORDERS.

The tree's memory has a repeat term (`training/deep/ranking.py`). So that this alone does not make the tree win, every compared method has
one. Methods return no scores, so this one moves items within their answers.

Knows ranks, histories and figures. Does not know methods.

Legend: B queries, N ranks of an answer, C candidates, M results, K the buckets of `espalier.memory` and BUCKETS for items that are not in
the history.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import numpy as np

from espalier.arrays import Array, Float64, Int64
from espalier.memory import BUCKETS, bucket_of
from espalier.search import NO_ITEM

from ..data.splits import EvaluationPair
from ..retrieval.task import Fitted, Method, Metric, Rank, Task
from ..retrieval.tuning import CUTS, Figures

log = logging.getLogger(__name__)

Choice = tuple[Any, ...]
"""A value for each bucket."""
Order = Literal["newest", "most frequent", "own"]
ORDERS: tuple[Order, ...] = ("newest", "most frequent", "own")
"""The last item of the history first; the one that came most often first, of equally frequent ones the newest; the method's order."""
Ordered = tuple[Order, Choice]
OWN, LEFT_OUT = -1, -2
"""Special places: the item stays where the method put it; the item is left out."""
PLACES = (OWN, LEFT_OUT, 0, 2, 5, 10, 20, 50, 100)
"""Places that are tried: the item comes after so many of the items that stay."""
PASSES = 2
"""Passes over the buckets."""
QUERIES, LEAST_QUERIES = 2000, 30
"""Most and least validation queries that choose places."""


class Measured(NamedTuple):
    """The figures at each of CUTS, and nDCG at the first of them."""

    at_cuts: Figures
    ndcg: Figures


@dataclass(frozen=True)
class Candidates:
    """What an answer of M items can have: of each query, the first M that are not in its history, and its history's items, in the order of
    the method's answer.

    item_BC    int64 item rows; NO_ITEM fills short rows
    rank_BC    positions in the method's answer; infinite: not in it
    bucket_BC  how long ago an item came last, see K
    age_BC     the same in positions, 0 for items that are not in the history
    count_BC   how often an item came
    """

    item_BC: Int64
    rank_BC: Float64
    bucket_BC: Int64
    age_BC: Int64
    count_BC: Int64

    @staticmethod
    def of(rows_BN: Int64, histories: Sequence[Int64], m: int) -> Candidates:
        rows = [_candidates(row_N.tolist(), history, m) for row_N, history in zip(rows_BN, histories, strict=True)]
        columns = np.empty((5, len(rows), max(map(len, rows), default=0)))
        columns[:] = np.array([NO_ITEM, np.inf, BUCKETS, 0, 0])[:, None, None]
        for number, row in enumerate(rows):
            columns[:, number, : len(row)] = row.T
        item_BC, rank_BC, *others = columns
        bucket_BC, age_BC, count_BC = (column.astype(np.int64) for column in others)
        return Candidates(item_BC.astype(np.int64), rank_BC, bucket_BC, age_BC, count_BC)

    def placed(self, places: Sequence[int], order: Order, m: int) -> Int64:
        """int64[B, M = m]: the answers with seen items moved.

        places  for each bucket, one of PLACES
        order   of items at the same place; where they are equal, the newest is first
        """
        place_BC = np.array([*places, OWN])[self.bucket_BC]
        is_moved_BC, stays_BC = place_BC >= 0, (place_BC == OWN) & np.isfinite(self.rank_BC)
        key_BC = np.where(is_moved_BC, place_BC, np.where(stays_BC, stays_BC.cumsum(axis=1) - 1, np.inf))
        within_BC = {"newest": self.age_BC, "most frequent": -self.count_BC, "own": self.rank_BC}[order]
        order_BM = np.lexsort((self.age_BC, within_BC, ~is_moved_BC, key_BC), axis=1)[:, :m]
        found_BM = np.take_along_axis(np.where(np.isinf(key_BC), NO_ITEM, self.item_BC), order_BM, axis=1)
        rows_BM = np.full((len(found_BM), m), NO_ITEM, np.int64)
        rows_BM[:, : found_BM.shape[1]] = found_BM
        return rows_BM


def _candidates(row_N: list[int], history: Int64, m: int) -> Float64:
    """float64[C, 5]: item, rank, bucket, age and count of a query's candidates."""
    newest_first = [item for item in reversed(history.tolist()) if item >= 0]
    count_of, age_of = Counter(newest_first), {item: age for age, item in reversed(list(enumerate(newest_first)))}
    rank_of = {item: float(rank) for rank, item in enumerate(row_N) if item != NO_ITEM}
    new = [item for item in rank_of if item not in age_of][:m]
    seen = [(item, rank_of.get(item, np.inf), bucket_of(age), age, count_of[item]) for item, age in age_of.items()]
    every = sorted([*((item, rank_of[item], BUCKETS, 0, 0) for item in new), *seen], key=itemgetter(1))
    return np.array(every, np.float64).reshape(-1, 5)


def rank_placed(rank: Rank, places: Sequence[int], order: Order, queries: Sequence[Array], /, m: int, exclude_seen: bool) -> Int64:
    """As `Rank`, with seen items at chosen places; see `Candidates.placed`."""
    if exclude_seen:
        return rank(queries, m, exclude_seen)
    longest = max((len(query) for query in queries), default=0)
    return Candidates.of(rank(queries, m + longest, exclude_seen), queries, m).placed(places, order, m)


def with_seen_placed(method: Method) -> Method:
    """The method with seen items placed, if that gains more than a standard error. Unchanged for vectors, for few queries, and, if time is
    limited, for tasks that exclude seen items."""

    def fit(task: Task) -> Fitted:
        fitted = method(task)
        task_with_seen = replace(task, exclude_seen=False)
        if task.split.lists.vectors_UF is not None or (task.exclude_seen and task.seconds is not None):
            return fitted
        pairs = task_with_seen.validation_pairs(QUERIES)
        order, places = best_places(fitted.rank, pairs, task.metric, has_order=task.split.lists.order != "none")
        if set(places) == {OWN}:
            return fitted
        names = ", ".join({OWN: "as it is", LEFT_OUT: "left out"}.get(place, str(place)) for place in places)
        log.info("  seen items, last seen 0, 1, 2, 4, 8 and 16 places ago: %s; order: %s", names, order)
        options = {**fitted.options, "seen": list(places), "seen_order": order}
        return replace(fitted, rank=partial(rank_placed, fitted.rank, places, order), options=options)

    return fit


def best_places(rank: Rank, pairs: Sequence[EvaluationPair], metric: Metric, *, has_order: bool) -> Ordered:
    """The best order and places on validation queries with seen items relevant, too; see `chosen_by_bucket`."""
    if len(pairs) < LEAST_QUERIES:
        return ORDERS[0], (OWN,) * BUCKETS
    histories = [pair.query for pair in pairs]
    candidates = Candidates.of(rank(histories, CUTS[-1] + max(map(len, histories)), False), histories, CUTS[-1])

    def measured(order: Order, places: Choice) -> Measured:
        rows_BM = candidates.placed(places, order, CUTS[-1])
        at_cuts = Figures(np.stack([replace(metric, m=cut).of(rows_BM, pairs) for cut in CUTS]))
        return Measured(at_cuts, Figures(Metric("ndcg", CUTS[0]).of(rows_BM, pairs)[None]))

    return chosen_by_bucket(PLACES, measured, ORDERS, has_order=has_order)


def chosen_by_bucket(
    values: Sequence[Any], measured: Callable[[Order, Choice], Measured], orders: Sequence[Order] = ("own",), *, has_order: bool
) -> Ordered:
    """An order, and a value for each bucket.

    First the order and one value for all that are the best at CUTS; then, in lists with an order, for each bucket the best value, if it
    gains over a standard error. Recall does not tell the first place from the tenth, so in the end one value for the newest buckets is
    tried in every order: of choices that lose at most a standard error at each cut, the one with the best nDCG, if that gains over one.

    values    the first one is the default; it stays unless others gain more than a standard error at the cuts or, level there, in nDCG; of
              equally good ones the first
    measured  the figures of a choice; called once for each
    """
    measured = cache(measured)

    def figure(ordered: Ordered) -> float:
        return measured(*ordered).at_cuts.figure

    def is_better(ordered: Ordered, than: Ordered) -> bool:
        gain, error = measured(*ordered).at_cuts.gain_over(measured(*than).at_cuts)
        return gain > error

    default: Ordered = orders[0], (values[0],) * BUCKETS
    order, choice = max([(order, (value,) * BUCKETS) for order in orders for value in values], key=figure)
    for step in range(PASSES * BUCKETS if has_order else 0):
        bucket = step % BUCKETS
        changed = max([(order, (*choice[:bucket], value, *choice[bucket + 1 :])) for value in values], key=figure)
        if is_better(changed, (order, choice)):
            _, choice = changed
    if not is_better((order, choice), default):
        order, choice = default
    counts = range(1, BUCKETS + 1) if has_order else [BUCKETS]
    others = [(order, (value,) * count + choice[count:]) for order in orders for count in counts for value in values]
    return _with_better_first_ranks((order, choice), others, measured)


def _with_better_first_ranks(best: Ordered, others: Sequence[Ordered], measured: Callable[[Order, Choice], Measured]) -> Ordered:
    at_cuts, ndcg = measured(*best)
    level = [ordered for ordered in others if measured(*ordered).at_cuts.is_level_with(at_cuts)]
    first = max([best, *level], key=lambda ordered: measured(*ordered).ndcg.figure)
    gain, error = measured(*first).ndcg.gain_over(ndcg)
    return first if gain > error else best
