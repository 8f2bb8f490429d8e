"""Linear node scorers: features of labels and their tree, the solver, training by layers, the search; C and γ by held-out points."""

from __future__ import annotations

import errno
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy.sparse import csr_array, random_array
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC

from benchmarks.random_bundles import random_chunks, random_tree, sparse_rows
from espalier.arrays import Array, Float32, Float64, Int64
from espalier.chunks import ARRAYS
from espalier.engines.linear.chunk_search import BeamParams, ChunkSearch
from espalier.errors import InvalidConfig, InvalidQuery
from espalier.manifest import Ranking
from espalier.text.sparse_rows import SparseRows
from espalier.tree import Tree, complete_tree
from tests.training.points import random_points, unit
from training.data.csr import Csr, as_matrix, as_rows, normalised
from training.data.xmc import LabelledPoints
from training.linear import choosing
from training.linear.choosing import COSTS, GAMMAS, Trial, choose
from training.linear.examples import Examples
from training.linear.fit import fit_linear
from training.linear.label_features import mean_points, pifa, weighted_sums
from training.linear.node_centroids import node_centroids
from training.linear.solver import _logistic, train_children
from training.specification.linear import LinearOptions, LinearTree
from training.trees.hierarchical_kmeans import hierarchical_kmeans

EVERY = np.arange(15, dtype=np.int32)
"""The features of most points here."""


def with_degrees(seed: int, points: int = 80, labels: int = 8) -> LabelledPoints:
    """Points whose labels have weights."""
    rng = np.random.default_rng(seed)
    data = random_points(rng, points, 15, labels)
    data.labels.data[:] = rng.choice([0.5, 1.0, 2.5, 4.0], data.labels.nnz)
    return data


# -- labels and their tree ------------------------------------------------------------------------------------------------


def test_features_of_a_label_are_the_normalised_sum_of_its_points() -> None:
    data = with_degrees(2, points=40)
    points, relevance = 3 * data.points, data.labels.toarray()
    is_own = relevance > 0
    shares = is_own / np.sqrt(np.maximum(is_own.sum(1, keepdims=True), 1))
    for features, weights, rows in ((pifa, shares, points), (weighted_sums, relevance, points), (mean_points, is_own, data.points)):
        sums = weights.T @ rows.toarray()
        lengths = np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-12)
        assert_allclose(features(LabelledPoints(points, data.labels)).toarray(), sums / lengths, atol=1e-6)


def test_a_tree_of_labels_is_balanced_and_keeps_like_labels_together() -> None:
    rng = np.random.default_rng(2)
    centres = rng.normal(size=(8, 20))
    group = rng.permutation(np.repeat(np.arange(8), 25))
    labels = unit(centres[group] + 0.05 * rng.normal(size=(200, 20)))
    tree, again, parallel, other = (
        hierarchical_kmeans(labels, branching=4, max_leaf=25, seed=seed, threads=threads)
        for seed, threads in ((0, 1), (0, 1), (0, 2), (1, 1))
    )
    assert tree.max_children == (2, 4, 25)
    assert tree.item_count == 200
    clusters = tree.leaf_item.reshape(8, 25)
    purity = np.mean([np.bincount(group[cluster]).max() for cluster in clusters]) / 25
    assert purity > 0.8  # halving need not find eight groups, but must not mix them up
    assert_array_equal(tree.leaf_item, again.leaf_item)
    assert_array_equal(tree.leaf_item, parallel.leaf_item)
    assert not np.array_equal(tree.leaf_item, other.leaf_item)


@pytest.mark.parametrize(
    ("count", "branching", "max_leaf", "children"),
    [(10, 16, 10, (10,)), (11, 16, 10, (2, 6)), (1, 2, 2, (1,)), (33, 5, 4, (4, 4, 3)), (100, 128, 2, (64, 2)), (7, 2, 2, (2, 2, 2))],
)
def test_trees_of_any_size(count: int, branching: int, max_leaf: int, children: tuple[int, ...]) -> None:
    labels = csr_array(random_array((count, 8), density=0.4, rng=np.random.default_rng(3), dtype=np.float32))
    tree = hierarchical_kmeans(labels, branching, max_leaf, seed=0)
    assert tree.max_children == children
    assert_array_equal(np.sort(tree.leaf_item), np.arange(count))


