"""Baselines: one contract of all of them, and each by hand and against dense arithmetic."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from espalier.arrays import Int64
from espalier.errors import DeviceUnavailable, InvalidConfig, InvalidData
from espalier.items import ItemTable
from tests.training.logs import log_of, task_of
from training.baselines import content as content_module
from training.baselines import ease as ease_module
from training.baselines import ials as ials_module
from training.baselines import item_cf as item_cf_module
from training.baselines import product_dnn, sasrec
from training.baselines.content import answering as answering_by_content
from training.baselines.content import content, item_vectors
from training.baselines.ease import START, answering, ease, invert, refuse_too_many, weights
from training.baselines.fusion import depth, fuse, fused, rank_by_both
from training.baselines.graph_filter import graph_filter
from training.baselines.ials import START as IALS_START
from training.baselines.ials import factors_of, ials, implicit_is_installed, scores_of
from training.baselines.item_cf import fit_item_cf
from training.baselines.methods import METHODS
from training.baselines.popularity import most_popular
from training.baselines.sasrec_model import SasRecConfig
from training.data.interactions import Interactions
from training.data.user_item_matrix import user_item_matrix
from training.neighbours import cooccurrence
from training.neighbours.fit import fading
from training.retrieval.needs import LEAST_S, available_bytes
from training.retrieval.task import Deadline, Fitted
from training.retrieval.tuning import Options


def test_popularity_counts_users_not_events_and_breaks_ties_by_row() -> None:
    assert most_popular(log_of([[2, 2, 2, 1], [3, 1], [3]], items=5), np.arange(3)).tolist() == [1, 3, 2, 0, 4]


@given(seed=st.integers(0, 2**32 - 1), neighbours=st.integers(1, 12), block=st.integers(1, 15), exclude_seen=st.booleans())
def test_item_cf_equals_dense_arithmetic_in_blocks_of_any_size(seed: int, neighbours: int, block: int, exclude_seen: bool) -> None:
    rng = np.random.default_rng(seed)
    lists = [rng.integers(0, 12, rng.integers(1, 7)).tolist() for _ in range(10)]
    histories = [rng.permutation(12)[: rng.integers(0, 4)] for _ in range(5)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cooccurrence, "BLOCK_VISITS", block)
        ranked = item_cf_module.rank(fit_item_cf(log_of(lists, items=12), np.arange(10), neighbours), histories, 6, exclude_seen)

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
    monkeypatch.setattr(item_cf_module, "GRID", (1, 2, 5))
    fitted = METHODS["item-cf"](task_of(log, list(range(6)), [6], m=2))
    assert [trial.figure for trial in fitted.trials] == [0, 1, 1]
    assert fitted.options == {"neighbours": 2}
    assert fitted.rank([np.array([0])], 2, True).tolist() == [[1, 3]]
    ended = METHODS["item-cf"](task_of(log, list(range(6)), [6], m=2, seconds=0.0))
    assert ended.options == {"neighbours": 1}
    assert ended.ended == "the search ended at its deadline after 1 of 3 trials"


def small(config: Any, **limits: Any) -> Any:
    """A configuration's class whose objects have these values, whatever else they are made of."""

    def made(**values: Any) -> Any:
        return config(**(values | limits))

    return made


