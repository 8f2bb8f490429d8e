"""FastXML, PfastreXML and the 1-norm classifier in their nodes."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csc_array, csr_array

from benchmarks.papers.xreg.fastxml import FastXmlOptions, fit_fastxml
from benchmarks.papers.xreg.l1_linear import Columns, Stop, minimise
from espalier.search import NO_ITEM
from training.data.xmc import LabelledPoints

pytestmark = pytest.mark.slow  # it compiles

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


def test_a_leaf_has_the_mean_relevance_of_its_points_and_no_more_labels_than_allowed() -> None:
    train = two_groups(10)
    train.labels.data = np.linspace(0.1, 1, train.labels.nnz).astype(np.float32)
    model = fit_fastxml(train, FastXmlOptions(trees=1, max_leaf=10, labels_per_leaf=5))
    label_BM, score_BM = model.best(train.points[[0]], 8)
    mean_I = train.labels.toarray().mean(axis=0)
    best = np.argsort(-mean_I, kind="stable")[:5]
    assert label_BM.tolist() == [[*best, NO_ITEM, NO_ITEM, NO_ITEM]]
    assert np.allclose(score_BM[0, :5], mean_I[best])
    assert (score_BM[0, 5:] == 0).all()
