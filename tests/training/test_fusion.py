"""Fusion of two answers, against the formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from espalier.errors import InvalidConfig
from tests.training.logs import log_of
from tests.training.tasks import task_of
from training.baselines.fusion import Fusion, depth, fuse, fused
from training.retrieval.task import Fitted

Int64 = NDArray[np.int64]


@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0.05, 0.95), constant=st.sampled_from([1.0, 10.0, 60.0]), m=st.integers(1, 12))
def test_it_ranks_by_summed_reciprocal_ranks(seed: int, share: float, constant: float, m: int) -> None:
    rng = np.random.default_rng(seed)
    first, second = (np.stack([rng.permutation(9)[:size] for _ in range(3)]) for size in rng.integers(1, 9, 2))
    found = fused(first, second, m, share, constant)
    for row, one, other in zip(found, first.tolist(), second.tolist(), strict=True):
        score = dict.fromkeys([*one, *other], 0.0)
        for rank, item in enumerate(one, start=1):
            score[item] += (1 - share) * (1 / (constant + rank))
        for rank, item in enumerate(other, start=1):
            score[item] += share * (1 / (constant + rank))
        expected = sorted(score, key=lambda item: (-score[item], item))[:m]
        assert row.tolist() == expected + [-1] * (m - len(expected))


def test_places_without_an_item_count_for_nothing_and_ties_come_by_the_lower_row() -> None:
    assert fused(np.array([[5, -1, -1]]), np.array([[3, -1, -1]]), 4, 0.5, 10).tolist() == [[3, 5, -1, -1]]


def constant_answer(*items: int) -> Fitted:
    def rank(histories: Sequence[Int64], m: int, exclude_seen: bool) -> Int64:
        rows = np.full((len(histories), m), -1)
        rows[:, : len(items)] = items
        return rows

    return Fitted(rank, {}, bytes=10, seconds=2.0)


def test_both_are_asked_for_more_than_is_wanted() -> None:
    asked = []

    def rank(histories: Sequence[Int64], m: int, exclude_seen: bool) -> Int64:
        asked.append((len(histories), m, exclude_seen))
        return np.tile(np.arange(m), (len(histories), 1))

    assert Fusion(rank, rank, 0.5, 10).rank([np.array([1])] * 3, 4, exclude_seen=True).tolist() == [[0, 1, 2, 3]] * 3
    assert asked == [(3, 200, True)] * 2
    assert depth(300) == 600
    with pytest.raises(InvalidConfig, match="m: got 0"):
        Fusion(rank, rank, 0.5, 10).rank([], 0, exclude_seen=True)


@pytest.mark.parametrize("better", [0, 1])
def test_the_weight_goes_to_the_method_that_finds_more(better: int) -> None:
    log = log_of([[0, 7]] * 4, items=20)
    methods = [constant_answer(5, 6), constant_answer(5, 6)]
    methods[better] = constant_answer(8, 7)
    task = task_of(log, [0, 1], [2, 3], m=2)
    fitted = fuse(methods[0], methods[1], task)
    assert (fitted.options["share"] > 0.5) == (better == 1)
    assert task.measured(fitted.rank, task.validation_pairs()) == 1 == max(trial.figure for trial in fitted.trials)
    assert fitted.bytes == 20
    assert fitted.seconds >= 4
    assert fitted.ended is None


def test_a_fusion_of_a_method_that_ended_early_says_so() -> None:
    short = replace(constant_answer(8), ended="3 of 60 steps")
    fitted = fuse(constant_answer(5), short, task_of(log_of([[0, 7]] * 4, items=20), [0, 1], [2, 3], m=2))
    assert fitted.ended == "of its parts, one ended early: 3 of 60 steps"
