"""Linear node scorers: the tree over sparse labels, the solver, training by layers, the search over chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from scipy.sparse import csr_array, random_array
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC

from benchmarks.random_bundles import random_chunks, random_tree, sparse_rows
from espalier.chunks import ARRAYS, Chunks
from espalier.engines.linear.chunk_search import BeamParams, ChunkSearch
from espalier.errors import InvalidConfig, InvalidData, InvalidQuery
from espalier.manifest import Ranking
from espalier.text.sparse_rows import SparseRows
from espalier.tree import Tree, complete_tree
from tests.training.points import random_points, unit
from training.data.csr import Csr, as_matrix, as_rows
from training.data.xmc import LabelledPoints
from training.linear import fit
from training.linear.examples import Examples
from training.linear.fit import fit_linear
from training.linear.label_features import pifa
from training.linear.node_centroids import node_centroids
from training.linear.solver import BLOCK, _logistic, train_children
from training.specification.linear import LinearOptions
from training.trees.hierarchical_kmeans import hierarchical_kmeans


def dense_of(rows: SparseRows) -> NDArray[np.float32]:
    return as_matrix(rows).toarray()


# -- labels and their tree ------------------------------------------------------------------------------------------------


def test_pifa_is_the_normalised_sum_of_a_labels_points() -> None:
    rng = np.random.default_rng(1)
    data = random_points(rng, 40, 12, 6)
    points, found = data.points.toarray(), pifa(data).toarray()
    for label in range(6):
        total = np.zeros(12)
        for b in range(40):
            own = data.labels_of(b)
            if label in own:
                total += points[b] / np.sqrt(len(own))
        assert_allclose(found[label], total / max(float(np.linalg.norm(total)), 1e-12), atol=1e-6)


def test_a_tree_of_labels_is_balanced_and_keeps_like_labels_together() -> None:
    rng = np.random.default_rng(2)
    centres = rng.normal(size=(8, 20))
    group = rng.permutation(np.repeat(np.arange(8), 25))
    labels = unit(centres[group] + 0.05 * rng.normal(size=(200, 20)))
    tree = hierarchical_kmeans(labels, branching=4, max_leaf=25, seed=0)
    assert tree.max_children == (2, 4, 25)
    assert tree.item_count == 200
    clusters = tree.leaf_item.reshape(8, 25)
    purity = np.mean([np.bincount(group[cluster]).max() for cluster in clusters]) / 25
    assert purity > 0.8  # halving need not find eight groups, but must not mix them up
    again = hierarchical_kmeans(labels, branching=4, max_leaf=25, seed=0)
    assert_array_equal(tree.leaf_item, again.leaf_item)
    other = hierarchical_kmeans(labels, branching=4, max_leaf=25, seed=1)
    assert not np.array_equal(tree.leaf_item, other.leaf_item)
    assert_array_equal(hierarchical_kmeans(labels, branching=4, max_leaf=25, seed=0, threads=2).leaf_item, tree.leaf_item)
    for options, message in (((1, 2), "branching: got 1, expected at least 2"), ((2, 1), "max_leaf: got 1, expected at least 2")):
        with pytest.raises(InvalidConfig, match=message):
            hierarchical_kmeans(labels, *options, 0)


@pytest.mark.parametrize(
    ("count", "branching", "max_leaf", "children"),
    [(10, 16, 10, (10,)), (11, 16, 10, (2, 6)), (1, 2, 2, (1,)), (33, 5, 4, (4, 4, 3)), (100, 128, 2, (64, 2)), (7, 2, 2, (2, 2, 2))],
)
def test_trees_of_any_size(count: int, branching: int, max_leaf: int, children: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    labels = csr_array(random_array((count, 8), density=0.4, rng=rng, dtype=np.float32))
    tree = hierarchical_kmeans(labels, branching, max_leaf, seed=0)
    assert tree.max_children == children
    assert_array_equal(np.sort(tree.leaf_item), np.arange(count))


# -- the solver -----------------------------------------------------------------------------------------------------------


class Exact(LinearOptions):
    """Trained to the minimum, with negatives from a beam of 1."""

    beam_size: ClassVar[int] = 1
    tolerance: ClassVar[float] = 1e-6
    passes: ClassVar[int] = 5000


class OfBeam3(LinearOptions):
    beam_size: ClassVar[int] = 3


def solved(
    points: Csr, rows: NDArray[np.int64], positives: list[list[int]], children: int, **options: Any
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """float32[F, K] and float32[K], the weights and biases that training makes."""
    made = Exact(**({"threshold": 0.0, "prior": 0.0} | options))
    number_of = np.full(points.shape[1], -1, np.int32)
    positive_from = np.concatenate([[0], np.cumsum([len(own) for own in positives])])
    positive_child = np.array([child for own in positives for child in own], np.int32)
    costs = np.full(len(positive_child), made.known_cost, np.float32)
    found = train_children(points, Examples(rows, positive_from, positive_child, costs), children, None, made, number_of, 1)
    assert_array_equal(number_of, np.full(points.shape[1], -1))
    assert np.all(np.diff(found.row_feature) > 0)
    assert np.all(np.diff(found.row_entry) > 0)
    dense = np.zeros((points.shape[1], children), np.float32)
    for row, feature in enumerate(found.row_feature):
        own = slice(found.row_entry[row], found.row_entry[row + 1])
        assert np.all(np.diff(found.entry_child[own].astype(np.int64)) > 0)
        dense[feature, found.entry_child[own]] = found.entry_weight[own]
    return dense, found.bias


@pytest.mark.parametrize(
    ("loss", "cost"), [*(("squared-hinge", cost) for cost in (0.3, 1.0, 5.0)), *(("logistic", cost) for cost in (0.1, 1.0, 30.0))]
)
def test_the_solver_finds_the_optimum_as_scikit_learn_does_one_child_at_a_time(loss: str, cost: float) -> None:
    rng = np.random.default_rng(4)
    data = random_points(rng, 60, 15, 5)
    rows = np.sort(rng.permutation(60)[:45])
    positives = [data.labels_of(b).tolist() for b in rows]
    weights, biases = solved(data.points, rows, positives, 5, loss=loss, cost=cost)
    dense = np.hstack([data.points.toarray()[rows].astype(np.float64), np.ones((45, 1))])  # the bias is one more feature
    for child in range(5):
        target = np.array([1 if child in own else -1 for own in positives])
        if loss == "logistic":
            model: Any = LogisticRegression(C=cost, fit_intercept=False, tol=1e-10, max_iter=10_000)
        else:
            model = LinearSVC(C=cost, fit_intercept=False, loss="squared_hinge", tol=1e-8, max_iter=100_000, random_state=0)
        assert_allclose(np.append(weights[:, child], biases[child]), model.fit(dense, target).coef_[0], atol=2e-3)


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


def test_more_children_than_one_block_are_independent_of_each_other() -> None:
    rng = np.random.default_rng(5)
    data = random_points(rng, 50, 15, 3)
    positives = [data.labels_of(b).tolist() for b in range(50)]
    few = solved(data.points, np.arange(50), positives, 3)[0]
    shifted = [[child + BLOCK + 5 for child in own] for own in positives]
    many = solved(data.points, np.arange(50), shifted, BLOCK + 9)[0]
    assert_allclose(many[:, BLOCK + 5 : BLOCK + 8], few, atol=1e-3)


def test_small_weights_are_left_out_and_a_node_without_points_has_none() -> None:
    rng = np.random.default_rng(6)
    data = random_points(rng, 50, 15, 3)
    positives = [data.labels_of(b).tolist() for b in range(50)]
    every, pruned = (solved(data.points, np.arange(50), positives, 3, threshold=least)[0] for least in (0.0, 0.2))
    assert_array_equal(pruned, np.where(np.abs(every) >= 0.2, every, 0))
    assert 0 < np.count_nonzero(pruned) < np.count_nonzero(every)
    weights, bias = solved(data.points, np.empty(0, np.int64), [], 2)
    assert not weights.any()
    assert not bias.any()


# -- training -------------------------------------------------------------------------------------------------------------


def weights_of(chunks: Chunks, tree: Tree, p: int) -> NDArray[np.float32]:
    """float32[F, children] of one inner node."""
    dense = np.zeros((chunks.width, int(tree.first_child[p + 1] - tree.first_child[p])), np.float32)
    for row in range(chunks.chunk_row[p], chunks.chunk_row[p + 1]):
        own = slice(chunks.row_entry[row], chunks.row_entry[row + 1])
        dense[chunks.row_feature[row], chunks.entry_child[own]] = chunks.entry_weight[own]
    return dense


def expected_rows(data: LabelledPoints, tree: Tree, p: int) -> NDArray[np.int64]:
    """The points with a label below an inner node."""
    below = {p}
    for _ in range(tree.height):
        below |= {c for node in below for c in range(tree.first_child[node], tree.first_child[node + 1])}
    labels = {int(tree.leaf_item[node - tree.leaf_offset]) for node in below if node >= tree.leaf_offset}
    own = [set(data.labels_of(b)) for b in range(len(data))]
    return np.array([b for b, some in enumerate(own) if some & labels], np.int64)


@pytest.mark.parametrize("negatives", ["teacher", "both", "matcher"])
def test_each_node_learns_from_the_points_that_come_there(negatives: Any) -> None:
    rng = np.random.default_rng(7)
    data = random_points(rng, 80, 20, 12)
    tree = hierarchical_kmeans(pifa(data), 4, 3, 0)
    options = Exact(negatives=negatives, threshold=0.0, prior=0)
    chunks = fit_linear(data, tree, options)
    chunks.check(tree)
    kept = ChunkSearch(tree, chunks, last=1).search(as_rows(data.points), BeamParams.uniform(len(data), 1, 1)).leaves_BM[:, 0]
    for p in range(tree.leaf_offset):
        rows = expected_rows(data, tree, p)
        if p > 0 and negatives != "teacher":
            by_beam = np.flatnonzero(kept == p)
            rows = by_beam if negatives == "matcher" else np.union1d(rows, by_beam)
        children = range(int(tree.first_child[p]), int(tree.first_child[p + 1]))
        positives = [
            [
                k
                for k, c in enumerate(children)
                if b in (expected_rows(data, tree, c) if c < tree.leaf_offset else _with_label(data, tree, c))
            ]
            for b in rows
        ]
        weights, bias = solved(data.points, rows, positives, len(children))
        assert_allclose(weights_of(chunks, tree, p), weights, atol=5e-3)
        assert_allclose(chunks.bias[children.start : children.stop], bias, atol=5e-3)


def _with_label(data: LabelledPoints, tree: Tree, leaf: int) -> NDArray[np.int64]:
    label = tree.leaf_item[leaf - tree.leaf_offset]
    return np.array([b for b in range(len(data)) if label in data.labels_of(b)], np.int64)


@pytest.mark.parametrize("loss", ["squared-hinge", "logistic"])
def test_weights_are_drawn_to_the_centroids(loss: Any) -> None:
    """At the minimum of ½‖w − βz‖² + C Σ loss(y (w·x + b)) + ½ (b + β/2)², w − βz = −C Σ loss′(y (w·x + b)) y x."""
    rng = np.random.default_rng(11)
    data = random_points(rng, 80, 15, 4)
    tree, centroids = complete_tree(np.arange(4), 2), pifa(data)
    options = Exact(negatives="teacher", threshold=0.0, prior=0.7, cost=0.3, loss=loss)
    chunks = fit_linear(data, tree, options, centroids=centroids)
    points, every = data.points.toarray(), np.arange(15, dtype=np.int32)
    below = {1: [0, 1], 2: [2, 3], 3: [0], 4: [1], 5: [2], 6: [3]}
    for node, labels in below.items():
        siblings = below[int(tree.parent[node])] if tree.parent[node] else [0, 1, 2, 3]
        known = [b for b in range(80) if set(data.labels_of(b)) & set(siblings)]
        y = np.array([1 if set(data.labels_of(b)) & set(labels) else -1 for b in known])
        largest = centroids.toarray()[labels].max(0)
        weights, bias = chunks.weights_of(tree, node, every), chunks.bias[node]
        margin = y * (points[known] @ weights + bias)
        fall = 2 * np.maximum(0, 1 - margin) if loss == "squared-hinge" else 1 / (1 + np.exp(margin))
        assert_allclose(weights - 0.7 * largest / np.linalg.norm(largest), 0.3 * (fall * y) @ points[known], atol=2e-3)
        assert bias + 0.35 == pytest.approx(0.3 * (fall * y).sum(), abs=2e-3)
    for name in ARRAYS:  # PIFA's are the default
        assert_array_equal(getattr(fit_linear(data, tree, options), name), getattr(chunks, name))
    none = csr_array(np.zeros((80, 2), np.float32))
    with pytest.raises(InvalidData, match=r"centroids: got '\[4, 15\]', expected \[2, 15\]"):
        fit_linear(LabelledPoints(data.points, none), complete_tree(np.arange(2), 2), options, centroids=centroids)


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
        assert_allclose(found.length_N, lengths, rtol=1e-5)
        assert_allclose(found.rows.toarray(), expected / np.where(lengths > 0, lengths, 1)[:, None], rtol=1e-5, atol=1e-7)


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
    assert_array_equal(found, np.argsort(-dense_of(queries) @ points.toarray().T, axis=1)[:, :10])
    for few, trained in ((1, True), (1.1, False)):
        assert np.any(fit_linear(data, tree, LinearOptions(min_positives=few)).bias[1:] != -1.5) == trained

    below = complete_tree(np.arange(4), 2)  # the first two items have one text, the others three
    counts = [1, 1, 3, 3]
    some = LabelledPoints(points[:8], csr_array(np.repeat(np.eye(4, dtype=np.float32), counts, axis=0)))
    bias = fit_linear(some, below, LinearOptions(min_positives=2)).bias
    assert_allclose(bias[3:5], -1.5)
    assert np.all(bias[[1, 2, 5, 6]] != -1.5)


@pytest.mark.parametrize("loss", ["squared-hinge", "logistic"])
def test_threads_change_nothing_and_progress_is_reported(loss: Any) -> None:
    rng = np.random.default_rng(8)
    data = random_points(rng, 200, 30, 40)
    tree = hierarchical_kmeans(pifa(data), 4, 5, 0)
    trained: list[int] = []
    one = fit_linear(data, tree, LinearOptions(loss=loss), progress=trained.append)
    two = fit_linear(data, tree, LinearOptions(loss=loss), threads=2)
    for name in ("chunk_row", "row_feature", "row_entry", "entry_child", "entry_weight", "bias"):
        assert_array_equal(getattr(one, name), getattr(two, name))
    assert sum(trained) == tree.leaf_offset


def learned_rows(data: LabelledPoints, tree: Tree, options: LinearOptions) -> tuple[Chunks, list[NDArray[np.int64]]]:
    """Trained scorers, and the points that each inner node learned from."""
    rows: list[NDArray[np.int64]] = []

    def recorded(points: Csr, examples: Examples, *rest: Any) -> Any:
        rows.append(examples.points)
        return train_children(points, examples, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "train_children", recorded)
        return fit_linear(data, tree, options), rows


def test_training_ranks_as_serving_will() -> None:
    """With γ = 0 a beam of the whole first level keeps the best nodes of the second by their own activations."""
    rng = np.random.default_rng(9)
    data = random_points(rng, 80, 20, 27)
    tree = complete_tree(np.arange(27), 3)
    every, rows = np.arange(20, dtype=np.int32), {}
    for gamma in (0.0, 1.0):
        options = OfBeam3(negatives="matcher", gamma=gamma, threshold=0)
        chunks, trained = learned_rows(data, tree, options)
        assert options.ranking == Ranking(activation="l3-hinge", own="log_activation", gamma=gamma)
        assert LinearOptions(loss="logistic", activation="l2-hinge").ranking.activation == "l2-hinge"
        assert LinearOptions(loss="logistic").ranking.activation == "sigmoid"
        nodes = [*tree.level(1), *tree.level(2)]
        logits_BN = data.points.toarray() @ np.array([chunks.weights_of(tree, node, every) for node in nodes]).T + chunks.bias[nodes]
        own_BN = -(np.maximum(1 - logits_BN, 0) ** 3)
        ranks_BN = own_BN[:, 3:] + gamma * np.repeat(own_BN[:, :3], 3, axis=1)
        kept_BK = np.argsort(-ranks_BN, axis=1, kind="stable")[:, :3]
        for k in range(9):
            assert_array_equal(trained[4 + k], np.flatnonzero((kept_BK == k).any(1)))
        rows[gamma] = trained[4:]
    assert any(len(one) != len(other) for one, other in zip(rows[0.0], rows[1.0], strict=True))


def test_a_damaged_level_of_a_killed_run_is_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    data = random_points(rng, 200, 30, 40)
    tree = hierarchical_kmeans(pifa(data), 4, 5, 0)
    fit_linear(data, tree, LinearOptions(), work=tmp_path)
    (tmp_path / "level-2.npz").write_bytes(b"damaged")
    with pytest.raises(InvalidConfig, match=r"--resume: got .*level-2.npz', expected a readable level"):
        fit_linear(data, tree, LinearOptions(), work=tmp_path)


@pytest.mark.parametrize("loss", ["squared-hinge", "logistic"])
def test_a_positive_costs_as_much_as_its_weight_says(loss: Any) -> None:
    rng = np.random.default_rng(8)
    data = random_points(rng, 60, 15, 4)
    data.labels.data[:] = rng.choice([0.5, 1.0, 4.0], data.labels.nnz)
    options = Exact(negatives="teacher", threshold=0.0, weighted=True, prior=0, loss=loss)
    tree = complete_tree(np.arange(4), 4)
    chunks = fit_linear(data, tree, options)
    weight_BI = data.labels.toarray() / data.labels.data.mean()
    known = np.flatnonzero(np.diff(data.labels.indptr))
    points = np.hstack([data.points.toarray()[known], np.ones((len(known), 1))])
    for label in range(4):
        cost = np.where(weight_BI[known, label] > 0, weight_BI[known, label], 1)
        if loss == "squared-hinge":
            model: Any = LinearSVC(fit_intercept=False, tol=1e-8, max_iter=100_000, random_state=0)
        else:
            model = LogisticRegression(fit_intercept=False, tol=1e-10, max_iter=10_000)
        model.fit(points, np.where(weight_BI[known, label] > 0, 1, -1), sample_weight=cost)
        assert_allclose(chunks.bias[1 + label], model.coef_[0, -1], atol=3e-3)
        assert_allclose(chunks.weights_of(tree, 1 + label, np.arange(15, dtype=np.int32)), model.coef_[0, :-1], atol=3e-3)


def test_labels_must_be_the_trees_and_no_more_than_a_chunk_can_number(monkeypatch: pytest.MonkeyPatch) -> None:
    points, tree = csr_array(np.eye(3, dtype=np.float32)), complete_tree(np.arange(4), 2)
    for shape in ((3, 5), (2, 4)):
        with pytest.raises(InvalidData, match=rf"labels: got '\[{shape[0]}, {shape[1]}\]', expected \[3, 4\]: a row per point"):
            fit_linear(LabelledPoints(points, csr_array(np.zeros(shape, np.float32))), tree, LinearOptions())
    monkeypatch.setattr("training.linear.fit.MAX_CHILDREN", 3)
    with pytest.raises(InvalidData, match="tree: got 'a node of 4 children', expected at most 3"):
        fit_linear(LabelledPoints(points, csr_array(np.zeros((3, 4), np.float32))), complete_tree(np.arange(4), 4), LinearOptions())


# -- the search -----------------------------------------------------------------------------------------------------------


def test_queries_that_would_be_written_outside_are_refused() -> None:
    rng = np.random.default_rng(10)
    tree = random_tree(rng, 3, 3)
    search = ChunkSearch(tree, random_chunks(rng, tree, 30, integer=False))
    good = sparse_rows(np.eye(30)[:2])
    for beam, m in ((0, 1), (1, -1)):
        with pytest.raises(InvalidQuery, match=f"got {min(beam, m)}, expected at least 1"):
            search.search(good, BeamParams.uniform(len(good), beam, m))
    with pytest.raises(InvalidQuery, match="features: got 'rows of 31 features', expected rows of 30"):
        search.search(sparse_rows(np.eye(31)[:2]), BeamParams.uniform(2, 1, 1))
    for bad in (-1, 30):
        rows = SparseRows(np.array([0, 1, 2]), np.array([3, bad], np.int32), np.ones(2, np.float32), 30)
        with pytest.raises(InvalidQuery, match=f"features.indices: got {bad}, expected feature numbers from 0 to 29"):
            search.search(rows, BeamParams.uniform(len(rows), 1, 1))
    assert len(search.search(good.take(np.empty(0, np.int64)), BeamParams.uniform(0, 1, 1)).leaves_BM) == 0
