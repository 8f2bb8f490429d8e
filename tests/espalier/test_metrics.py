"""The metrics of the papers, against hand-computed values and a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from espalier.errors import InvalidData
from espalier.metrics import WithoutRelevant, average_precision, expected_reciprocal_rank, ndcg, ndcg_at_m, precision_recall_f, regret_at_m
from espalier.search import NO_ITEM


def rows(*lists: list[int]) -> np.ndarray:
    return np.array(lists, np.int64)


def test_a_missing_item_does_not_hit_the_last_item_of_the_query_before() -> None:
    precision, _, _ = precision_recall_f(rows([0, 1], [-1, -1]), [np.array([1]), np.array([0])], 2)
    assert_array_equal(precision, [0.5, 0])


def test_no_queries_give_no_values() -> None:
    assert [len(values) for values in precision_recall_f(np.zeros((0, 3), np.int64), [], 3)] == [0, 0, 0]


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 12), st.integers(1, 12), st.booleans())
def test_a_batch_equals_the_definition_query_by_query(seed: int, batch: int, columns: int, m: int, multiset: bool) -> None:
    rng = np.random.default_rng(seed)
    recommended = np.stack([rng.permutation(15)[:columns] for _ in range(batch)])
    recommended[rng.random(recommended.shape) < 0.2] = -1
    relevant = [rng.integers(0, 15, rng.integers(1, 9)) for _ in range(batch)]
    precision, recall, f = precision_recall_f(recommended, relevant, m, multiset=multiset)
    for b in range(batch):
        truth = relevant[b].tolist() if multiset else sorted(set(relevant[b].tolist()))
        hits = sum(truth.count(item) for item in recommended[b, :m].tolist())
        p, r = hits / m, hits / len(truth)
        assert_allclose([precision[b], recall[b], f[b]], [p, r, 2 * p * r / (p + r) if hits else 0])


@pytest.mark.parametrize(
    ("recommended", "relevant", "m", "field"),
    [
        (rows([1, 2]), [np.array([1])], 0, "m"),
        (rows([1, 2]), [], 1, "relevant"),
        (rows([1, 2], [1, 2]), [np.array([1]), np.array([], np.int64)], 1, "relevant[1]"),
        (rows([1, 2]), [np.array([0.5])], 1, "relevant"),
        (rows([1, 2]), [np.array([-1])], 1, "relevant"),
        (rows([0, 3], [2, 2]), [np.array([1]), np.array([1])], 2, "item_rows_BM[1]"),
        (rows([0, -2]), [np.array([1])], 2, "item_rows_BM"),
        (np.ones(3), [np.array([1])], 2, "item_rows_BM"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(recommended: np.ndarray, relevant: list[np.ndarray], m: int, field: str) -> None:
    with pytest.raises(InvalidData) as error:
        precision_recall_f(recommended, relevant, m)
    assert error.value.field == field


@given(seed=st.integers(0, 2**32 - 1), m=st.integers(1, 6))
def test_ndcg_at_m_counts_what_was_not_retrieved(seed: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    rows_BM = np.stack([rng.permutation(9)[:5] for _ in range(3)])
    rows_BM[0, 3:] = NO_ITEM
    relevant = [rng.integers(0, 9, rng.integers(1, 8)) for _ in range(3)]
    for rows, wanted, found in zip(rows_BM, relevant, ndcg_at_m(rows_BM, relevant, m), strict=True):
        gain = sum(1 / np.log2(place + 2) for place, row in enumerate(rows[:m]) if row in wanted)
        best = sum(1 / np.log2(place + 2) for place in range(min(m, len(set(wanted.tolist())))))
        assert found == pytest.approx(gain / best)


def test_regret_is_what_is_missing_of_the_best_m() -> None:
    eta = np.array([[0.1, 0.9, 0.5, 0.3], [0.1, 0.9, 0.5, 0.3]])
    assert_allclose(regret_at_m(eta, rows([2, 1], [0, -1]), 2), [0, (0.9 + 0.5 - 0.1) / 2])


def test_regret_with_more_places_than_items_counts_the_items_there_are() -> None:
    assert_allclose(regret_at_m(np.array([[0.25, 0.5]]), rows([0, -1, -1, -1]), 4), [0.5 / 4])


@given(st.integers(0, 2**32 - 1), st.integers(1, 30))
def test_regret_is_never_negative_and_zero_for_the_best_items_in_any_order(seed: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    eta = rng.random((3, 20))
    assert (regret_at_m(eta, np.stack([rng.permutation(20) for _ in range(3)]), m) >= 0).all()
    best = np.argsort(-eta, axis=1)[:, :m]
    assert_allclose(regret_at_m(eta, best[:, ::-1].copy(), m), 0, atol=1e-15)


def test_regret_refuses_items_outside_the_catalogue() -> None:
    with pytest.raises(InvalidData, match="item rows below 2") as error:
        regret_at_m(np.array([[0.25, 0.5]]), rows([2]), 1)
    assert error.value.field == "item_rows_BM"


# -- rankings -------------------------------------------------------------------------------------------------------------

SCORES = np.array([0.1, 0.9, 0.5, 3.0, 2.0, 7.0])
GRADES = np.array([0.0, 1, 2, 0, 0, 3])
OFFSET = np.array([0, 3, 5, 6])


def test_ndcg_has_the_gains_and_discounts_of_the_paper() -> None:
    dcg = 1 / np.log2(2) + 3 / np.log2(3)
    ideal = 3 / np.log2(2) + 1 / np.log2(3)
    assert_allclose(ndcg(SCORES, GRADES, OFFSET), [dcg / ideal, 0, 1])
    assert_allclose(ndcg(SCORES, GRADES, OFFSET, 1), [1 / 3, 0, 1])


@pytest.mark.parametrize(("convention", "expected"), [("one", [1.0]), ("zero", [0.0]), ("drop", [])])
def test_queries_without_a_relevant_item_count_as_asked_for(convention: WithoutRelevant, expected: list[float]) -> None:
    for values in (
        ndcg(SCORES, GRADES, OFFSET, 2, convention),
        average_precision(SCORES, GRADES, OFFSET, convention),
        expected_reciprocal_rank(SCORES, GRADES, OFFSET, 4, convention),
    ):
        assert values[1:-1].tolist() == expected
        assert min(values[0], values[-1]) > 0


def test_equal_scores_keep_the_order_of_the_rows() -> None:
    scores, offset = np.ones(3), np.array([0, 3])
    assert_allclose(ndcg(scores, np.array([1.0, 0, 0]), offset), [1])
    assert_allclose(average_precision(scores, np.array([0.0, 0, 1]), offset), [1 / 3])


@given(st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(-3, 3)), min_size=1, max_size=8), min_size=1, max_size=5))
def test_ranking_metrics_are_those_of_plain_loops(queries: list[list[tuple[int, int]]]) -> None:
    scores = np.array([float(score) for query in queries for _, score in query])
    grades = np.array([float(grade) for query in queries for grade, _ in query])
    offset = np.concatenate([[0], np.cumsum([len(query) for query in queries])])
    for place, query in enumerate(queries):
        ranked = [grade for grade, _ in sorted(query, key=lambda pair: -pair[1])]
        dcg, best = (sum((2**r - 1) / np.log2(i + 2) for i, r in enumerate(order[:3])) for order in (ranked, sorted(ranked)[::-1]))
        err, reading = 0.0, 1.0
        for i, r in enumerate(ranked):
            err += reading * (2**r - 1) / 16 / (i + 1)
            reading *= 1 - (2**r - 1) / 16
        hits = [sum(r > 0 for r in ranked[: i + 1]) / (i + 1) for i, r in enumerate(ranked) if r > 0]
        assert_allclose(ndcg(scores, grades, offset, 3)[place], dcg / best if best else 0, atol=1e-12)
        assert_allclose(expected_reciprocal_rank(scores, grades, offset, 4)[place], err, atol=1e-12)
        assert_allclose(average_precision(scores, grades, offset)[place], np.mean(hits) if hits else 0, atol=1e-12)


def test_rankings_that_do_not_fit_are_named() -> None:
    with pytest.raises(InvalidData, match="scores_R"):
        ndcg(SCORES[:5], GRADES, OFFSET)
    with pytest.raises(InvalidData, match="query_offset"):
        ndcg(SCORES, GRADES, np.array([0, 3, 3, 6]))
    with pytest.raises(InvalidData, match="NaN"):
        average_precision(np.full(6, np.nan), GRADES, OFFSET)
    with pytest.raises(InvalidData, match="max_grade"):
        expected_reciprocal_rank(SCORES, GRADES, OFFSET, 2)
    with pytest.raises(InvalidData, match="k"):
        ndcg(SCORES, GRADES, OFFSET, 0)
