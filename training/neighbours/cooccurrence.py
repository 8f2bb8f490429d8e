"""How often items follow each other in users' lists, counted with a weight that falls with the distance. Compiled by numba.

    after[a, b]  = Σ_users len^−γ · Σ_{p < q ≤ p + W} dec^(q−p−1) · 1[item p is a, item q is b],    before[a, b] = after[b, a]

All users count, whatever the size of the log. Only the newest LONGEST events of a list count, and an item keeps only as many neighbours as
fit into MOST_PAIRS for all items. Rows are counted one after another, each from the lists that contain its item. Memory is

    4 bytes an event for the lists, 8 for positions of items in them, 4 for weights (if γ is not 0); 12 bytes for each of the pairs

which is 0.8 GB for a million events, and 2.4 GB for 100 million. Time grows with the visits of pairs in a window, some nanoseconds each.

Knows lists. Does not know how the counts are used.

Legend: I items, U users, E events, N pairs of items that are in some window together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from espalier.arrays import Array, Float32, Float64, Int32, Int64
from espalier.compiled_code import compiled

from ..data.interactions import Interactions
from ..retrieval.scores import keep_best

END = -1
"""The end of each list."""
LONGEST = 1 << 14
"""Most events of a list that count, the newest: a program's million visits would otherwise make a trillion pairs."""
MOST_PAIRS = 1 << 26
"""Most pairs of items whose counts are kept, 12 bytes each."""
DAMPING = 0.25
"""The exponent of popularity when an item keeps only some of its neighbours. 0 and ½ each find much less on one of two logs."""
BLOCK_VISITS = 1 << 30
"""About how many pairs are visited in one compiled call, some seconds; an interrupt ends the counting after it."""


@dataclass(frozen=True)
class Lists:
    """Some users' lists, one after another, oldest first, END behind each.

    item_E     int32[E + U]
    length_U   int64[U]
    events_I   int64[I]: events of each item
    """

    item_E: Int32
    length_U: Int64
    events_I: Int64


def lists_of(interactions: Interactions, users: Int64, distinct: bool = False) -> Lists:
    """The newest events of some users' lists, in the users' order. distinct: only the first event of an item in a list counts."""
    end_U = interactions.offset_U1[users + 1]
    begin_U = np.maximum(interactions.offset_U1[users], end_U - LONGEST)
    item_E, length_U = np.empty(int((end_U - begin_U).sum()) + len(users), np.int32), np.empty(len(users), np.int64)
    events_I, last_I = np.zeros(interactions.item_count, np.int64), np.full(interactions.item_count, -1, np.int64)
    used = _copy_lists(interactions.item_of_event_E, begin_U, end_U, distinct, last_I, item_E, length_U, events_I)
    return Lists(item_E[:used], length_U, events_I)


@compiled()
def _copy_lists(
    source_E: Array, begin_U: Array, end_U: Array, distinct: bool, last_I: Array, item_E: Array, length_U: Array, events_I: Array
) -> int:
    """Fills item_E, whose length it returns, and length_U, and adds to events_I. last_I: −1, then the last user of each item."""
    place = 0
    for user in range(len(begin_U)):
        first = place
        for event in range(begin_U[user], end_U[user]):
            item = source_E[event]
            if distinct and last_I[item] == user:
                continue
            last_I[item] = user
            item_E[place] = item
            events_I[item] += 1
            place += 1
        length_U[user] = place - first
        item_E[place] = END
        place += 1
    return place


class Counts(NamedTuple):
    """`after` and `before` in sparse rows that share their columns.

    offset_I1  int64[I + 1]: row a is offset_I1[a] … offset_I1[a + 1] − 1
    item_N     int32: b · after_N, before_N  float32
    total_I    float64[I]: the events of each item, each counted as len^−γ
    """

    offset_I1: Int64
    item_N: Int32
    after_N: Float32
    before_N: Float32
    total_I: Float64


