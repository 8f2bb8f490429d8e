"""XReg: edge regressors by the weighted log loss of Eq. 5, where targets come from, and models whose scores estimate relevance."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import scipy.sparse
from numpy.testing import assert_allclose
from numpy.typing import NDArray
from scipy.sparse import csr_array
from sklearn.linear_model import LogisticRegression

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.engines.linear.chunk_search import BeamParams, ChunkSearch
from espalier.queries import QueryBatch
from espalier.search import SearchParams
from espalier.tree import Tree, complete_tree
from tests.service.running import run
from tests.training.points import random_points
from training.__main__ import fit
from training.data.csr import as_rows
from training.data.xmc import LabelledPoints
from training.linear.examples import Examples
from training.linear.fit import fit_linear
from training.linear.label_features import weighted_sums
from training.specification.linear import LinearOptions


class Exact(LinearOptions):
    """Trained to the minimum."""

    tolerance: ClassVar[float] = 1e-6
    passes: ClassVar[int] = 5000


def options(**other: Any) -> Exact:
    made: dict[str, Any] = {"loss": "relevance", "negatives": "teacher", "cost": 2.0, "threshold": 0.0, "prior": 0.0, "gamma": 1.0}
    return Exact(**(made | other))


def with_degrees(seed: int, points: int = 80, labels: int = 8) -> LabelledPoints:
    rng = np.random.default_rng(seed)
    data = random_points(rng, points, 15, labels)
    data.labels.data[:] = rng.choice([0.5, 1.0, 2.5, 4.0], data.labels.nnz)
    return data


def largest_below(tree: Tree, relevance_BI: NDArray[Any]) -> NDArray[Any]:
    """float[B, N]: m_n of each point, by the definition."""
    largest = np.zeros((len(relevance_BI), tree.node_count))
    largest[:, tree.leaf_of_item] = relevance_BI
    for node in range(tree.leaf_offset - 1, -1, -1):
        largest[:, node] = largest[:, tree.first_child[node] : tree.first_child[node + 1]].max(1)
    return largest


def test_each_edge_minimises_equation_5() -> None:
    """scikit-learn's LogisticRegression, given each point twice: as a positive with the weight s z, as a negative with s (1 − z)."""
    data = with_degrees(1)
    tree = complete_tree(np.arange(8), 2)
    chunks = fit_linear(data, tree, options())
    largest_BN = largest_below(tree, data.labels.toarray() / data.labels.data.max())
    points = np.hstack([data.points.toarray(), np.ones((len(data), 1))])
    for parent in range(tree.leaf_offset):
        known = np.flatnonzero(largest_BN[:, parent] > 0)
        share = np.ones(len(known)) if parent == 0 else largest_BN[known, parent]
        cost = 2.0 * share * len(known) / share.sum()
        for child in range(int(tree.first_child[parent]), int(tree.first_child[parent + 1])):
            target = largest_BN[known, child] / share
            model: Any = LogisticRegression(fit_intercept=False, tol=1e-10, max_iter=10_000)
            model.fit(
                np.vstack([points[known]] * 2),
                np.repeat([1, 0], len(known)),
                sample_weight=np.concatenate([cost * target, cost * (1 - target)]),
            )
            assert_allclose(chunks.bias[child], model.coef_[0, -1], atol=3e-3)
            assert_allclose(chunks.weights_of(tree, child, np.arange(15, dtype=np.int32)), model.coef_[0, :-1], atol=3e-3)


def test_a_score_estimates_the_relevance_itself() -> None:
    """Points that a feature of their own tells apart, at a high cost: products along the path come to y / max y."""
    labels = csr_array(np.array([[4.0, 1, 0, 0], [0, 2, 2, 0], [1, 0, 0, 3], [0, 0, 0, 0.5]], np.float32))
    data = LabelledPoints(csr_array(np.eye(4, dtype=np.float32)), labels)
    tree = complete_tree(np.arange(4), 2)
    exact = options(cost=1e5)
    found = ChunkSearch(tree, fit_linear(data, tree, exact), exact.ranking).search(as_rows(data.points), BeamParams.uniform(4, 4, 4))
    scores = np.zeros((4, 4))
    np.put_along_axis(scores, tree.leaf_item[found.leaves_BM - tree.leaf_offset], np.exp(found.ranks_BM), axis=1)
    assert_allclose(scores, labels.toarray() / 4, atol=2e-3)


