"""The metrics of the papers: of sets, of rankings and of graded relevance, against hand-computed values, plain loops and dense matrices."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from benchmarks.papers.nce.rank_metrics import average_precision, expected_reciprocal_rank
from benchmarks.papers.otm.regret import regret_at_m
from espalier.errors import InvalidData
from espalier.metrics import ndcg, ndcg_at_m, precision_recall_f
from espalier.regression_metrics import RankedErrors
from espalier.relevance import Relevance
from espalier.search import NO_ITEM
from espalier.weighted_metrics import almost_zero, auprc, propensity_scored, tau_at_k, wn_at_k, wp_at_k


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


def test_queries_without_a_relevant_item_count_0() -> None:
    for values in (
        ndcg(SCORES, GRADES, OFFSET, 2),
        average_precision(SCORES, GRADES, OFFSET),
        expected_reciprocal_rank(SCORES, GRADES, OFFSET, 4),
    ):
        assert values[1] == 0
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


# -- graded relevance --------------------------------------------------------------------------------------------------

Dense = NDArray[np.float64]
seeds = st.integers(0, 2**32 - 1)


def sparse(dense: Dense) -> Relevance:
    columns = [np.flatnonzero(row) for row in dense]
    return Relevance.of_lists(columns, [row[at] for row, at in zip(dense, columns, strict=True)], dense.shape[1])


def best_first(dense: Dense) -> Relevance:
    """Predictions in the order of a search: by descending score, equal ones by column; some rows shorter than others."""
    widest = int((dense > 0).sum(axis=1).max(initial=0))
    order_BM = np.argsort(-dense, axis=1, kind="stable")[:, :widest]
    scores_BM = np.take_along_axis(dense, order_BM, axis=1)
    return Relevance.of_predictions(np.where(scores_BM > 0, order_BM, -1), scores_BM.astype(np.float32), dense.shape[1])


def random_pair(seed: int) -> tuple[Dense, Dense]:
    """Relevances and predictions with ties, empty rows and empty columns."""
    rng = np.random.default_rng(seed)
    shape = int(rng.integers(1, 7)), int(rng.integers(1, 9))
    levels = np.array([0.125, 0.25, 0.5, 1.0, 2.5])  # float32 has them all, so ties are ties

    def draw(density: float) -> Dense:
        return np.where(rng.random(shape) < density, rng.choice(levels, shape), 0.0)

    return draw(rng.random()), draw(rng.random())


def places(predicted: Dense, row: int) -> list[int]:
    order = np.argsort(-predicted[row], kind="stable")
    return [int(label) for label in order if predicted[row, label] > 0]


@given(seeds, st.integers(1, 10))
def test_errors_are_the_k_largest_of_all_labels(seed: int, k: int) -> None:
    y, p = random_pair(seed)
    errors = np.sort(np.abs(p - y), axis=1)[:, ::-1][:, :k]
    assert_allclose(RankedErrors.of(sparse(y), best_first(p)).xmad(k), errors.sum(axis=1) / k, atol=1e-12)
    assert_allclose(RankedErrors.of(sparse(y), best_first(p)).xrmse(k), np.sqrt((errors**2).sum(axis=1) / k), atol=1e-12)


@given(seeds, st.integers(1, 10))
def test_released_errors_are_those_of_the_k_best_predictions(seed: int, k: int) -> None:
    y, p = random_pair(seed)
    errors = [[abs(p[b, label] - y[b, label]) for label in places(p, b)[:k]] for b in range(len(y))]
    found = RankedErrors.of(sparse(y), best_first(p), "predicted")
    assert_allclose(RankedErrors.of(sparse(y), best_first(p), "predicted").xmad(k), [sum(row) / k for row in errors], atol=1e-12)
    assert_allclose(found.xrmse(k), [math.sqrt(sum(e * e for e in row) / k) for row in errors], atol=1e-12)


@given(seeds, st.integers(1, 5))
def test_the_errors_bound_the_ranking_error(seed: int, k: int) -> None:
    """XReg Lemma A.1: 0 ≤ ½ · max(ranking error@k, regression error@k) ≤ XMAD@2k ≤ XRMSE@2k, for every point."""
    y, p = random_pair(seed)
    k = min(k, y.shape[1])
    errors = RankedErrors.of(sparse(y), best_first(p))
    xmad_B, xrmse_B = errors.xmad(2 * k), errors.xrmse(2 * k)
    for b in range(len(y)):
        by_y, by_p = np.argsort(-y[b], kind="stable")[:k], np.argsort(-p[b], kind="stable")[:k]
        ranking = (y[b, by_y].sum() - y[b, by_p].sum()) / k
        regression = np.abs(p[b] - y[b])[by_p].sum() / k
        assert ranking >= -1e-12
        assert max(ranking, regression) / 2 <= xmad_B[b] + 1e-12
        assert xmad_B[b] <= xrmse_B[b] + 1e-12


@given(seeds, st.integers(1, 10))
def test_gains_are_a_ratio_of_sums_over_all_points(seed: int, k: int) -> None:
    y, p = random_pair(seed)
    inverse_I: Dense = np.random.default_rng(seed).uniform(1, 2, y.shape[1])  # type: ignore[assignment]  # an array, by its size
    scored = np.where(y > 0, inverse_I, 0.0)

    def gain(truth: Dense, discounted: bool) -> float:
        weight = [1 / math.log2(j + 2) if discounted else 1.0 for j in range(k)]
        got = sum(truth[b, label] * weight[j] for b in range(len(y)) for j, label in enumerate(places(p, b)[:k]))
        best = sum(value * weight[j] for b in range(len(y)) for j, value in enumerate(sorted(truth[b], reverse=True)[:k]))
        return float(got / best) if best else 0.0

    true, found = sparse(y), best_first(p)
    assert wp_at_k(true, found, k) == pytest.approx(gain(y, False))
    assert wn_at_k(true, found, k) == pytest.approx(gain(y, True))
    assert wp_at_k(propensity_scored(true, inverse_I), found, k) == pytest.approx(gain(scored, False))
    assert wn_at_k(propensity_scored(true, inverse_I), found, k) == pytest.approx(gain(scored, True))


@given(seeds, st.integers(1, 10))
def test_tau_counts_better_labels_that_stand_below(seed: int, k: int) -> None:
    y, p = random_pair(seed)
    wrong = pairs = 0
    for b in range(len(y)):
        relevant = np.flatnonzero(y[b])
        for label in places(p, b)[:k]:
            pairs += len(relevant)
            wrong += sum(y[b, other] > y[b, label] + 1e-6 and p[b, other] < p[b, label] - 1e-6 for other in relevant)
    assert tau_at_k(sparse(y), best_first(p), k) == pytest.approx(1 - wrong / max(pairs, 1))


@given(seeds)
def test_auprc_is_the_area_under_one_curve_of_all_pairs(seed: int) -> None:
    y, p = random_pair(seed)
    area, recall_before = 0.0, 0.0
    for threshold in sorted(set(p.ravel()), reverse=True):
        kept = p >= threshold
        recall = y[kept].sum() / max(y.sum(), 1e-300)
        area += y[kept].sum() / kept.sum() * (recall - recall_before)
        recall_before = recall
    assert auprc(sparse(y), best_first(p)) == pytest.approx(area)


@given(seeds)
def test_metrics_of_labels_are_those_of_the_transposed_matrices(seed: int) -> None:
    y, p = random_pair(seed)
    true, found = sparse(y).transposed(), best_first(p).transposed()
    true_T, found_T = sparse(y.T.copy()), best_first(p.T.copy())
    for metric in (wp_at_k, wn_at_k, tau_at_k):
        assert metric(true, found, 2) == pytest.approx(metric(true_T, found_T, 2))
    assert_allclose(RankedErrors.of(true, found).xmad(2), RankedErrors.of(true_T, found_T).xmad(2))


def test_xreg_zero_ranks_as_well_and_filters_worse() -> None:
    """Two points, one with a relevant label and a sure prediction, one with neither."""
    y, p = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]), np.array([[0.9, 0.8, 0.0], [0.1, 0.2, 0.3]])
    true, found = sparse(y), best_first(p)
    corrupted = almost_zero(found)
    assert corrupted.value_E.max() <= 1e-6
    assert wp_at_k(true, corrupted, 1) == wp_at_k(true, found, 1) == 1
    assert auprc(true, found) == 1
    assert auprc(true, corrupted) == 1 / 2, "the best of both points are tied"


def test_the_order_of_the_search_stands_where_scores_are_equal() -> None:
    found = Relevance.of_predictions(np.array([[2, 0]]), np.ones((1, 2), np.float32), 3)
    assert wp_at_k(sparse(np.array([[0.0, 0.0, 1.0]])), found, 1) == 1
    assert wp_at_k(sparse(np.array([[1.0, 0.0, 0.0]])), found, 1) == 0


def test_nothing_relevant_and_nothing_found() -> None:
    nothing = sparse(np.zeros((2, 3)))
    assert (wp_at_k(nothing, nothing, 1), tau_at_k(nothing, nothing, 1), auprc(nothing, nothing)) == (0, 1, 0)
    assert_array_equal(RankedErrors.of(nothing, nothing).xmad(2), [0, 0])


def test_what_cannot_be_compared_is_refused() -> None:
    some, other = sparse(np.ones((2, 3))), sparse(np.ones((2, 4)))
    with pytest.raises(InvalidData, match=r"predicted: got '\[2, 4\]', expected \[2, 3\], the shape of the true ones"):
        wp_at_k(some, other, 1)
    with pytest.raises(InvalidData, match="k: got 0, expected at least 1"):
        RankedErrors.of(some, some).xmad(0)
    with pytest.raises(InvalidData, match=r"true: got -1.0, expected relevances of at least 0"):
        RankedErrors.of(some.times(-1.0), some)
    with pytest.raises(InvalidData, match=r"inverse_propensity_I: got \[2\], expected \[3\], one for each label"):
        propensity_scored(some, np.ones(2))
    with pytest.raises(InvalidData, match="value_E: got nan, expected finite numbers"):
        some.times(math.nan)
    with pytest.raises(InvalidData, match="column_E, row 0: got 1, expected each column at most once in a row"):
        Relevance.of_predictions(np.array([[1, 1]]), np.ones((1, 2), np.float32), 3)
    with pytest.raises(InvalidData, match="column_E: got 3, expected columns from 0 to 2"):
        Relevance.of_predictions(np.array([[1, 3]]), np.ones((1, 2), np.float32), 3)
    with pytest.raises(InvalidData, match=r"scores_BM: got \[1, 1\], expected \[1, 2\], a score for each place"):
        Relevance.of_predictions(np.array([[1, 3]]), np.ones((1, 1), np.float32), 3)


def test_a_large_matrix_is_never_made_dense() -> None:
    """10⁵ points × 10⁵ labels would take 80 GB."""
    true = Relevance(np.arange(100_001), np.arange(100_000), np.ones(100_000), 100_000)
    assert float(RankedErrors.of(true, true.times(0.5)).xmad(5).mean()) == pytest.approx(0.1)
    assert wp_at_k(true, true, 5) == 1
    assert auprc(true, true) == 1
    assert tau_at_k(true.transposed(), true, 5) == 1


def test_a_score_of_0_is_no_better_than_none() -> None:
    true = sparse(np.array([[1.0, 0.0]]))
    scored_0 = Relevance.of_predictions(np.array([[0]]), np.zeros((1, 1), np.float32), 2)
    assert auprc(true, scored_0) == auprc(true, sparse(np.zeros((1, 2)))) == 1 / 2


def test_an_entry_of_0_is_not_relevant() -> None:
    """Neither to propensities nor to Tau."""
    true = Relevance.of_lists([np.array([0, 1])], [np.array([1.0, 0.0])], 2)
    found = Relevance.of_predictions(np.array([[1, 0]]), np.array([[0.9, 0.1]], np.float32), 2)
    assert wp_at_k(propensity_scored(true, np.array([2.0, 5.0])), found, 1) == 0
    assert tau_at_k(true, found, 1) == 0