# -- the solver -----------------------------------------------------------------------------------------------------------


class Exact(LinearOptions):
    """Trained to the minimum, with negatives from a narrow beam."""

    beam_size: ClassVar[int] = 3
    tolerance: ClassVar[float] = 1e-6
    passes: ClassVar[int] = 5000


def exact(**other: Any) -> Exact:
    made: dict[str, Any] = {"negatives": "teacher", "threshold": 0.0, "prior": 0.0}
    return Exact(**(made | other))


def solved(points: Csr, rows: Int64, positives: list[list[int]], children: int, **options: Any) -> tuple[Float32, Float32]:
    """float32[F, K] and float32[K], the weights and biases that training makes."""
    made = exact(**options)
    number_of = np.full(points.shape[1], -1, np.int32)
    positive_from = np.concatenate([[0], np.cumsum([len(own) for own in positives])])
    positive_child = np.array([child for own in positives for child in own], np.int32)
    costs = np.full(len(positive_child), made.known_cost, np.float32)
    found = train_children(points, Examples(rows, positive_from, positive_child, costs), children, None, made, number_of, 1)
    assert_array_equal(number_of, np.full(points.shape[1], -1))
    assert np.all(np.diff(found.row_feature) > 0)
    assert np.all(found.row_count > 0)
    row_entry = np.concatenate([[0], np.cumsum(found.row_count)])
    dense = np.zeros((points.shape[1], children), np.float32)
    for row, feature in enumerate(found.row_feature):
        own = slice(row_entry[row], row_entry[row + 1])
        assert np.all(np.diff(found.entry_child[own].astype(np.int64)) > 0)
        dense[feature, found.entry_child[own]] = found.entry_weight[own]
    return dense, found.bias


def optimum(loss: str, points_RF: Array, is_positive_R: Array, cost_R: Array) -> Float64:
    """float64[F + 1]: scikit-learn's weights of one child, the bias at the end, which is one more feature."""
    if loss == "squared-hinge":
        model: Any = LinearSVC(fit_intercept=False, tol=1e-8, max_iter=100_000, random_state=0)
    else:
        model = LogisticRegression(fit_intercept=False, tol=1e-10, max_iter=10_000)
    dense = np.hstack([points_RF.astype(np.float64), np.ones((len(points_RF), 1))])
    coefficients: Float64 = model.fit(dense, np.where(is_positive_R, 1, -1), sample_weight=cost_R).coef_[0]
    return coefficients


@pytest.mark.parametrize(
    ("loss", "cost"), [*(("squared-hinge", cost) for cost in (0.3, 1.0, 5.0)), *(("logistic", cost) for cost in (0.1, 1.0, 30.0))]
)
def test_the_solver_finds_the_optimum_as_scikit_learn_does_one_child_at_a_time(loss: str, cost: float) -> None:
    rng = np.random.default_rng(4)
    data = random_points(rng, 60, 15, 5)
    rows = np.sort(rng.permutation(60)[:45])
    positives = [data.labels_of(b).tolist() for b in rows]
    weights, biases = solved(data.points, rows, positives, 5, loss=loss, cost=cost)
    for child in range(5):
        expected = optimum(loss, data.points.toarray()[rows], data.labels.toarray()[rows, child] > 0, np.full(45, cost))
        assert_allclose(np.append(weights[:, child], biases[child]), expected, atol=2e-3)


@given(
    margin=st.floats(-40, 40), square=st.floats(1e-3, 100), cost=st.floats(1e-3, 1e3), target=st.floats(0, 1), share=st.floats(0, 1)
)  # fmt: skip
def test_a_logistic_step_is_the_root_of_its_equation(margin: float, square: float, cost: float, target: float, share: float) -> None:
    dual = cost * (target - share)
    after, push = _logistic.py_func(*(np.float32(value) for value in (margin, square, cost, target, dual)))
    assert cost * (target - 1) - 1e-6 * cost <= after <= cost * target + 1e-6 * cost
    low, high = -1e4, 1e4  # bisection, in double precision
    for _ in range(200):
        middle = (low + high) / 2
        gain = cost * (target - 1 / (1 + np.exp(min(-middle, 700)))) - dual
        low, high = (low, middle) if middle - margin > square * gain else (middle, high)
    root = min(max(low, -30), 30)
    assert margin + push == pytest.approx(root, abs=2e-3 + 1e-5 * square * cost)