def test_without_evidence_an_estimate_is_the_base_rate_or_a_half() -> None:
    """With a cost near 0 weights stay where they are regularised towards; the path's product is then the mean relevance over the points
    that have a label, which are those that the root learns from."""
    data = with_degrees(3)
    data = data.take(np.flatnonzero(np.diff(data.labels.indptr)))
    tree = complete_tree(np.arange(8), 2)
    relevance_BI = data.labels.toarray() / data.labels.data.max()
    rows = as_rows(data.points)
    for intercept, expected in (("base-rate", relevance_BI.mean(0)), ("zero", np.full(8, 0.5**3))):
        chosen = options(cost=1e-6, intercept=intercept)
        found = ChunkSearch(tree, fit_linear(data, tree, chosen), chosen.ranking).search(rows, BeamParams.uniform(len(data), 8, 8))
        for leaf, mean in zip(tree.leaf_of_item.tolist(), expected.tolist(), strict=True):
            assert_allclose(np.exp(found.ranks_BM[found.leaves_BM == leaf]), mean, rtol=1e-3)


def test_the_scale_of_relevance_changes_nothing() -> None:
    data, tree = with_degrees(3), complete_tree(np.arange(8), 2)
    thrice = LabelledPoints(data.points, data.labels * np.float32(4))
    one, other = (fit_linear(some, tree, options()) for some in (data, thrice))
    assert_allclose(one.entry_weight, other.entry_weight, rtol=1e-6)
    assert_allclose(one.bias, other.bias, rtol=1e-6)


def test_costs_of_a_nodes_points_are_in_proportion_to_their_relevance_there() -> None:
    positive_from, child = np.array([0, 2, 3, 3]), np.array([0, 1, 1], np.int32)
    relevance = np.array([0.25, 0.5, 0.125], np.float32)
    made = Examples(np.arange(3), positive_from, child, np.ones(3, np.float32)).of_relevance(relevance, 10, of_root=False)
    assert made.cost is not None
    assert made.positive_target is not None
    assert_allclose(made.positive_target, [0.5, 1, 1])
    assert_allclose(made.cost, np.array([0.5, 0.125, 0.3125]) * 10 / 0.3125)  # the third came by a beam: the mean of the others
    assert_allclose(made.positive_cost, made.cost[[0, 0, 1]])
    root = Examples(np.arange(3), positive_from, child, np.ones(3, np.float32)).of_relevance(relevance, 10, of_root=True)
    assert root.cost is not None
    assert root.positive_target is not None
    assert_allclose(root.cost, [10, 10, 10])
    assert_allclose(root.positive_target, relevance)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_relative_threshold_drops_the_small_weights_of_each_scorer(share: float) -> None:
    data, tree = with_degrees(4), complete_tree(np.arange(8), 8)
    every, pruned = (fit_linear(data, tree, options(relative_threshold=least)) for least in (0.0, share))
    features = np.arange(15, dtype=np.int32)
    for leaf in range(1, 9):
        whole = every.weights_of(tree, leaf, features)
        kept = np.abs(whole) >= np.float32(share) * np.abs(whole).max()
        assert_allclose(pruned.weights_of(tree, leaf, features), np.where(kept, whole, 0), rtol=1e-5)
        assert 0 < kept.sum() < 15


# -- models of kind xreg ------------------------------------------------------------------------------------------------


