"""iALS: what `implicit` is given, histories that were not in training, and limits."""

from __future__ import annotations

import time

import numpy as np
import pytest
from numpy.testing import assert_allclose

from espalier.errors import DeviceUnavailable, InvalidData
from tests.training.tasks import task_of
from tests.training.test_ease import grouped
from training.baselines import ials as module
from training.baselines.ials import START, Ials, factors_of, ials, implicit_is_installed
from training.data.user_item_matrix import user_item_matrix
from training.neighbours.fit import fading
from training.retrieval.task import Deadline

installed = pytest.mark.skipif(not implicit_is_installed(), reason="the extra `baselines` is not installed")
SMALL = {**START, "factors": 6, "iterations": 8}


@installed
def test_a_history_gets_its_vector_by_least_squares() -> None:
    matrix = user_item_matrix(grouped(1), np.arange(60))
    model = factors_of(matrix, SMALL, seed=1)
    fitted = Ials(model, np.ones(36, np.bool_), fading(0.5, 3), np.arange(36))
    score = fitted.scores([np.array([1, 4, 2, 4, 30])])[0]

    vectors = model.item_factors.astype(np.float64)
    confidence = np.ones(36)
    confidence[[30, 4, 2]] += 10 * np.array([1, 0.5, 0.25])  # the three latest different items
    preference = np.isin(np.arange(36), [30, 4, 2]) * 1.0
    l2 = SMALL["l2"] * np.sqrt(60 * 36)
    # `implicit` counts an observation's confidence as alpha · weight alone, where there is one
    confidence[[30, 4, 2]] -= 1
    user = np.linalg.solve(vectors.T @ (confidence[:, None] * vectors) + l2 * np.eye(6), vectors.T @ (confidence * preference))
    assert_allclose(score, vectors @ user, rtol=1e-3, atol=1e-5)


@installed
def test_items_that_no_training_user_has_come_last() -> None:
    task = task_of(grouped(3), list(range(60)), list(range(60, 80)), m=4, seconds=0.0)
    lists = task.split.lists
    absent = sorted(set(range(36)) - set(np.concatenate([lists.of(user) for user in range(3)]).tolist()))
    fitted = module.ials(task_of(lists, [0, 1, 2], list(range(60, 80)), m=4, seconds=0.0))
    answer = fitted.rank([lists.of(0)], 36, False)[0].tolist()
    assert answer[-len(absent) :] == absent
    assert len(fitted.trials) == 1
    assert "deadline" in str(fitted.ended)


@installed
def test_a_deadline_ends_training_after_an_iteration() -> None:
    matrix = user_item_matrix(grouped(1), np.arange(60))
    ended = factors_of(matrix, SMALL, 1, Deadline(time.monotonic()))
    one = factors_of(matrix, {**SMALL, "iterations": 1}, 1)
    assert ended.item_factors.tolist() == one.item_factors.tolist() != factors_of(matrix, SMALL, 1).item_factors.tolist()


@installed
def test_vectors_take_no_more_memory_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(grouped(3), list(range(60)), list(range(60, 80)), m=4)
    monkeypatch.setattr(module, "MOST_TRIALS", 9)
    fitted = ials(task, most_bytes=4 * 96 * 20)
    assert {trial.options["factors"] for trial in fitted.trials} <= set(range(8, 21))
    with pytest.raises(InvalidData, match="96 users and items"):
        ials(task, most_bytes=4 * 96 * 8 - 1)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "implicit_is_installed", lambda: False)
    with pytest.raises(DeviceUnavailable, match="baselines"):
        ials(task_of(grouped(3), [0], [1]))
