"""Models of linear scorers and new items: where they go, what they weigh, that all else stays, how they are served, in a tree and in a
forest; what a forest is, and how it is explained.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from benchmarks.random_bundles import (
    make_linear_bundle,
    random_chunks,
    random_queries,
    random_tree,
    sparse_rows,
    tree_over,
)
from espalier.bundle import Bundle
from espalier.bundle_writer import LinearContent, write_bundle
from espalier.checks.golden import encode_table, verify_golden
from espalier.chunks import ARRAYS, TreeChunks
from espalier.engines import open_engine
from espalier.engines.linear.chunk_search import L3_HINGE, BeamParams, ChunkSearch
from espalier.engines.reference import ReferenceEngine
from espalier.live.operations import ItemBody
from espalier.manifest import LiveInfo, ManifestDraft, Ranking
from espalier.masks.eligibility import node_mask
from espalier.placement.linear_rows import LinearRows
from espalier.placement.near_items import NearItems
from espalier.queries import QueryBatch, TextKind, encode_texts
from espalier.search import NO_ITEM, SearchParams, SearchResult
from espalier.tree import complete_tree
from loadtest.queries import held_out
from service.models.probe import Replay
from tests.espalier.second_stages import with_tail
from tests.service.running import run
from tests.training.commands import command
from tests.training.placed_items import of_features, put_and_fold
from tests.training.shop import item_frame, write_shop
from training.__main__ import fit
from training.golden import golden_answers
from training.inspect import inspect
from training.linear import run as linear_run
from training.linear.prepare import written_features
from training.publish import publish

WIDTH = 20
"""Of models of features."""
NEW = ["purple-teapot", "red-clock", "blue-clock", "golden-spoon", "purple-lamp"]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shop of coloured things, a model of it (version 1), and the same with new things (version 2)."""
    folder = tmp_path_factory.mktemp("shop")
    config = write_shop(folder, data={"own_texts": [["title", "tags"]]})
    models = folder / "models" / "shop"
    fit(config=config, out=models / "1", data=None, test=None, device="cpu", resume=False)
    put_and_fold(Bundle.open(models / "1"), described(NEW), models / "2")
    return folder


@pytest.fixture(scope="module")
def bundles(shop: Path) -> tuple[Bundle, Bundle]:
    return Bundle.open(shop / "models" / "shop" / "1"), Bundle.open(shop / "models" / "shop" / "2")


def ask(bundle: Bundle, texts: list[str], params: SearchParams, engine: str | None = None) -> SearchResult:
    kind = bundle.manifest.query
    assert isinstance(kind, TextKind)
    return open_engine(bundle, "cpu", engine).search(encode_texts(kind, bundle.vectoriser, texts), params)


def described(items: list[str]) -> dict[str, ItemBody]:
    """New things of the shop with their fields, and their titles and tags as text."""
    bodies = {}
    for row in item_frame(items).to_dicts():
        fields = {name: value for name, value in row.items() if name != "id"}
        bodies[row["id"]] = ItemBody(fields=fields, text=" ".join([row["title"], *row["tags"]]))
    return bodies


def parents_of(bundle: Bundle, count: int) -> Any:
    """The nodes above the last `count` items."""
    return bundle.tree.parent[bundle.tree.leaf_of_item[-count:]]


# -- the new version --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["sparse-cpu", "reference"])
def test_placed_items_are_found_by_their_own_text(bundles: tuple[Bundle, Bundle], engine: str) -> None:
    after = bundles[1]
    titles = item_frame(NEW)["title"].to_list()
    found = ask(after, titles, SearchParams.uniform(len(NEW), 10, 5), engine)
    for item, rows in zip(NEW, found.item_rows_BM, strict=True):
        assert item in after.items.ids_of(rows)


def test_answers_among_old_items_stay(bundles: tuple[Bundle, Bundle]) -> None:
    before, after = bundles
    texts = before.heldout().column("text").to_pylist() + item_frame(NEW)["title"].to_list()
    old = np.arange(len(before.items))
    mask = node_mask(after.tree, np.isin(np.arange(len(after.items)), old))
    params = SearchParams.uniform(len(texts), 4, 20)
    was = ask(before, texts, params)
    is_now = ask(after, texts, SearchParams(params.beam_size_B, params.m_B, mask_B=(mask,) * len(texts)))
    assert_array_equal(is_now.item_rows_BM, was.item_rows_BM)
    assert_allclose(is_now.scores_BM, was.scores_BM, rtol=1e-5)


