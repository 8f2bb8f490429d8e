"""Training instances are slices of users' lists: what came before a cut and what came after it, by (seed, step) alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from espalier.errors import InvalidData
from tests.training.logs import log_of
from training.deep.instances import Instances, InstanceSource
from training.specification.deep import InstanceConfig

STEPS = 5
SIZE = 40

lists_of_users = st.lists(st.integers(2, 30), min_size=1, max_size=6)


def distinct_lists(lengths: list[int]) -> list[list[int]]:
    """Users without an item in common, items counting up, so that an item says whose it is and where it stood."""
    start = np.concatenate([[0], np.cumsum(lengths)])
    return [list(range(start[user], start[user + 1])) for user in range(len(lengths))]


def source(lists: list[list[int]], seed: int = 3, order: Any = "file", **config: Any) -> InstanceSource:
    settings = InstanceConfig.model_validate({"windows": (4, 2, 1), "cold_share": 0.0} | config)
    return InstanceSource(log_of(lists, order), np.arange(len(lists)), settings, seed)


def instances(drawn: InstanceSource, steps: int = STEPS) -> list[tuple[list[int], list[int]]]:
    """(history, targets) without padding, after checking that padding is where it belongs."""
    found = []
    for step in range(steps):
        batch = drawn.batch(step, SIZE)
        assert batch.query.shape == (SIZE, drawn.length)
        assert batch.query.dtype == batch.target_BP.dtype == np.int64
        for history, targets in zip(batch.query.tolist(), batch.target_BP.tolist(), strict=True):
            known, wanted = [item for item in history if item >= 0], [item for item in targets if item >= 0]
            assert history == [-1] * (len(history) - len(known)) + known
            assert targets == wanted + [-1] * (len(targets) - len(wanted))
            found.append((known, wanted))
    return found


def whose(lists: list[list[int]], targets: list[int]) -> list[int]:
    return next(items for items in lists if targets[0] in items)


@given(lists_of_users, st.integers(0, 2**32))
def test_history_and_targets_are_what_lies_before_and_after_a_cut(lengths: list[int], seed: int) -> None:
    lists = distinct_lists(lengths)
    for history, targets in instances(source(lists, seed, targets=100)):
        items = whose(lists, targets)
        cut = len(items) - len(targets)
        assert cut >= 1
        assert targets == items[cut:]
        assert history == items[max(0, cut - 7) : cut]


@given(lists_of_users)
def test_the_half_split_cuts_in_the_middle(lengths: list[int]) -> None:
    lists = distinct_lists(lengths)
    for history, targets in instances(source(lists, split="half", targets=100)):
        items = whose(lists, targets)
        middle = len(items) // 2
        assert (history, targets) == (items[max(0, middle - 7) : middle], items[middle:])


def test_the_random_split_cuts_everywhere_alike() -> None:
    lists = distinct_lists([11])
    cuts = [11 - len(targets) for _, targets in instances(source(lists, targets=100), steps=50)]
    times = np.bincount(cuts, minlength=12)[1:11]
    assert len(cuts) == times.sum()
    assert_array_equal(np.abs(times - 200) < 5 * np.sqrt(200), True)


@given(lists_of_users, st.integers(1, 12))
def test_a_cap_takes_that_many_targets_in_order_from_after_the_cut(lengths: list[int], cap: int) -> None:
    lists = distinct_lists(lengths)
    for history, targets in instances(source(lists, targets=cap)):
        items = whose(lists, targets)
        rest = items[items.index(history[-1]) + 1 :]
        assert len(targets) == min(cap, len(rest))
        assert targets == sorted(targets)
        assert set(targets) <= set(rest)
        assert targets == rest or len(rest) > cap
        assert cap > 1 or targets == rest[:1], "a single target is the next item"
        assert len(set(targets)) == len(targets)


def test_a_cap_reaches_every_item_after_the_cut() -> None:
    rest = range(5, 10)
    times = np.zeros(10)
    for _, targets in instances(source(distinct_lists([10]), split="half", targets=2), steps=50):
        times += np.bincount(targets, minlength=10)
    assert times[:5].sum() == 0
    expected = times.sum() / len(rest)
    assert_array_equal(np.abs(times[5:] - expected) < 6 * np.sqrt(expected), True)


@given(lists_of_users)
def test_a_list_without_an_order_is_cut_into_disjoint_random_parts(lengths: list[int]) -> None:
    lists = distinct_lists(lengths)
    for history, targets in instances(source(lists, order="none", targets=100)):
        items = whose(lists, targets)
        assert set(history) <= set(items)
        assert set(targets) <= set(items)
        assert not set(history) & set(targets)
        assert len(set(history)) == len(history)
        assert len(history) == min(7, len(items) - len(targets))


def test_without_an_order_every_item_is_as_often_in_the_history() -> None:
    times = np.zeros(8)
    drawn = instances(source(distinct_lists([8]), order="none", split="half", targets=100), steps=50)
    for history, _ in drawn:
        times += np.bincount(history, minlength=8)
    assert_array_equal(np.abs(times - len(drawn) / 2) < 5 * np.sqrt(len(drawn) / 4), True)
    assert len({tuple(history) for history, _ in drawn}) > 100  # not one permutation for all


@pytest.mark.parametrize("share", [0.0, 0.25, 0.9])
def test_a_share_of_the_instances_is_cold_and_keeps_the_whole_list_as_targets(share: float) -> None:
    lists = distinct_lists([9, 5])
    drawn = instances(source(lists, cold_share=share, targets=100), steps=50)
    cold = [targets for history, targets in drawn if not history]
    assert abs(len(cold) - share * len(drawn)) <= 5 * np.sqrt(share * (1 - share) * len(drawn))
    assert all(targets in lists for targets in cold)


def test_users_are_drawn_alike_whatever_the_length_of_their_lists() -> None:
    lists = distinct_lists([2, 30, 9, 4])
    drawn = instances(source(lists), steps=50)
    times = np.bincount([lists.index(whose(lists, targets)) for _, targets in drawn], minlength=4)
    assert_array_equal(np.abs(times - len(drawn) / 4) < 5 * np.sqrt(len(drawn) / 4), True)


def same(one: Instances, other: Instances) -> bool:
    return np.array_equal(one.query, other.query) and np.array_equal(one.target_BP, other.target_BP)


@pytest.mark.parametrize("order", ["file", "none"])
def test_a_batch_depends_on_the_seed_and_the_step_alone(order: str) -> None:
    lists = distinct_lists([12, 7, 20])
    one, other = source(lists, order=order), source(lists, order=order)
    later = other.batch(4, SIZE)
    assert same(one.batch(4, SIZE), later)  # whatever was drawn before
    assert not same(one.batch(4, SIZE), one.batch(5, SIZE))
    assert not same(one.batch(4, SIZE), source(lists, seed=4, order=order).batch(4, SIZE))


def test_only_the_given_users_with_two_events_or_more_are_drawn() -> None:
    lists = [[0], [1, 2, 3], [4, 5], [6, 7]]
    drawn = InstanceSource(log_of(lists), np.array([0, 1, 3]), InstanceConfig(targets=100), 1)
    seen = {item for history, targets in instances(drawn) for item in history + targets}
    assert seen == {1, 2, 3, 6, 7}
    with pytest.raises(InvalidData, match="log: got '2 training users', expected at least one with two events or more"):
        source([[0], [1]])