def test_small_weights_are_left_out_and_a_node_without_points_has_none() -> None:
    data = random_points(np.random.default_rng(6), 50, 15, 3)
    positives = [data.labels_of(b).tolist() for b in range(50)]
    every, pruned, relative = (
        solved(data.points, np.arange(50), positives, 3, **option)[0] for option in ({}, {"threshold": 0.2}, {"relative_threshold": 0.3})
    )
    sizes = np.abs(every)
    for found, is_kept in ((pruned, sizes >= 0.2), (relative, sizes >= np.float32(0.3) * sizes.max(0))):
        assert_array_equal(found, np.where(is_kept, every, 0))
        assert 0 < np.count_nonzero(found) < np.count_nonzero(every)
    weights, bias = solved(data.points, np.empty(0, np.int64), [], 2)
    assert not weights.any()
    assert not bias.any()


# -- training -------------------------------------------------------------------------------------------------------------


def largest_below(tree: Tree, weight_BI: Array) -> Array:
    """float[B, N]: the largest weight of each point's labels below a node, by the definition."""
    largest = np.zeros((len(weight_BI), tree.node_count))
    largest[:, tree.leaf_of_item] = weight_BI
    for node in range(tree.leaf_offset - 1, -1, -1):
        largest[:, node] = largest[:, tree.first_child[node] : tree.first_child[node + 1]].max(1)
    return largest


@pytest.mark.parametrize(("negatives", "gamma"), [("teacher", 1.0), ("both", 1.0), ("matcher", 1.0), ("matcher", 0.0)])
def test_each_node_learns_from_the_points_that_come_there(negatives: Any, gamma: float) -> None:
    """A beam of 3 keeps the whole first level and the best 3 nodes of the second, which are ranked as serving will rank them."""
    data, tree = random_points(np.random.default_rng(9), 80, 15, 27), complete_tree(np.arange(27), 3)
    options = exact(negatives=negatives, gamma=gamma)
    assert options.ranking == Ranking(activation="l3-hinge", own="log_activation", gamma=gamma)
    chunks = fit_linear(data, tree, options)
    chunks.check(tree)
    has_label_BN = largest_below(tree, data.labels.toarray()) > 0
    weights_NF = np.array([chunks.weights_of(tree, node, EVERY) for node in range(1, tree.node_count)])
    own_BN = -(np.maximum(1 - (data.points.toarray() @ weights_NF.T + chunks.bias[1:]), 0) ** 3)
    ranks_BN = own_BN[:, 3:12] + gamma * np.repeat(own_BN[:, :3], 3, axis=1)
    kept_BN = has_label_BN if negatives == "teacher" else np.ones_like(has_label_BN)
    kept_BN[:, 4:13] = has_label_BN[:, 4:13] if negatives != "matcher" else False
    if negatives != "teacher":
        np.put_along_axis(kept_BN, 4 + np.argsort(-ranks_BN, axis=1, kind="stable")[:, :3], True, axis=1)
    kept_BN[:, 0] = has_label_BN[:, 0]
    for p in range(tree.leaf_offset):
        rows, children = np.flatnonzero(kept_BN[:, p]), slice(int(tree.first_child[p]), int(tree.first_child[p + 1]))
        positives = [np.flatnonzero(own).tolist() for own in has_label_BN[rows, children]]
        weights, bias = solved(data.points, rows, positives, 3)
        assert_allclose(weights_NF[children.start - 1 : children.stop - 1].T, weights, atol=5e-3)
        assert_allclose(chunks.bias[children], bias, atol=5e-3)


