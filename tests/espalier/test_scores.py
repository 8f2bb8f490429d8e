"""What a rank becomes in the answer: a score in [0, 1] that keeps the order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from espalier.manifest import MAX_KNOTS, Calibration, Ranking
from espalier.scores import bent, scores_of_ranks
from training.deep.calibration import TAIL, calibrate, piecewise

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
    found = calibrate(*planted(slope, intercept))
    assert found.slope == pytest.approx(slope, abs=0.1)
    assert found.intercept == pytest.approx(intercept, abs=0.1)


def test_places_without_an_item_do_not_count_in_the_calibration() -> None:
    rows_BM, ranks_BM, relevant = planted(1.5, -2.0)
    padded_rows = np.pad(rows_BM, ((0, 0), (0, 30)), constant_values=-1)
    padded_ranks = np.pad(ranks_BM, ((0, 0), (0, 30)), constant_values=-np.inf)
    assert calibrate(padded_rows, padded_ranks, relevant) == calibrate(rows_BM, ranks_BM, relevant)


def test_a_calibration_never_turns_the_order_round() -> None:
    assert calibrate(*planted(-2.0, 0.0)).slope > 0


def test_without_hits_or_misses_there_is_nothing_to_calibrate() -> None:
    rows_BM, ranks_BM, _ = planted(1.0, 0.0)
    for relevant in (np.empty(0, np.int64), np.arange(50)):
        plain = calibrate(rows_BM, ranks_BM, [relevant] * len(rows_BM))
        assert_array_equal([plain.slope, plain.intercept], [1, 0])


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