def weighted(seed: int, points: int = 400, labels: int = 30) -> LabelledPoints:
    """Points whose labels have degrees of relevance: each label its own."""
    rng = np.random.default_rng(seed)
    data = random_points(rng, points, 60, labels, density=0.02)
    data.labels.data[:] = (1 + data.labels.indices % 4).astype(np.float32)
    return data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and one with a tail."""
    made = tmp_path_factory.mktemp("xreg")
    data = weighted(1)
    for name, rows in (("train", np.arange(300)), ("test", np.arange(300, 400))):
        part = data.take(rows)
        scipy.sparse.save_npz(made / f"{name}.npz", scipy.sparse.csr_matrix(part.points))
        scipy.sparse.save_npz(made / f"{name}_labels.npz", scipy.sparse.csr_matrix(part.labels))
    (made / "any.toml").write_text(
        f'''
        kind = "xreg"
        name = "any"
        [data]
        format = "npz"
        train = "{made}/train.npz"
        train_labels = "{made}/train_labels.npz"
        test = "{made}/test.npz"
        test_labels = "{made}/test_labels.npz"
        [tree]
        max_leaf = 8
        '''
    )
    (made / "tail.toml").write_text((made / "any.toml").read_text() + "count = 2\n[tail]\nform = 'product'\nalpha = 0.8\n")
    for name in ("any", "tail"):
        fit(config=made / f"{name}.toml", out=made / "models" / name / "1", data=None, test=None, device="cpu", resume=False)
    return made


def test_scores_estimate_how_relevant_an_item_is(folder: Path) -> None:
    bundle = Bundle.open(folder / "models" / "any" / "1")
    assert bundle.manifest.algorithm == "xreg"
    assert bundle.manifest.tree.max_children == (2, 2, 8)
    assert (bundle.manifest.ranking.gamma, bundle.manifest.ranking.activation) == (1, "sigmoid")
    data = weighted(1).take(np.arange(300))
    found = open_engine(bundle, "cpu").search(
        QueryBatch(bundle.manifest.query, as_rows(data.points)), SearchParams(np.full(300, 4), np.full(300, 30))
    )
    estimates = np.zeros((300, 30))
    np.put_along_axis(estimates, found.item_rows_BM, found.scores_BM, axis=1)
    truth = data.labels.toarray() / 4
    assert np.abs(estimates - truth)[truth > 0].mean() < 0.25
    assert np.abs(estimates - truth)[truth == 0].mean() < 0.03
    by_degree = [estimates[truth == degree / 4].mean() for degree in (1, 2, 3, 4)]
    assert np.all(np.diff(by_degree) > 0.1)


def test_a_tail_holds_the_direction_of_each_items_points(folder: Path) -> None:
    bundle = Bundle.open(folder / "models" / "tail" / "1")
    assert bundle.tail is not None
    assert (bundle.tail.info.form, bundle.tail.info.alpha) == ("product", 0.8)
    assert bundle.manifest.metrics["golden_overlap"] == 1
    data = weighted(1).take(np.arange(300))
    sums = (data.labels.toarray() > 0).T @ data.points.toarray()
    rows = np.zeros((30, 60))
    rows[np.repeat(np.arange(30), np.diff(bundle.tail.row_begin)), bundle.tail.feature] = bundle.tail.value
    assert_allclose(rows, sums / np.linalg.norm(sums, axis=1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize("name", ["any", "tail"])
def test_it_is_served_with_scores_filters_of_scores_and_explanations(folder: Path, name: str) -> None:
    bundle = Bundle.open(folder / "models" / name / "1")
    features = bundle.heldout().column("features").to_pylist()[0]
    with run(folder / "models", lambda opened: open_engine(opened, "cpu")) as running:
        body = {"model": name, "queries": [{"features": features}], "m": 30, "beam_size": 30}
        answer = running.client.post("/retrieve", json=body).json()["results"][0]["items"]
        scores = [item["score"] for item in answer]
        assert len(answer) == 30
        assert scores == sorted(scores, reverse=True)
        assert 0 < scores[-1] < scores[0] <= 1
        least = (scores[4] + scores[5]) / 2
        some = running.client.post("/retrieve", json=body | {"min_score": least}).json()["results"][0]["items"]
        assert [item["id"] for item in some] == [item["id"] for item in answer[:5]]
        explained = running.client.post("/retrieve", json=body | {"m": 3, "explain_items": [answer[7]["id"]]})
        assert explained.status_code == 200, explained.text
        returned = running.client.post("/retrieve", json=body | {"explain_items": [answer[0]["id"]]}).json()["results"][0]
        first = returned["explain"]["items"][0]
        mean = sum(np.exp(tree["rank"]) for tree in first["trees"] if tree["outcome"] == "scored") / len(first["trees"])
        assert ("tail" in first) == (name == "tail")
        assert first["rank"] == pytest.approx(0.8 * np.log(mean) + first["tail"] if name == "tail" else np.log(mean), abs=1e-4)
        described = running.client.get(f"/models/{name}").json()
        tail = {"form": "product", "alpha": 0.8, "gamma": 30.0, "entries": len(bundle.tail.value)} if bundle.tail is not None else None
        assert (described["trees"], described["tail"]) == ((2, tail) if name == "tail" else (3, None))


def test_features_of_labels_weigh_points_by_relevance() -> None:
    data = weighted(2, points=40)
    data.labels.data[:] = np.random.default_rng(3).uniform(0.5, 3, data.labels.nnz)
    sums = data.labels.toarray().T @ data.points.toarray()
    lengths = np.linalg.norm(sums, axis=1, keepdims=True)
    assert_allclose(weighted_sums(data).toarray(), sums / np.where(lengths > 0, lengths, 1), atol=1e-6)
