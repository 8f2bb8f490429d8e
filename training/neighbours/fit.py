"""Item neighbours with distance decay, direction, damping and recency: what an expert tries first, since it costs seconds.

    M = after + back · before                                    of `cooccurrence.py`, within W events, weighted by dec^(distance − 1)
    C[a, b] = (M[a, b] / ((pop_a + s)^row · (pop_b + s)^column))^power
    S[a, b] = C[a, b] + unit · (near · near(a, b) + slim · w_b[a])  of `near_items.py` and `slim.py`; unit: the mean over a of max_b C[a, b]
    score(b | history) = Σ_{d < L} recency^d · S[h_d, b],        h_0 the last item of the history

pop is how many events of training users an item has. Lists without an order have no distance, direction or recency: W is the whole list,
and all these are 1. Only they have `slim`. Item-CF (Sarwar et al. 2001) is the case row = column = ½ of lists without repeats.

Options are chosen on validation users by coordinate passes over GRID (GRID_WITHOUT_ORDER), from the better of two starts. Near items are
used if they gain over a standard error. Then the fewest neighbours an item that find as much are kept. All training users count in every
trial. Most options only weigh counts; those in COUNTED need new counts, and are tried only if counting takes a small part of the remaining
time. Those and `l2` need a new regression. Two counts and two regressions are in memory at a time.

Legend: I items, N pairs of items with a count, L items of a history that count.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from espalier.arrays import Array, Float64, Int64
from espalier.compiled_code import compiled

from ..data.interactions import Interactions
from ..data.splits import EvaluationPair
from ..neighbours.cooccurrence import Counts, Lists, count_pairs, lists_of
from ..neighbours.near_items import near_items
from ..neighbours.neighbour_lists import NeighbourLists, Pairs
from ..neighbours.slim import STEP_S, slim, steps
from ..retrieval.scores import by_popularity
from ..retrieval.task import Deadline, Fitted, Task, Trial
from ..retrieval.tuning import Option, Options, Remembered, search

log = logging.getLogger(__name__)

Made = Callable[[], Pairs]
"""Pairs that take long to make, made when they are first needed."""

DAMPING = (
    Option("column", (0.0, 0.1, 0.2, 0.3, 0.4, 0.5), add=0.1, least=-1.0, most=1.0),
    Option("row", (0.2, 0.3, 0.4, 0.5, 0.6, 0.7), add=0.1, least=-0.5, most=1.5),
    Option("power", (0.6, 0.8, 1.0, 1.25), add=0.1, least=0.1, most=2.5),
    Option("user", (0.0, 0.25, 0.5, 0.75, 1.0)),
    Option("shrink", (0.0, 1.0, 3.0, 10.0), times=3, least=1.0, most=1000.0),
    Option("near", (0.0, 0.03, 0.1, 0.3, 1.0)),
)
"""The last one takes longest: near items have to be found first."""
GRID = (
    Option("recency", (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 1.0)),
    Option("back", (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)),
    Option("decay", (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 1.0)),
    *DAMPING,
    Option("window", (5, 10, 20, 50, 100), times=2, most=400),
    Option("longest", (20, 50, 100, 200), times=2, most=800),
)
L2 = Option("l2", (1.0, 3.0, 10.0, 30.0), times=3, least=0.1, most=1000.0, only_with="slim")
SLIM = Option("slim", (0.0, 0.3, 1.0, 3.0), times=3, most=100.0)
GRID_WITHOUT_ORDER = (*DAMPING[:-1], SLIM, L2, DAMPING[-1])
COUNTED = ("window", "decay", "user")
"""Options that the counts depend on."""
WEIGHED = (*(option for option in DAMPING if option.name in ("near", "column", "row", "power")), SLIM)
"""Options of S that need no new counts, cosines or regression and matter most."""
NEIGHBOUR_LIMITS = (100, 200, 500, 1000, 2000, 5000)
"""Limits of neighbours an item to try in the end, besides no limit, where neighbours answer alone. A tree's memory then tries
NEIGHBOUR_COUNTS (`deep/memory.py`) of them, which says why there are two grids."""
_DAMPING_START: Options = {"near": 0.0, "slim": 0.0, "l2": 10.0, "column": 0.2, "row": 0.5, "power": 0.8, "user": 0.0, "shrink": 0.0}
WIDE: Options = {"recency": 0.93, "back": 0.5, "decay": 0.95, **_DAMPING_START, "window": 50, "longest": 100}
NARROW: Options = {"recency": 0.7, "back": 0.125, "decay": 0.85, **_DAMPING_START, "window": 20, "longest": 100}
WITHOUT_ORDER: Options = {"recency": 1.0, "back": 1.0, "decay": 1.0, **_DAMPING_START, "user": 0.5, "window": 2000, "longest": 2000}
REGRESSED: Options = {**WITHOUT_ORDER, "slim": 1.0}
"""Starts: for lists whose order matters little, for lists whose next item depends on the last ones, and two for lists without an order."""
VALIDATION_QUERIES, QUERIES_PER_SECOND = 20_000, 100
"""Most validation queries to choose options by, in total and for each second of the task: a trial answers all of them."""
NEAR_COUNTS = 20
"""About how many counts take as long as finding the near items; more on small logs, where neither takes long."""
COUNTS_LEFT = 10
"""A trial with new counts is made only if the remaining time is enough for so many: other trials gain more in that time."""


@dataclass(frozen=True)
class Neighbours:
    """`lists` holds S. weight_L: float64[L], the weights of a history's items, from the last one back."""

    lists: NeighbourLists
    weight_L: Float64
    counts: Counts
    near: Made
    regressed: Made
    events_I: Int64

    def rank(self, histories: Sequence[Int64], m: int, exclude_seen: bool) -> Int64:
        """int64[B, M = m]: as `NeighbourLists.rank`: items with a score, then popular ones."""
        return self.lists.rank(histories, m, exclude_seen, self.weight_L)