@pytest.fixture
def small_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of few steps."""
    limits = {"max_rounds": 1, "warm_steps": 1, "width": 8, "heads": 1, "places": 32}
    monkeypatch.setattr(sasrec, "SasRecConfig", small(SasRecConfig, **limits))
    monkeypatch.setattr(product_dnn, "ProductDnnConfig", small(product_dnn.ProductDnnConfig, max_steps=3, round_steps=3, batch=8, dim=4))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "item-means"])
def test_answers_depend_on_the_seed_and_training_and_validation_users_and_on_no_other_query(name: str, small_networks: None) -> None:
    if name == "ials" and not implicit_is_installed():
        pytest.skip("the extra `baselines` is not installed")
    histories = [np.array([12]), np.array([0, 10]), np.array([], np.int64), np.array([-1, 4, -1])]

    def answers(tested: list[int], histories: list[Int64] = histories) -> list[list[int]]:
        lists = [[user % 5, 5 + user % 4, 10, (user + 1) % 5] for user in range(12)]
        task = task_of(log_of([*lists, *[tested] * 20], items=14), list(range(10)), [10, 11], m=3)
        words = pa.table({"id": [f"i{row}" for row in range(14)], "title": [f"a{row % 3} b{row % 5}" for row in range(14)]})
        fitted = METHODS[name](replace(task, items=ItemTable.build(words)))
        found = fitted.rank(histories, 5, exclude_seen=False)
        for history, row_M in zip(histories, found, strict=True):
            assert_array_equal(fitted.rank([history], 5, exclude_seen=False)[0], row_M)
            unseen = fitted.rank([history], 14, exclude_seen=True)[0]
            assert not set(unseen.tolist()) & {*history.tolist()} - {-1}
        rows: list[list[int]] = found.tolist()
        return rows

    assert answers([12, 13, 12, 13]) == answers([11, 7, 3])


# -- fusion -------------------------------------------------------------------------------------------------------------


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

    assert rank_by_both(rank, rank, 0.5, 10, [np.array([1])] * 3, 4, exclude_seen=True).tolist() == [[0, 1, 2, 3]] * 3
    assert asked == [(3, 200, True)] * 2
    assert depth(300) == 600


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


# -- iALS ---------------------------------------------------------------------------------------------------------------


installed = pytest.mark.skipif(not implicit_is_installed(), reason="the extra `baselines` is not installed")
SMALL = {**IALS_START, "factors": 6, "iterations": 8}


@installed
def test_a_history_gets_its_vector_by_least_squares() -> None:
    matrix = user_item_matrix(grouped(1), np.arange(60))
    model = factors_of(matrix, SMALL, seed=1)
    score = scores_of(model, np.ones(36, np.bool_), fading(0.5, 3), [np.array([1, 4, 2, 4, 30])])[0]

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
    fitted = ials_module.ials(task_of(lists, [0, 1, 2], list(range(60, 80)), m=4, seconds=0.0))
    answer = fitted.rank([lists.of(0)], 36, False)[0].tolist()
    assert answer[-len(absent) :] == absent
    assert len(fitted.trials) == 1
    assert fitted.ended == "1 of 8 iterations"
    assert fitted.share == 1 / 8


@installed
def test_a_deadline_ends_training_after_an_iteration() -> None:
    matrix = user_item_matrix(grouped(1), np.arange(60))
    ended = factors_of(matrix, SMALL, 1, Deadline(time.monotonic()))
    one = factors_of(matrix, {**SMALL, "iterations": 1}, 1)
    assert ended.item_factors.tolist() == one.item_factors.tolist() != factors_of(matrix, SMALL, 1).item_factors.tolist()


@installed
def test_vectors_take_no_more_memory_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(grouped(3), list(range(60)), list(range(60, 80)), m=4)
    monkeypatch.setattr(ials_module, "MOST_TRIALS", 9)
    monkeypatch.setattr(ials_module, "available_bytes", lambda: 4 * 4 * 96 * 20)
    fitted = ials(task)
    assert {trial.options["factors"] for trial in fitted.trials} <= set(range(8, 21))
    monkeypatch.setattr(ials_module, "available_bytes", lambda: 4 * (4 * 96 * 8 - 1))
    with pytest.raises(InvalidData, match=r"96 users and items', expected at most 95: iALS's vectors of 8 numbers would take 0.0 GiB"):
        ials(task)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ials_module, "implicit_is_installed", lambda: False)
    with pytest.raises(DeviceUnavailable, match="baselines"):
        ials(task_of(grouped(3), [0], [1]))


# -- neighbours by content ----------------------------------------------------------------------------------------------


def table(**columns: Any) -> ItemTable:
    count = len(next(iter(columns.values())))
    return ItemTable.build(pa.table({"id": [f"i{row}" for row in range(count)], **columns}))


def test_items_are_alike_by_the_words_and_attributes_that_they_share() -> None:
    vectors = item_vectors(
        table(
            title=["Red shoe, red", "blue SHOE", "green hat", None, "unique"],
            tags=[["x", "y"], None, ["x"], ["shoe", None], []],
            price=[1.0, 1.0, 1.0, 1.0, 1.0],
        )
    ).toarray()
    assert vectors.shape == (5, 2)  # `shoe` and `tags=x`: all others are one item's
    likeness = vectors @ vectors.T
    assert_allclose(likeness[[0, 1, 2], [0, 1, 2]], 1, rtol=1e-6)
    assert likeness[0, 1] > 0 < likeness[0, 2]
    assert likeness[1, 2] == 0
    assert not vectors[3:].any()  # an attribute `shoe` is not the word


def test_answers_by_content_are_those_of_the_formula() -> None:
    vectors = item_vectors(table(title=["a b", "a c", "b c", "c", "d d", "d", "e", "a"]))
    fitted = answering_by_content(vectors, vectors.T.tocsr(), np.arange(8), {"recency": 0.5})
    history = np.array([4, 0, -1, 3])
    dense = vectors.toarray()
    expected = dense @ (dense[3] + 0.5 * dense[0] + 0.25 * dense[4])
    order = [row for row in np.argsort(-expected, kind="stable").tolist() if expected[row] > 0]
    assert fitted.rank([history], 8, exclude_seen=False)[0].tolist() == [*order, *(row for row in range(8) if row not in order)]
    assert not set(fitted.rank([history], 8, exclude_seen=True)[0].tolist()) & {0, 3, 4}
    assert fitted.rank([np.array([6])], 3, exclude_seen=True).tolist() == [[0, 1, 2]]  # nothing like it: popular ones


def test_an_item_without_events_comes_back() -> None:
    # Item 9 is in no list, but shares its word with items 0 … 4.
    items = table(title=["rock"] * 5 + ["jazz"] * 4 + ["rock"])
    task = replace(task_of(log_of([[0, 1], [1, 2], [2, 3, 4, 0], [5, 6], [6, 7, 8, 5]], items=10), [0, 1, 3], [2, 4], m=5), items=items)
    fitted = content(task)
    assert 9 in fitted.rank([np.array([0, 1])], 4, exclude_seen=True)[0].tolist()
    assert task.measured(fitted.rank, task.validation_pairs()) == max(trial.figure for trial in fitted.trials) == 1
    assert fitted.bytes > 0
    assert content(task).options == fitted.options


@pytest.mark.parametrize("columns", [{}, {"price": [1.0, 2.0, 3.0]}, {"title": ["one", "two", None]}])
def test_a_table_without_content_is_refused(columns: dict[str, Any]) -> None:
    items = ItemTable.build(pa.table({"id": ["a", "b", "c"], **columns}))
    with pytest.raises(InvalidData, match=r"items: got .*, expected a column beside id with texts"):
        content(replace(task_of(log_of([[0, 1], [1, 2], [2, 0]]), [0], [1, 2]), items=items))


def test_of_very_many_words_an_items_first_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_module, "MOST_ENTRIES", 7)
    assert item_vectors(table(title=["a b c", "a b c", "a b c"])).shape == (3, 2)


# -- EASE -----------------------------------------------------------------------------------------------------------------


def some_lists(seed: int, items: int, users: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, items, rng.integers(1, 7)).tolist() for _ in range(users)]


@given(size=st.integers(1, 40), block=st.integers(1, 50), seed=st.integers(0, 2**32 - 1))
def test_a_matrix_is_inverted_in_its_place(size: int, block: int, seed: int) -> None:
    half = np.random.default_rng(seed).normal(size=(size, size)).astype(np.float32)
    matrix = half @ half.T + size * np.eye(size, dtype=np.float32)
    expected = np.linalg.inv(matrix.astype(np.float64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ease_module, "BLOCK", block)
        invert(matrix)
    assert_allclose(matrix, expected, rtol=1e-3, atol=1e-5)
    assert_allclose(matrix, matrix.T)


def test_a_matrix_that_has_no_inverse_is_refused() -> None:
    with pytest.raises(InvalidData, match="l2"):
        invert(np.zeros((3, 3), np.float32))


@given(seed=st.integers(0, 2**32 - 1), block=st.integers(1, 12), exclude_seen=st.booleans())
def test_answers_of_ease_are_those_of_the_formula(seed: int, block: int, exclude_seen: bool) -> None:
    items, options = 9, {"recency": 0.8, "column": 0.3, "row": 0.2, "l2": 2.0, "ridge": 0.5, "user": 0.5}
    lists = [*some_lists(seed, items, 15), list(range(items))]
    matrix = user_item_matrix(log_of(lists), np.arange(16))
    pop = (matrix.toarray() > 0).sum(axis=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ease_module, "BLOCK", block)
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
    monkeypatch.setattr(ease_module, "inversion_seconds", lambda items: 1234.0)
    log = log_of([[0, 1]], items=100)
    monkeypatch.setattr(ease_module, "MOST_BYTES", 8 * 100**2)
    refuse_too_many(log)
    monkeypatch.setattr(ease_module, "MOST_BYTES", 8 * 100**2 - 1)
    with pytest.raises(
        InvalidData,
        match=r"items: got '100 items', expected at most 99: EASE's two matrices would take .*; an inversion would take 1,234 s",
    ):
        refuse_too_many(log)
    monkeypatch.setattr(ease_module, "MOST_BYTES", 8 * 35**2 + 1)
    with pytest.raises(InvalidData, match="at most 35"):
        ease(task_of(grouped(1), list(range(60)), list(range(60, 80))))


def test_less_time_than_an_inversion_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ease_module, "inversion_seconds", lambda items: 100.0)
    with pytest.raises(InvalidConfig, match=r"seconds: got 60.0, expected at least 100 for EASE's inversion of 36 items"):
        ease(task_of(grouped(1), list(range(60)), list(range(60, 80)), seconds=60.0))


def test_what_an_inversion_takes_grows_with_the_items() -> None:
    assert ease_module.inversion_seconds(ease_module.PROBE) == 0
    assert ease_module.inversion_seconds(40 * ease_module.PROBE) > 8 * ease_module.inversion_seconds(10 * ease_module.PROBE) > 0


def test_what_it_needs_leaves_time_to_answer_where_inversions_take_next_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(grouped(1), list(range(60)), list(range(60, 80)))
    least, enough = (ease_module.needs(task).least_s, ease_module.needs(task).full_s)
    assert least == LEAST_S
    assert enough >= ease_module.ANSWERING_S
    monkeypatch.setattr(ease_module, "inversion_seconds", lambda items: 100.0)
    assert ease_module.needs(task).least_s == 100 * ease_module.ONCE
    assert ease_module.needs(task).full_s == ease_module.ANSWERING_S + 100 * ease_module.SEARCH


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

    monkeypatch.setattr(ease_module, "weights", noted)
    fitted = ease(task)
    assert task.measured(fitted.rank, task.validation_pairs()) == max(trial.figure for trial in fitted.trials) > 0.4
    inverted = [tuple(options[name] for name in ("l2", "ridge", "user")) for options in made]
    assert len(inverted) == len(set(inverted)) < len(fitted.trials)
    assert ease(task).options == fitted.options
    assert fitted.bytes == 4 * 36**2 + 3 * 8 * 36


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


# -- graph filter -------------------------------------------------------------------------------------------------------


def test_a_graph_filters_scores_are_those_of_the_formula() -> None:
    rng = np.random.default_rng(2)
    lists = log_of([rng.choice(12, 5, replace=False, p=np.arange(1, 13) / 78).tolist() for _ in range(80)], items=13)
    task = task_of(lists, list(range(60)), list(range(60, 80)), m=4)
    fitted = graph_filter(task)
    touched = user_item_matrix(lists, np.arange(60)).toarray()
    per_user, per_item = touched.sum(1), np.maximum(touched.sum(0), 1)
    scaled = touched / np.sqrt(per_user)[:, None] / np.sqrt(per_item)
    power = scaled.T @ scaled
    vectors = np.linalg.eigh(power)[1][:, ::-1][:, :12]  # all that are not of the item that nobody has
    options = fitted.options
    filtered = power - np.diag(np.diag(power)) + options["alpha"] * vectors @ vectors.T
    history = np.array([3, 1, 11, 7])
    weights = options["recency"] ** np.arange(4)[::-1] * per_item[history] ** -options["row"]
    expected = (weights @ filtered[history]) * per_item ** -options["column"]
    answer = fitted.rank([history], 12, exclude_seen=False)[0]
    assert sorted(answer.tolist()) == np.flatnonzero(touched.sum(0)).tolist()
    assert_allclose(expected[answer], np.sort(expected[touched.sum(0) > 0])[::-1], rtol=1e-3, atol=1e-4)
    assert task.measured(fitted.rank, task.validation_pairs()) == max(trial.figure for trial in fitted.trials)
    assert len({trial.options["alpha"] for trial in fitted.trials}) > 1


def test_a_graph_filter_needs_two_users() -> None:
    with pytest.raises(InvalidData, match="1 training users"):
        graph_filter(task_of(grouped(2), [0], [1]))