def test_the_new_version_says_what_it_is_and_is_whole(bundles: tuple[Bundle, Bundle], shop: Path) -> None:
    before, after = bundles
    assert (after.manifest.name, after.manifest.version) == ("shop", 2)
    assert after.manifest.tree.items == len(before.items) + len(NEW) == after.manifest.data["items"]
    assert after.manifest.live == LiveInfo(through=len(NEW), folded_from=1)
    assert after.manifest.data["sha256"] == before.manifest.data["sha256"]
    assert after.manifest.training == before.manifest.training
    assert after.items.to_table().slice(0, len(before.items)).equals(before.items.to_table())
    assert after.items.values("price", after.items.rows_of(["red-clock"])) == [len("red-clock")]
    assert after.heldout().select(["text", "relevant"]).equals(before.heldout().select(["text", "relevant"]))
    recall = np.mean(after.heldout().column("recall@10").to_pylist())
    assert after.manifest.metrics["test"]["raw"][0]["recall"] == pytest.approx(recall)
    assert recall > np.mean(before.heldout().column("recall@10").to_pylist()) - 0.1
    assert after.golden().column("text").equals(before.golden().column("text"))
    for engine in ("sparse-cpu", "reference"):
        assert verify_golden(after, open_engine(after, "cpu", engine)) == 1
    assert sorted(path.name for path in (shop / "models" / "shop").iterdir()) == ["1", "2"]


def test_the_offline_commands_take_it(shop: Path, tmp_path: Path) -> None:
    log = [("purple teapot", "purple-teapot"), ("lamp, purple", "purple-lamp"), ("red lamp", "red-lamp")]
    pl.DataFrame(log, schema=["query", "item"], orient="row").write_csv(tmp_path / "log.csv")
    model, rows = shop / "models" / "shop" / "2", tmp_path / "rows.json"
    options = ("--data", tmp_path / "log.csv", "--beam", 10, "--m", 5, "--json", rows)
    assert command("evaluate", "--model", model, *options).status == 0
    report = json.loads(rows.read_text())
    assert (report["queries"], report["rows"][0]["recall"]) == (3, 1)
    assert "live items: up to operation 5, folded from version 1" in inspect(Bundle.open(model))


def test_more_items_go_into_a_version_with_placed_ones(shop: Path, tmp_path: Path) -> None:
    second = Bundle.open(shop / "models" / "shop" / "2")
    third = put_and_fold(second, described(["pink-chair", "pink-table"]), tmp_path / "other" / "7")
    assert (third.manifest.name, third.manifest.version) == ("other", 7)
    assert third.items.ids_of(np.arange(len(third.items)))[-7:] == [*NEW, "pink-chair", "pink-table"]
    found = ask(third, ["pink chair"], SearchParams.uniform(1, 10, 5)).item_rows_BM[0]
    assert "pink-chair" in third.items.ids_of(found)


# -- parts ------------------------------------------------------------------------------------------------------------------


def test_items_go_where_the_model_looks_for_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 3, 5), L3_HINGE, integer=False)
    dense = (rng.random((20, WIDTH)) < 0.4) * rng.integers(1, 5, (20, WIDTH)) + np.eye(20)
    placed_in = parents_of(put_and_fold(bundle, of_features(dense), tmp_path / "linear" / "2"), 20)
    own = sparse_rows(dense).normalised()
    search = ChunkSearch(bundle.tree, bundle.chunks, bundle.manifest.ranking, last=2)
    assert_array_equal(placed_in, search.search(own, BeamParams.uniform(20, bundle.tree.level_size(2), 1)).leaves_BM[:, 0])


def test_a_full_cluster_sends_items_on_to_the_next(tmp_path: Path) -> None:
    """A cluster takes 16 new items, or four times the mean of its children."""
    rng = np.random.default_rng(2)
    bundle = make_linear_bundle(tmp_path, rng, complete_tree(np.arange(16), 4), L3_HINGE, integer=False)
    same = np.tile(np.eye(1, WIDTH), (40, 1))
    placed_in = parents_of(put_and_fold(bundle, of_features(same), tmp_path / "linear" / "2"), 40)
    search = ChunkSearch(bundle.tree, bundle.chunks, bundle.manifest.ranking, last=1)
    best = search.search(sparse_rows(same[:1]), BeamParams.uniform(1, 4, 3)).leaves_BM[0]
    assert_array_equal(placed_in, np.repeat(best, [16, 16, 8]))


def test_weights_are_the_text_and_the_neighbours() -> None:
    rng = np.random.default_rng(3)
    tree, width = random_tree(rng, 2, 5, empty_share=0.2), 10
    chunks = random_chunks(rng, tree, width, integer=False)
    old, new = (sparse_rows((rng.random((n, width)) < 0.5) * rng.random((n, width))).normalised() for n in (tree.item_count, 6))
    features = np.arange(width, dtype=np.int32)
    weights_I = np.array([chunks.weights_of(tree, leaf, features) for leaf in tree.leaf_of_item.tolist()])
    length = np.median(np.linalg.norm(weights_I, axis=1))
    item_nK, cosine_nK = NearItems(old).nearest(new, 3)
    leaves = LinearRows(tree, chunks)
    assert leaves.bias == pytest.approx(np.quantile(chunks.bias[tree.leaf_of_item], 0.25))
    for i in range(len(new)):
        own = new.between(i, i + 1)
        x = np.zeros(width)
        x[own.indices] = own.values
        for near, near_part in ((((), ()), 0), ((item_nK[i], cosine_nK[i]), cosine_nK[i] @ weights_I[item_nK[i]] / 3 / 2)):
            expected = length * x + near_part
            expected[np.abs(expected) < np.abs(weights_I[weights_I != 0]).min()] = 0
            row = leaves.row((own.indices, own.values), *near)
            found = np.zeros(width)
            found[row.feature] = row.values
            assert_allclose(found, expected, atol=1e-5)
            assert row.bias == np.float32(leaves.bias)


