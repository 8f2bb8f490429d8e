"""Entries that are appended and closed: what a snapshot shows never changes, whatever is written meanwhile."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from espalier import entry_lists
from espalier.entry_lists import EntryArrays, EntryLists, entries_of, entries_under, open_entries, with_room
from espalier.read_only import read_only

VALUE, OTHER_VALUE = 4, 6
"""The first column that is no key, without and with a second key."""


def under(keys: list[int], entries: EntryArrays) -> list[tuple[int, int]]:
    """(the place of a key, a value) of the entries of some keys."""
    entry_C, of_C = entries_under(*read_only(np.array(keys, np.int64)), entries)
    return [(place, int(entries.rows[entry, VALUE])) for entry, place in zip(entry_C.tolist(), of_C.tolist(), strict=True)]


def test_an_entry_counts_from_the_moment_it_is_born_to_the_one_it_dies() -> None:
    lists = EntryLists(3, 4)
    first = lists.add(2, (3, 0, 70))
    assert [under([3], lists.snapshot(moment)) for moment in (1, 2, 5)] == [[], [(0, 70)], [(0, 70)]]
    lists.close(first, 5)
    assert [under([3], lists.snapshot(moment)) for moment in (4, 5)] == [[(0, 70)], []]
    assert [open_entries(lists.snapshot(moment)).tolist() for moment in (1, 2, 4, 5)] == [[], [first], [first], []]


def test_the_entries_of_a_key_come_in_order_of_arrival() -> None:
    lists = EntryLists(3, 4)
    for key, value in [(2, 20), (1, 10), (2, 21), (2, 22)]:
        lists.add(1, (key, 0, value))
    entries = lists.snapshot(1)
    assert under([2, 0, 1], entries) == [(0, 20), (0, 21), (0, 22), (2, 10)]
    assert under([99, 2], entries) == [(1, 20), (1, 21), (1, 22)]  # a key that there is no room for has none
    assert under([], entries) == []
    assert entries.length[:4].tolist() == [0, 1, 3, 0]


def test_a_snapshot_does_not_see_what_came_or_went_after_it() -> None:
    lists = EntryLists(3, 2)
    old = lists.add(1, (1, 0, 10))
    before = lists.snapshot(1)
    lists.close(old, 2)
    lists.add(2, (1, 0, 11))
    assert under([1], before) == [(0, 10)]
    assert open_entries(before).tolist() == [old]
    assert under([1], lists.snapshot(2)) == [(0, 11)]


def test_a_second_key_has_one_entry_that_counts() -> None:
    lists = EntryLists(5, 4, 1)
    assert entries_of(*read_only(np.array([-1, 0, 7])), lists.snapshot(1)).tolist() == [0, 0, 0]
    numbers: list[int] = []
    for moment, key in enumerate((1, 2, 1), start=1):
        if numbers:
            lists.close(numbers[-1], moment)
        numbers.append(lists.add(moment, (key, 0, 7, 0, moment)))
    other = lists.add(3, (1, 0, 0, 0, 9))
    for moment, entry in enumerate(numbers, start=1):
        found = entries_of(*read_only(np.array([7, 0, 8, -1])), lists.snapshot(moment))
        assert found.tolist() == [entry, other if moment == 3 else 0, 0, 0]
    lists.close(numbers[-1], 4)
    assert entries_of(*read_only(np.array([7])), lists.snapshot(4)).tolist() == [0]


def test_arrays_that_are_full_are_replaced_and_stay_with_who_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_lists, "FIRST", 2)
    lists = EntryLists(3, 1)
    lists.add(1, (0, 0, 10))
    before = lists.snapshot(1)
    assert lists.snapshot(2).rows is before.rows  # nothing is copied for a snapshot
    for number in range(1, 20):
        lists.add(1 + number, (number, 0, 10 + number))
    assert (len(before.rows), len(before.first)) == (2, 1)
    assert under([0, 3], before) == [(0, 10)]
    assert under([0, 19, 3], lists.snapshot(20)) == [(0, 10), (1, 29), (2, 13)]
    assert not lists.snapshot(20).rows.flags.writeable


def test_a_snapshot_of_full_arrays_is_not_led_past_their_end() -> None:
    """The first entry of a key that had none lies in the arrays that replaced those of the snapshot."""
    lists = EntryLists(5, 4, 600)
    for number in range(1, entry_lists.FIRST):
        lists.add(1, (1, 0, number, 0, 7))
    full = lists.snapshot(1)
    assert lists.used == len(full.rows)
    late = lists.add(2, (3, 0, 500, 0, 8))
    assert late == len(full.rows)
    assert (full.first[3], full.by_other[500]) == (0, 0)
    assert under([3], full) == []
    assert entries_of(*read_only(np.array([500, 1])), full).tolist() == [0, 1]
    assert entries_of(*read_only(np.array([500, 1])), lists.snapshot(2)).tolist() == [late, 1]


def test_closed_entries_are_dropped_and_the_others_keep_their_order() -> None:
    lists = EntryLists(5, 3, 9)
    numbers = [lists.add(1, (key, 0, other, 0, 10 * key + other)) for other, key in enumerate((2, 1, 2, 2, 0))]
    before = lists.snapshot(1)
    for entry in (numbers[0], numbers[3]):
        lists.close(entry, 2)
    assert lists.closed == 2
    kept = lists.drop_closed()
    assert (kept.tolist(), lists.closed, lists.used) == ([0, numbers[4], numbers[1], numbers[2]], 0, 4)
    lists.add(3, (2, 0, 3, 0, 23))
    lists.add(3, (1, 0, 5, 0, 15))
    found = lists.snapshot(3)
    entry_C, of_C = entries_under(*read_only(np.array([0, 1, 2])), found)
    assert found.rows[entry_C, OTHER_VALUE].tolist() == [4, 11, 15, 22, 23]
    assert of_C.tolist() == [0, 1, 1, 2, 2]
    others = entries_of(*read_only(np.arange(6)), found)
    assert found.rows[others, OTHER_VALUE].tolist() == [0, 11, 22, 23, 4, 15]
    assert found.length[:3].tolist() == [1, 2, 2]
    entry_C, _ = entries_under(*read_only(np.array([2])), before)
    assert before.rows[entry_C, OTHER_VALUE].tolist() == [20, 22, 23]


def test_nothing_is_left_when_all_are_closed() -> None:
    lists = EntryLists(3, 1)
    lists.close(lists.add(1, (0, 0, 1)), 2)
    assert lists.drop_closed().tolist() == [0]
    assert under([0], lists.snapshot(2)) == []
    lists.add(3, (0, 0, 5))
    assert under([0], lists.snapshot(3)) == [(0, 5)]


def test_a_larger_array_begins_with_what_there_was() -> None:
    array = np.array([[1, 2], [3, 4]])
    assert with_room(array, 2) is array
    assert_array_equal(with_room(array, 3), [[1, 2], [3, 4], [0, 0], [0, 0]])
    assert len(with_room(array, 9)) == 9


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), max_size=30), st.sampled_from([1, 2, 4]))
def test_every_snapshot_stays_as_lists_would_have_been(steps: list[tuple[int, bool, bool]], block: int) -> None:
    """Each step closes the oldest entry of a key or appends one; now and then those that are closed are dropped."""
    lists = EntryLists(3, 1, block=block)
    expected: list[list[int]] = [[] for _ in range(4)]
    number: dict[int, int] = {}  # value → entry
    snapshots = []
    for moment, (key, closes, drops) in enumerate(steps, start=1):
        if closes and expected[key]:
            lists.close(number.pop(expected[key].pop(0)), moment)
        else:
            expected[key].append(moment)
            number[moment] = lists.add(moment, (key, 0, moment))
        if drops:
            place = {entry: new for new, entry in enumerate(lists.drop_closed().tolist())}
            number = {value: place[entry] for value, entry in number.items()}
        snapshots.append((lists.snapshot(moment), [(key, value) for key in range(4) for value in expected[key]]))
    for entries, wanted in snapshots:
        assert under([0, 1, 2, 3], entries) == wanted


def test_entries_of_a_key_are_side_by_side_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_lists, "LARGEST_BLOCK", 4)
    lists = EntryLists(3, 2, block=2)
    numbers: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(6):
        for key in (0, 1):
            numbers[key].append(lists.add(1, (key, 0, 0)))
    assert numbers == {0: [1, 2, 5, 6, 9, 10], 1: [3, 4, 7, 8, 13, 14]}
    assert lists.used == 17  # the third blocks have room for as many entries as there were, which is the most that a block has
    assert entries_under(*read_only(np.array([1])), lists.snapshot(1))[0].tolist() == numbers[1]


def test_arrays_are_worn_when_a_quarter_is_closed_or_half_is_not_in_order() -> None:
    lists = EntryLists(3, 1)
    numbers = [lists.add(1, (0, 0, 0)) for _ in range(11)]
    assert [lists.is_worn(spare) for spare in (4, 5)] == [True, False]  # 12 are used, of which one was in order
    for entry in numbers[:8]:
        lists.close(entry, 2)
    assert [lists.is_worn(5), lists.closed] == [False, 8]
    lists.close(numbers[8], 2)
    assert lists.is_worn(5)
    lists.drop_closed()
    assert [lists.used, lists.is_worn(0)] == [3, False]
    for _ in range(3):
        lists.add(3, (0, 0, 0))
    assert not lists.is_worn(0)
    lists.add(3, (0, 0, 0))
    assert lists.is_worn(0)
