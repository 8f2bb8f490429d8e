"""What benchmarks.shards says of answers: which are mixed, which went back, and quantiles of a histogram."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.service.shard_answers import Seen, is_mixed, went_back
from benchmarks.service.shard_fleet import SHIFT
from benchmarks.service.shards import quantile_ms

FIRST = (0.9, 0.5, 0.2)


def of_version(version: int, scores: tuple[float, ...] = FIRST) -> tuple[float, ...]:
    log_odds = [np.log(score / (1 - score)) + SHIFT * (version - 1) for score in scores]
    return tuple(float(1 / (1 + np.exp(-value))) for value in log_odds)


def answer(version: int, scores: tuple[float, ...], began: float = 0.0, ended: float = 1.0) -> Seen:
    return Seen(0, began, ended, version, 1.0, scores)


@pytest.mark.parametrize("version", [1, 2, 21])
def test_an_answer_with_the_scores_of_its_version_is_not_mixed(version: int) -> None:
    assert not is_mixed(answer(version, of_version(version)), {0: FIRST}, 1)


def test_one_score_of_another_version_makes_an_answer_mixed() -> None:
    scores = (*of_version(3)[:2], of_version(2)[2])
    assert is_mixed(answer(3, scores), {0: FIRST}, 1)
    assert is_mixed(answer(2, of_version(2)[:2]), {0: FIRST}, 1)


def test_an_answer_goes_back_if_a_higher_version_had_answered_before_it_began() -> None:
    higher, lower = answer(2, (), 0.0, 1.0), answer(1, (), 1.5, 2.0)
    assert went_back([higher, lower]) == 1
    assert went_back([higher, replace(lower, began=0.5)]) == 0, "it was under way already"


def test_a_quantile_is_of_what_was_counted_between_two_looks() -> None:
    before, after = [(0.001, 100.0), (0.002, 100.0), (0.004, 100.0)], [(0.001, 100.0), (0.002, 110.0), (0.004, 110.0)]
    assert quantile_ms(before, after, 0.5) == pytest.approx(1.5)
