"""Popularity and Item-CF, against hand-computed cases and dense arithmetic."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from espalier.errors import InvalidConfig
from espalier.items import ItemTable
from tests.training.logs import log_of
from tests.training.tasks import task_of
from training.baselines import item_cf as module
from training.baselines import product_dnn, sasrec
from training.baselines.ials import implicit_is_installed
from training.baselines.item_cf import fit_item_cf
from training.baselines.methods import METHODS
from training.baselines.popularity import fit_popularity
from training.baselines.product_dnn import ProductDnnConfig
from training.baselines.sasrec_model import SasRecConfig
from training.data.user_item_matrix import user_item_matrix
from training.neighbours.neighbour_lists import NeighbourLists


def dense(lists: NeighbourLists) -> NDArray[np.float64]:
    """S as a matrix."""
    matrix = np.zeros((len(lists.offset_I1) - 1,) * 2)
    matrix[np.repeat(np.arange(len(matrix)), np.diff(lists.offset_I1)), lists.item_N] = lists.score_N
    return matrix


LISTS = [[0, 1, 1], [1, 2], [1, 2, 3], [3]]
"""Users of item: 0 → {0}, 1 → {0 1 2}, 2 → {1 2}, 3 → {2 3}."""


def test_the_matrix_is_binary_and_holds_the_given_users_in_their_order() -> None:
    matrix = user_item_matrix(log_of([[0, 1, 1], [2], [3, 0]]), np.array([2, 0]))
    assert matrix.toarray().tolist() == [[1, 0, 0, 1], [1, 1, 0, 0]]


def test_popularity_counts_users_not_events_and_breaks_ties_by_row() -> None:
    assert fit_popularity(log_of([[2, 2, 2, 1], [3, 1], [3]], items=5), np.arange(3)).best_I.tolist() == [1, 3, 2, 0, 4]


def test_popularity_leaves_out_what_was_seen_and_pads() -> None:
    popularity = fit_popularity(log_of(LISTS), np.arange(4))
    histories = [np.array([1, 1, 3]), np.array([], np.int64)]
    assert popularity.rank(histories, 3, exclude_seen=True).tolist() == [[2, 0, -1], [1, 2, 3]]
    assert popularity.rank(histories, 5, exclude_seen=False).tolist() == [[1, 2, 3, 0, -1]] * 2


def test_item_cf_similarity_is_the_cosine_of_user_sets() -> None:
    similarity = dense(fit_item_cf(log_of(LISTS), np.arange(4), 10).neighbours)
    half, r3, r6 = 0.5, 1 / np.sqrt(3), 1 / np.sqrt(6)
    assert_allclose(similarity, [[0, r3, 0, 0], [r3, 0, 2 * r6, r6], [0, 2 * r6, 0, half], [0, r6, half, 0]], rtol=1e-6)


def test_item_cf_keeps_the_best_neighbours_and_the_lower_row_of_equals() -> None:
    log = log_of([[0, 1, 2, 3], [0, 3]])
    kept = fit_item_cf(log, np.arange(2), 2).neighbours
    assert kept.item_N.tolist() == [3, 1, 2, 0, 1, 0, 0, 1]
    assert kept.offset_I1.tolist() == [0, 2, 4, 6, 8]
    assert_array_equal(dense(fit_item_cf(log, np.arange(2), 3).limited(2).neighbours), dense(kept))


def test_item_cf_ranks_by_summed_similarity() -> None:
    item_cf = fit_item_cf(log_of(LISTS), np.arange(4), 10)
    # From {1, 3}: item 2 gets 2/√6 + 1/2, item 0 gets 1/√3, item 1 gets 1/√6 (through 3), item 3 the same (through 1).
    histories = [np.array([1, 3, 3, -1])]
    assert item_cf.rank(histories, 5, exclude_seen=False).tolist() == [[2, 0, 1, 3, -1]]
    assert item_cf.rank(histories, 1, exclude_seen=True).tolist() == [[2]]
    assert item_cf.rank(histories, 3, exclude_seen=True).tolist() == [[2, 0, -1]]


def test_what_neighbours_leave_empty_is_filled_with_popular_items() -> None:
    item_cf = fit_item_cf(log_of(LISTS, items=6), np.arange(4), 10)
    histories = [np.array([0]), np.array([5]), np.array([], np.int64)]
    assert item_cf.rank(histories, 4, exclude_seen=False).tolist() == [[1, 2, 3, 0], [1, 2, 3, 0], [1, 2, 3, 0]]
    assert item_cf.rank(histories, 6, exclude_seen=True).tolist() == [[1, 2, 3, 4, 5, -1], [1, 2, 3, 0, 4, -1], [1, 2, 3, 0, 4, 5]]


@given(seed=st.integers(0, 2**32 - 1), neighbours=st.integers(1, 12), block=st.integers(1, 15), exclude_seen=st.booleans())
def test_item_cf_equals_dense_arithmetic_in_blocks_of_any_size(seed: int, neighbours: int, block: int, exclude_seen: bool) -> None:
    rng = np.random.default_rng(seed)
    lists = [rng.permutation(12)[: rng.integers(1, 6)].tolist() for _ in range(10)]
    histories = [rng.permutation(12)[: rng.integers(0, 4)] for _ in range(5)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        ranked = fit_item_cf(log_of(lists, items=12), np.arange(10), neighbours).rank(histories, 6, exclude_seen)

    touched = np.zeros((10, 12))
    for user, items in enumerate(lists):
        touched[user, items] = 1
    norm = np.sqrt(touched.sum(axis=0))
    similarity = np.divide(touched.T @ touched, np.outer(norm, norm), out=np.zeros((12, 12)), where=np.outer(norm, norm) > 0)
    np.fill_diagonal(similarity, 0)
    for row in similarity:
        row[np.lexsort((np.arange(12), -row.round(12)))[neighbours:]] = 0
    for b, history in enumerate(histories):
        score = similarity[history].sum(axis=0)
        if exclude_seen:
            score[history] = 0
        assert len(set(ranked[b].tolist())) == 6
        assert not exclude_seen or not set(ranked[b]) & set(history)
        assert_allclose(score[ranked[b]], np.sort(score)[::-1][:6], rtol=1e-6)


def test_tuning_takes_the_best_figure_and_the_smaller_of_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    # Item 0's neighbours are 1 (two users) and 3 (one user); the most popular other item is 2. Only with two neighbours does 3 come back.
    log = log_of([[0, 1], [0, 1], [0, 3], [2], [2], [2], [0, 3]])
    monkeypatch.setattr(module, "GRID", (1, 2, 5))
    fitted = METHODS["item-cf"](task_of(log, list(range(6)), [6], m=2))
    assert [trial.figure for trial in fitted.trials] == [0, 1, 1]
    assert fitted.options == {"neighbours": 2}
    assert fitted.rank([np.array([0])], 2, True).tolist() == [[1, 3]]
    ended = METHODS["item-cf"](task_of(log, list(range(6)), [6], m=2, seconds=0.0))
    assert ended.options == {"neighbours": 1}
    assert ended.ended == "the search ended at its deadline after 1 of 3 trials"


def test_bad_arguments_are_refused_by_name() -> None:
    log, users = log_of(LISTS), np.arange(4)
    for refused, field in (
        (lambda: fit_item_cf(log, users, 0), "neighbours"),
        (lambda: fit_item_cf(log, users, 1).limited(0), "neighbours"),
        (lambda: fit_item_cf(log, users, 1).rank([], 0, exclude_seen=False), "m"),
        (lambda: fit_popularity(log, users).rank([], 0, exclude_seen=False), "m"),
    ):
        with pytest.raises(InvalidConfig) as error:
            refused()
        assert error.value.field == field


def small(config: Any, **limits: Any) -> Any:
    """A configuration's class whose objects have these values, whatever else they are made of."""

    def made(**values: Any) -> Any:
        return config(**(values | limits))

    return made


