"""The mem of leaves, for a history: sums over its places of trained and of live entries, compiled.

    mem(leaf of item b) = Σ_d w_d · S[h_d, b], S the larger of the trained entry and the live one, 0 where there is neither

Sums are made place by place in float64, so that a live leaf has the mem that it has in a fold. Knows arrays alone.

Legend: B queries, T history, I trained items, R handles, L leaves, S sources of live entries, C live leaves.

trained  offset int64[I + 1], item, value, weight of `Memory`
live     source_S, place_S, begin_P, end_P, target, value of `LiveMemory`; all empty: there are no live entries
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.compiled_code import compiled

Array = NDArray[Any]


@compiled()
def trained_span(source: int, trained: Any) -> Any:
    """Where the trained entries of an item row begin and end; those of a live item are none."""
    offset = trained[0]
    if source >= len(offset) - 1:
        return np.int64(0), np.int64(0)
    return offset[source], offset[source + 1]


@compiled()
def live_span(source: int, live: Any) -> Any:
    """Where the live entries of an item row begin and end."""
    source_S, place_S, begin_P, end_P = live[:4]
    at = np.searchsorted(source_S, source)
    if at == len(source_S) or source_S[at] != source:
        return np.int64(0), np.int64(0)
    return begin_P[place_S[at]], end_P[place_S[at]]


@compiled()
def add_up(history_T: Array, trained: Any, live: Any, leaf_of_item: Array, leaf_offset: int, sum_L: Array, sum_R: Array) -> Any:
    """int64 and int64: the leaves and the handles with memory, in no order; mem is added up in `sum_L` and `sum_R` (float64, 0 before)."""
    items, weight = len(leaf_of_item), trained[3]
    total, live_total, d = 0, 0, 0
    for t in range(len(history_T) - 1, -1, -1):
        if history_T[t] >= 0 and d < len(weight):
            e, end = trained_span(history_T[t], trained)
            x, end_x = live_span(history_T[t], live)
            total += end - e + end_x - x
            live_total += end_x - x
            d += 1
    leaves, handles = np.empty(min(total, len(sum_L)), np.int64), np.empty(min(live_total, len(sum_R)), np.int64)
    leaf_count, handle_count, d = 0, 0, 0
    item, value, target, live_value = trained[1], trained[2], live[4], live[5]
    for t in range(len(history_T) - 1, -1, -1):
        if history_T[t] < 0 or d == len(weight):
            continue
        e, end = trained_span(history_T[t], trained)
        x, end_x = live_span(history_T[t], live)
        while e < end or x < end_x:
            if x == end_x or (e < end and item[e] < target[x]):
                row, entry = item[e], value[e]
                e += 1
            else:
                row, entry = target[x], live_value[x]
                x += 1
                if e < end and item[e] == row:
                    entry = max(entry, value[e])
                    e += 1
            part = np.float64(weight[d]) * np.float64(entry)
            if not part > 0:
                continue
            if row >= items:
                if sum_R[row - items] == 0:
                    handles[handle_count] = row - items
                    handle_count += 1
                sum_R[row - items] += part
            else:
                leaf = leaf_of_item[row]
                if sum_L[leaf - leaf_offset] == 0:
                    leaves[leaf_count] = leaf
                    leaf_count += 1
                sum_L[leaf - leaf_offset] += part
        d += 1
    return leaves[:leaf_count], handles[:handle_count]


@compiled()
def of_live_leaves(history_BT: Array, begin_B: Array, row_C: Array, items: int, trained: Any, live: Any, sum_R: Array) -> Array:
    """float32[C]: mem of the item rows of live leaves. Those of query b, begin_B[b] … begin_B[b + 1] − 1, are for its history.

    items  I of the tree: `trained` may have sources that the tree does not hold
    sum_R  float64, 0 before and afterwards
    """
    weight, target, live_value = trained[3], live[4], live[5]
    mem_C = np.empty(len(row_C), np.float32)
    for b in range(len(history_BT)):
        for is_gone in (False, True):  # add up, then clear what was added up
            d = 0
            for t in range(history_BT.shape[1] - 1, -1, -1):
                source = history_BT[b, t]
                if begin_B[b] == begin_B[b + 1] or source < 0 or d == len(weight):
                    continue
                x, end_x = live_span(source, live)
                for e in range(x + np.searchsorted(target[x:end_x], items), end_x):
                    part = np.float64(weight[d]) * np.float64(live_value[e])
                    sum_R[target[e] - items] = 0 if is_gone else sum_R[target[e] - items] + part
                d += 1
            if not is_gone:
                for c in range(begin_B[b], begin_B[b + 1]):
                    is_new = row_C[c] >= items
                    mem_C[c] = sum_R[row_C[c] - items] if is_new else of_item(history_BT[b], row_C[c], trained, live)
    return mem_C


@compiled()
def of_item(history_T: Array, row: int, trained: Any, live: Any) -> float:
    """mem of one item row, float64."""
    weight, mem, d = trained[3], 0.0, 0
    for t in range(len(history_T) - 1, -1, -1):
        if history_T[t] < 0 or d == len(weight):
            continue
        e, end = trained_span(history_T[t], trained)
        x, end_x = live_span(history_T[t], live)
        mem += np.float64(weight[d]) * np.float64(
            max(entry_of(row, trained[1], trained[2], e, end), entry_of(row, live[4], live[5], x, end_x))
        )
        d += 1
    return mem


@compiled()
def entry_of(row: int, item: Array, value: Array, begin: int, end: int) -> Any:
    """The value of an item row among entries in ascending order; 0 where it is not there."""
    at = begin + np.searchsorted(item[begin:end], row)
    return value[at] if at < end and item[at] == row else np.float32(0)


@compiled()
def in_order(numbers: Array, highest: int) -> Array:
    """Numbers from 0 to `highest` (int64), ascending: a radix sort, several times faster than a comparing one."""
    other, shift = np.empty_like(numbers), 0
    while highest >> shift > 0:
        begin = np.zeros(257, np.int64)
        for number in numbers:
            begin[((number >> shift) & 255) + 1] += 1
        for digit in range(256):
            begin[digit + 1] += begin[digit]
        for number in numbers:
            digit = (number >> shift) & 255
            other[begin[digit]] = number
            begin[digit] += 1
        numbers, other = other, numbers
        shift += 8
    return numbers
