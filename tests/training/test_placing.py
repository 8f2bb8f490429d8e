"""Models of linear scorers and new items: where they go, what they weigh, that all else stays, how they are served, in a tree and in a
forest; what a forest is, and how it is explained.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from espalier.bundle import Bundle
from espalier.bundle_writer import LinearContent, write_bundle
from espalier.checks.golden import encode_table, verify_golden
from espalier.checks.random_bundles import (
    make_bundle,
    make_linear_bundle,
    random_chunks,
    random_queries,
    random_tree,
    sparse_rows,
    tree_over,
)
from espalier.chunks import ARRAYS, TreeChunks
from espalier.engines import open_engine
from espalier.engines.linear.chunk_search import L3_HINGE, BeamParams, ChunkSearch
from espalier.engines.reference import ReferenceEngine
from espalier.errors import BundleExists, InvalidConfig, InvalidData
from espalier.items import ItemTable
from espalier.manifest import ManifestDraft, Ranking
from espalier.masks.eligibility import node_mask
from espalier.placement.linear_rows import LinearRows
from espalier.placement.near_items import NearItems
from espalier.queries import QueryBatch, TextKind, encode_texts
from espalier.search import NO_ITEM, SearchParams, SearchResult
from espalier.tree import complete_tree
from loadtest.queries import held_out
from service.models.probe import Replay
from tests.espalier.test_tail import with_tail
from tests.service.running import run
from tests.training.commands import command
from tests.training.shop import item_frame, write_shop
from training.__main__ import fit
from training.__main__ import place as place_command
from training.golden import golden_answers
from training.inspect import inspect
from training.linear import run as linear_run
from training.linear.placing import place
from training.linear.prepare import written_features
from training.publish import publish

WIDTH = 20
"""Of models of features."""
NEW = ["purple-teapot", "red-clock", "blue-clock", "golden-spoon", "purple-lamp"]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shop of coloured things, a model of it (version 1), and the same with new things (version 2)."""
    folder = tmp_path_factory.mktemp("shop")
    item_frame(NEW).write_parquet(folder / "new.parquet")
    config = write_shop(folder, data={"own_texts": [["title", "tags"]]})
    models = folder / "models" / "shop"
    fit(config=config, out=models / "1", data=None, test=None, device="cpu", resume=False)
    place_command(model=models / "1", items=folder / "new.parquet", out=models / "2", text="title,tags")
    return folder


@pytest.fixture(scope="module")
def bundles(shop: Path) -> tuple[Bundle, Bundle]:
    return Bundle.open(shop / "models" / "shop" / "1"), Bundle.open(shop / "models" / "shop" / "2")


def ask(bundle: Bundle, texts: list[str], params: SearchParams, engine: str | None = None) -> SearchResult:
    kind = bundle.manifest.query
    assert isinstance(kind, TextKind)
    return open_engine(bundle, "cpu", engine).search(encode_texts(kind, bundle.vectoriser, texts), params)


def feature_items(ids: list[str], features: list[Any]) -> pl.DataFrame:
    return pl.DataFrame({"id": ids, "title": [f"Title {item}" for item in ids], "features": features})


def placed(bundle: Bundle, dense: Any, out: Path) -> Bundle:
    """A model of features with new items of these features, [n, F]."""
    features = [{"indices": np.flatnonzero(row).tolist(), "values": row[row != 0].tolist()} for row in dense]
    file = out.parent / "new.parquet"
    feature_items([f"new-{i}" for i in range(len(features))], features).write_parquet(file)
    return place(bundle.path, file, (), out)


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
    (told,) = after.manifest.data["placed"]
    assert told | {"sha256": ""} == {"items": len(NEW), "sha256": "", "text": ["title", "tags"], "into": "shop/1"}
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
    assert "placed without training: 5 items" in inspect(Bundle.open(model))


