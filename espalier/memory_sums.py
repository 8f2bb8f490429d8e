"""The mem of leaves for a history: compiled sums over trained and live memory entries.

    mem(leaf of item b) = Σ_d w_d · S[h_d, b] + r(b), S the larger of the trained and the live entry, 0 without either

Sums run over the history in float64, with r last, so that a live leaf has the same mem as after a fold. Knows only arrays.

Legend: B queries, T history, D distinct items of it, I trained items, R handles, L leaves, E live entries, C live leaves.

trained  offset int64[I + 1], item, value (see `stored_numbers`), weight and repeat of `Memory`; local_I int64: for a shard, its row of each
         item of the whole bundle, −1 for items that it does not hold; empty if the tree is whole
live     entries by source, `EntryArrays`, and value float32[E] of `LiveMemory`; all empty if there are no live entries
"""

from __future__ import annotations

from typing import Any

import numpy as np

from espalier.arrays import Array
from espalier.compiled_code import compiled
from espalier.entry_lists import BORN, DIED, KEY, NEXT
from espalier.memory import BUCKETS
from espalier.stored_numbers import number

SOURCE, TARGET = KEY, NEXT + 1
"""Columns of a live entry."""
AGE_BITS, LAST_AGE = 24, (1 << 24) - 1
"""Low bits of a sort key that hold an item's age, and their mask. Age: how many items of the history came after it."""


@compiled()
def trained_span(source: int, trained: Any) -> Any:
    """Begin and end of the trained entries of an item row. A live item has none."""
    offset = trained[0]
    if source >= len(offset) - 1:
        return np.int64(0), np.int64(0)
    return offset[source], offset[source + 1]


@compiled()
def first_entry(source: int, entries: Any) -> Any:
    """The first live entry of an item row, in the snapshot or not; 0 if there is none."""
    return entries.first[source] if source < len(entries.first) else np.int64(0)


@compiled()
def add_up(history_T: Array, trained: Any, live: Any, leaf_of_item: Array, leaf_offset: int, sum_L: Array, sum_R: Array) -> Any:
    """The leaves and the handles with memory (int64 each, unordered). Adds their mem to `sum_L` and `sum_R` (float64, 0 before)."""
    item, value, weight, repeat, local_I = trained[1:]
    entries, live_value = live
    rows, moment, items = entries.rows, entries.moment, len(leaf_of_item)
    repeats, bonus_D = repeat_terms(history_T, repeat) if repeat.max() > 0 else (np.empty(0, np.int64), np.empty(0, np.float64))
    most_trained, most_live = most_entries(history_T, trained, entries)
    leaves = np.empty(min(most_trained + most_live + len(repeats), len(sum_L)), np.int64)
    handles = np.empty(min(most_live + len(repeats), len(sum_R)), np.int64)
    leaf_count, handle_count, d = 0, 0, 0
    for t in range(len(history_T) - 1, -1, -1):
        source = history_T[t]
        if source < 0 or d == len(weight):
            continue
        e, end = trained_span(source, trained)
        exceeded, x = np.empty(0, np.int64), first_entry(source, entries)  # trained entries below a live one, ascending
        while x > 0:
            if rows[x, BORN] <= moment < rows[x, DIED]:
                row, term = rows[x, TARGET], np.float64(weight[d]) * np.float64(live_value[x])
                if row >= items:
                    handle_count = added(term, row - items, sum_R, handles, handle_count)
                else:
                    at = e + np.searchsorted(item[e:end], row)
                    has_trained = at < end and item[at] == row
                    if not has_trained or live_value[x] > number(value[at]):
                        if has_trained:
                            exceeded = with_number(exceeded, at)
                        leaf_count = added(term, leaf_of_item[row] - leaf_offset, sum_L, leaves, leaf_count)
            x = rows[x, NEXT]
        left_out = 0
        for at in range(e, end):
            if left_out < len(exceeded) and exceeded[left_out] == at:
                left_out += 1
            else:
                term = np.float64(weight[d]) * np.float64(number(value[at]))
                leaf_count = added(term, leaf_of_item[item[at]] - leaf_offset, sum_L, leaves, leaf_count)
        d += 1
    for i in range(len(repeats)):
        row = local_row(repeats[i], local_I)
        if 0 <= row < items:
            leaf_count = added(bonus_D[i], leaf_of_item[row] - leaf_offset, sum_L, leaves, leaf_count)
        elif items <= row < items + len(sum_R):
            handle_count = added(bonus_D[i], row - items, sum_R, handles, handle_count)
    return leaves[:leaf_count] + leaf_offset, handles[:handle_count]


