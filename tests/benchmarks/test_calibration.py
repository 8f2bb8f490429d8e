"""The benchmark of calibrations: rows are means over ranges of scores."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.quality import calibration


def test_rows_hold_the_mean_score_and_the_share_of_hits_of_a_range() -> None:
    scores_R = np.array([0, 0.005, 0.3, 0.4, 0.95, 1], np.float32)
    hits_R = np.array([False, True, True, True, False, True])
    rows = calibration.reliability(scores_R, hits_R)
    assert [(row["from"], row["to"], row["items"], row["hits"]) for row in rows] == [(0, 0.01, 2, 0.5), (0.3, 0.5, 2, 1), (0.9, 1, 2, 0.5)]
    assert [row["score"] for row in rows] == pytest.approx([0.0025, 0.35, 0.975])


def test_the_log_loss_of_a_certain_mistake_is_large_and_finite() -> None:
    hits_R = np.array([True, False])
    assert calibration.log_loss(np.array([0.5, 0.5], np.float32), hits_R) == pytest.approx(math.log(2))
    assert calibration.log_loss(np.array([0, 0], np.float32), hits_R) == pytest.approx(-math.log(calibration.LEAST) / 2)
