"""The metrics of graded relevance, against their definitions on dense matrices."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from espalier.errors import InvalidData
from espalier.regression_metrics import RankedErrors, xmad_at_k
from espalier.relevance import Relevance
from espalier.weighted_metrics import almost_zero, auprc, propensity_scored, tau_at_k, wn_at_k, wp_at_k

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
    assert_allclose(xmad_at_k(sparse(y), best_first(p), k), errors.sum(axis=1) / k, atol=1e-12)
    assert_allclose(RankedErrors.of(sparse(y), best_first(p)).xrmse(k), np.sqrt((errors**2).sum(axis=1) / k), atol=1e-12)


@given(seeds, st.integers(1, 10))
def test_released_errors_are_those_of_the_k_best_predictions(seed: int, k: int) -> None:
    y, p = random_pair(seed)
    errors = [[abs(p[b, label] - y[b, label]) for label in places(p, b)[:k]] for b in range(len(y))]
    found = RankedErrors.of(sparse(y), best_first(p), "predicted")
    assert_allclose(xmad_at_k(sparse(y), best_first(p), k, "predicted"), [sum(row) / k for row in errors], atol=1e-12)
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
    assert_allclose(xmad_at_k(true, found, 2), xmad_at_k(true_T, found_T, 2))


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
    assert_array_equal(xmad_at_k(nothing, nothing, 2), [0, 0])


def test_what_cannot_be_compared_is_refused() -> None:
    some, other = sparse(np.ones((2, 3))), sparse(np.ones((2, 4)))
    with pytest.raises(InvalidData, match=r"predicted: got '\[2, 4\]', expected \[2, 3\], the shape of the true ones"):
        wp_at_k(some, other, 1)
    with pytest.raises(InvalidData, match="k: got 0, expected at least 1"):
        xmad_at_k(some, some, 0)
    with pytest.raises(InvalidData, match=r"true: got -1.0, expected relevances of at least 0"):
        xmad_at_k(some.times(-1.0), some, 1)
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
    """10⁶ points × 10⁶ labels would take terabytes."""
    true = Relevance(np.arange(1_000_001), np.arange(1_000_000), np.ones(1_000_000), 1_000_000)
    assert float(xmad_at_k(true, true.times(0.5), 5).mean()) == pytest.approx(0.1)
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
