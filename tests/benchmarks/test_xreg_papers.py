"""XReg's table: linear baselines at the optimum of what they say they minimise, forests, and the benchmark on a small set."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csc_array, csr_array, issparse, save_npz

from benchmarks.papers.xreg import leml, proxml, xmc
from benchmarks.papers.xreg.fastxml import FastXmlOptions, fit_fastxml
from benchmarks.papers.xreg.l1_linear import Columns, Stop, minimise
from benchmarks.papers.xreg.label_rank_svm import fit_label_rank_svm, pair_loss
from benchmarks.papers.xreg.least_squares import fit_least_squares
from benchmarks.papers.xreg.leml import fit_leml
from benchmarks.papers.xreg.linear_scores import LinearScores, with_bias
from benchmarks.papers.xreg.proxml import fit_proxml
from benchmarks.papers.xreg.xmc_baselines import of_relevance
from training.data.xmc import LabelledPoints

pytestmark = pytest.mark.release
POINTS = np.eye(12, 20, dtype=np.float32) + np.eye(12, 20, 1, dtype=np.float32)
LABELS = np.eye(12, 6, dtype=np.float32) + np.eye(12, 6, -6, dtype=np.float32)


def as_npz(folder: Path) -> None:
    folder.mkdir(parents=True)
    for part in ("train", "test"):
        save_npz(folder / f"{part}_X.npz", csr_array(POINTS))
        save_npz(folder / f"{part}_Y.npz", csr_array(LABELS))


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


def points_with_labels(points: int = 40, features: int = 12, labels: int = 5, seed: int = 1) -> LabelledPoints:
    """Labels that depend on features, with some noise; the last label has no point."""
    rng = np.random.default_rng(seed)
    x = rng.random((points, features)) * (rng.random((points, features)) < 0.5)
    y = (x @ rng.normal(size=(features, labels)) + 0.3 * rng.normal(size=(points, labels)) > 0.3).astype(np.float32)
    y[:, -1] = 0
    return LabelledPoints(csr_array(x.astype(np.float32)), csr_array(y * rng.uniform(0.2, 1, labels).astype(np.float32)))


def dense(train: LabelledPoints) -> tuple[np.ndarray, np.ndarray]:
    return with_bias(train.points).toarray().astype(np.float64), train.labels.toarray().astype(np.float64)


@pytest.mark.parametrize("points", [40, 8])
def test_least_squares_has_no_gradient(points: int) -> None:
    train = points_with_labels(points)
    x, y = dense(train)
    weight_FI = np.asarray(fit_least_squares(train, 0.5).left)
    assert np.allclose(x.T @ (x @ weight_FI - y) + 0.5 * weight_FI, 0, atol=1e-5)


def test_leml_of_full_rank_is_the_trace_norms_optimum_and_of_a_lower_rank_no_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leml, "ROUNDS", 300)
    train = points_with_labels()
    x, y = dense(train)

    def objective(model: LinearScores) -> float:
        left, right = np.asarray(model.left), np.asarray(model.right)
        return float(((y - x @ left @ right) ** 2).sum() + 0.3 * ((left**2).sum() + (right**2).sum())) / 2

    full, low = fit_leml(train, 5, 0.3), fit_leml(train, 2, 0.3)
    weight_FI = np.asarray(full.left) @ np.asarray(full.right)
    # At the optimum the gradient −Xᵀ(Y − XW) is −λ times a subgradient of the trace norm: no singular value of it is above λ.
    singular = np.linalg.svd(x.T @ (y - x @ weight_FI), compute_uv=False)
    assert singular.max() == pytest.approx(0.3, rel=0.05)
    assert objective(full) < objective(low)
    assert np.asarray(low.right).shape == (2, 5)


def test_loss_over_pairs_is_that_of_all_pairs() -> None:
    rng = np.random.default_rng(4)
    for _ in range(20):
        score_B, has_B = np.round(rng.normal(size=12), 1), rng.random(12) < 0.4
        loss, slope_B = pair_loss(score_B, has_B)
        pairs = product(score_B[has_B], score_B[~has_B])
        assert loss == pytest.approx(sum(max(0.0, 1 - high + low) ** 2 for high, low in pairs))
        step_B = 1e-6 * rng.normal(size=12)
        rise = pair_loss(score_B + step_B, has_B)[0] - pair_loss(score_B - step_B, has_B)[0]
        assert rise == pytest.approx(2 * float(slope_B @ step_B), rel=1e-3, abs=1e-9)
        assert slope_B.sum() == pytest.approx(0, abs=1e-9)


def test_rank_svm_has_no_gradient_and_no_weights_for_a_label_without_points() -> None:
    train = points_with_labels()
    x, y = dense(train)
    weight_FI = np.asarray(fit_label_rank_svm(train, 2.0).left)
    for label in range(4):
        has_B = y[:, label] > 0
        _, slope_B = pair_loss(x @ weight_FI[:, label], has_B)
        unit = 2.0 * y[has_B, label].mean() / (~has_B).sum()
        assert np.allclose(weight_FI[:, label] + unit * (x.T @ slope_B), 0, atol=2e-2)
        assert np.abs(weight_FI[:, label]).max() > 0.5
    assert (weight_FI[:, 4] == 0).all()


def weights_of(model: LinearScores) -> np.ndarray:
    assert issparse(model.left)
    return model.left.toarray()


def test_proxml_is_at_the_optimum_of_its_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxml, "STOP", Stop(tolerance=1e-6, rounds=500, passes=100))
    train = points_with_labels(200)
    x, y = dense(train)
    weight_FI = weights_of(fit_proxml(train, 1.0))
    for label in range(4):
        sign_B = np.where(y[:, label] > 0, 1.0, -1.0)
        gradient_F = -2 * x.T @ (sign_B * np.maximum(1 - sign_B * (x @ weight_FI[:, label]), 0))
        zero_F = weight_FI[:, label] == 0
        assert (np.abs(gradient_F[zero_F]) <= 1.001).all()
        assert np.allclose(gradient_F[~zero_F], -np.sign(weight_FI[~zero_F, label]), atol=1e-3)
    assert (weight_FI == 0).any()


EXACT = Stop(tolerance=1e-9, rounds=500, passes=500)


def as_columns(matrix: np.ndarray) -> Columns:
    columns = csc_array(matrix.astype(np.float32))
    return Columns(columns.indptr.astype(np.int64), columns.indices, columns.data)


@pytest.mark.parametrize("hinge", [False, True])
def test_the_1_norm_classifier_is_at_its_optimum(hinge: bool) -> None:
    rng = np.random.default_rng(3)
    points = rng.normal(size=(60, 12)) * (rng.random((60, 12)) < 0.6)
    sign_R = np.where(points[:, 0] - points[:, 1] + 0.5 * rng.normal(size=60) > 0, 1.0, -1.0)
    cost_R = rng.uniform(0.1, 0.6, 60)
    weight_F = minimise(as_columns(points), sign_R, cost_R, hinge, EXACT, 1)
    margin_R = sign_R * (points @ weight_F)
    slope_R = -2 * np.maximum(1 - margin_R, 0) if hinge else -1 / (1 + np.exp(margin_R))
    gradient_F = points.T @ (cost_R * sign_R * slope_R)
    zero_F = weight_F == 0
    assert 0 < zero_F.sum() < 12
    assert (np.abs(gradient_F[zero_F]) <= 1 + 1e-4).all()
    assert np.allclose(gradient_F[~zero_F], -np.sign(weight_F[~zero_F]), atol=1e-4)


def two_groups(points: int) -> LabelledPoints:
    """Points of two kinds, with features and labels of their own; every third has a label that no other has."""
    kind_B = np.arange(points) % 2
    features, labels = np.zeros((points, 6), np.float32), np.zeros((points, 4 + points), np.float32)
    for b, kind in enumerate(kind_B):
        features[b, 3 * kind : 3 * kind + 3] = 1 + (np.arange(3) + b) % 3
        labels[b, 2 * kind : 2 * kind + 2] = 1
        if b % 3 == 0:
            labels[b, 4 + b] = 1
    return LabelledPoints(csr_array(features), csr_array(labels))


def test_a_forest_finds_the_labels_of_a_points_group_first() -> None:
    train = two_groups(40)
    model = fit_fastxml(train, FastXmlOptions(trees=5))
    label_BM, score_BM = model.best(train.points, 3)
    for b in range(40):
        assert set(label_BM[b, :2]) == {2 * (b % 2), 2 * (b % 2) + 1}
    assert np.allclose(score_BM[:, :2], 1)
    assert (np.diff(score_BM, axis=1) <= 0).all()
    assert len(model.forest.root) == 5
    first = model.arrays()
    assert all(np.array_equal(first[name], array) for name, array in fit_fastxml(train, FastXmlOptions(trees=5)).arrays().items())
