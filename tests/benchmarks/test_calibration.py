"""The benchmark of calibrations: rows are means over ranges of scores."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.quality import calibration
from tests import ROOT


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


@pytest.mark.slow
def test_the_samples_scores_are_compared_with_what_its_held_out_queries_want(tmp_path: Path) -> None:
    model = ROOT / "models" / "debian-depends" / "1"
    calibration.main(["--model", str(model), "--json", str(tmp_path / "report.json")])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["model"] == "debian-depends/1"
    assert sum(row["items"] for row in report["rows"]) == report["items"] > 0
    hits = sum(row["items"] * row["hits"] for row in report["rows"]) / report["items"]
    always_the_mean = -(hits * math.log(hits) + (1 - hits) * math.log(1 - hits))
    assert 0 < report["log_loss"] < always_the_mean, "scores say more than how often an answer is relevant"