@pytest.fixture
def small_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of few steps."""
    limits = {"max_rounds": 1, "warm_steps": 1, "width": 8, "heads": 1, "places": 32}
    monkeypatch.setattr(sasrec, "SasRecConfig", small(sasrec.SasRecConfig, **limits))
    monkeypatch.setattr(product_dnn, "ProductDnnConfig", small(product_dnn.ProductDnnConfig, max_steps=3, round_steps=3, batch=8, dim=4))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "item-means"])
def test_answers_depend_on_the_seed_and_training_and_validation_users_and_on_no_other_query(name: str, small_networks: None) -> None:
    if name == "ials" and not implicit_is_installed():
        pytest.skip("the extra `baselines` is not installed")
    histories = [np.array([12]), np.array([0, 10]), np.array([], np.int64), np.array([-1, 4, -1])]

    def answers(tested: list[int], histories: list[NDArray[np.int64]] = histories) -> list[list[int]]:
        lists = [[user % 5, 5 + user % 4, 10, (user + 1) % 5] for user in range(12)]
        task = task_of(log_of([*lists, *[tested] * 20], items=14), list(range(10)), [10, 11], m=3)
        words = pa.table({"id": [f"i{row}" for row in range(14)], "title": [f"a{row % 3} b{row % 5}" for row in range(14)]})
        fitted = METHODS[name](replace(task, items=ItemTable.build(words)))
        found = fitted.rank(histories, 5, exclude_seen=False)
        for history, rows in zip(histories, found, strict=True):
            assert_array_equal(fitted.rank([history], 5, exclude_seen=False)[0], rows)
            unseen = fitted.rank([history], 14, exclude_seen=True)[0]
            assert not set(unseen.tolist()) & {*history.tolist()} - {-1}
        rows: list[list[int]] = found.tolist()
        return rows

    assert answers([12, 13, 12, 13]) == answers([11, 7, 3])


@pytest.mark.parametrize("config", [SasRecConfig(init="random"), ProductDnnConfig(init="random")])
def test_options_of_networks_that_make_no_sense_are_refused_by_name(config: Any) -> None:
    numbers = {"width", "layers", "heads", "length", "negatives", "places", "average", "patience", "max_rounds"}
    numbers |= {"input_dim", "dim", "batch", "max_steps", "round_steps"}
    wrong = [(name, 0) for name in numbers] + [("init_std", 0.0), ("init_std", math.inf), ("learning_rate", -1.0)]
    wrong += [("learning_rate", math.inf), ("hidden", (8, 0)), ("dropout", 1.0), ("weight_decay", -0.1), ("warm_steps", -1)]
    wrong += [("loss", "half"), ("init", "zeros"), ("proposal", "alias")]
    own = {field.name for field in fields(config)}
    for name, value in wrong:
        if name in own:
            with pytest.raises(InvalidConfig) as error:
                replace(config, **{name: value})
            assert error.value.field == name