def test_more_items_go_into_a_version_with_placed_ones(shop: Path, tmp_path: Path) -> None:
    item_frame(["pink-chair", "pink-table"]).write_parquet(tmp_path / "more.parquet")
    third = place(shop / "models" / "shop" / "2", tmp_path / "more.parquet", ("title",), tmp_path / "other" / "7")
    assert (third.manifest.name, third.manifest.version) == ("other", 7)
    assert [told["into"] for told in third.manifest.data["placed"]] == ["shop/1", "shop/2"]
    assert third.items.ids_of(np.arange(len(third.items)))[-7:] == [*NEW, "pink-chair", "pink-table"]
    found = ask(third, ["pink chair"], SearchParams.uniform(1, 10, 5)).item_rows_BM[0]
    assert "pink-chair" in third.items.ids_of(found)


# -- parts ------------------------------------------------------------------------------------------------------------------


def test_items_go_where_the_model_looks_for_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 3, 5), L3_HINGE, integer=False)
    dense = (rng.random((20, WIDTH)) < 0.4) * rng.integers(1, 5, (20, WIDTH)) + np.eye(20)
    placed_in = parents_of(placed(bundle, dense, tmp_path / "linear" / "2"), 20)
    own = sparse_rows(dense).normalised()
    search = ChunkSearch(bundle.tree, bundle.chunks, bundle.manifest.ranking, last=2)
    assert_array_equal(placed_in, search.search(own, BeamParams.uniform(20, bundle.tree.level_size(2), 1)).leaves_BM[:, 0])


def test_a_full_cluster_sends_items_on_to_the_next(tmp_path: Path) -> None:
    """A cluster takes 16 new items, or four times the mean of its children."""
    rng = np.random.default_rng(2)
    bundle = make_linear_bundle(tmp_path, rng, complete_tree(np.arange(16), 4), L3_HINGE, integer=False)
    same = np.tile(np.eye(1, WIDTH), (40, 1))
    placed_in = parents_of(placed(bundle, same, tmp_path / "linear" / "2"), 40)
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
    features = [{"indices": [3, 1], "values": [3.0, 4.0]}, {"indices": [7], "values": [2.0]}]
    feature_items(["a", "b"], features).write_parquet(tmp_path / "new.parquet")
    after = place(bundle.path, tmp_path / "new.parquet", (), tmp_path / "linear" / "2")
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
    features = [{"indices": [3, 1], "values": [3.0, 4.0]}, {"indices": [7], "values": [2.0]}]
    feature_items(["a", "b"], features).write_parquet(tmp_path / "new.parquet")
    after = place(bundle.path, tmp_path / "new.parquet", (), tmp_path / "tailed" / "2")
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


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"indices": [20], "values": [1.0]}, r"item 'a', features.indices: got '20', expected feature numbers from 0 to 19"),
        ({"indices": [1, 1], "values": [1.0, 1.0]}, r"item 'a', features.indices: got '1', expected each feature number once"),
        ({"indices": [], "values": []}, r"item 'a', features: got None, expected something that the model has features for"),
        (None, r"item 'a', features: got None, expected a struct of the lists indices and values"),
    ],
)
def test_wrong_features_are_named_with_their_item(tmp_path: Path, features: Any, message: str) -> None:
    rng = np.random.default_rng(5)
    bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 2, 5), L3_HINGE)
    feature_items(["b", "a"], [{"indices": [0], "values": [1.0]}, features]).write_parquet(tmp_path / "new.parquet")
    with pytest.raises(InvalidData, match=message):
        place(bundle.path, tmp_path / "new.parquet", (), tmp_path / "linear" / "2")
    with pytest.raises(InvalidConfig, match=r"--text: got \['title'\], expected none: the model takes features"):
        place(bundle.path, tmp_path / "new.parquet", ("title",), tmp_path / "linear" / "2")