def count_pairs(
    lists: Lists, weight_W: Float64, user_exponent: float = 0.0, damping: float = DAMPING, most_pairs: int = MOST_PAIRS
) -> Counts:
    """The counts. If there could be more than `most_pairs`, each item keeps only as many neighbours as fit: those with the largest
    (after + before) / events^damping, with the neighbour's events."""
    items = len(lists.events_I)
    first_I1 = np.concatenate([[0], np.cumsum(lists.events_I)]).astype(np.int64)
    position_E = np.empty(first_I1[-1], np.int64)
    _places(lists.item_E, first_I1[:-1].copy(), position_E)
    window = max(1, min(len(weight_W), int(lists.length_U.max(initial=1)) - 1))
    reach_I = _reach(lists.item_E, window, items)
    bound_I = np.minimum(reach_I, items)
    most = _most_per_row(bound_I, most_pairs)
    bound = int(np.minimum(bound_I, most).sum())
    pairs = (np.empty(bound, np.int32), np.empty(bound, np.float32), np.empty(bound, np.float32))
    weight_D = weight_W[:window].astype(np.float32)
    weight_E = np.empty(0, np.float32)
    if user_exponent:
        weight_U = np.power(np.maximum(lists.length_U, 1).astype(np.float32), np.float32(-user_exponent))
        weight_E = np.repeat(weight_U, lists.length_U + 1)
    total_I = _totals(lists.item_E, weight_E, items) if user_exponent else lists.events_I.astype(np.float64)
    damped_I = np.power(np.maximum(lists.events_I, 1), damping, dtype=np.float32)
    offset_I1 = np.zeros(items + 1, np.int64)
    blocks = np.searchsorted(np.cumsum(reach_I), np.arange(0, int(reach_I.sum()), BLOCK_VISITS)[1:]).tolist()
    for first, last in zip([0, *blocks], [*blocks, items], strict=True):
        _count_rows((lists.item_E, position_E, first_I1, weight_E, weight_D, damped_I), first, last, most, offset_I1, pairs)
    used = offset_I1[-1]
    return Counts(offset_I1, pairs[0][:used], pairs[1][:used], pairs[2][:used], total_I)


@compiled()
def _totals(item_E: Array, weight_E: Array, items: int) -> Array:
    total_I = np.zeros(items, np.float64)
    for place in range(len(item_E)):
        if item_E[place] != END:
            total_I[item_E[place]] += weight_E[place]
    return total_I


@compiled()
def _places(item_E: Array, next_I: Array, place_E: Array) -> None:
    """Where each item is in the lists, ascending. next_I: where its places begin in place_E, then where they end."""
    for place in range(len(item_E)):
        item = item_E[place]
        if item != END:
            place_E[next_I[item]] = place
            next_I[item] += 1


@compiled()
def _reach(item_E: Array, window: int, items: int) -> Array:
    """int64[I]: how many events are in the windows of an item's events."""
    reach_I = np.zeros(items, np.int64)
    first = 0
    for e in range(len(item_E)):
        if item_E[e] == END:
            for place in range(first, e):
                reach_I[item_E[place]] += min(window, place - first) + min(window, e - 1 - place)
            first = e + 1
    return reach_I


def _most_per_row(bound_I: Int64, most_pairs: int) -> int:
    """The largest limit of neighbours an item for which all items together have at most `most_pairs`; at least 1."""
    low, high = 1, max(1, int(bound_I.max(initial=1)))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if np.minimum(bound_I, middle).sum() <= most_pairs else (low, middle - 1)
    return low


@compiled()
def _count_rows(lists: Any, first: int, last: int, most: int, offset_I1: Array, found: Any) -> None:
    """Rows first … last − 1, one after another, to `found` from offset_I1[first] on; where each ends to offset_I1."""
    item_E, place_E, first_I1, weight_E, weight_D, damped_I = lists
    item_N, after_N, before_N = found
    items, used = len(first_I1) - 1, offset_I1[first]
    after_I, before_I = np.zeros(items, np.float32), np.zeros(items, np.float32)
    known_I, neighbours = np.zeros(items, np.bool_), np.empty(items, np.int32)
    likeness = np.empty(items, np.float32)
    kept_M, score_M = np.empty(most, np.int64), np.empty(most, np.float64)
    for a in range(first, last):
        count = 0
        for e in range(first_I1[a], first_I1[a + 1]):
            place = place_E[e]
            weight = weight_E[place] if len(weight_E) else np.float32(1)
            for distance in range(len(weight_D)):
                b = item_E[place + distance + 1]
                if b < 0:
                    break
                if not known_I[b]:
                    known_I[b] = True
                    neighbours[count] = b
                    count += 1
                after_I[b] += weight * weight_D[distance]
            for distance in range(min(len(weight_D), place)):
                b = item_E[place - distance - 1]
                if b < 0:
                    break
                if not known_I[b]:
                    known_I[b] = True
                    neighbours[count] = b
                    count += 1
                before_I[b] += weight * weight_D[distance]
        kept = count
        if count > most:
            for n in range(count):
                b = neighbours[n]
                likeness[n] = (after_I[b] + before_I[b]) / damped_I[b]
            kept = keep_best(neighbours, likeness, count, kept_M, score_M)
            item_N[used : used + kept] = kept_M[:kept]
        else:
            item_N[used : used + kept] = neighbours[:count]
        for n in range(used, used + kept):
            after_N[n], before_N[n] = after_I[item_N[n]], before_I[item_N[n]]
        for n in range(count):
            b = neighbours[n]
            known_I[b], after_I[b], before_I[b] = False, 0, 0
        used += kept
        offset_I1[a + 1] = used
