"""The benchmark of calibrations: rows are means over ranges of scores, and no query is scored by a calibration that it was fitted on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from benchmarks.quality import calibration
from espalier.manifest import Ranking
from tests import ROOT

RANKING = Ranking(own="logit", gamma=0)


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


@pytest.mark.parametrize("heavy_tailed", [False, True])
def test_what_is_relevant_to_a_fold_does_not_change_its_own_scores(heavy_tailed: bool) -> None:
    rng = np.random.default_rng(3)
    rows_BM, keys_BM = np.tile(np.arange(20), (100, 1)), rng.normal(size=(100, 20)).astype(np.float32)
    relevant = [np.flatnonzero(rng.random(20) < 1 / (1 + np.exp(-keys))) for keys in keys_BM]
    scores_BM = calibration.crossed(RANKING, rows_BM, keys_BM, relevant, heavy_tailed)
    others = [np.empty(0, np.int64) if b % calibration.FOLDS == 2 else rows for b, rows in enumerate(relevant)]
    changed_BM = calibration.crossed(RANKING, rows_BM, keys_BM, others, heavy_tailed)
    mine_B = np.arange(100) % calibration.FOLDS == 2
    assert_array_equal(scores_BM[mine_B], changed_BM[mine_B])
    assert np.all(scores_BM[~mine_B] != changed_BM[~mine_B])


@pytest.mark.slow
def test_on_the_sample_piecewise_scores_are_nearer_to_what_is_relevant(tmp_path: Path) -> None:
    model = ROOT / "models" / "debian-depends" / "1"
    calibration.main(["--model", str(model), "--json", str(tmp_path / "report.json")])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["log_loss"]["piecewise"] < report["log_loss"]["logistic"]
    for name in ("bundle", "logistic", "piecewise"):
        rows = [row for row in report["rows"] if row["calibration"] == name]
        assert sum(row["items"] for row in rows) == report["items"]
