"""Held-out users and the halves of their lists."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from espalier.errors import InvalidConfig
from tests.training.logs import log_of
from training.data.splits import EvaluationPair, halves, split_users, without_seen
from training.specification.log_format import Order


def test_every_user_is_in_exactly_one_part_of_the_stated_size() -> None:
    split = split_users(log_of([[0, 1]] * 57), 0.2, 0.1, seed=3)
    assert (len(split.test), len(split.validation), len(split.train)) == (11, 5, 41)
    assert_array_equal(np.sort(np.concatenate([split.train, split.validation, split.test])), np.arange(57))


def test_the_seed_decides_the_split() -> None:
    log = log_of([[0, 1]] * 100)
    assert_array_equal(split_users(log, seed=1).test, split_users(log, seed=1).test)
    assert not np.array_equal(split_users(log, seed=1).test, split_users(log, seed=2).test)


@pytest.mark.parametrize(
    ("test", "validation", "field"), [(-0.1, 0.1, "test_share"), (0.5, 0.5, "validation_share"), (0.1, 1, "validation_share")]
)
def test_shares_that_leave_no_training_users_are_refused(test: float, validation: float, field: str) -> None:
    with pytest.raises(InvalidConfig) as error:
        split_users(log_of([[0, 1]] * 10), test, validation, seed=0)
    assert error.value.field == field


def test_the_first_half_is_the_query_and_the_whole_second_half_is_relevant() -> None:
    pairs = halves(log_of([[4, 3, 2, 1, 0], [1, 1]]), np.array([1, 0]), seed=0)
    assert [(pair.user, pair.history.tolist(), pair.relevant.tolist()) for pair in pairs] == [(1, [1], [1]), (0, [4, 3], [2, 1, 0])]


def test_a_list_too_short_for_two_halves_is_skipped() -> None:
    assert [pair.user for pair in halves(log_of([[0], [0, 1]]), np.array([0, 1]), seed=0)] == [1]


def test_lists_without_order_are_shuffled_and_ordered_ones_are_not() -> None:
    users = np.arange(1)
    orders: tuple[Order, Order] = ("file", "none")
    ordered, shuffled = (halves(log_of([list(range(40))], order), users, seed=5)[0] for order in orders)
    assert ordered.history.tolist() == list(range(20))
    assert shuffled.history.tolist() != list(range(20))
    assert sorted([*shuffled.history, *shuffled.relevant]) == list(range(40))


def test_a_users_shuffle_depends_on_the_seed_but_not_on_the_other_users() -> None:
    log = log_of([list(range(40))] * 6, "none")
    together, alone = halves(log, np.arange(6), seed=5), halves(log, np.array([4]), seed=5)
    assert_array_equal(together[4].history, alone[0].history)
    assert not np.array_equal(together[4].history, together[3].history)
    assert not np.array_equal(alone[0].history, halves(log, np.array([4]), seed=6)[0].history)


def test_without_seen_takes_the_history_out_of_what_is_relevant() -> None:
    pairs = [EvaluationPair(0, np.array([1, 2]), np.array([2, 3, 3])), EvaluationPair(1, np.array([1]), np.array([1]))]
    kept = without_seen(pairs)
    assert [(pair.user, pair.history.tolist(), pair.relevant.tolist()) for pair in kept] == [(0, [1, 2], [3, 3])]