def neighbours_of(counts: Counts, near: Made, regressed: Made, events_I: Int64, options: Options) -> Neighbours:
    """S and the history's weights for these options. near, regressed: called only if the options use them."""
    lists = scored_pairs(counts, events_I, options)
    unit = _mean_largest(lists)
    for name, make in (("near", near), ("slim", regressed)):
        if options[name]:
            lists = _sum(lists, make(), options[name] * unit)
    return Neighbours(lists, fading(options["recency"], options["longest"]), counts, near, regressed, events_I)


def scored_pairs(counts: Counts, events_I: Int64, options: Options) -> NeighbourLists:
    """C of these options."""
    damped_I = np.maximum(events_I, 1) + options["shrink"]
    score_N = np.empty(len(counts.item_N), np.float32)
    scales = (damped_I ** -options["row"], damped_I ** -options["column"])
    _scale(counts, *scales, float(options["back"]), score_N)
    if options["power"] != 1:
        np.power(score_N, np.float32(options["power"]), out=score_N)  # several times faster than a loop on processors with AVX-512
    return NeighbourLists(counts.offset_I1, counts.item_N, score_N, by_popularity(events_I))


def _mean_largest(lists: NeighbourLists) -> float:
    """The mean over items with neighbours of the largest score; 1 if none has any."""
    has_neighbours_I = np.diff(lists.offset_I1) > 0
    return float(np.maximum.reduceat(lists.score_N, lists.offset_I1[:-1][has_neighbours_I]).mean()) if has_neighbours_I.any() else 1.0


def _sum(lists: NeighbourLists, pairs: Pairs, weight: float) -> NeighbourLists:
    """The lists with the scores of other pairs, times `weight`, added."""
    rows = lists.offset_I1, lists.item_N, lists.score_N
    offset_I1, bound = np.zeros_like(lists.offset_I1), len(lists.item_N) + len(pairs.item_N)
    item_N, score_N = np.empty(bound, np.int32), np.empty(bound, np.float32)
    _fill_union(rows, pairs, np.float32(weight), offset_I1, item_N, score_N)
    used = offset_I1[-1]
    return NeighbourLists(offset_I1, item_N[:used], score_N[:used], lists.popular_I)


@compiled()
def _fill_union(rows: Any, pairs: Pairs, weight: Any, offset_I1: Array, item_N: Array, score_N: Array) -> None:
    """To offset_I1 and the first places of the others: the neighbours of each item in the rows, then those in `pairs` alone."""
    first_I1, counted_N, counted_score_N = rows
    place_I = np.full(len(first_I1) - 1, -1, np.int64)
    for a in range(len(first_I1) - 1):
        begin, used = offset_I1[a], offset_I1[a]
        for n in range(first_I1[a], first_I1[a + 1]):
            item_N[used], score_N[used] = counted_N[n], counted_score_N[n]
            place_I[counted_N[n]] = used
            used += 1
        for n in range(pairs.offset_I1[a], pairs.offset_I1[a + 1]):
            b, score = pairs.item_N[n], weight * pairs.score_N[n]
            if place_I[b] >= begin:
                score_N[place_I[b]] += score
            else:
                item_N[used], score_N[used] = b, score
                used += 1
        offset_I1[a + 1] = used


def fading(factor: float, most: int) -> Float64:
    """float64[at most `most`]: factor^0, factor^1, …, without weights below 1e−6."""
    weights = np.power(float(factor), np.arange(most))
    return weights[weights >= 1e-6]


@compiled()
def _scale(counts: Counts, row_I: Array, column_I: Array, back: float, score_N: Array) -> None:
    for a in range(len(counts.offset_I1) - 1):
        for n in range(counts.offset_I1[a], counts.offset_I1[a + 1]):
            score_N[n] = (counts.after_N[n] + back * counts.before_N[n]) * row_I[a] * column_I[counts.item_N[n]]


def count(lists: Lists, options: Options) -> Counts:
    """The counts for these options, of which they depend on COUNTED."""
    return count_pairs(lists, fading(options["decay"], options["window"]), options["user"])