# -- what is wrong ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda frame: frame.with_columns(id=pl.lit("red-lamp")).head(1), "new.parquet, id: got 'red-lamp', expected an id that the model"),
        (lambda frame: frame.with_columns(id=pl.lit("x")), "items.id: got 'x', expected each id once"),
        (lambda frame: frame.with_columns(id=pl.lit(None, pl.String)), "items.id: got None, expected a non-empty string"),
        (lambda frame: frame.drop("title"), r"new.parquet, columns: got .* expected a column 'title'"),
        (lambda frame: frame.with_columns(weight=1), "new.parquet, columns: got 'weight', expected columns of the model's item table: id"),
        (lambda frame: frame.with_columns(pl.col("price").cast(pl.String)), "new.parquet, price: got 'large_string', expected int64, as"),
        (lambda frame: frame.with_columns(price=1.5), "new.parquet, price: .* expected values of int64, as in the model"),
        (lambda frame: frame.with_columns(tags=pl.lit("a")), "new.parquet, tags: got 'large_string', expected .*list"),
        (
            lambda frame: frame.with_columns(title=pl.lit("Ω"), tags=pl.lit(None, pl.List(pl.String))),
            "new.parquet, item 'purple-teapot', title, tags: got 'Ω', expected something that the model has features for",
        ),
    ],
)
def test_a_wrong_table_says_what_is_wrong(shop: Path, tmp_path: Path, change: Callable[[pl.DataFrame], pl.DataFrame], message: str) -> None:
    change(item_frame(NEW)).write_parquet(tmp_path / "new.parquet")
    with pytest.raises(InvalidData, match=message):
        place(shop / "models" / "shop" / "1", tmp_path / "new.parquet", ("title", "tags"), tmp_path / "shop" / "2")
    assert not (tmp_path / "shop").exists()


def test_types_of_one_family_are_taken(shop: Path, tmp_path: Path) -> None:
    frame = item_frame(NEW).with_columns(pl.col("price").cast(pl.Int16), pl.col("colour").cast(pl.Categorical))
    frame.with_columns(title=pl.col("title") + " thing").write_parquet(tmp_path / "new.parquet")
    after = place(shop / "models" / "shop" / "1", tmp_path / "new.parquet", ("title",), tmp_path / "shop" / "2")
    assert after.items.values("colour", after.items.rows_of(["golden-spoon"])) == ["golden"]
    assert after.items.column("price").type == ItemTable.open(shop / "models" / "shop" / "1" / "items.arrow").column("price").type


def test_wrong_options_are_named(shop: Path, tmp_path: Path) -> None:
    model, new = shop / "models" / "shop" / "1", shop / "new.parquet"
    for columns, message in (
        ((), r"--text: got \[\], expected columns of the item table that are its items' text"),
        (("name",), "--text: got 'name', expected a column of the model's item table: id, title, colour, tags, price"),
    ):
        with pytest.raises(InvalidConfig, match=message):
            place(model, new, columns, tmp_path / "shop" / "2")
    with pytest.raises(InvalidData, match=r"nowhere.parquet: .* expected a readable Parquet file"):
        place(model, tmp_path / "nowhere.parquet", ("title",), tmp_path / "shop" / "2")
    with pytest.raises(BundleExists):
        place_command(model=model, items=new, out=shop / "models" / "shop" / "2", text="title")
    with pytest.raises(InvalidConfig, match=r"--out: got .* expected models/NAME/VERSION"):
        place_command(model=model, items=new, out=tmp_path / "shop" / "new", text="title")
    rng = np.random.default_rng(0)
    graphs = make_bundle(tmp_path, rng, complete_tree(np.arange(4), 2))
    with pytest.raises(InvalidConfig, match=r"--model: got .*tiny/1', expected a model of linear scorers, not of graphs"):
        place(graphs.path, new, ("title",), tmp_path / "tiny" / "2")


def test_too_many_of_a_kind_are_refused(shop: Path, tmp_path: Path) -> None:
    frame = item_frame([f"pink-{k}lamp" for k in range(400)])
    frame.with_columns(title=pl.lit("Pink lamp")).write_parquet(tmp_path / "new.parquet")
    with pytest.raises(InvalidData, match=r"got '400 items', expected at most \d{3} items like these, .* train a new model"):
        place(shop / "models" / "shop" / "1", tmp_path / "new.parquet", ("title",), tmp_path / "shop" / "2")
    assert not (tmp_path / "shop").exists()


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
    item_frame(new).write_parquet(tmp_path / "new.parquet")
    larger = place(forest.path, tmp_path / "new.parquet", ["title"], tmp_path / "shop" / "3")
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
