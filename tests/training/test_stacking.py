"""Stacking is learned from points that trees did not see, and kept where it finds more."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.sparse import csr_array

from espalier.arrays import Int64
from espalier.bundle import Bundle
from espalier.chunks import TreeChunks
from espalier.engines import open_engine
from espalier.errors import InvalidConfig
from espalier.queries import QueryBatch
from espalier.search import SearchParams
from espalier.stacking import FARTHEST, FEATURES, NETWORK, TABLES, StackingNetwork
from tests.service.running import run
from tests.training.points import npz_files, unit
from training.data.csr import as_rows
from training.data.xmc import LabelledPoints
from training.linear import stacking, stacking_examples, stacking_tables
from training.linear.run import fit_and_export
from training.linear.stacking import fit_network, folds, gain_of, learn_stacking, logits
from training.linear.stacking_examples import StackingExamples, candidates_of, examples_of
from training.linear.stacking_tables import Weighing, tables_of
from training.specification.linear import LinearConfig, StackingOptions
from training.specification.models import SPECIFICATION

LABELS, GROUPS, KNOWN = 24, 60, len(FEATURES)


def parity(count: int, seed: int = 0) -> LabelledPoints:
    """Points of one of 60 groups, each a set of 4 of 20 features and 2 of 24 labels drawn at random, so that no line separates labels; with
    noise."""
    fixed, rng = np.random.default_rng(1), np.random.default_rng(seed)
    features, labels = (np.array([fixed.permutation(n)[:k] for _ in range(GROUPS)]) for n, k in ((20, 4), (LABELS, 2)))
    group = rng.integers(GROUPS, size=count)
    dense = 0.3 * rng.random((count, 20)) * (rng.random((count, 20)) < 0.2)
    np.put_along_axis(dense, features[group], 1, axis=1)
    own = np.zeros((count, LABELS), np.float32)
    np.put_along_axis(own, labels[group], 1, axis=1)
    return LabelledPoints(unit(dense), csr_array(own))


def fitted(folder: Path, train: LabelledPoints, test: LabelledPoints, version: int, threads: int = 1, **sections: Any) -> Bundle:
    raw = {
        "kind": "xr-linear",
        "name": "parity",
        "data": npz_files(folder, train=train, test=test),
        "tree": {"branching": 4, "max_leaf": 4},
    }
    config = SPECIFICATION.checked(raw | {"linear": {"cost": 1.0, "gamma": 0.5}} | sections)
    assert isinstance(config, LinearConfig)
    (folder / str(version)).mkdir()
    return fit_and_export(config, folder / "models" / "parity" / str(version), folder / str(version), threads)


def queries_of(bundle: Bundle, points: LabelledPoints) -> QueryBatch:
    return QueryBatch(bundle.manifest.query, as_rows(points.points))


def found(bundle: Bundle) -> float:
    """Recall@2 of test points."""
    rows_BM = open_engine(bundle, "cpu").search(queries_of(bundle, TEST), SearchParams.uniform(len(TEST), 10, 2)).item_rows_BM
    return float(np.mean([len(set(rows.tolist()) & set(TEST.labels_of(b).tolist())) / 2 for b, rows in enumerate(rows_BM)]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def trees_of_parity(folder: Path) -> Bundle:
    """The model without stacking."""
    return fitted(folder, TRAIN, TEST, 1, stacking={"model": "none"})


TRAIN, TEST = parity(2400), parity(300, seed=2)
SMALL = {"candidates": 5, "points": 700}


@pytest.fixture(scope="module")
def stacked(folder: Path) -> Bundle:
    return fitted(folder, TRAIN, TEST, 2, stacking=SMALL)


def test_what_no_line_separates_is_found_by_neighbours(folder: Path, trees_of_parity: Bundle, stacked: Bundle) -> None:
    """And the same model comes of any number of threads."""
    assert trees_of_parity.stacking is None
    assert stacked.stacking is not None
    assert stacked.stacking.arrays().keys() == {*TABLES, *NETWORK}
    assert found(trees_of_parity) + 0.1 < found(stacked)
    report = stacked.stacking.info.training
    assert report["gain"] > report["standard_error"] > 0
    assert report["stacked"]["recall@10"] >= report["trees"]["recall@10"]
    again = fitted(folder, TRAIN, TEST, 3, threads=2, stacking=SMALL)
    assert again.stacking is not None
    for name, array in stacked.stacking.arrays().items():
        assert_array_equal(again.stacking.arrays()[name], array, err_msg=name)


def test_trees_stay_alone_where_nothing_is_gained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Labels that are features: a tree knows all there is to know. With few points nothing is tried by itself, and a network takes ten."""
    own = np.random.default_rng(0).integers(LABELS, size=2400)
    labels = csr_array((np.ones(2400, np.float32), (np.arange(2400), own)), shape=(2400, LABELS))
    easy, few = LabelledPoints(labels.copy(), labels), parity(20, seed=2)
    with caplog.at_level(logging.INFO, "training.linear.stacking"):
        assert fitted(tmp_path, easy, easy.take(np.arange(50)), 1).stacking is None
        assert "gain 0.0000, standard error 0.0000: left out" in caplog.text
        assert fitted(tmp_path, parity(300), few, 2).stacking is None
        assert "300 points with labels, it takes 2000" in caplog.text
    with pytest.raises(InvalidConfig, match="9 training points have labels, a network takes 10"):
        fitted(tmp_path, parity(9), few, 3, stacking={"model": "network"})
    ten = fitted(tmp_path, parity(10), few, 4, stacking={"model": "network"}).stacking
    assert ten is not None
    assert np.isfinite(ten.info.training["standard_error"])


