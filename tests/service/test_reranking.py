"""The second stage: features of candidates, rankers in bundles, and POST /retrieve with `rerank`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.random_bundles import make_bundle, make_linear_bundle, random_tree
from espalier.bundle import RANKER, Bundle
from espalier.bundle_writer import write_bundle
from espalier.engines import open_engine
from espalier.errors import BundleCorrupt, BundleNotFound
from espalier.manifest import Manifest, RankerInfo, Ranking
from espalier.queries import HistoryKind, QueryBatch, VectorKind, encode_vectors, pad_histories
from espalier.rank_features import HALF_LIFE, HISTORY, KNOWN, LEAF, RETRIEVAL
from espalier.rerank.features import CallerFeatures, RankFeatures
from espalier.rerank.ranker import GOLDEN_SCORES, Reranker, golden_scores, verify_ranker
from espalier.search import SearchParams, SearchResult
from espalier.tree import complete_tree
from service.models.loading import EngineSource, LoadFailed, load_version
from service.settings import Settings
from service.watch.metrics import Metrics
from tests.espalier.bundle.parts import content_of, draft_of
from tests.rankers import add_ranker, weighted_sum, with_ranker
from tests.service.running import LIMITS, Json, Running, ids, problem, run
from training.golden import golden_answers

ITEMS = 32
YEARS = [None if i == 3 else 1990 + i for i in range(ITEMS)]


def result_of(rows: list[list[int]], width: int = 0) -> SearchResult:
    """A result with these item rows, of ranks −1, −2, … and scores 1, 1/2, …"""
    width = max(width, *map(len, rows))
    rows_BM, ranks_BM = np.full((len(rows), width), -1, np.int64), np.full((len(rows), width), -np.inf, np.float32)
    scores_BM = np.zeros((len(rows), width), np.float32)
    for b, row in enumerate(rows):
        rows_BM[b, : len(row)], ranks_BM[b, : len(row)] = row, -np.arange(1, len(row) + 1)
        scores_BM[b, : len(row)] = 1 / np.arange(1, len(row) + 1)
    return SearchResult(rows_BM, scores_BM, ranks_BM, ranks_BM, np.array([len(row) for row in rows]), np.ones(len(rows), np.bool_))


def histories(bundle: Bundle, *lists: list[int]) -> QueryBatch:
    kind = bundle.manifest.query
    assert isinstance(kind, HistoryKind)
    return pad_histories(kind, [np.array(rows, np.int64) for rows in lists])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A model of histories, with golden queries and numeric columns."""
    folder, rng = tmp_path_factory.mktemp("plain"), np.random.default_rng(5)
    columns = {
        "year": YEARS,
        "free": [i % 2 == 0 for i in range(ITEMS)],
        "price": pa.array([i / 4 for i in range(ITEMS)], pa.float64()),
        "brand": ["x"] * ITEMS,
    }
    bare = make_bundle(
        folder / "bare", rng, complete_tree(rng.permutation(ITEMS), 2), integer=False, name="books", columns=columns, **LIMITS
    )
    asked = [[], [1, 2], [5, 9, 30, 2], [7]]
    golden = golden_answers(
        bare,
        histories(bare, *asked),
        pa.array([bare.items.ids_of(np.array(rows, np.int64)) for rows in asked], pa.list_(pa.string())),
        SearchParams.uniform(len(asked), 8, 10),
    )
    return rewritten(bare, folder / "books" / "1", golden)


def rewritten(bundle: Bundle, path: Path, golden: pa.Table) -> Bundle:
    """The same bundle with other golden queries."""
    return write_bundle(path, draft_of(bundle), content_of(bundle, golden=golden))


# -- features --------------------------------------------------------------------------------------------------------


def features(bundle: Bundle, names: tuple[str, ...], history: list[int], rows: list[int], sent: CallerFeatures | None = None) -> Any:
    result = result_of([rows])
    queries = histories(bundle, history)
    columns = RankFeatures(bundle, names).of(
        queries, 0, result.item_rows_BM[0], result.ranks_BM[0], result.scores_BM[0], sent or CallerFeatures()
    )
    assert columns.dtype == np.float32
    assert columns.shape == (len(rows), len(names))
    return dict(zip(names, columns.T.tolist(), strict=True))


