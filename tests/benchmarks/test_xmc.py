"""`python -m benchmarks.xmc` on a small set."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_array, save_npz

from benchmarks.papers.xreg import xmc
from benchmarks.papers.xreg.xmc_baselines import of_relevance
from benchmarks.papers.xreg.xmc_figures import Found, figures_of
from training.data.xmc import LabelledPoints

pytestmark = pytest.mark.slow

POINTS = np.eye(12, 20, dtype=np.float32) + np.eye(12, 20, 1, dtype=np.float32)
LABELS = np.eye(12, 6, dtype=np.float32) + np.eye(12, 6, -6, dtype=np.float32)


def as_npz(folder: Path) -> None:
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        save_npz(folder / f"{part}_X.npz", csr_array(POINTS))
        save_npz(folder / f"{part}_Y.npz", csr_array(LABELS))


def test_values_of_xreg_zero_keep_the_order_alone() -> None:
    rng = np.random.default_rng(2)
    labels = (rng.random((30, 6)) < 0.3).astype(np.float32)
    train = test = LabelledPoints(csr_array(labels), csr_array(labels))
    scores_BM = -np.sort(-rng.random((30, 6)), axis=1)
    rows_BM = np.argsort(-labels * rng.random((30, 1)), axis=1, kind="stable")
    plain, zero = (figures_of(Found(rows_BM, scores_BM, True, zero), train, test) for zero in (False, True))
    assert (zero["psp5"], zero["tau5"]) == (plain["psp5"], plain["tau5"])
    assert zero["xmad5"] == pytest.approx(figures_of(Found(np.full((30, 1), -1), np.zeros((30, 1))), train, test)["xmad5"], abs=1e-4)
    assert zero["xmad5"] != plain["xmad5"]


def test_rows_have_all_figures_and_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_npz(tmp_path / "xmc-small-flowers")

    def rows(systems: str) -> list[dict[str, object]]:
        out = tmp_path / "rows.json"
        options = {"data": tmp_path, "set": "flowers", "beam": "1,3", "json": out, "systems": systems}
        monkeypatch.setattr(sys, "argv", ["xmc", *(f"--{key}={value}" for key, value in options.items())])
        xmc.main()
        found: list[dict[str, object]] = json.loads(out.read_text())["rows"]
        return found

    first = rows("all-zero,dismec")
    assert [(row["system"], row["beam_size"]) for row in first] == [("all-zero", None), ("dismec", 1), ("dismec", 3)]
    figures = ["p1", "p3", "p5", "psp1", "psp3", "psp5", "r10", "r100", "xmad5", "ms_p50", "train_cpu_s", "model_mb"]
    assert list(first[1]) == ["system", "beam_size", *figures, "tau5", "auprc"]
    assert first[0] | {"p1": 0, "r100": 0, "psp5": 0} == first[0]
    # Every point has one label, whose relevance is the largest, since all labels have two points.
    assert first[0]["xmad5"] == pytest.approx(1 / 5)
    assert first[2]["p1"] == first[2]["r10"] == 100
    second = rows("dismec,parabel")
    assert second[:3] == first
    assert [row["system"] for row in second[3:]] == ["parabel", "parabel"]


def test_relevance_of_baselines_is_inverse_propensity_over_its_maximum() -> None:
    labels = np.eye(12, 6, dtype=np.float32)
    labels[:, 0] = 1
    found = of_relevance(LabelledPoints(csr_array(POINTS), csr_array(labels))).labels.toarray()
    c = (np.log(12) - 1) * 2.5**0.55
    assert np.allclose(found[:6, 1:], labels[:6, 1:])  # rare: one point each
    assert np.allclose(found[:, 0], (1 + c * 13.5**-0.55) / (1 + c * 2.5**-0.55))
