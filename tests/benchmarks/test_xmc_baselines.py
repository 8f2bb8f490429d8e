"""Linear baselines over points with labels: each is at the optimum of what it says it minimises."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy.sparse import csr_array, issparse

from benchmarks.papers.xreg import leml, sparse_one_vs_all
from benchmarks.papers.xreg.l1_linear import Stop
from benchmarks.papers.xreg.label_rank_svm import fit_label_rank_svm, pair_loss
from benchmarks.papers.xreg.least_squares import fit_least_squares
from benchmarks.papers.xreg.leml import fit_leml
from benchmarks.papers.xreg.linear_scores import LinearScores, with_bias
from benchmarks.papers.xreg.sparse_one_vs_all import fit_ppd_sparse, fit_proxml
from benchmarks.papers.xreg.xlr import _Objective, fit_xlr
from training.data.xmc import LabelledPoints


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


def test_xlr_has_the_gradient_of_its_objective_and_its_rankers_order_pairs() -> None:
    train = points_with_labels(120)
    objective, rng = _Objective(train, 3, 2.0, 1), np.random.default_rng(2)
    both = rng.normal(size=objective.size)
    _, gradient = objective(both)
    for _ in range(5):
        step = 1e-6 * rng.normal(size=objective.size)
        assert objective(both + step)[0] - objective(both - step)[0] == pytest.approx(2 * float(gradient @ step), rel=1e-3)
    x, y = dense(train)
    model = fit_xlr(train, 3, 10.0)
    scores_BI = x @ np.asarray(model.left) @ np.asarray(model.right)
    for label in range(4):
        has_B = y[:, label] > 0
        assert (scores_BI[has_B, label][:, None] > scores_BI[~has_B, label]).mean() > 0.8
    assert np.allclose(np.asarray(model.right)[:, 4], 0, atol=1e-2)


def weights_of(model: LinearScores) -> np.ndarray:
    assert issparse(model.left)
    return model.left.toarray()


def test_proxml_is_at_the_optimum_of_its_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_one_vs_all, "PROXML_STOP", Stop(tolerance=1e-6, rounds=500, passes=100))
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


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.5])
def test_ppd_sparse_is_at_the_optimum_of_its_objective(sparsity: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_one_vs_all, "PASSES", 5000)
    monkeypatch.setattr(sparse_one_vs_all, "TOLERANCE", 1e-4)
    train = points_with_labels(100)
    x, y = dense(train)
    weight_FI = weights_of(fit_ppd_sparse(train, 1.0, sparsity))
    for label in range(4):
        sign_B, weight_F = np.where(y[:, label] > 0, 1.0, -1.0), weight_FI[:, label].astype(np.float64)

        def objective(w: np.ndarray, sign_B: np.ndarray = sign_B) -> float:
            return float(sparsity * np.abs(w).sum() + w @ w / 2 + np.maximum(1 - sign_B * (x @ w), 0).sum())

        reached = objective(weight_F)
        rng = np.random.default_rng(label)
        for scale in (0.3, 0.03, 0.003):
            nearby = [objective(weight_F + scale * rng.normal(size=len(weight_F)) * (rng.random(len(weight_F)) < 0.5)) for _ in range(200)]
            assert reached <= min(nearby) * 1.00001
    assert (weight_FI == 0).mean() >= (0 if sparsity == 0 else 0.2)