def test_weights_are_what_is_estimated() -> None:
    tiny = csr_array(np.array([[1e-38, 1e10, 0]], np.float32))  # what float32 cannot hold is relevant still
    points = LabelledPoints(csr_array(np.ones((1, 2), np.float32)), tiny)
    tables_of(points, Weighing.of(tiny, None), 10, 0).check(3, 2)
    labels = csr_array(np.array([[0, 2, 4], [1, 0, 0]], np.float32))
    assert_allclose(Weighing.of(labels, None).targets(labels).toarray(), [[0, 0.5, 1], [0.25, 0, 0]])
    rare = Weighing.of(labels, np.array([1.0, 2.0, 8.0]))
    assert rare.weight_I is not None
    assert_allclose(rare.weight_I, [0.25, 0.5, 1])  # no label counts more than the largest of training
    assert_allclose(rare.targets(labels).toarray(), [[0, 1, 1], [1, 0, 0]])


def test_a_point_of_very_many_labels_does_not_take_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    own = np.eye(40, 30, dtype=np.float32) + np.eye(40, 30, 1, dtype=np.float32)
    own[0] = 1
    data = LabelledPoints(csr_array(np.ones((40, 2), np.float32)), csr_array(own))
    monkeypatch.setattr(stacking_tables, "MOST_LABELS", 4)
    monkeypatch.setattr(stacking_tables, "MOST_PAIRS", 200)
    few = [tables_of(data, Weighing.of(data.labels, None), 10, seed) for seed in range(5)]
    assert {len(tables.beside) for tables in few} == {56}  # all neighbours but 0 and 1, which only the point of all labels has
    assert tables_of(data, Weighing.of(data.labels, None), 40, 0).points == 29  # nor has it a vote
    monkeypatch.setattr(stacking_tables, "BLOCK_PAIRS", 7)
    for seed, tables in enumerate(few):
        again = tables_of(data, Weighing.of(data.labels, None), 10, seed)
        for name in TABLES:
            assert_array_equal(getattr(again, name), getattr(tables, name))