def test_the_activation_is_that_of_the_loss_unless_it_is_said() -> None:
    assert LinearOptions(loss="logistic", activation="l2-hinge").ranking.activation == "l2-hinge"
    assert LinearOptions(loss="logistic").ranking.activation == "sigmoid"


@pytest.mark.parametrize("loss", ["squared-hinge", "logistic"])
def test_weights_are_drawn_to_the_centroids(loss: Any) -> None:
    """At the minimum of ½‖w − βz‖² + C Σ loss(y (w·x + b)) + ½ (b + β/2)², w − βz = −C Σ loss′(y (w·x + b)) y x."""
    data = random_points(np.random.default_rng(11), 80, 15, 4)
    tree, centroids = complete_tree(np.arange(4), 2), pifa(data)
    options = exact(prior=0.7, cost=0.3, loss=loss)
    chunks, points = fit_linear(data, tree, options, centroids=centroids), data.points.toarray()
    has_label_BN = largest_below(tree, data.labels.toarray()) > 0
    for node, labels in {1: [0, 1], 2: [2, 3], 3: [0], 4: [1], 5: [2], 6: [3]}.items():
        known = np.flatnonzero(has_label_BN[:, tree.parent[node]])
        y = np.where(has_label_BN[known, node], 1, -1)
        largest = centroids.toarray()[labels].max(0)
        weights, bias = chunks.weights_of(tree, node, EVERY), chunks.bias[node]
        margin = y * (points[known] @ weights + bias)
        fall = 2 * np.maximum(0, 1 - margin) if loss == "squared-hinge" else 1 / (1 + np.exp(margin))
        assert_allclose(weights - 0.7 * largest / np.linalg.norm(largest), 0.3 * (fall * y) @ points[known], atol=2e-3)
        assert bias + 0.35 == pytest.approx(0.3 * (fall * y).sum(), abs=2e-3)
    for name in ARRAYS:  # PIFA's are the default
        assert_array_equal(getattr(fit_linear(data, tree, options), name), getattr(chunks, name))


@pytest.mark.parametrize("empty_share", [0.0, 0.4])
def test_a_nodes_centroid_is_the_largest_of_its_items_where_features_are_negative_too(empty_share: float) -> None:
    """An item that lacks a feature has 0 there, which is more than −1; an empty leaf is no item."""
    rng = np.random.default_rng(4)
    tree = random_tree(rng, 3, 3, empty_share=empty_share)
    dense_IF = np.where(rng.random((tree.item_count, 6)) < 0.6, rng.normal(size=(tree.item_count, 6)) - 1, 0).astype(np.float32)
    for level, found in enumerate(node_centroids(csr_array(dense_IF), tree), start=1):
        expected = np.zeros((tree.level_size(level), 6))
        path_I = tree.ancestors(tree.leaf_of_item)[:, level] - tree.level(level).start
        for n in np.unique(path_I):
            expected[n] = dense_IF[path_I == n].max(0)
        lengths = np.linalg.norm(expected, axis=1)
        divisors = np.where((lengths > 0) & (level < tree.height), lengths, 1)  # leaves stay as long as their items' rows
        assert_allclose(found.divisor_N, divisors, rtol=1e-5)
        every = slice(0, tree.level_size(level))
        assert_allclose(found.of(every).toarray(), expected / divisors[:, None], rtol=1e-5, atol=1e-7)


