"""EASE against numpy's inverse, its limits of memory and time, and how its options are chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from espalier.errors import InvalidConfig, InvalidData
from tests.training.logs import log_of
from tests.training.tasks import task_of
from training.baselines import ease as module
from training.baselines.ease import START, answering, ease, invert, refuse_too_many, weights
from training.data.interactions import Interactions
from training.data.user_item_matrix import user_item_matrix
from training.retrieval.needs import LEAST_S, available_bytes
from training.retrieval.tuning import Options


def some_lists(seed: int, items: int, users: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, items, rng.integers(1, 7)).tolist() for _ in range(users)]


@given(size=st.integers(1, 40), block=st.integers(1, 50), seed=st.integers(0, 2**32 - 1))
def test_a_matrix_is_inverted_in_its_place(size: int, block: int, seed: int) -> None:
    half = np.random.default_rng(seed).normal(size=(size, size)).astype(np.float32)
    matrix = half @ half.T + size * np.eye(size, dtype=np.float32)
    expected = np.linalg.inv(matrix.astype(np.float64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        invert(matrix)
    assert_allclose(matrix, expected, rtol=1e-3, atol=1e-5)
    assert_allclose(matrix, matrix.T)


def test_a_matrix_that_has_no_inverse_is_refused() -> None:
    with pytest.raises(InvalidData, match="l2"):
        invert(np.zeros((3, 3), np.float32))


@given(seed=st.integers(0, 2**32 - 1), block=st.integers(1, 12), exclude_seen=st.booleans())
def test_answers_are_those_of_the_formula(seed: int, block: int, exclude_seen: bool) -> None:
    items, options = 9, {"recency": 0.8, "column": 0.3, "row": 0.2, "l2": 2.0, "ridge": 0.5, "user": 0.5}
    lists = [*some_lists(seed, items, 15), list(range(items))]
    matrix = user_item_matrix(log_of(lists), np.arange(16))
    pop = (matrix.toarray() > 0).sum(axis=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        fitted = answering(weights(matrix, options), pop, options, 3)
    history = np.random.default_rng([seed, 1]).integers(-1, items, 6)
    found = fitted.rank([history], 6, exclude_seen)[0]

    scaled = matrix.toarray() / np.sqrt(np.maximum(matrix.sum(axis=1), 1) ** 0.5)[:, None]
    inverse = np.linalg.inv(scaled.T @ scaled + np.diag(2.0 * pop**0.5))
    weight = -inverse / np.diag(inverse)
    np.fill_diagonal(weight, 0)
    known = history[history >= 0]
    if not len(known):
        return
    score = sum(0.8**d * pop[item] ** -0.2 * weight[item] for d, item in enumerate(known[::-1][:3])) * pop**-0.3
    if exclude_seen:
        score[known] = -np.inf
    found = found[found >= 0]
    found = found[np.isfinite(score[found])]
    assert_allclose(score[found], np.sort(score)[::-1][: len(found)], rtol=1e-3, atol=1e-5)


def test_items_without_training_users_come_after_all_others_and_an_empty_history_gets_popular_ones() -> None:
    matrix = user_item_matrix(log_of([[0, 1], [0, 1], [1, 3], [1, 3]], items=6), np.arange(4))
    fitted = answering(weights(matrix, START), np.array([2, 4, 0, 2, 0, 0]), START, 10)
    histories = [np.array([], np.int64), np.array([4]), np.array([-1]), np.array([0])]
    assert fitted.rank(histories[:3], 3, exclude_seen=True).tolist() == [[1, 0, 3]] * 3
    assert fitted.rank(histories[3:], 6, exclude_seen=True).tolist() == [[1, 3, 2, 4, 5, -1]]


def test_more_memory_than_it_may_take_is_refused_and_says_how_many_items_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "inversion_seconds", lambda items: 1234.0)
    log = log_of([[0, 1]], items=100)
    refuse_too_many(log, 8 * 100**2)
    with pytest.raises(
        InvalidData,
        match=r"items: got '100 items', expected at most 99: EASE's two matrices would take .*; an inversion would take 1,234 s",
    ):
        refuse_too_many(log, 8 * 100**2 - 1)
    with pytest.raises(InvalidData, match="at most 35"):
        ease(task_of(grouped(1), list(range(60)), list(range(60, 80))), most_bytes=8 * 35**2 + 1)


def test_less_time_than_an_inversion_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "inversion_seconds", lambda items: 100.0)
    with pytest.raises(InvalidConfig, match=r"seconds: got 60.0, expected at least 100 for EASE's inversion of 36 items"):
        ease(task_of(grouped(1), list(range(60)), list(range(60, 80)), seconds=60.0))


def test_what_an_inversion_takes_grows_with_the_items() -> None:
    assert module.inversion_seconds(module.PROBE) == 0
    assert module.inversion_seconds(40 * module.PROBE) > 8 * module.inversion_seconds(10 * module.PROBE) > 0


def test_what_it_needs_leaves_time_to_answer_where_inversions_take_next_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(grouped(1), list(range(60)), list(range(60, 80)))
    least, enough = (module.needs(task).least_s, module.needs(task).full_s)
    assert least == LEAST_S
    assert enough >= module.ANSWERING_S
    monkeypatch.setattr(module, "inversion_seconds", lambda items: 100.0)
    assert module.needs(task).least_s == 100 * module.ONCE
    assert module.needs(task).full_s == module.ANSWERING_S + 100 * module.SEARCH


def grouped(seed: int) -> Interactions:
    """Lists of items of one of six groups, and one of a popular seventh between them."""
    rng = np.random.default_rng(seed)
    lists = []
    for _ in range(80):
        own = 6 * rng.integers(0, 5) + rng.permutation(6)
        lists.append([*own[:3].tolist(), int(30 + rng.integers(0, 6)), *own[3:5].tolist(), int(30 + rng.integers(0, 6))])
    return log_of(lists, items=36)


def test_options_are_chosen_by_validation_queries_the_latest_and_the_best_inverse_held(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(grouped(3), list(range(60)), list(range(60, 80)), m=4)
    made: list[Options] = []

    def noted(matrix: Any, options: Options) -> Any:
        made.append(options)
        return weights(matrix, options)

    monkeypatch.setattr(module, "weights", noted)
    fitted = ease(task)
    assert task.measured(fitted.rank, task.validation_pairs()) == max(trial.figure for trial in fitted.trials) > 0.4
    inverted = [tuple(options[name] for name in ("l2", "ridge", "user")) for options in made]
    assert len(inverted) == len(set(inverted)) < len(fitted.trials)
    assert ease(task).options == fitted.options
    assert fitted.bytes == 4 * 36**2 + 3 * 8 * 36


def test_a_deadline_that_is_over_gives_the_start() -> None:
    fitted = ease(task_of(grouped(3), list(range(60)), list(range(60, 80)), seconds=0.0))
    assert [trial.options for trial in fitted.trials] == [START]
    assert "deadline" in str(fitted.ended)


def test_available_memory_is_the_smaller_of_the_machines_and_the_containers(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) == 4 << 30
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  5000 kB\n")
    assert available_bytes(tmp_path, tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path, tmp_path) == 5000 * 1024
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert available_bytes(tmp_path, tmp_path) == 2_000_000
    assert available_bytes() > 1 << 20
