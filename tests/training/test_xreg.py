"""Models of kind `xreg`, from weighted labels to scores that estimate them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from numpy.testing import assert_allclose

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.queries import QueryBatch
from espalier.search import SearchParams
from tests.service.running import run
from tests.training.points import random_points
from training.__main__ import fit
from training.data.csr import as_rows
from training.data.xmc import LabelledPoints
from training.linear.label_features import weighted_sums


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