def test_items_of_few_queries_stay_at_their_centroids_and_are_found_as_by_them() -> None:
    """One text an item: the tree ranks as the cosine to the centroids does, and nodes of items with more texts are trained."""
    rng = np.random.default_rng(13)
    rows = np.abs(rng.normal(size=(40, 30))) * (rng.random((40, 30)) < 0.4) + np.eye(40, 30) * 0.1
    points = unit(rows)
    data = LabelledPoints(points, csr_array(np.eye(40, dtype=np.float32)))
    tree = complete_tree(np.arange(40), 40)
    chunks = fit_linear(data, tree, LinearOptions(threshold=0.0))
    assert_allclose(chunks.bias[1:], -1.5)
    queries = sparse_rows(np.abs(rng.normal(size=(9, 30)))).normalised()
    found = ChunkSearch(tree, chunks).search(queries, BeamParams.uniform(9, 1, 10)).leaves_BM - 1
    assert_array_equal(found, np.argsort(-as_matrix(queries).toarray() @ points.toarray().T, axis=1)[:, :10])
    for few, trained in ((1, True), (1.1, False)):
        assert np.any(fit_linear(data, tree, LinearOptions(min_positives=few)).bias[1:] != -1.5) == trained

    below = complete_tree(np.arange(4), 2)  # the first two items have one text, the others three
    counts = [1, 1, 3, 3]
    some = LabelledPoints(points[:8], csr_array(np.repeat(np.eye(4, dtype=np.float32), counts, axis=0)))
    bias = fit_linear(some, below, LinearOptions(min_positives=2)).bias
    assert_allclose(bias[3:5], -1.5)
    assert np.all(bias[[1, 2, 5, 6]] != -1.5)