def test_cosines_to_the_history(plain: Bundle) -> None:
    history, rows = [1, 2, 3, 4], [8, 1]
    leaves = plain.node_rows_ND[plain.tree.leaf_of_item]
    unit = leaves / np.linalg.norm(leaves, axis=1, keepdims=True)
    cosines = unit[rows] @ unit[history].T
    weights = 0.5 ** (np.array([3, 2, 1, 0]) / HALF_LIFE)
    found = features(plain, (*HISTORY, *LEAF), history, rows)
    assert found["history.best"] == pytest.approx(cosines.max(1), abs=1e-6)
    assert found["history.best"][1] == pytest.approx(1)  # item 1 is in the history
    assert found["history.top3"] == pytest.approx(np.sort(cosines, 1)[:, 1:].mean(1), abs=1e-6)
    assert found["history.mean"] == pytest.approx(cosines.mean(1), abs=1e-6)
    assert found["history.recent"] == pytest.approx(cosines @ weights / weights.sum(), abs=1e-6)
    assert found["history.last"] == pytest.approx(cosines[:, 3], abs=1e-6)
    assert found["history.length"] == [4, 4]
    assert np.array_equal(found["history.seen"], [np.nan, 3], equal_nan=True)
    assert found["leaf.norm"] == pytest.approx(np.linalg.norm(leaves[rows], axis=1))


SENT = CallerFeatures({"hour": 7}, {8: {"clicks": 3, "age": 1}, 30: {"clicks": 9}})
HUGE = CallerFeatures({"hour": 1e300}, {2: {"clicks": float("inf")}, 8: {"clicks": 3, "age": -1e39}})
NAN = float("nan")


@pytest.mark.parametrize(
    ("history", "rows", "sent", "expected"),
    [
        ([], [4, 9], None, {"retrieval.log_position": [0, np.log(2)], "retrieval.rank": [-1, -2], "retrieval.score": [1, 0.5]}),
        ([6, 7, 6, 8], [6, 8], None, {"history.seen": [1, 0]}),  # an item seen twice was seen last
        ([], [6, 8], None, {"history.length": [0, 0]} | {name: [NAN, NAN] for name in HISTORY if name != "history.length"}),
        ([], [2, 3], None, {"attribute.year": [1992, NAN], "attribute.free": [1, 0], "attribute.price": [0.5, 0.75]}),
        ([], [2, 8], HUGE, {"query.hour": [NAN, NAN], "item.clicks": [NAN, 3], "item.age": [NAN, NAN], "retrieval.rank": [-1, -2]}),
        ([], [2, 8], SENT, {"query.hour": [7, 7], "item.clicks": [NAN, 3], "item.age": [NAN, 1], "query.day": [NAN, NAN]}),
    ],
)
def test_features_of_histories_of_columns_and_of_callers(
    plain: Bundle, history: list[int], rows: list[int], sent: CallerFeatures | None, expected: dict[str, list[float]]
) -> None:
    found = features(plain, tuple(expected), history, rows, sent)
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, nan_ok=True), name


def test_a_history_of_one_item_has_a_best_three_and_equal_scores_keep_their_order(plain: Bundle) -> None:
    found = features(plain, ("history.top3", "history.best"), [6], [1, 2])
    assert found["history.top3"] == found["history.best"]
    bundle = add_ranker(plain, {"attribute.free": 1.0}, version=11)
    reranked = Reranker(bundle).rerank(histories(bundle, []), result_of([[1, 2, 3, 4, 6, 5]]), 6)
    assert reranked.of(np.array([[1, 2, 3, 4, 6, 5]])).tolist() == [[2, 4, 6, 1, 3, 5]]


@pytest.mark.parametrize(("column", "why"), [("brand", "type string"), ("weight", "the items have id, title, year")])
def test_a_column_that_is_no_number_is_no_feature(plain: Bundle, column: str, why: str) -> None:
    with pytest.raises(BundleCorrupt, match=why):
        RankFeatures(plain, (f"attribute.{column}",))


@pytest.mark.parametrize("names", [("history.worst",), ("leaf",), ("leaf.norm", "leaf.norm"), ("item.",), ("query.a b",)])
def test_names_are_checked(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"no feature of a candidate|twice"):
        RankerInfo(features=names, depth=1, max_depth=2)
    assert {"leaf.norm", "item.NAME"} <= set(KNOWN)