def test_examples_know_nothing_of_the_points_held_out(trees_of_parity: Bundle) -> None:
    bundle = trees_of_parity
    points, held, kept = parity(300), np.arange(0, 300, 5), np.flatnonzero(np.arange(300) % 5)
    seen: list[LabelledPoints] = []

    def train(part: LabelledPoints) -> Sequence[TreeChunks]:
        seen.append(part)
        return bundle.trees

    weighing, ranking = Weighing.of(points.labels, None), bundle.manifest.ranking
    examples = examples_of(points, held, kept, weighing, train, ranking, 30, 10, 1000, 0)
    (part,) = seen
    assert_array_equal(part.points.toarray(), points.points.toarray()[kept])
    assert_array_equal(part.labels.toarray(), points.labels.toarray()[kept])
    assert_array_equal(examples.points, held)
    assert (examples.rows[:, -1] == -1).all()  # of 24 labels
    own = dict(zip(FEATURES, np.moveaxis(examples.features, 2, 0), strict=True))
    assert own["near.1"].max() < 0.999  # nobody is among the own neighbours
    truth = np.where(examples.rows >= 0, np.take_along_axis(points.labels.toarray()[held], np.maximum(examples.rows, 0), axis=1), 0)
    assert_array_equal(examples.targets, truth)
    counts = np.where(examples.rows >= 0, part.labels.toarray().sum(0)[np.maximum(examples.rows, 0)] * 300 / 240, 0)
    assert_allclose(own["item.count"], np.log1p(counts), rtol=1e-5)  # as if the part were all points