def test_rows_that_are_too_many_to_copy_are_halved_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = pifa(random_points(np.random.default_rng(5), 400, 60, 90, density=0.1))
    copied = hierarchical_kmeans(labels, 4, 5, 0)
    monkeypatch.setattr("training.trees.hierarchical_kmeans.MOST_COPIED", labels.nnz // 3)
    assert_array_equal(hierarchical_kmeans(labels, 4, 5, 0).leaf_item, copied.leaf_item)


def test_a_disk_without_room_for_scorers_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_points(np.random.default_rng(8), 50, 30, 12)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("training.linear.node_scorers.os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        fit_linear(data, hierarchical_kmeans(pifa(data), 4, 5, 0), LinearOptions(), work=tmp_path)
    assert {file.suffix for file in tmp_path.iterdir()} == {".safetensors"}


def test_threads_change_nothing_progress_is_reported_and_a_damaged_level_of_a_killed_run_is_named(tmp_path: Path) -> None:
    data = random_points(np.random.default_rng(8), 200, 30, 40)
    tree, trained = hierarchical_kmeans(pifa(data), 4, 5, 0), list[int]()
    one = fit_linear(data, tree, LinearOptions(), progress=trained.append, work=tmp_path)
    two = fit_linear(data, tree, LinearOptions(), threads=2)
    for name in ARRAYS:
        assert_array_equal(getattr(one, name), getattr(two, name))
    assert sum(trained) == tree.leaf_offset
    file = tmp_path / "level-2.safetensors"
    good = file.read_bytes()
    for damaged in (b"damaged", good[:-5]):
        file.write_bytes(damaged)
        with pytest.raises(InvalidConfig, match=r"--resume: got .*level-2.safetensors', expected a readable level"):
            fit_linear(data, tree, LinearOptions(), work=tmp_path)


@pytest.mark.parametrize("loss", ["squared-hinge", "logistic"])
def test_a_positive_costs_as_much_as_its_weight_says(loss: Any) -> None:
    data, tree = with_degrees(8, 60, 4), complete_tree(np.arange(4), 4)
    chunks = fit_linear(data, tree, exact(weighted=True, loss=loss))
    known = np.flatnonzero(np.diff(data.labels.indptr))
    weight_BI = data.labels.toarray()[known] / data.labels.data.mean()
    for label in range(4):
        is_own = weight_BI[:, label] > 0
        expected = optimum(loss, data.points.toarray()[known], is_own, np.where(is_own, weight_BI[:, label], 1))
        assert_allclose(np.append(chunks.weights_of(tree, 1 + label, EVERY), chunks.bias[1 + label]), expected, atol=3e-3)


# -- XReg: targets and costs of relevance ---------------------------------------------------------------------------------


def xreg(**other: Any) -> Exact:
    return exact(**({"loss": "relevance", "cost": 2.0, "gamma": 1.0} | other))


def test_each_edge_minimises_equation_5() -> None:
    """A logistic regression, given each point twice: as a positive with the weight s z, as a negative with s (1 − z)."""
    data, tree = with_degrees(1), complete_tree(np.arange(8), 2)
    chunks = fit_linear(data, tree, xreg())
    largest_BN = largest_below(tree, data.labels.toarray() / data.labels.data.max())
    for parent in range(tree.leaf_offset):
        known = np.flatnonzero(largest_BN[:, parent] > 0)
        share = np.ones(len(known)) if parent == 0 else largest_BN[known, parent]
        cost, twice = 2.0 * share * len(known) / share.sum(), np.vstack([data.points.toarray()[known]] * 2)
        for child in range(int(tree.first_child[parent]), int(tree.first_child[parent + 1])):
            target = largest_BN[known, child] / share
            expected = optimum("logistic", twice, np.repeat([True, False], len(known)), np.append(cost * target, cost * (1 - target)))
            assert_allclose(np.append(chunks.weights_of(tree, child, EVERY), chunks.bias[child]), expected, atol=3e-3)


def test_without_evidence_an_estimate_is_the_base_rate_or_a_half() -> None:
    """With a cost near 0 weights stay where they are regularised towards; the path's product is then the mean relevance over the points
    that have a label, which are those that the root learns from."""
    data = with_degrees(3)
    data = data.take(np.flatnonzero(np.diff(data.labels.indptr)))
    tree = complete_tree(np.arange(8), 2)
    relevance_BI = data.labels.toarray() / data.labels.data.max()
    rows = as_rows(data.points)
    for intercept, expected in (("base-rate", relevance_BI.mean(0)), ("zero", np.full(8, 0.5**3))):
        chosen = xreg(cost=1e-6, intercept=intercept)
        found = ChunkSearch(tree, fit_linear(data, tree, chosen), chosen.ranking).search(rows, BeamParams.uniform(len(data), 8, 8))
        for leaf, mean in zip(tree.leaf_of_item.tolist(), expected.tolist(), strict=True):
            assert_allclose(np.exp(found.ranks_BM[found.leaves_BM == leaf]), mean, rtol=1e-3)


def test_a_point_that_only_a_beam_brought_costs_as_much_as_the_mean_of_the_others() -> None:
    positive_from, child = np.array([0, 2, 3, 3]), np.array([0, 1, 1], np.int32)
    relevance = np.array([0.25, 0.5, 0.125], np.float32)
    examples = Examples(np.arange(3), positive_from, child, np.ones(3, np.float32))
    made, root = (examples.of_relevance(relevance, 10, of_root=of_root) for of_root in (False, True))
    assert made.cost is not None
    assert root.cost is not None
    assert_allclose(made.cost, np.array([0.5, 0.125, 0.3125]) * 10 / 0.3125)
    assert_allclose(root.cost, [10, 10, 10])


# -- the search -----------------------------------------------------------------------------------------------------------


def test_queries_that_would_be_written_outside_are_refused() -> None:
    rng = np.random.default_rng(10)
    tree = random_tree(rng, 3, 3)
    search = ChunkSearch(tree, random_chunks(rng, tree, 30, integer=False))
    good = sparse_rows(np.eye(30)[:2])
    outside = [SparseRows(np.array([0, 1, 2]), np.array([3, bad], np.int32), np.ones(2, np.float32), 30) for bad in (-1, 30)]
    for rows, expected in (
        (sparse_rows(np.eye(31)[:2]), "features: got 'rows of 31 features', expected rows of 30"),
        (outside[0], "features.indices: got -1, expected feature numbers from 0 to 29"),
        (outside[1], "features.indices: got 30, expected feature numbers from 0 to 29"),
    ):
        with pytest.raises(InvalidQuery, match=expected):
            search.search(rows, BeamParams.uniform(2, 1, 1))
    assert len(search.search(good.take(np.empty(0, np.int64)), BeamParams.uniform(0, 1, 1)).leaves_BM) == 0


# -- the choice of C and γ ------------------------------------------------------------------------------------------------


def clusters(count: int, noise: float, seed: int = 0) -> LabelledPoints:
    """Points of 40 features around the centres of their labels, of which there are 30."""
    rng = np.random.default_rng(seed)
    centres = rng.random((30, 40)) * (rng.random((30, 40)) < 0.2)
    own = np.array([rng.permutation(30)[:2] for _ in range(count)])
    dense = centres[own].sum(1) + noise * rng.random((count, 40)) * (rng.random((count, 40)) < 0.3)
    labels = np.zeros((count, 30), np.float32)
    np.put_along_axis(labels, own, 1, axis=1)
    return LabelledPoints(normalised(csr_array(dense.astype(np.float32))), csr_array(labels))


def tree_of(points: LabelledPoints, max_leaf: int = 4) -> tuple[Tree, Csr]:
    rows = pifa(points)
    return hierarchical_kmeans(rows, branching=4, max_leaf=max_leaf, seed=0), rows


def test_a_gamma_with_which_quality_falls_is_not_taken() -> None:
    trial = Trial(1.0, 0.5, np.array([[0.8, 0.5], [0.7, 0.6]]))
    assert trial.quality == pytest.approx((0.7 * 0.5) ** (1 / 2)), "that of the worse beam"
    assert trial.fall == pytest.approx(np.log((0.8 * 0.5) / (0.7 * 0.6)) / 2)
    assert trial.row()["at_wide_beam"] == {"ndcg@5": 0.7, "recall@10": 0.6}
    falls = Trial(1.0, 0.0, np.array([[0.9, 0.9], [0.85, 0.9]]))
    steady = Trial(1.0, 0.7, np.full((2, 2), 0.8))
    assert falls.quality > steady.quality
    assert choosing._best([falls, steady]) is steady
    worse = Trial(1.0, 1.0, np.array([[0.9, 0.9], [0.5, 0.9]]))
    assert choosing._best([worse, falls]) is falls  # where all fall, the one that falls least
    equal = Trial(1.0, 0.85, np.full((2, 2), 0.8))
    assert choosing._best([steady, equal]) is equal  # of equal ones the nearest to probabilities


def test_the_options_are_those_that_find_most() -> None:
    """And what is tried is in the report, the same at every run and with any number of threads."""
    data = clusters(600, 0.8)
    one, two = (choose(data, tree_of, LinearOptions(), 2, threads) for threads in (1, 2))
    assert one == two
    assert one.report is not None
    trials = one.report["trials"]
    assert {trial["gamma"] for trial in trials} == set(GAMMAS)
    costs = list(dict.fromkeys(trial["cost"] for trial in trials))
    assert len(costs) >= 2
    assert set(costs) <= set(COSTS.values)
    chosen = next(trial for trial in trials if (trial["cost"], trial["gamma"]) == (one.options.cost, one.options.gamma))
    steady = [trial["quality"] for trial in trials if falls_by(trial) <= choosing.MOST_FALL]
    assert chosen["quality"] == max(steady)
    assert one.report["held_out"] == 600  # each quarter in turn
    assert one.report["beams"] == [2, 10]


def falls_by(trial: dict[str, Any]) -> float:
    names = "ndcg@5", "recall@10"
    return float(np.mean([np.log(trial["at_beam"][name] / trial["at_wide_beam"][name]) for name in names]))


def test_configured_numbers_are_kept_and_without_inner_nodes_there_is_no_gamma_to_try() -> None:
    data, known = clusters(600, 0.8), LinearOptions(cost=2.0, gamma=0.4)
    assert choose(data, tree_of, known, 2).options is known
    only_gamma = choose(data, tree_of, LinearOptions(cost=2.0), 2)
    flat = choose(data, partial(tree_of, max_leaf=30), LinearOptions(), 2)
    assert only_gamma.options.cost == 2.0
    for found, name, values in ((only_gamma, "cost", {2.0}), (flat, "gamma", {1.0})):
        assert found.report is not None
        assert {trial[name] for trial in found.report["trials"]} == values
    assert choose(data, tree_of, LinearOptions(gamma=0.4), 2).options.gamma == 0.4


def test_too_few_points_that_the_tree_has_not_seen_choose_nothing() -> None:
    data = clusters(600, 0.8)
    few, many = (replace(data, seen_B=np.arange(600) >= asked) for asked in (199, 400))
    none = data.take(np.empty(0, np.int64))
    for some in (none, clusters(5, 0.8), clusters(199, 0.8), few):
        found = choose(some, tree_of, LinearOptions(), 2)
        assert found.report is None
        assert (found.options.cost, found.options.gamma) == (1.0, 0.5)
    enough = choose(many, tree_of, LinearOptions(), 2)
    assert enough.report is not None
    assert enough.report["held_out"] == 400


def test_a_trial_learns_from_a_limited_part(monkeypatch: pytest.MonkeyPatch) -> None:
    data = clusters(600, 0.8)
    monkeypatch.setattr(choosing, "MOST_VALUES", data.points.nnz // 2)
    part = data.take(choosing._most_values(data.points, 0))
    assert data.points.nnz // 2 - 40 < part.points.nnz <= data.points.nnz // 2
    assert 250 < len(part) < 350


def test_folds_hold_out_each_point_once_at_most() -> None:
    unseen = np.arange(0, 2000, 4)
    for held, learned in choosing._folds(unseen, 2000, 3):
        assert np.isin(held, unseen).all()
        assert sorted([*held, *learned]) == list(range(2000))
    folds = list(choosing._folds(np.arange(1200), 1200, 3))
    assert len(folds) == 4
    assert sorted(np.concatenate([held for held, _ in folds])) == list(range(1200))
    for held, learned in folds:
        assert sorted([*held, *learned]) == list(range(1200))


def test_a_trial_of_many_points_learns_from_a_quarter_and_from_all_texts_of_items() -> None:
    ((held, learned),) = choosing._folds(np.arange(50_000, 101_000), 101_000, 3)
    assert len(held) == len(set(held)) == 1000
    assert (np.diff(learned) > 0).all()
    assert not np.isin(held, learned).any()
    assert (learned < 50_000).sum() == 50_000
    assert (learned >= 50_000).sum() == 12_500
    ((_, learned),) = choosing._folds(np.arange(10_000), 10_000, 3)
    assert len(learned) == choosing.LEAST_LEARNED


def test_clusters_are_children_of_the_root_where_nothing_is_trained() -> None:
    """Unless there are more clusters than a root holds: some nodes below it could then be trained, with too many children for memory."""
    assert LinearTree().shape_of(1 << 20, 1, is_trained=True).branching == 128
    assert LinearTree().shape_of(1 << 20, 1, is_trained=False).branching == 1 << 15
    assert LinearTree().shape_of((1 << 20) + 1, 1, is_trained=False).branching == 128
    assert LinearTree(branching=16).shape_of(100, 1, is_trained=False).branching == 16


def test_few_items_are_one_node() -> None:
    """Unless its dense weights would be too large, or a forest would hold the same node several times."""
    assert {LinearTree().shape_of(1024, 1 << 16, is_trained).max_leaf for is_trained in (False, True)} == {1024}
    assert LinearTree().shape_of(1024, (1 << 16) + 1, is_trained=True).max_leaf == 32
    assert LinearTree().shape_of(1025, 10, is_trained=True).max_leaf == 32
    assert LinearTree(count=2).shape_of(1024, 10, is_trained=True).max_leaf == 32
    assert LinearTree(max_leaf=7).shape_of(5, 10, is_trained=False).max_leaf == 7


def test_clusters_are_small_where_nothing_is_trained() -> None:
    """Unless there are few items, or more clusters than the root holds."""
    sizes = (1 << 14, (1 << 14) + 1, 1 << 18, (1 << 18) + 1, 1 << 19, 1 << 20, (1 << 20) + 1)
    shapes = [LinearTree().shape_of(items, 1 << 20, is_trained=False) for items in sizes]
    assert [shape.max_leaf for shape in shapes] == [32, 8, 8, 16, 16, 32, 32]
    assert [shape.is_wide for shape in shapes] == [False, *[True] * 5, False]
    for tree, is_trained in ((LinearTree(), True), (LinearTree(branching=128), False), (LinearTree(max_leaf=32), False)):
        shape = tree.shape_of(1 << 18, 10, is_trained)
        assert (shape.max_leaf, shape.is_wide) == (32, False)
