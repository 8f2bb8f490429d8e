"""What a rank becomes in the answer: a score in [0, 1] that keeps the order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from espalier.manifest import Calibration, Ranking
from espalier.scores import scores_of_ranks
from training.deep.ranking import calibrate

NODE = Ranking(own="logit", gamma=0)
PATH = Ranking(own="log_activation", gamma=1)
DISCOUNTED = Ranking(own="logit", gamma=0.5, calibration=Calibration(slope=2, intercept=-1))


def scores(ranking: Ranking, *ranks: float) -> list[float]:
    return list(map(float, scores_of_ranks(ranking, np.array(ranks, np.float32))))


def test_each_family_has_its_own_meaning_of_a_score() -> None:
    assert_allclose(scores(NODE, 0, np.log(3)), [0.5, 0.75], rtol=1e-6)
    assert_allclose(scores(PATH, 0, np.log(0.25)), [1, 0.25], rtol=1e-6)
    assert_allclose(scores(DISCOUNTED, 0.5, (1 + np.log(3)) / 2), [0.5, 0.75], rtol=1e-6)


@pytest.mark.parametrize("ranking", [NODE, PATH, DISCOUNTED])
def test_scores_lie_in_0_to_1_keep_the_order_and_are_0_where_there_is_no_item(ranking: Ranking) -> None:
    ranks = np.array([-np.inf, -1e30, -300, -5, -1, -1e-3, 0, 4, 300, 1e30], np.float32)
    with np.errstate(all="raise", under="ignore"):
        found = scores_of_ranks(ranking, ranks)
    assert found.dtype == np.float32
    assert found[0] == 0
    assert np.all((found >= 0) & (found <= 1))
    assert np.all(np.diff(found) >= 0)


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