# -- features ---------------------------------------------------------------------------------------------------------------


def test_a_model_of_features_takes_items_with_features(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 2, 5), L3_HINGE, integer=False)
    dense = np.zeros((2, WIDTH))
    dense[0, [3, 1]], dense[1, 7] = (3, 4), 2
    after = put_and_fold(bundle, of_features(dense, ["a", "b"]), tmp_path / "linear" / "2")
    assert after.items.fields == ("id", "title")
    leaf = int(after.tree.leaf_of_item[after.items.rows_of(["a"])[0]])
    weights = after.chunks.weights_of(after.tree, leaf, np.arange(20, dtype=np.int32))
    assert_array_equal(np.flatnonzero(weights), [1, 3])
    assert weights[1] / weights[3] == pytest.approx(4 / 3)
    queries = QueryBatch(after.manifest.query, sparse_rows(np.eye(20)[[7]]))
    rows = open_engine(after, "cpu").search(queries, SearchParams.uniform(1, 25, len(after.items))).item_rows_BM[0]
    assert after.items.rows_of(["b"])[0] in rows


@pytest.mark.parametrize("form", ["product", "gaussian"])
def test_in_a_tail_an_item_has_its_own_features_and_the_others_keep_theirs(tmp_path: Path, form: Literal["product", "gaussian"]) -> None:
    bundle, _ = with_tail(tmp_path, 5, form)
    assert bundle.tail is not None
    dense = np.zeros((2, 12))
    dense[0, [3, 1]], dense[1, 7] = (3, 4), 2
    after = put_and_fold(bundle, of_features(dense, ["a", "b"]), tmp_path / "tailed" / "2")
    assert after.tail is not None
    assert (after.tail.info.form, after.tail.info.alpha) == (form, bundle.tail.info.alpha)
    old = len(bundle.tail.value)
    assert_array_equal(after.tail.value[:old], bundle.tail.value)
    assert after.tail.feature[old:].tolist() == [1, 3, 7]
    assert_allclose(after.tail.value[old:], [0.8, 0.6, 1])
    queries = QueryBatch(after.manifest.query, sparse_rows(np.eye(12)[[7]]))
    params = SearchParams.uniform(1, 25, len(after.items))
    found, of_reference = (engine.search(queries, params) for engine in (open_engine(after, "cpu"), ReferenceEngine(after)))
    assert_array_equal(found.item_rows_BM, of_reference.item_rows_BM)
    assert int(found.item_rows_BM[0, 0]) == after.items.rows_of(["b"])[0]


# -- forests ------------------------------------------------------------------------------------------------------------


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
    assert forest.manifest.metrics["golden_overlap"] == 1


def test_each_tree_keeps_its_levels_in_a_folder_of_its_own(tmp_path: Path) -> None:
    folders = [linear_run.folder_of_tree(tmp_path, place) for place in range(3)]
    assert folders == [tmp_path, tmp_path / "tree-2", tmp_path / "tree-3"]
    assert all(folder.is_dir() for folder in folders)
    assert len({linear_run.seed_of_tree(seed, place) for seed in (0, 1, 2**32 - 1) for place in range(16)}) == 48
    assert linear_run.seed_of_tree(7, 0) == 7


def test_a_forest_is_inspected_evaluated_and_watched(forest: Bundle) -> None:
    report = inspect(forest)
    assert "an item's score is its mean over the 3 trees" in report
    assert f"tree 3: {forest.trees[2].tree.node_count} nodes" in report
    evaluated = command("evaluate", "--model", forest.path, "--beam", "1,10", "--m", 10, "--engine", "reference", "--batch", 4)
    assert "shop version 1 on reference" in evaluated.out
    assert len(held_out(forest)) == forest.manifest.data["test_queries"]
    assert Replay(forest).expected[10] == pytest.approx(np.mean(forest.heldout().column("recall@10").to_pylist()))


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


def test_new_items_are_placed_in_every_tree(forest_shop: Path, forest: Bundle, tmp_path: Path) -> None:
    new = ["purple-teapot", "golden-spoon"]
    larger = put_and_fold(forest, described(new), tmp_path / "shop" / "3")
    assert len(larger.trees) == TREES
    for (tree, _), (after, _) in zip(forest.trees, larger.trees, strict=True):
        assert after.item_count == tree.item_count + 2
        assert after.height == tree.height
    kind = larger.manifest.query
    assert isinstance(kind, TextKind)
    queries = encode_texts(kind, larger.vectoriser, ["purple teapot", "golden spoon"])
    params = SearchParams.uniform(2, 10, 48)
    found = open_engine(larger, "cpu").search(queries, params)
    expected = ReferenceEngine(larger).search(queries, params)
    rows = larger.items.rows_of(new)
    for b in range(2):
        assert rows[b] in found.item_rows_BM[b, :3]
        assert_array_equal(found.item_rows_BM[b, :3], expected.item_rows_BM[b, :3])
    assert NO_ITEM not in rows
