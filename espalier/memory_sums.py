"""The mem of leaves, for a history: sums over its places of trained and of live entries, compiled.

    mem(leaf of item b) = Σ_d w_d · S[h_d, b] + r(b), S the larger of the trained entry and the live one, 0 where there is neither

Sums are made place by place in float64, r last, so that a live leaf has the mem that it has in a fold. Knows arrays alone.

Legend: B queries, T history, D distinct items of it, I trained items, R handles, L leaves, E live entries, C live leaves.

trained  offset int64[I + 1], item, value (as `stored_numbers` has it), weight and repeat of `Memory`; own int64: the row that each item of
         the whole has in a shard, −1 of those that it does not hold; empty where the tree is whole
live     entries by source, `EntryArrays`, and value float32[E] of `LiveMemory`; all empty: there are no live entries
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.compiled_code import compiled
from espalier.entry_lists import BORN, DIED, KEY, NEXT
from espalier.memory import BUCKETS
from espalier.stored_numbers import number

Array = NDArray[Any]
SOURCE, TARGET = KEY, NEXT + 1
"""Columns of a live entry."""
PLACE_BITS, LAST_PLACE = 24, (1 << 24) - 1
"""Of the place that an item of a history carries along while it is sorted."""


@compiled()
def trained_span(source: int, trained: Any) -> Any:
    """Where the trained entries of an item row begin and end; those of a live item are none."""
    offset = trained[0]
    if source >= len(offset) - 1:
        return np.int64(0), np.int64(0)
    return offset[source], offset[source + 1]


@compiled()
def first_entry(source: int, entries: Any) -> Any:
    """The first live entry of an item row, whether it counts or not; 0 where it has none."""
    return entries.first[source] if source < len(entries.first) else np.int64(0)


@compiled()
def add_up(history_T: Array, trained: Any, live: Any, leaf_of_item: Array, leaf_offset: int, sum_L: Array, sum_R: Array) -> Any:
    """int64 and int64: the leaves and the handles with memory, in no order; mem is added up in `sum_L` and `sum_R` (float64, 0 before)."""
    items, weight = len(leaf_of_item), trained[3]
    item, value = trained[1], trained[2]
    entries, live_value = live
    rows, moment = entries.rows, entries.moment
    total, most_live, d = 0, 0, 0
    for t in range(len(history_T) - 1, -1, -1):
        source = history_T[t]
        if source >= 0 and d < len(weight):
            e, end = trained_span(source, trained)
            total += end - e
            most_live += entries.length[source] if source < len(entries.length) else 0
            d += 1
    repeat, own = trained[4], trained[5]
    repeats, place_D = newest(history_T) if repeat.max() > 0 else (np.empty(0, np.int64), np.empty(0, np.int64))
    leaves = np.empty(min(total + most_live + len(repeats), len(sum_L)), np.int64)
    handles = np.empty(min(most_live + len(repeats), len(sum_R)), np.int64)
    leaf_count, handle_count, d = 0, 0, 0
    for t in range(len(history_T) - 1, -1, -1):
        source = history_T[t]
        if source < 0 or d == len(weight):
            continue
        e, end = trained_span(source, trained)
        exceeded, x = np.empty(0, np.int64), first_entry(source, entries)  # trained entries that are below a live one, ascending
        while x > 0:
            if rows[x, BORN] <= moment < rows[x, DIED]:
                row, part = rows[x, TARGET], np.float64(weight[d]) * np.float64(live_value[x])
                if row >= items:
                    if part > 0 and sum_R[row - items] == 0:
                        handles[handle_count] = row - items
                        handle_count += 1
                    sum_R[row - items] += part
                else:
                    at = e + np.searchsorted(item[e:end], row)
                    has_trained = at < end and item[at] == row
                    if not has_trained or live_value[x] > number(value[at]):
                        if has_trained:
                            exceeded = with_number(exceeded, at)
                        leaf = leaf_of_item[row]
                        if part > 0 and sum_L[leaf - leaf_offset] == 0:
                            leaves[leaf_count] = leaf
                            leaf_count += 1
                        sum_L[leaf - leaf_offset] += part
            x = rows[x, NEXT]
        left_out = 0
        for at in range(e, end):
            if left_out < len(exceeded) and exceeded[left_out] == at:
                left_out += 1
                continue
            part = np.float64(weight[d]) * np.float64(number(value[at]))
            if not part > 0:
                continue
            leaf = leaf_of_item[item[at]]
            if sum_L[leaf - leaf_offset] == 0:
                leaves[leaf_count] = leaf
                leaf_count += 1
            sum_L[leaf - leaf_offset] += part
        d += 1
    for i in range(len(repeats)):
        row, part = own_row(repeats[i], own), np.float64(repeat[bucket_of(place_D[i])])
        if row < 0 or row - items >= len(sum_R) or not part > 0:
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
    return leaves[:leaf_count], handles[:handle_count]


@compiled()
def newest(history_T: Array) -> Any:
    """int64[D] and int64[D]: the distinct items of a history, and how many places ago each came last."""
    numbers, count, highest = np.empty(len(history_T), np.int64), 0, np.int64(0)
    for t in range(len(history_T) - 1, -1, -1):
        if history_T[t] >= 0:
            numbers[count] = (history_T[t] << PLACE_BITS) + count
            highest = max(highest, numbers[count])
            count += 1
    numbers, distinct = in_order(numbers[:count], highest, PLACE_BITS), 0
    for i in range(count):
        if i == 0 or numbers[i] >> PLACE_BITS != numbers[distinct - 1] >> PLACE_BITS:
            numbers[distinct] = numbers[i]
            distinct += 1
    return numbers[:distinct] >> PLACE_BITS, numbers[:distinct] & LAST_PLACE


@compiled()
def bucket_of(place: int) -> Any:
    """See `espalier.memory`."""
    bucket = 0
    while place > 0 and bucket < BUCKETS - 1:
        place >>= 1
        bucket += 1
    return bucket


@compiled()
def own_row(row: int, own: Array) -> Any:
    """An item row of the whole in this tree, −1 where it is not in it."""
    if len(own) == 0:
        return row
    return own[row] if row < len(own) else np.int64(-1)


@compiled()
def left_out_rows(history_BT: Array, left_out: Array, own: Array) -> Array:
    """int64[B, T]: the items of each history whose bucket is left out (bool[BUCKETS]), −1 as padding and for those not in this tree."""
    rows_BT = np.full(history_BT.shape, -1, np.int64)
    for b in range(len(history_BT)):
        row_D, place_D = newest(history_BT[b])
        count = 0
        for i in range(len(row_D)):
            if left_out[bucket_of(place_D[i])]:
                rows_BT[b, count] = own_row(row_D[i], own)
                count += 1
    return rows_BT


@compiled()
def with_number(ascending: Array, number: int) -> Array:
    """Numbers in ascending order with one more."""
    more, i = np.empty(len(ascending) + 1, np.int64), len(ascending)
    more[:i] = ascending
    while i > 0 and more[i - 1] > number:
        more[i] = more[i - 1]
        i -= 1
    more[i] = number
    return more


@compiled()
def of_leaves(
    history_BT: Array,
    begin_B: Array,
    row_C: Array,
    trained: Any,
    live: Any,
    leaf_of_item: Array,
    leaf_offset: int,
    sum_L: Array,
    sum_R: Array,
) -> Array:
    """float32[C]: mem of item rows, trained or live. Those of query b, begin_B[b] … begin_B[b + 1] − 1, are for its history.

    sum_L sum_R  float64, 0 before and afterwards
    """
    items, mem_C = len(leaf_of_item), np.empty(len(row_C), np.float32)
    for b in range(len(history_BT)):
        if begin_B[b] == begin_B[b + 1]:
            continue
        leaves, handles = add_up(history_BT[b], trained, live, leaf_of_item, leaf_offset, sum_L, sum_R)
        for c in range(begin_B[b], begin_B[b + 1]):
            row = row_C[c]
            mem_C[c] = sum_R[row - items] if row >= items else sum_L[leaf_of_item[row] - leaf_offset]
        for leaf in leaves:
            sum_L[leaf - leaf_offset] = 0
        for handle in handles:
            sum_R[handle] = 0
    return mem_C


@compiled()
def in_order(numbers: Array, highest: int, shift: int = 0) -> Array:
    """Numbers from 0 to `highest` (int64), ascending without their last `shift` bits, ties in the order in which they came: a radix sort,
    several times faster than a comparing one.
    """
    other = np.empty_like(numbers)
    while highest >> shift > 0:
        begin = np.zeros(257, np.int64)
        for one in numbers:
            begin[((one >> shift) & 255) + 1] += 1
        for digit in range(256):
            begin[digit + 1] += begin[digit]
        for one in numbers:
            digit = (one >> shift) & 255
            other[begin[digit]] = one
            begin[digit] += 1
        numbers, other = other, numbers
        shift += 8
    return numbers
