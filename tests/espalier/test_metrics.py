"""The metrics of the papers, of sets, of rankings and of graded relevance, against hand-computed values, plain loops and dense matrices.
And what a rank becomes in the answer: a score in [0, 1] that keeps the order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from benchmarks.papers.nce.nce_summary import average_precision, expected_reciprocal_rank
from benchmarks.papers.otm.regret import regret_at_m
from espalier.arrays import Float64
from espalier.errors import InvalidData
from espalier.manifest import MAX_KNOTS, Calibration, Ranking
from espalier.metrics import ndcg, ndcg_at_m, precision_recall_f
from espalier.scores import bent, scores_of_ranks
from espalier.search import NO_ITEM
from training.deep.calibration import TAIL, calibrate, piecewise
from training.graded_metrics import RankedErrors, almost_zero, auprc, propensity_scored, tau_at_k, wn_at_k, wp_at_k
from training.graded_relevance import Relevance


def rows(*lists: list[int]) -> np.ndarray:
    return np.array(lists, np.int64)


def test_a_missing_item_does_not_hit_the_last_item_of_the_query_before() -> None:
    precision, _, _ = precision_recall_f(rows([0, 1], [-1, -1]), [np.array([1]), np.array([0])], 2)
    assert_array_equal(precision, [0.5, 0])
    assert [len(values) for values in precision_recall_f(np.zeros((0, 3), np.int64), [], 3)] == [0, 0, 0]


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 12), st.integers(1, 12))
def test_a_batch_equals_the_definition_query_by_query(seed: int, batch: int, columns: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    recommended = np.stack([rng.permutation(15)[:columns] for _ in range(batch)])
    recommended[rng.random(recommended.shape) < 0.2] = -1
    relevant = [rng.integers(0, 15, rng.integers(1, 9)) for _ in range(batch)]
    precision, recall, f = precision_recall_f(recommended, relevant, m)
    for b in range(batch):
        truth = set(relevant[b].tolist())
        hits = len(truth & set(recommended[b, :m].tolist()))
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


@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.integers(0, 4))
def test_regret_is_what_is_missing_of_the_best_m(seed: int, m: int, missing: int) -> None:
    """With more places than items, of the items that there are, still divided by m; in any order."""
    rng = np.random.default_rng(seed)
    eta, found = rng.random((3, 20)), np.stack([rng.permutation(20) for _ in range(3)])
    found[:, 20 - missing :] = NO_ITEM
    for b, regret in enumerate(regret_at_m(eta, found, m)):
        got = sum(eta[b, row] for row in found[b, :m] if row >= 0)
        assert regret == pytest.approx((sum(sorted(eta[b])[::-1][:m]) - got) / m, abs=1e-12)


def test_regret_refuses_items_outside_the_catalogue() -> None:
    with pytest.raises(InvalidData, match="item rows below 2") as error:
        regret_at_m(np.array([[0.25, 0.5]]), rows([2]), 1)
    assert error.value.field == "item_rows_BM"


# -- rankings -------------------------------------------------------------------------------------------------------------

SCORES = np.array([0.1, 0.9, 0.5, 3.0, 2.0, 7.0])
GRADES = np.array([0.0, 1, 2, 0, 0, 3])
OFFSET = np.array([0, 3, 5, 6])


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(-3, 3)), min_size=1, max_size=8), min_size=1, max_size=5),
    st.sampled_from([None, 1, 3]),
)
def test_ranking_metrics_are_those_of_plain_loops(queries: list[list[tuple[int, int]]], k: int | None) -> None:
    """Equal scores keep the order of the rows; a query without a relevant item counts 0."""
    scores = np.array([float(score) for query in queries for _, score in query])
    grades = np.array([float(grade) for query in queries for grade, _ in query])
    offset = np.concatenate([[0], np.cumsum([len(query) for query in queries])])
    for place, query in enumerate(queries):
        ranked = [grade for grade, _ in sorted(query, key=lambda pair: -pair[1])]
        dcg, best = (sum((2**r - 1) / np.log2(i + 2) for i, r in enumerate(order[:k])) for order in (ranked, sorted(ranked)[::-1]))
        err, reading = 0.0, 1.0
        for i, r in enumerate(ranked):
            err += reading * (2**r - 1) / 16 / (i + 1)
            reading *= 1 - (2**r - 1) / 16
        hits = [sum(r > 0 for r in ranked[: i + 1]) / (i + 1) for i, r in enumerate(ranked) if r > 0]
        assert_allclose(ndcg(scores, grades, offset, k)[place], dcg / best if best else 0, atol=1e-12)
        assert_allclose(expected_reciprocal_rank(scores, grades, offset, 4)[place], err, atol=1e-12)
        assert_allclose(average_precision(scores, grades, offset)[place], np.mean(hits) if hits else 0, atol=1e-12)


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (lambda: ndcg(SCORES[:5], GRADES, OFFSET), "scores_R"),
        (lambda: ndcg(SCORES, GRADES, np.array([0, 3, 3, 6])), "query_offset"),
        (lambda: ndcg(SCORES, GRADES, OFFSET, 0), "k"),
        (lambda: average_precision(np.full(6, np.nan), GRADES, OFFSET), "NaN"),
        (lambda: expected_reciprocal_rank(SCORES, GRADES, OFFSET, 2), "max_grade"),
    ],
)
def test_rankings_that_do_not_fit_are_named(refused: Callable[[], object], said: str) -> None:
    with pytest.raises(InvalidData, match=said):
        refused()


# -- graded relevance --------------------------------------------------------------------------------------------------

seeds = st.integers(0, 2**32 - 1)


def sparse(dense: Float64) -> Relevance:
    columns = [np.flatnonzero(row) for row in dense]
    return Relevance.of_lists(columns, [row[at] for row, at in zip(dense, columns, strict=True)], dense.shape[1])


def best_first(dense: Float64) -> Relevance:
    """Predictions in the order of a search: by descending score, equal ones by column; some rows shorter than others."""
    widest = int((dense > 0).sum(axis=1).max(initial=0))
    order_BM = np.argsort(-dense, axis=1, kind="stable")[:, :widest]
    scores_BM = np.take_along_axis(dense, order_BM, axis=1)
    return Relevance.of_predictions(np.where(scores_BM > 0, order_BM, -1), scores_BM.astype(np.float32), dense.shape[1])


def random_pair(seed: int) -> tuple[Float64, Float64]:
    """Relevances and predictions with ties, empty rows and empty columns."""
    rng = np.random.default_rng(seed)
    shape = int(rng.integers(1, 7)), int(rng.integers(1, 9))
    levels = np.array([0.125, 0.25, 0.5, 1.0, 2.5])  # float32 has them all, so ties are ties

    def draw(density: float) -> Float64:
        return np.where(rng.random(shape) < density, rng.choice(levels, shape), 0.0)

    return draw(rng.random()), draw(rng.random())


def places(predicted: Float64, row: int) -> list[int]:
    order = np.argsort(-predicted[row], kind="stable")
    return [int(label) for label in order if predicted[row, label] > 0]


@given(seeds, st.integers(1, 10))
def test_errors_are_the_k_largest_of_all_labels_and_released_ones_those_of_the_k_best_predictions(seed: int, k: int) -> None:
    y, p = random_pair(seed)
    largest = [sorted(row, reverse=True)[:k] for row in np.abs(p - y).tolist()]
    best = [[abs(p[b, label] - y[b, label]) for label in places(p, b)[:k]] for b in range(len(y))]
    true, found = sparse(y), best_first(p)
    for ranked, errors in ((RankedErrors.of(true, found), largest), (RankedErrors.of(true, found, "predicted"), best)):
        assert_allclose(ranked.xmad(k), [sum(row) / k for row in errors], atol=1e-12)
        assert_allclose(ranked.xrmse(k), [math.sqrt(sum(e * e for e in row) / k) for row in errors], atol=1e-12)


@given(seeds, st.integers(1, 10))
def test_gains_are_a_ratio_of_sums_over_all_points(seed: int, k: int) -> None:
    y, p = random_pair(seed)
    inverse_I: Float64 = np.random.default_rng(seed).uniform(1, 2, (y.shape[1],))
    scored = np.where(y > 0, inverse_I, 0.0)

    def gain(truth: Float64, discounted: bool) -> float:
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


def test_xreg_zero_ranks_as_well_and_filters_worse() -> None:
    """Two points, one with a relevant label and a sure prediction, one with neither."""
    y, p = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]), np.array([[0.9, 0.8, 0.0], [0.1, 0.2, 0.3]])
    true, found = sparse(y), best_first(p)
    corrupted = almost_zero(found)
    assert corrupted.value_E.max() <= 1e-6
    assert wp_at_k(true, corrupted, 1) == wp_at_k(true, found, 1) == 1
    assert auprc(true, found) == 1
    assert auprc(true, corrupted) == 1 / 2, "the best of both points are tied"


def test_the_order_of_the_search_stands_where_scores_are_equal_and_a_score_of_0_is_no_better_than_none() -> None:
    found = Relevance.of_predictions(np.array([[2, 0]]), np.ones((1, 2), np.float32), 3)
    assert wp_at_k(sparse(np.array([[0.0, 0.0, 1.0]])), found, 1) == 1
    assert wp_at_k(sparse(np.array([[1.0, 0.0, 0.0]])), found, 1) == 0
    true, scored_0 = sparse(np.array([[1.0, 0.0]])), Relevance.of_predictions(np.array([[0]]), np.zeros((1, 1), np.float32), 2)
    assert auprc(true, scored_0) == auprc(true, sparse(np.zeros((1, 2)))) == 1 / 2


def test_nothing_relevant_and_nothing_found_and_an_entry_of_0_is_not_relevant() -> None:
    """Neither to propensities nor to Tau."""
    nothing = sparse(np.zeros((2, 3)))
    assert (wp_at_k(nothing, nothing, 1), tau_at_k(nothing, nothing, 1), auprc(nothing, nothing)) == (0, 1, 0)
    assert_array_equal(RankedErrors.of(nothing, nothing).xmad(2), [0, 0])
    true = Relevance.of_lists([np.array([0, 1])], [np.array([1.0, 0.0])], 2)
    found = Relevance.of_predictions(np.array([[1, 0]]), np.array([[0.9, 0.1]], np.float32), 2)
    assert wp_at_k(propensity_scored(true, np.array([2.0, 5.0])), found, 1) == 0
    assert tau_at_k(true, found, 1) == 0


def test_a_large_matrix_is_never_made_dense() -> None:
    """10⁵ points × 10⁵ labels would take 80 GB."""
    true = Relevance(np.arange(100_001), np.arange(100_000), np.ones(100_000), 100_000)
    assert float(RankedErrors.of(true, true.times(0.5)).xmad(5).mean()) == pytest.approx(0.1)
    assert wp_at_k(true, true, 5) == 1
    assert auprc(true, true) == 1
    assert tau_at_k(true.transposed(), true, 5) == 1


# -- scores -------------------------------------------------------------------------------------------------------------


NODE = Ranking(own="logit", gamma=0)
PATH = Ranking(own="log_activation", gamma=1)
DISCOUNTED = Ranking(own="logit", gamma=0.5, calibration=Calibration(slope=2, intercept=-1))
BENT = Ranking(own="logit", gamma=0.5, calibration=Calibration(slope=2, intercept=1, knots=((-2, -3), (0, -1), (10, 1))))
STEEP = Ranking(own="logit", gamma=0.5, calibration=Calibration(slope=1, intercept=0, knots=((0, -3e38), (1e-40, 3e38))))


def scores(ranking: Ranking, *ranks: float) -> list[float]:
    return list(map(float, scores_of_ranks(ranking, np.array(ranks, np.float32))))


def test_each_family_has_its_own_meaning_of_a_score() -> None:
    assert_allclose(scores(NODE, 0, np.log(3)), [0.5, 0.75], rtol=1e-6)
    assert_allclose(scores(PATH, 0, np.log(0.25)), [1, 0.25], rtol=1e-6)
    assert_allclose(scores(DISCOUNTED, 0.5, (1 + np.log(3)) / 2), [0.5, 0.75], rtol=1e-6)


@pytest.mark.parametrize("ranking", [NODE, PATH, DISCOUNTED, BENT, STEEP])
def test_scores_lie_in_0_to_1_keep_the_order_and_are_0_where_there_is_no_item(ranking: Ranking) -> None:
    ranks = np.array([-np.inf, -1e30, -300, -5, -1, -1e-3, 0, 4, 300, 1e30], np.float32)
    with np.errstate(all="raise", under="ignore"):
        found = scores_of_ranks(ranking, ranks)
    assert found.dtype == np.float32
    assert found[0] == 0
    assert np.all((found >= 0) & (found <= 1))
    assert np.all(np.diff(found) >= 0)


def test_between_knots_scores_are_linear_in_the_log_odds_and_beyond_them_they_go_on() -> None:
    keys = {-4.0: -5.0, -2.0: -3.0, -1.0: -2.0, 0.0: -1.0, 5.0: 0.0, 10.0: 1.0, 20.0: 3.0}
    log_odds = 2 * np.array([*keys.values()]) + 1
    assert_allclose(scores(BENT, *keys), 1 / (1 + np.exp(-log_odds)), rtol=1e-6)


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(2, MAX_KNOTS), steep=st.sampled_from([1e-30, 1.0, 1e30]))
def test_scores_never_fall_as_keys_rise_across_knots_too(seed: int, count: int, steep: float) -> None:
    rng = np.random.default_rng(seed)
    knot_K, value_K = (np.cumsum(rng.random(count) + 1e-3) - rng.random() * count for _ in range(2))
    knots = tuple(zip((knot_K * steep).tolist(), value_K.tolist(), strict=True))
    ranking = Ranking(own="logit", gamma=0, calibration=Calibration(slope=1, intercept=0, knots=knots))
    near = np.concatenate([np.nextafter(np.float32(knot_K * steep), np.float32(side)) for side in (-np.inf, np.inf)])
    keys = np.sort(np.concatenate([near, (rng.normal(size=99) * count * steep).astype(np.float32)]))
    found = scores_of_ranks(ranking, keys)
    assert np.all(np.diff(found) >= 0)
    assert found[0] < found[-1]


@pytest.mark.parametrize("seed", range(20))
def test_the_end_of_a_piece_is_not_above_the_next_one(seed: int) -> None:
    """A key just below a knot, which rounding takes for the knot itself; numbers of all sizes, whose differences are not exact."""
    rng = np.random.default_rng(seed)
    knot_K, value_K = (np.sort(rng.choice([-1, 1], MAX_KNOTS) * 10 ** rng.uniform(-9, 3, MAX_KNOTS)) for _ in range(2))
    calibration = Calibration(slope=1, intercept=0, knots=tuple(zip(knot_K.tolist(), value_K.tolist(), strict=True)))
    assert np.all(bent(calibration, np.nextafter(knot_K, -np.inf))[:-1] <= value_K[:-1])
    assert_array_equal(bent(calibration, knot_K)[:-1], value_K[:-1])


def planted(slope: float, intercept: float) -> tuple[Any, Any, Any]:
    """Ranks, and items that are relevant with probability sigmoid(slope · rank + intercept)."""
    rng = np.random.default_rng(0)
    ranks_BM = np.sort(rng.normal(size=(400, 50)).astype(np.float32))[:, ::-1]
    rows_BM = np.tile(np.arange(50), (400, 1))
    hit_BM = rng.random((400, 50)) < 1 / (1 + np.exp(-(slope * ranks_BM + intercept)))
    return rows_BM, ranks_BM, [np.flatnonzero(hits) for hits in hit_BM]


@pytest.mark.parametrize(("slope", "intercept"), [(1.5, -2.0), (0.5, 1.0)])
def test_the_calibration_finds_how_likely_a_rank_is_relevant(slope: float, intercept: float) -> None:
    """Places without an item do not count."""
    rows_BM, ranks_BM, relevant = planted(slope, intercept)
    found = calibrate(rows_BM, ranks_BM, relevant)
    assert found.slope == pytest.approx(slope, abs=0.1)
    assert found.intercept == pytest.approx(intercept, abs=0.1)
    padded_rows = np.pad(rows_BM, ((0, 0), (0, 30)), constant_values=-1)
    assert calibrate(padded_rows, np.pad(ranks_BM, ((0, 0), (0, 30)), constant_values=-np.inf), relevant) == found


def test_a_calibration_never_turns_the_order_round_and_needs_hits_and_misses() -> None:
    assert calibrate(*planted(-2.0, 0.0)).slope > 0
    rows_BM, ranks_BM, _ = planted(1.0, 0.0)
    for relevant in (np.empty(0, np.int64), np.arange(50)):
        plain = calibrate(rows_BM, ranks_BM, [relevant] * len(rows_BM))
        assert (plain.slope, plain.intercept) == (1, 0)


# -- keys with a memory ---------------------------------------------------------------------------------------------------


def heavy_tailed(queries: int = 600, most: float = 0.4) -> tuple[Any, Any, Any, Any]:
    """Keys of which a tenth is far larger than the rest; items are relevant with at most a probability of `most`, which comes last."""
    rng = np.random.default_rng(1)
    shape = queries, 50
    wide_BM = rng.normal(size=shape) + np.where(rng.random(shape) < 0.1, 5 * rng.pareto(1.2, shape), 0)
    keys_BM = np.sort(wide_BM.astype(np.float32))[:, ::-1]
    probability_BM = most / (1 + np.exp(2 - keys_BM.astype(np.float64)))
    hit_BM = rng.random(shape) < probability_BM
    return np.tile(np.arange(50), (queries, 1)), keys_BM, [np.flatnonzero(hits) for hits in hit_BM], probability_BM


def test_piecewise_scores_of_a_heavy_tail_are_how_often_items_are_relevant() -> None:
    rows_BM, keys_BM, relevant, probability_BM = heavy_tailed()
    error = {}
    for bends in (False, True):
        found = calibrate(rows_BM, keys_BM, relevant, heavy_tailed=bends)
        scores_BM = scores_of_ranks(Ranking(own="logit", gamma=0, calibration=found), keys_BM)
        top_BM = keys_BM > np.quantile(keys_BM, 0.99)
        error[bends] = abs(float(scores_BM[top_BM].mean() - probability_BM[top_BM].mean()))
    assert error[False] > 0.2
    assert error[True] < 0.05


def test_knots_ascend_are_few_and_end_at_the_largest_key() -> None:
    rows_BM, keys_BM, relevant, _ = heavy_tailed()
    found = calibrate(rows_BM, keys_BM, relevant, heavy_tailed=True)
    keys, values = np.array(found.knots).T
    assert 3 <= len(keys) <= MAX_KNOTS
    assert (found.slope, found.intercept) == (1, 0)
    assert np.all(np.diff(keys) > 0)
    assert np.all(np.diff(values) > 0)
    assert keys[-1] == keys_BM.max()
    assert values[-1] - values[-2] <= TAIL + 1e-12


def test_a_memory_with_few_hits_or_whose_keys_say_nothing_keeps_the_logistic_function() -> None:
    rows_BM, keys_BM, relevant, _ = heavy_tailed()
    few = calibrate(rows_BM[:3], keys_BM[:3], relevant[:3], heavy_tailed=True)
    assert few == calibrate(rows_BM[:3], keys_BM[:3], relevant[:3])
    falling = calibrate(*planted(-2.0, 0.0), heavy_tailed=True)
    assert falling.knots == ()
    assert falling.slope > 0


def test_bins_of_equal_keys_have_no_empty_one() -> None:
    """All keys are one of two, so that edges of bins coincide, and one lies at the smallest key."""
    rng = np.random.default_rng(2)
    keys_R = np.repeat([1.0, 4.0], 500)
    hits_R = rng.random(1000) < np.where(keys_R == 1, 0.3, 0.6)
    (low, _), (high, value) = piecewise(keys_R, hits_R)
    assert (low, high) == (1, 4)
    assert 1 / (1 + np.exp(-value)) == pytest.approx(hits_R[keys_R == 4].mean(), abs=0.01)