def fit_neighbours(interactions: Interactions, users: Int64, options: Options, seed: int) -> Neighbours:
    """Neighbours with given options, from the lists of some users."""
    lists = lists_of(interactions, users)
    counts = count(lists, options)
    return neighbours_of(
        counts, lambda: near_items(interactions, users, seed), lambda: slim(counts, options["l2"]), lists.events_I, options
    )


def neighbours(task: Task) -> Fitted:
    """Choose the options on validation queries, at most `most_queries`, and fit on all training users. `source` is a Neighbours."""
    begin, deadline = time.perf_counter(), task.deadline()
    interactions, users = task.split.lists, task.split.train
    ordered = interactions.order != "none"
    starts, grid = ([WIDE, NARROW], GRID) if ordered else ([WITHOUT_ORDER, REGRESSED], GRID_WITHOUT_ORDER)
    pairs = task.validation_pairs(most_queries(task))
    log.info("neighbours: %s", "; ".join(map(str, grid)))
    count(lists_of(interactions, users[:0]), starts[0])  # loads the compiled code, or compiles
    lists = lists_of(interactions, users)
    counts = Remembered(lambda options: count(lists, options), COUNTED)
    count_begin = time.perf_counter()
    counts.of(starts[0])
    count_s = time.perf_counter() - count_begin
    regression_s = STEP_S * steps(counts.of(starts[0]))

    near = cache(lambda: near_items(interactions, users, task.seed))
    regressed = Remembered(lambda options: slim(counts.of(options), options["l2"]), (*COUNTED, "l2"))

    def fitted(options: Options) -> Neighbours:
        return neighbours_of(counts.of(options), near, partial(regressed.of, options), lists.events_I, options)

    def cost_s(options: Options) -> float:
        near_s = NEAR_COUNTS * count_s if options["near"] and not near.cache_info().currsize else 0.0
        slim_s = regression_s if options["slim"] and not regressed.has(options) else 0.0
        return near_s + slim_s + (0.0 if counts.has(options) else COUNTS_LEFT * count_s * options["window"] / starts[0]["window"])

    figure = regressed.watched(counts.watched(lambda options: task.measured(fitted(options).rank, pairs)))
    result = search(figure, starts, grid, deadline, cost_s=cost_s)
    chosen = _without_near(task, pairs, fitted, result.best)
    best = fitted(chosen.options)
    limit, limit_trials = _fewest_neighbours(task, pairs, best, chosen, deadline)
    best = best if limit is None else replace(best, lists=best.lists.limited(limit))
    if chosen.options["slim"]:  # what is returned holds one regression, and not what made others
        regression = best.regressed()
        best = replace(best, regressed=lambda: regression)
    else:
        best = replace(best, regressed=partial(slim, best.counts, chosen.options["l2"]))
    options = {**chosen.options, "kept": limit}
    seconds, trials = time.perf_counter() - begin, [*result.trials, *limit_trials]
    return Fitted(best.rank, options, best.lists.bytes, seconds, trials, result.ended, source=best)


def _without_near(task: Task, pairs: Sequence[EvaluationPair], fitted: Callable[[Options], Neighbours], best: Trial) -> Trial:
    """The best options, or the same without near items if these gain no more than a standard error: they take most of the memory."""
    if not best.options["near"]:
        return best
    queries, options = [pair.query for pair in pairs], {**best.options, "near": 0.0}
    with_B, without_B = (
        task.metric.of(fitted(each).rank(queries, task.metric.m, task.exclude_seen), pairs) for each in (best.options, options)
    )
    gain_B = with_B - without_B
    if gain_B.mean() > gain_B.std() / np.sqrt(len(gain_B)):
        return best
    log.info("near items: %+.5f, no more than a standard error", gain_B.mean())
    return Trial(options, float(without_B.mean()))


def most_queries(task: Task) -> int:
    """How many validation queries a trial answers, at least 1,000."""
    return VALIDATION_QUERIES if task.seconds is None else max(1000, min(VALIDATION_QUERIES, int(QUERIES_PER_SECOND * task.seconds)))


def _fewest_neighbours(
    task: Task, pairs: Sequence[EvaluationPair], unlimited: Neighbours, best: Trial, deadline: Deadline
) -> tuple[int | None, list[Trial]]:
    """The smallest of NEIGHBOUR_LIMITS that finds at least as much as no limit (else None), and the trials."""
    trials: list[Trial] = []
    most = int(np.diff(unlimited.lists.offset_I1).max(initial=0))
    for limit in sorted((limit for limit in NEIGHBOUR_LIMITS if limit < most), reverse=True):
        if deadline.is_over():
            break
        limited = replace(unlimited, lists=unlimited.lists.limited(limit))
        trials.append(Trial({**best.options, "kept": limit}, task.measured(limited.rank, pairs)))
        if trials[-1].figure < best.figure:
            break
    enough = [trial.options["kept"] for trial in trials if trial.figure >= best.figure]
    return min(enough, default=None), trials