def test_gain_is_measured_on_points_that_the_network_did_not_see(
    trees_of_parity: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, points = trees_of_parity, parity(100)
    learned, judged = list[Int64](), list[Int64]()

    def fit(examples: StackingExamples, seed: int) -> StackingNetwork:
        learned.append(examples.points)
        return fit_network(examples, seed)

    def gain(network: StackingNetwork, examples: StackingExamples, *rest: Any) -> dict[str, Any]:
        judged.append(examples.points)
        return gain_of(network, examples, *rest)

    monkeypatch.setattr(stacking, "fit_network", fit)
    monkeypatch.setattr(stacking, "gain_of", gain)
    options = StackingOptions(model="network", candidates=5)
    made = learn_stacking(
        points, Weighing.of(points.labels, None), lambda _: bundle.trees, bundle.manifest.ranking, options, 10, 0, tmp_path
    )
    assert made is not None
    assert len(judged[0]) == made.info.training["held_out"] == 20
    assert_array_equal(np.sort([*judged[0], *learned[0]]), np.arange(100))
    assert len(learned) == 1  # the network that is kept is the one that was measured


@pytest.mark.parametrize("gain", [0.01, -0.01])
def test_a_network_that_finds_less_than_the_trees_is_kept_if_asked_for_with_a_warning(
    trees_of_parity: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gain: float
) -> None:
    bundle, points, weighing = trees_of_parity, parity(100), Weighing.of(parity(100).labels, None)
    options = StackingOptions(model="network", candidates=5)
    monkeypatch.setattr(stacking, "gain_of", lambda *arguments: gain_of(*arguments) | {"gain": gain})
    made = learn_stacking(points, weighing, lambda _: bundle.trees, bundle.manifest.ranking, options, 10, 0, tmp_path)
    assert made is not None
    warned = "the mean of nDCG@5 and recall@10 changes by -0.0100 on 20 points held out. With auto it is left out"
    assert (warned in caplog.text) == (gain < 0)


def test_gain_is_that_of_the_order_that_is_served() -> None:
    """A network that knows nothing: weights alone order the candidates, unless power is 0."""
    rows = np.array([[0, 1, 2, -1], [2, 0, 1, -1]])
    known = StackingExamples(np.zeros((2, 4, KNOWN), np.float32), np.zeros((2, 4), np.float32), rows, np.arange(2))
    labels = LabelledPoints(csr_array(np.ones((2, 1), np.float32)), csr_array(np.array([[0, 0, 1], [0, 0, 1]], np.float32)))
    shapes = [(KNOWN,), (KNOWN,), (KNOWN, 1), (1,), (1, 1), (1,), (1,), (1,)]
    network = StackingNetwork(*(np.zeros(shape, np.float32) for shape in shapes))
    weight_I = np.array([0.25, 0.5, 1])
    first, second = (gain_of(network, known, labels, weight_I, power) for power in (0.0, 1.0))
    assert first["gain"] == 0
    assert second["trees"]["ndcg@5"] == 0.75  # the item is the third, and the first
    assert second["stacked"] == {"ndcg@5": 1, "recall@10": 1}


def test_logits_are_those_of_two_hidden_layers() -> None:
    rng = np.random.default_rng(3)
    shapes = [(KNOWN,), (KNOWN,), (KNOWN, 4), (4,), (4, 3), (3,), (3,), (1,)]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    features = rng.normal(size=(5, 2, KNOWN)).astype(np.float32)
    mean, scale, weight_1, bias_1, weight_2, bias_2, weight_3, bias_3 = arrays
    hidden = np.maximum(np.clip((features - mean) * scale, -FARTHEST, FARTHEST) @ weight_1 + bias_1, 0)
    expected = np.maximum(hidden @ weight_2 + bias_2, 0) @ weight_3 + bias_3
    assert_allclose(logits(StackingNetwork(*arrays), features), expected, rtol=1e-4, atol=1e-5)


def test_tables_hold_points_and_what_goes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    points = csr_array(np.array([[1, 0, 1], [1, 1, 0], [0, 0, 1], [1, 0, 0]], np.float32))
    labels = csr_array(np.array([[1, 1, 0], [1, 0, 1], [0, 0, 0], [1, 1, 0]], np.float32))
    data = LabelledPoints(points, labels)
    tables = tables_of(data, Weighing.of(labels, None), 100, 0)
    tables.check(3, 3)
    assert tables.points == 3  # points without labels have no vote
    idf = np.log1p(4 / np.array([3, 1, 2]))
    assert_allclose(tables.feature_weight, idf, rtol=1e-6)
    first = np.array([idf[0], 0, idf[2]]) / np.hypot(idf[0], idf[2])
    assert_allclose(tables.posting_value[tables.posting_begin[2] : tables.posting_begin[3]], first[2:], rtol=1e-3)
    shares: Any = csr_array((tables.beside_share, tables.beside, tables.beside_begin), shape=(3, 3)).toarray()
    assert_allclose(shares, np.array([[0, 2 / 3, 1 / 3], [1, 0, 0], [1, 0, 0]]), rtol=1e-6)
    assert_allclose(np.expm1(tables.log_count), [3, 2, 1], rtol=1e-6)
    monkeypatch.setattr(stacking_tables, "MOST_BESIDE", 1)
    assert_array_equal(tables_of(data, Weighing.of(labels, None), 100, 0).beside, [1, 0, 0])
    assert tables_of(data, Weighing.of(labels, None), 2, 0).points == 2


def test_the_most_frequent_features_have_no_postings_and_queries_read_no_more_than_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    data = parity(500)
    common = csr_array(np.hstack([data.points.toarray(), np.full((500, 1), 0.2, np.float32)]))
    tables = tables_of(LabelledPoints(common, data.labels), Weighing.of(data.labels, None), 100, 0)
    sizes = np.diff(tables.posting_begin)
    monkeypatch.setattr(stacking_tables, "MOST_POSTINGS", 200)
    fewer = tables_of(data, Weighing.of(data.labels, None), 1 << 16, 0)
    lengths, indptr = np.diff(fewer.posting_begin), data.points.indptr
    read = np.mean([lengths[data.points.indices[indptr[b] : indptr[b + 1]]].sum() for b in range(500)])
    assert 100 < read < 300, "fewer points vote where queries would read much"
    assert sizes[20] == 0
    assert (sizes[:20] > 0).sum() >= 18
    cosines = np.bincount(tables.posting_point, tables.posting_value.astype(np.float64) ** 2)
    assert (cosines < 0.999).all()  # they count in lengths


def test_folds_hold_a_fifth_out_until_enough_points_are() -> None:
    known = np.arange(0, 1000, 2)
    small = list(folds(known, 10, 64, 0))
    assert [len(fold) for fold in small] == [100] * 5
    assert_array_equal(np.sort(np.concatenate(small)), known)
    assert len(list(folds(np.arange(10_000), 10, 64, 0))) == 2
    (large,) = folds(np.arange(500_000), 10, 64, 0)
    assert len(large) == stacking.HELD_OUT
    assert len(list(folds(known, stacking.LARGE_SET + 1, 64, 0))) == 1
    many = list(folds(np.arange(100_000), 10, 4096, 0))
    assert sum(len(fold) for fold in many) * 4096 == stacking.MOST_CANDIDATES  # many candidates of fewer points


def test_candidates_do_not_depend_on_blocks_of_points_and_are_those_that_are_served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = fitted(folder, TRAIN, TEST, 4, tree={"branching": 4, "max_leaf": 4, "count": 2}, stacking={"model": "none"})
    for trees in (bundle.trees[:1], bundle.trees):
        rows_BC, ranks_BC = candidates_of(trees, bundle.manifest.ranking, TEST.points, 5, 10)
        with monkeypatch.context() as patched:
            patched.setattr(stacking_examples, "BLOCK", 7)
            for part, whole in zip(candidates_of(trees, bundle.manifest.ranking, TEST.points, 5, 10), (rows_BC, ranks_BC), strict=True):
                assert_array_equal(part, whole)
    served = open_engine(bundle, "cpu").search(queries_of(bundle, TEST), SearchParams.uniform(len(TEST), 10, 5))
    assert_array_equal(rows_BC, served.item_rows_BM)  # with few items all of it
    assert_allclose(np.exp(ranks_BC), served.scores_BM, rtol=1e-4)


def test_stacking_is_served_and_explained(tmp_path: Path, stacked: Bundle) -> None:
    shutil.copytree(stacked.path, tmp_path / "parity" / "2")
    assert stacked.stacking is not None
    assert (stacked.stacking.info.candidates, stacked.stacking.tables.points) == (5, 700)
    row = as_rows(parity(1, seed=2).points)
    query = {"features": {"indices": row.indices.tolist(), "values": row.values.astype(float).tolist()}}
    explained: dict[str, Any] = {}
    with run(tmp_path, lambda bundle: open_engine(bundle, "cpu")) as running:
        described = running.client.get("/models/parity").json()
        body = {"model": "parity", "queries": [query], "m": 3, "beam_size": 2}
        for begin in range(0, LABELS, 8):
            wanted = [str(label) for label in range(begin, begin + 8)]
            result = running.client.post("/retrieve", json=body | {"explain_items": wanted}).json()["results"][0]
            explained |= {entry["id"]: entry for entry in result["explain"]["items"]}
    assert (described["version"], described["stacking"]["candidates"]) == (2, 5)
    assert len(result["explain"]["trees"]) == 1
    for place, item in enumerate(result["items"], 1):
        entry = explained[item["id"]]
        assert (entry["outcome"], entry["place"], entry["trees"][0]["outcome"]) == ("returned", place, "scored")
        assert np.exp(entry["rank"]) == pytest.approx(item["score"], rel=1e-5)
    outcomes = [entry["outcome"] for entry in explained.values()]
    assert outcomes.count("returned") == 3
    assert {"below_m", "pruned"} <= set(outcomes)
    cuts = [np.exp(entry["cut"]) for entry in explained.values() if entry["outcome"] == "below_m"]
    assert_allclose(cuts, result["items"][-1]["score"], rtol=1e-5)