# -- the ranker ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranked(plain: Bundle) -> Bundle:
    """Version 2 of it: the later year first, then the later place; the price that a caller sends counts most."""
    return add_ranker(plain, {"attribute.year": 1.0, "retrieval.log_position": 0.25, "item.price": -100.0, "query.late": 1.0})


@pytest.mark.parametrize("price", [3e38, -3e38])
def test_a_score_that_is_not_finite_is_none_and_comes_after_those_that_are(plain: Bundle, price: float) -> None:
    path = plain.path.parent / "31"
    bundle = Bundle.open(path) if path.exists() else add_ranker(plain, {"item.price": 10.0}, version=31)
    sent = [CallerFeatures(items={4: {"price": price}, 9: {"price": 1.0}, 2: {"price": 2.0}})]
    reranked = Reranker(bundle).rerank(histories(bundle, []), result_of([[4, 9, 2, 8]]), 4, sent)
    assert reranked.of(np.array([[4, 9, 2, 8]])).tolist() == [[2, 9, 8, 4]]
    assert np.array_equal(reranked.score_BM[0], [20, 10, 0, np.nan], equal_nan=True)


@given(seed=st.integers(0, 2**32 - 1))
def test_a_query_is_ranked_alike_in_any_batch(plain: Bundle, seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = {name: float(rng.normal()) for name in (*RETRIEVAL, *HISTORY, *LEAF)}
    path = plain.path.parent / "200"
    bundle = Bundle.open(path) if path.exists() else add_ranker(plain, names, version=200)
    batch = int(rng.integers(1, 6))
    rows = [rng.permutation(ITEMS)[: rng.integers(0, 12)].tolist() for _ in range(batch)]
    seen = [rng.integers(0, ITEMS, rng.integers(0, 8)).tolist() for _ in range(batch)]
    depth, reranker = int(rng.integers(1, 14)), Reranker(bundle)
    together = reranker.rerank(histories(bundle, *seen), result_of(rows, 12), depth)
    for b in range(batch):
        alone = reranker.rerank(histories(bundle, seen[b]), result_of([rows[b]], 12), depth)
        assert np.array_equal(together.retrieved_BM[b], alone.retrieved_BM[0])
        assert np.array_equal(together.score_BM[b], alone.score_BM[0], equal_nan=True)
        assert sorted(together.retrieved_BM[b].tolist()) == list(range(12))


# -- bundles ---------------------------------------------------------------------------------------------------------


def test_a_ranker_that_answers_otherwise_or_does_not_fit_its_manifest_is_not_served(plain: Bundle, ranked: Bundle) -> None:
    assert verify_ranker(ranked, Reranker(ranked)) < 1e-5, "which orders golden items otherwise than they were found"
    names = ("attribute.year", "retrieval.log_position")
    golden, other = plain.golden(), weighted_sum(dict(zip(names, (1.0, 0.5), strict=True)))
    graph = weighted_sum(dict(zip(names, (1.0, 3.5), strict=True)))
    scores = golden_scores(plain, golden, RankFeatures(plain, names), other)
    info = RankerInfo(features=names, depth=4, max_depth=8)
    bundle = with_ranker(plain, plain.path.parent / "13", info, graph, golden.append_column(GOLDEN_SCORES, scores))
    with pytest.raises(BundleCorrupt, match="golden query 0 otherwise"):
        verify_ranker(bundle, Reranker(bundle))
    bare = with_ranker(plain, plain.path.parent / "14", info, graph, golden)
    with pytest.raises(BundleCorrupt, match="no column 'rerank_scores'"):
        verify_ranker(bare, Reranker(bare))
    engines = EngineSource(lambda b, *_: open_engine(b, "cpu", "onnx-cpu"))
    with pytest.raises(LoadFailed, match="golden query 0 otherwise"):
        load_version(Settings(models=plain.path.parent.parent, engine="reference"), Metrics(), engines, "books", 13, print)
    info = RankerInfo(features=("retrieval.score",), depth=4, max_depth=8)
    golden = plain.golden().append_column(GOLDEN_SCORES, pa.array([[0.0] * 10] * 4, pa.list_(pa.float32())))
    wide = weighted_sum({"retrieval.score": 1, "retrieval.rank": 1})
    with pytest.raises(BundleCorrupt, match=r"expected float features \[N, 1\]"):
        Reranker(with_ranker(plain, plain.path.parent / "15", info, wide, golden))
    with pytest.raises(BundleCorrupt, match=r"ranker\.onnx: not a valid ONNX model"):
        Reranker(with_ranker(plain, plain.path.parent / "16", info, b"no graph", golden))
    with pytest.raises(BundleCorrupt, match="has no ranker"):
        Reranker(plain)


def test_a_manifest_says_what_cannot_be(plain: Bundle, tmp_path: Path) -> None:
    def manifest(bundle: Bundle, **ranker: Any) -> Manifest:
        return Manifest.model_validate(bundle.manifest.model_dump() | {"ranker": {"features": ["retrieval.score"]} | ranker})

    assert manifest(plain, depth=4, max_depth=8).ranker is not None
    for wrong, why in (
        ({"depth": 9, "max_depth": 8}, "exceeds the limit"),
        ({"depth": 9, "max_depth": 900}, "at most 40"),
        ({"depth": 1, "max_depth": 1, "features": []}, "at least 1 item"),
    ):
        with pytest.raises(ValueError, match=why):
            manifest(plain, **wrong)
    rng = np.random.default_rng(0)
    linear = make_linear_bundle(tmp_path, rng, random_tree(rng, 2, 3), Ranking(own="log_activation", gamma=1))
    for name, why in (
        ("history.seen", "of features queries"),
        ("text.words.brand", "of features queries"),
        ("leaf.norm", "no node rows"),
    ):
        with pytest.raises(ValueError, match=why):
            manifest(linear, depth=1, max_depth=1, features=[name])


def test_a_bundle_without_its_ranker_file_does_not_open(plain: Bundle) -> None:
    bundle = add_ranker(plain, {"retrieval.score": 1.0}, version=17)
    (bundle.path / RANKER).unlink()
    with pytest.raises(BundleNotFound, match=RANKER):
        Bundle.open(bundle.path)
    manifest = bundle.path / "manifest.json"
    document = json.loads(manifest.read_text())
    del document["files"][RANKER]
    manifest.write_text(json.dumps(document))
    with pytest.raises(BundleCorrupt, match=f"does not list {RANKER}"):
        Bundle.open(bundle.path)


def test_models_of_vectors_and_of_features_can_have_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    vectors = make_bundle(tmp_path, rng, complete_tree(rng.permutation(8), 2), kind="vector", name="vectors")
    kind = vectors.manifest.query
    assert isinstance(kind, VectorKind)
    reranker = Reranker(add_ranker(vectors, {"retrieval.log_position": 1.0, "leaf.norm": 0.0}))
    assert reranker.rerank(encode_vectors(kind, [[1.0] * 4]), result_of([[5, 6, 7]]), 3).retrieved_BM.tolist() == [[2, 1, 0]]
    linear = make_linear_bundle(tmp_path, rng, random_tree(rng, 2, 3), Ranking(own="log_activation", gamma=1))
    assert Reranker(add_ranker(linear, {"retrieval.log_position": 1.0})).features.names == ("retrieval.log_position",)


# -- the service -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(plain: Bundle, ranked: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Version 2 as `books`, and version 1 as `plain`, over an engine that finds item-0, item-1, …"""
    models = tmp_path_factory.mktemp("served")
    assert ranked.manifest.ranker is not None
    with_ranker(plain, models / "books" / "2", ranked.manifest.ranker, ranked.graph(RANKER), ranked.golden()[:0])
    rewritten(replace(plain, manifest=plain.manifest.model_copy(update={"name": "plain"})), models / "plain" / "1", plain.golden()[:0])
    with run(models, max_queries=8) as running:
        yield running


def test_the_answer_is_in_the_rankers_order_also_outside_of_the_event_loop(served: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = served.retrieve(queries=[{"history": []}], m=3, beam_size=20, rerank=True, fields=["year"])
    items = answer["results"][0]["items"]
    assert [item["fields"]["year"] for item in items] == [1997, 1996, 1995]
    assert ids(answer["results"][0]) == ["item-7", "item-6", "item-5"]  # of the best 8; item-3 has no year
    expected = [1997 + 0.25 * np.log(8), 1996 + 0.25 * np.log(7), 1995 + 0.25 * np.log(6)]
    assert [item["rerank_score"] for item in items] == pytest.approx(expected)
    assert [item["score"] for item in items] == pytest.approx([1 / 8, 1 / 7, 1 / 6])
    assert answer["timing"]["rerank_ms"] > 0
    assert served.engines["books"].calls[-1][1].m_B.tolist() == [8]
    monkeypatch.setattr("service.retrieval.retrieve.INLINE_VALUES", 4)
    answer = served.retrieve(queries=[{"history": []}] * 3, m=2, beam_size=20, rerank=True)
    assert [ids(result) for result in answer["results"]] == [["item-7", "item-6"]] * 3
    told = {model["name"]: model["ranker"] for model in served.client.get("/models").json()["models"]}
    assert told["plain"] is None
    assert (told["books"]["depth"], told["books"]["max_depth"], told["books"]["features"][0]) == (8, 16, "attribute.year")


ALL_BUT_FOUR: Json = {"queries": [{"history": [], "exclude": [f"item-{i}" for i in range(28)]}]}


@pytest.mark.parametrize(
    ("body", "found", "complete"),
    [
        ({"m": 4, "rerank": {"depth": 2}}, [1, 0, 2, 3], True),
        ({"m": 4, "min_score": 0.3}, [2, 1, 0], True),  # of retrieval, and it comes first
        (ALL_BUT_FOUR | {"m": 4}, [31, 30, 29, 28], True),
        ({"m": 5, "beam_size": 5}, [4, 2, 1, 0, 3], True),
        ({"m": 6, "beam_size": 5}, [4, 2, 1, 0, 3], False),  # it speaks of m
    ],
)
def test_depth_m_and_min_score_decide_what_comes_back(served: Running, body: Json, found: list[int], complete: bool) -> None:
    result = served.retrieve(**{"queries": [{"history": []}], "beam_size": 20, "rerank": True} | body)["results"][0]
    assert (ids(result), result["complete"]) == ([f"item-{i}" for i in found], complete)
    scored = [item["rerank_score"] is not None for item in result["items"]]
    assert scored == [place < body.get("rerank", {"depth": 8})["depth"] for place in range(len(found))]


def test_callers_send_features_and_the_stage_is_counted_where_it_ran(served: Running) -> None:
    queries = [
        {"history": [], "item_features": {"item-7": {"price": 1}, "item-6": {"price": 0.5}, "gone": {"price": 2}}},
        {"history": [], "rank_features": {"late": 5}},
    ]
    first, second = served.retrieve(queries=queries, m=8, beam_size=20, rerank=True)["results"]
    assert ids(first) == ["item-5", "item-4", "item-2", "item-1", "item-0", "item-6", "item-7", "item-3"]
    assert first["unknown"] == ["gone"]
    assert second["items"][0]["rerank_score"] == pytest.approx(1997 + 0.25 * np.log(8) + 5)

    def counted() -> float:
        for line in served.client.get("/metrics").text.splitlines():
            if line.startswith('espalier_stage_seconds_count{model="books",stage="rerank"}'):
                return float(line.split()[-1])
        return 0.0

    before = counted()
    plain = served.retrieve(queries=[{"history": []}], m=2)
    assert plain["results"][0]["items"] == [{"id": "item-0", "score": 1.0}, {"id": "item-1", "score": 0.5}]
    assert (plain["timing"]["rerank_ms"], served.engines["books"].calls[-1][1].m_B.tolist()) == (0, [2])
    assert counted() == before
    body: Json = {"model": "books", "queries": [{"history": []}], "beam_size": 20, "rerank": True}
    header = served.client.post("/retrieve", json=body).headers["server-timing"]
    assert counted() == before + 1
    assert [part.split(";")[0] for part in header.split(", ")] == ["queue", "encode", "search", "serialise", "rerank", "total"]


def test_explain_says_what_moved(served: Running, plain: Bundle, ranked: Bundle) -> None:
    with run(served.app.state.service.settings.models, lambda bundle: open_engine(bundle, "cpu", "onnx-cpu"), max_explained=16) as real:
        body: Json = {"queries": [{"history": ["item-1"], "exclude": ["item-9"]}], "m": 3, "beam_size": 20}
        before = real.retrieve(**body | {"m": 12})["results"][0]
        wanted = [*ids(before)[:8], ids(before)[11], "item-9"]
        result = real.retrieve(**body, rerank=True, explain_items=wanted)["results"][0]
    explained = {item["id"]: item for item in result["explain"]["items"]}
    for place, item in enumerate(result["items"], 1):
        told = explained[item["id"]]
        assert (told["outcome"], told["place"], told["retrieved_place"]) == ("returned", place, ids(before).index(item["id"]) + 1)
        assert told["rerank_score"] == pytest.approx(item["rerank_score"])
        assert told["rank_features"]["retrieval.log_position"] == pytest.approx(np.log(told["retrieved_place"]))
        assert told["rank_features"]["item.price"] is None
    behind = [explained[item_id] for item_id in ids(before)[:8] if item_id not in ids(result)]
    assert [told["outcome"] for told in behind] == ["below_m"] * 5
    assert sorted(told["place"] for told in behind) == [4, 5, 6, 7, 8]
    assert (explained[ids(before)[11]]["outcome"], explained["item-9"]["outcome"]) == ("pruned", "excluded")
    moved = {entry["id"]: (entry["retrieved_place"], entry["place"]) for entry in result["explain"]["moved"]}
    places = {item_id: (ids(before).index(item_id) + 1, place) for place, item_id in enumerate(ids(result), 1)}
    assert moved == {item_id: pair for item_id, pair in places.items() if pair[0] != pair[1]}


def test_explain_shows_what_the_ranker_saw_of_all_its_candidates_though_a_score_is_not_finite(plain: Bundle, tmp_path: Path) -> None:
    own = add_ranker(plain, {"item.price": 10.0}, version=32)
    assert own.manifest.ranker is not None
    with_ranker(plain, tmp_path / "books" / "2", own.manifest.ranker, own.graph(RANKER), own.golden()[:0])
    with run(tmp_path, lambda bundle: open_engine(bundle, "cpu", "onnx-cpu"), max_explained=16) as real:
        found = ids(real.retrieve(queries=[{"history": ["item-1"]}], m=8, beam_size=20)["results"][0])
        queries = [{"history": ["item-1"], "item_features": {found[0]: {"price": 3e38}, found[7]: {"price": 2.0}}}]
        body: Json = {"queries": queries, "m": 8, "beam_size": 20, "rerank": True, "explain_items": found}
        told = {item["id"]: item for item in real.retrieve(**body)["results"][0]["explain"]["items"]}
    assert [told[item_id]["rank_features"]["item.price"] is not None for item_id in found] == [True, *[False] * 6, True]
    assert (told[found[0]]["rerank_score"], told[found[7]]["rerank_score"]) == (None, 20.0)


@pytest.mark.parametrize(
    ("body", "field", "expected"),
    [
        ({"model": "plain", "rerank": True}, "rerank", "no ranker"),
        ({"model": "plain", "rerank": {"depth": 3}}, "rerank", "no ranker"),
        ({"model": "plain", "queries": [{"history": [], "rank_features": {"late": 1}}]}, "queries[0]", "no ranker"),
        ({"rerank": {"depth": 17}}, "rerank.depth", "at most 16"),
        ({"rerank": {"depth": 0}}, "rerank", "greater than or equal to 1"),
        ({"rerank": 5}, "rerank", "true, false or"),
        ({"rerank": {"deep": 5}}, "rerank.deep", "only the fields depth"),
        ({"queries": [{"features": {"indices": [], "values": [], "count": 3}}]}, "queries[0].features.count", "indices, values"),
        ({"queries": [{"history": [], "rank_features": {"early": 1}}]}, "queries[0].rank_features.early", "one of late"),
        ({"queries": [{"history": [], "rank_features": {"late": 1e39}}]}, "queries[0].rank_features.late", "32-bit"),
        ({"queries": [{"history": [], "rank_features": {"late": "1"}}]}, "queries[0].rank_features.late", "number"),
        ({"queries": [{"history": [], "item_features": {"item-1": {"late": 1}}}]}, "queries[0].item_features.item-1.late", "price"),
        ({"queries": [{"history": [], "item_features": {str(i): {} for i in range(41)}}]}, "queries[0].item_features", "at most 40"),
    ],
)
def test_wrong_requests_say_what_is_wrong(served: Running, body: Json, field: str, expected: str) -> None:
    answer = served.client.post("/retrieve", json={"model": "books", "queries": [{"history": []}], "beam_size": 10} | body)
    assert answer.status_code == 422, answer.text
    errors = problem(answer)["errors"]
    assert any(error["field"].startswith(field) and expected in error["expected"] for error in errors), errors
