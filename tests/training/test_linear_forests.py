"""Forests of linear scorers, trained, probed and explained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from benchmarks.random_bundles import make_linear_bundle, random_queries, tree_over
from espalier.bundle import Bundle
from espalier.bundle_writer import LinearContent, write_bundle
from espalier.checks.golden import encode_table
from espalier.chunks import ARRAYS, TreeChunks
from espalier.engines import open_engine
from espalier.manifest import ManifestDraft, Ranking
from espalier.search import SearchParams
from service.models.probe import Replay
from tests.service.running import run
from tests.training.shop import write_shop
from training.__main__ import fit
from training.golden import golden_answers
from training.inspect import inspect
from training.linear import run as linear_run
from training.linear.prepare import written_features
from training.publish import publish

TREES = 3


@pytest.fixture(scope="module")
def forest_shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shop of coloured things, a forest over them, and beside it a model of one tree."""
    folder = tmp_path_factory.mktemp("shop")
    for name, count in (("models", TREES), ("single", 1)):
        config = write_shop(folder, tree={"branching": 4, "max_leaf": 6, "count": count}, linear={"cost": 1.0, "gamma": 0.5})
        fit(config=config, out=folder / name / "shop" / "1", data=None, test=None, device="cpu", resume=False)
    return folder


@pytest.fixture(scope="module")
def forest(forest_shop: Path) -> Bundle:
    return Bundle.open(forest_shop / "models" / "shop" / "1")


def test_the_first_tree_is_that_of_a_model_of_one_and_the_others_are_different(forest_shop: Path, forest: Bundle) -> None:
    alone = Bundle.open(forest_shop / "single" / "shop" / "1")
    assert len(forest.trees) == TREES
    assert alone.manifest.trees == ()
    for name in ARRAYS:
        assert_array_equal(getattr(forest.chunks, name), getattr(alone.chunks, name))
    assert len({tuple(tree.leaf_item.tolist()) for tree, _ in forest.trees}) == TREES
    assert len({linear_run.seed_of_tree(seed, place) for seed in (0, 1, 2**32 - 1) for place in range(16)}) == 48


def test_a_forest_is_inspected(forest: Bundle) -> None:
    report = inspect(forest)
    assert "an item's score is its mean over the 3 trees" in report
    assert f"tree 3: {forest.trees[2].tree.node_count} nodes" in report
    assert forest.manifest.metrics["golden_overlap"] == 1


def random_forest(folder: Path, ranking: Ranking) -> Bundle:
    """Two trees over feature queries, with golden answers; the weights of the second are a million times as large."""
    rng = np.random.default_rng(5)
    trees = [tree_over(rng, 30, 4) for _ in range(2)]
    bundle = make_linear_bundle(folder / "bare", rng, trees[0], ranking, integer=False, others=trees[1:])
    (_, large) = bundle.trees[1]
    other = TreeChunks(trees[1], replace(large, entry_weight=large.entry_weight * np.float32(1e6)))
    draft = ManifestDraft(**{name: getattr(bundle.manifest, name) for name in ManifestDraft.model_fields})
    content = LinearContent(*bundle.trees[0], bundle.items, bundle.golden(), bundle.heldout(), others=[other])
    queries = random_queries(rng, bundle, 6)
    params = SearchParams.uniform(6, 5, 5)
    return publish(
        folder / "models" / "linear" / "1",
        lambda path: write_bundle(path, draft, content),
        lambda bare: golden_answers(bare, queries, written_features(queries.features), params),
    )


def test_the_probe_knows_the_golden_scores_of_a_forest(tmp_path: Path) -> None:
    """They are means of the trees' scores, whose logs are the ranks, also where a tree's ranks are logits."""
    forest = random_forest(tmp_path, Ranking(own="logit", gamma=0.5))
    queries = encode_table(forest, forest.golden())
    found = open_engine(forest, "cpu").search(queries, SearchParams.uniform(6, 5, 5))
    for stored_M, score_M in zip(Replay(forest)._golden_scores, found.scores_BM, strict=True):
        np.testing.assert_allclose(stored_M, score_M, rtol=1e-3)


def test_an_explanation_tells_what_each_tree_did(forest_shop: Path, forest: Bundle) -> None:
    with run(forest_shop / "models", lambda bundle: open_engine(bundle, "cpu")) as running:
        wanted = ["yellow-lamp", "yellow-chair", "red-bucket", "gone"]
        body = {"model": "shop", "version": 1, "queries": [{"text": "yellow lamp"}], "m": 2, "beam_size": 1, "explain_items": wanted}
        result = running.client.post("/retrieve", json=body).json()["results"][0]
    explained = result["explain"]
    assert len(explained["trees"]) == TREES
    assert explained["levels"] == explained["trees"][0]["levels"]
    for tree, (own, _) in zip(explained["trees"], forest.trees, strict=True):
        assert tree["levels"][-1]["level"] == own.height
        assert tree["levels"][-1]["kept"] == tree["levels"][-1]["candidates"]
    best = explained["items"][0]
    assert (best["outcome"], best["place"]) == ("returned", 1)
    assert np.exp(best["rank"]) == pytest.approx(result["items"][0]["score"], rel=1e-5)
    mean = sum(np.exp(tree["rank"]) for tree in best["trees"] if tree["outcome"] == "scored") / TREES
    assert mean == pytest.approx(result["items"][0]["score"], rel=1e-5)
    assert best["features"][0]["feature"] in ("yellow", "lamp", "yellow lamp")
    text_row = forest.vectoriser.transform(["yellow lamp"])
    names = forest.vectoriser.features_of(text_row.indices)
    item = int(forest.items.rows_of(["yellow-lamp"])[0])
    for entry in best["features"]:
        at = names.index(entry["feature"])
        paths = [(tree, chunks, tree.ancestors(tree.leaf_of_item[[item]])[0][1:]) for tree, chunks in forest.trees]
        sums = [sum(float(chunks.weights_of(tree, int(node), text_row.indices)[at]) for node in path) for tree, chunks, path in paths]
        assert entry["contribution"] == pytest.approx(np.mean(sums) * text_row.values[at], rel=1e-4), "the mean over the trees"
    for item in explained["items"][1:3]:
        outcomes = [tree["outcome"] for tree in item["trees"]]
        if item["outcome"] == "pruned":
            assert outcomes == ["pruned"] * TREES
            assert all(tree["rank"] is None or tree["rank"] <= tree["cut"] for tree in item["trees"])
        elif item["outcome"] == "below_m":
            assert "scored" in outcomes
            assert np.exp(item["cut"]) == pytest.approx(result["items"][-1]["score"], rel=1e-5)
    assert {item["outcome"] for item in explained["items"][1:3]} <= {"pruned", "below_m", "returned"}
    assert explained["items"][3] == {"id": "gone", "outcome": "unknown"}
