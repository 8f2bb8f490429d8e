"""How often items follow each other in users' lists, counted with a weight that falls with the distance. Compiled by numba.

    after[a, b]  = Σ_users len^−γ · Σ_{p < q ≤ p + W} dec^(q−p−1) · 1[item p is a, item q is b],    before[a, b] = after[b, a]

Knows lists. Does not know what is made of the counts.

Legend: I items, E events, N pairs of items that are in some window together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.compiled_code import compiled
from training.data.interactions import Interactions
from training.retrieval.scores import keep_best

Array = NDArray[Any]
Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]

END = -1
"""Stands behind each list."""
MOST_PAIRS = 1 << 26
"""Most pairs of items whose counts are kept, 12 bytes each; beyond them, items with the most neighbours keep their most frequent ones."""
BLOCK_PAIRS = 1 << 24
"""About how many pairs are counted at a time."""


@dataclass(frozen=True)
class Lists:
    """Some users' lists, one after another, oldest first, END behind each.

    item_E     int32[E + users]
    length_E   float32[E + users]: of the list that an event is in
    events_I   int64[I]: events of each item
    """

    item_E: Int32
    length_E: Float32
    events_I: Int64


def lists_of(interactions: Interactions, users: Int64) -> Lists:
    """The lists of some users, in their order."""
    begin_U, end_U = interactions.offset_U1[users], interactions.offset_U1[users + 1]
    size = int((end_U - begin_U).sum()) + len(users)
    item_E, length_E, events_I = np.empty(size, np.int32), np.empty(size, np.float32), np.zeros(interactions.item_count, np.int64)
    _copy_lists(interactions.item_of_event_E, begin_U, end_U, item_E, length_E, events_I)
    return Lists(item_E, length_E, events_I)


@compiled()
def _copy_lists(source_E: Array, begin_U: Array, end_U: Array, item_E: Array, length_E: Array, events_I: Array) -> None:
    place = 0
    for user in range(len(begin_U)):
        length = end_U[user] - begin_U[user]
        for event in range(begin_U[user], end_U[user]):
            item_E[place], length_E[place] = source_E[event], length
            events_I[source_E[event]] += 1
            place += 1
        item_E[place], length_E[place] = END, length
        place += 1


class Counts(NamedTuple):
    """`after` and `before` in sparse rows that share their columns.

    offset_I1  int64[I + 1]: row a is offset_I1[a] … offset_I1[a + 1] − 1
    item_N     int32: b · after_N, before_N  float32
    """

    offset_I1: Int64
    item_N: Int32
    after_N: Float32
    before_N: Float32


def counted(lists: Lists, weight_W: NDArray[np.float64], user_exponent: float = 0.0, most_pairs: int = MOST_PAIRS) -> Counts:
    """The counts. Where an item could have too many neighbours for `most_pairs`, those with the largest after + before stay."""
    items = len(lists.events_I)
    place_E = np.argsort(lists.item_E, kind="stable")[int(np.count_nonzero(lists.item_E == END)) :]  # events by item
    first_I1 = np.concatenate([[0], np.cumsum(lists.events_I)]).astype(np.int64)
    window = max(1, min(len(weight_W), int(lists.length_E.max(initial=1)) - 1))
    bound_I = np.minimum(_reach(lists.item_E, window, items), items)
    most = _most_per_row(bound_I, most_pairs)
    weight_D = weight_W[:window].astype(np.float32)
    weight_E = np.power(lists.length_E, np.float32(-user_exponent)) if user_exponent else np.ones(0, np.float32)
    blocks = np.searchsorted(np.cumsum(bound_I), np.arange(0, int(bound_I.sum()), BLOCK_PAIRS)[1:]).tolist()
    parts, lengths = [], [np.zeros(1, np.int64)]
    for first, last in zip([0, *blocks], [*blocks, items], strict=True):
        bound = int(np.minimum(bound_I[first:last], most).sum())
        length = np.zeros(last - first, np.int64)
        found = (np.empty(bound, np.int32), np.empty(bound, np.float32), np.empty(bound, np.float32))
        used = _count_rows((lists.item_E, place_E, first_I1, weight_E, weight_D), first, last, most, length, found)
        parts.append([array[:used].copy() for array in found])
        lengths.append(length)
    columns = [np.concatenate([np.zeros(0, np.float32 if i else np.int32), *(part[i] for part in parts)]) for i in range(3)]
    return Counts(np.cumsum(np.concatenate(lengths)), columns[0], columns[1], columns[2])


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
    """The largest number of neighbours an item with which all items together have at most `most_pairs`; at least 1."""
    low, high = 1, max(1, int(bound_I.max(initial=1)))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if np.minimum(bound_I, middle).sum() <= most_pairs else (low, middle - 1)
    return low


@compiled()
def _count_rows(lists: Any, first: int, last: int, most: int, length: Array, found: Any) -> int:
    """Rows first … last − 1, one after another, to `found`; how many entries each has to `length`. Returns the entries of all."""
    item_E, place_E, first_I1, weight_E, weight_D = lists
    item_N, after_N, before_N = found
    items, used = len(first_I1) - 1, 0
    after_I, before_I = np.zeros(items, np.float32), np.zeros(items, np.float32)
    known_I, neighbours = np.zeros(items, np.bool_), np.empty(items, np.int32)
    both = np.empty(items, np.float32)
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
                both[n] = after_I[neighbours[n]] + before_I[neighbours[n]]
            kept = keep_best(neighbours, both, count, kept_M, score_M)
            item_N[used : used + kept] = kept_M[:kept]
        else:
            item_N[used : used + kept] = neighbours[:count]
        for n in range(used, used + kept):
            after_N[n], before_N[n] = after_I[item_N[n]], before_I[item_N[n]]
        for n in range(count):
            b = neighbours[n]
            known_I[b], after_I[b], before_I[b] = False, 0, 0
        length[a - first] = kept
        used += kept
    return used