@compiled()
def added(term: float, index: int, sums: Array, found: Array, count: int) -> Any:
    """Add a term to a sum. `found` lists the sums above 0; returns how many there are, `count` before."""
    if term > 0:
        if sums[index] == 0:
            found[count] = index
            count += 1
        sums[index] += term
    return count


@compiled()
def most_entries(history_T: Array, trained: Any, entries: Any) -> Any:
    """At most how many trained and how many live entries `add_up` reads, entries outside of the snapshot included."""
    most_trained, most_live, d = 0, 0, 0
    for t in range(len(history_T) - 1, -1, -1):
        source = history_T[t]
        if source >= 0 and d < len(trained[3]):
            e, end = trained_span(source, trained)
            most_trained += end - e
            most_live += entries.length[source] if source < len(entries.length) else 0
            d += 1
    return most_trained, most_live


@compiled()
def newest(history_T: Array) -> Any:
    """int64[D] and int64[D]: the distinct items of a history, and the age of each one's last occurrence."""
    numbers, distinct = occurrences(history_T), 0
    for i in range(len(numbers)):
        if i == 0 or numbers[i] >> AGE_BITS != numbers[distinct - 1] >> AGE_BITS:
            numbers[distinct] = numbers[i]
            distinct += 1
    return numbers[:distinct] >> AGE_BITS, numbers[:distinct] & LAST_AGE


@compiled()
def repeat_terms(history_T: Array, repeat: Array) -> Any:
    """int64[D] and float64[D]: the distinct items of a history, and r of each, its newest occurrence added first."""
    numbers, distinct = occurrences(history_T), 0
    row_D, term_D = np.empty(len(numbers), np.int64), np.zeros(len(numbers), np.float64)
    for occurrence in numbers:
        row = occurrence >> AGE_BITS
        if distinct == 0 or row_D[distinct - 1] != row:
            row_D[distinct] = row
            distinct += 1
        term_D[distinct - 1] += np.float64(repeat[bucket_of(occurrence & LAST_AGE)])
    return row_D[:distinct], term_D[:distinct]


@compiled()
def occurrences(history_T: Array) -> Any:
    """int64: item << AGE_BITS | age for each item of a history, ascending."""
    numbers, count, highest = np.empty(len(history_T), np.int64), 0, np.int64(0)
    for t in range(len(history_T) - 1, -1, -1):
        if history_T[t] >= 0:
            numbers[count] = (history_T[t] << AGE_BITS) + count
            highest = max(highest, numbers[count])
            count += 1
    return in_order(numbers[:count], highest, AGE_BITS)


@compiled()
def bucket_of(age: int) -> Any:
    """`bucket_of` in `espalier.memory`, compiled."""
    bucket = 0
    while age > 0 and bucket < BUCKETS - 1:
        age >>= 1
        bucket += 1
    return bucket


@compiled()
def local_row(row: int, local_I: Array) -> Any:
    """The row in this tree of an item row of the whole bundle; −1 if the tree does not hold the item."""
    if len(local_I) == 0:
        return row
    return local_I[row] if row < len(local_I) else np.int64(-1)


@compiled()
def left_out_rows(history_BT: Array, left_out: Array, local_I: Array) -> Array:
    """int64[B, T]: the items of each history whose bucket is left out (bool[BUCKETS]), −1 as padding and for items of other shards."""
    rows_BT = np.full(history_BT.shape, -1, np.int64)
    for b in range(len(history_BT)):
        row_D, age_D = newest(history_BT[b])
        count = 0
        for i in range(len(row_D)):
            if left_out[bucket_of(age_D[i])]:
                rows_BT[b, count] = local_row(row_D[i], local_I)
                count += 1
    return rows_BT


@compiled()
def with_number(ascending: Array, number: int) -> Array:
    """Ascending numbers with one more number inserted."""
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
    """float32[C]: mem of item rows, trained or live. Query b's rows are begin_B[b] … begin_B[b + 1] − 1.

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
    """Numbers from 0 to `highest` (int64), sorted stably without their last `shift` bits; several times faster than a comparison sort."""
    buffer = np.empty_like(numbers)
    while highest >> shift > 0:
        begin = np.zeros(257, np.int64)
        for value in numbers:
            begin[((value >> shift) & 255) + 1] += 1
        for digit in range(256):
            begin[digit + 1] += begin[digit]
        for value in numbers:
            digit = (value >> shift) & 255
            buffer[begin[digit]] = value
            begin[digit] += 1
        numbers, buffer = buffer, numbers
        shift += 8
    return numbers
