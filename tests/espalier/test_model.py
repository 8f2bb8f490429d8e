"""A model in a notebook: what it is asked with, what it answers, and what it says of wrong questions."""

from __future__ import annotations

import gc
import gzip
import pickle
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse as sp

import espalier
from benchmarks.random_bundles import make_bundle, make_linear_bundle, random_memory, random_tree
from espalier.errors import BundleCorrupt, BundleExists, InvalidInput, InvalidQuery
from espalier.manifest import Ranking
from espalier.memory import BUCKETS
from espalier.model import Model
from espalier.queries import HistoryKind, QueryBatch, encode_histories
from espalier.search import SearchParams, SearchResult
from tests import ROOT
from tests.espalier.second_stages import F, with_stacking

SAMPLE = ROOT / "models/debian-depends"
HISTORIES = [["nginx", "postgresql"], ["libsdl2-2.0-0", "libgl1"], ["no such package", "perl"], []]


@pytest.fixture(scope="module")
def model() -> Model:
    return espalier.open(SAMPLE, "cpu", frame="arrow")


def history_kind(model: Model) -> HistoryKind:
    kind = model.bundle.manifest.query
    assert isinstance(kind, HistoryKind)
    return kind


def test_a_folder_of_versions_stands_for_its_highest_one(tmp_path: Path, model: Model) -> None:
    model.save(tmp_path / "books/2")
    model.save(tmp_path / "books/10")
    found = espalier.open(tmp_path / "books")
    assert (found.name, found.version) == ("books", 10)
    assert found.search(HISTORIES, m=7).equals(espalier.open(tmp_path / "books/2").search(HISTORIES, m=7))
    with pytest.raises(BundleExists):
        model.save(tmp_path / "books/2")
    with pytest.raises(InvalidInput, match="path"):
        model.save(tmp_path / "books")


def test_a_search_finds_what_the_engine_finds(model: Model) -> None:
    batch, _ = encode_histories(history_kind(model), model.bundle.items, HISTORIES)
    result = model.engine.search(batch, SearchParams.uniform(len(HISTORIES), 150, 9, np.asarray(batch.array, np.int64)))
    found = model.search(HISTORIES, m=9, beam_size=150, exclude_seen=True, fields=["title", "section"]).to_pylist()
    for b in range(len(HISTORIES)):
        own = [row for row in found if row["query"] == b]
        rows = result.item_rows_BM[b]
        assert [row["item"] for row in own] == model.bundle.items.ids_of(rows)
        assert [row["rank"] for row in own] == list(range(1, 10))
        assert [row["title"] for row in own] == model.bundle.items.values("title", rows)
        np.testing.assert_array_equal([row["score"] for row in own], result.scores_BM[b])


def test_a_model_is_pickled_as_its_path_or_as_its_files_if_they_are_deleted_with_it(model: Model, tmp_path: Path) -> None:
    other = pickle.loads(pickle.dumps(espalier.open(model.bundle.path, "cpu", "reference", "arrow")))
    assert (other.bundle.path, other.engine.name, other.frame) == (model.bundle.path.absolute(), "reference", "arrow")
    temporary = espalier.open(model.save(tmp_path / "m" / "1"), "cpu", frame="arrow")
    temporary.owns(tmp_path / "m")
    content = pickle.dumps(temporary)
    expected = temporary.search(HISTORIES, m=7)
    bundle = temporary.bundle
    del temporary
    gc.collect()
    assert len(bundle.golden()), "the bundle reads files that it did not need yet"
    del bundle
    gc.collect()
    assert not (tmp_path / "m").exists()
    restored = pickle.loads(content)
    assert restored.search(HISTORIES, m=7).equals(expected)
    again, folder = pickle.loads(pickle.dumps(restored)), restored.bundle.path
    del restored
    gc.collect()
    assert not folder.exists()
    assert again.search(HISTORIES, m=7).equals(expected)


def test_a_pickle_that_holds_no_sound_model_leaves_nothing_behind(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = espalier.open(model.save(tmp_path / "m" / "1"), "cpu")
    temporary.owns(tmp_path / "m")
    (tmp_path / "m" / "1" / "items.arrow").write_bytes(b"")
    content = pickle.dumps(temporary)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    with pytest.raises(BundleCorrupt, match=r"items\.arrow"):
        pickle.loads(content)
    assert [*(tmp_path / "scratch").iterdir()] == []


def test_more_queries_than_one_call_takes_are_numbered_through(model: Model) -> None:
    some = [[item] for item in model.bundle.items.ids_of(np.arange(600))]
    found = model.search(some, m=2)
    assert found.column("query").to_pylist() == [b for b in range(600) for _ in range(2)]
    alone = model.search(some[599:], m=2)
    assert found.column("item").to_pylist()[-2:] == alone.column("item").to_pylist()
    assert model.search([], m=2).num_rows == 0


def test_who_has_seen_much_is_searched_for_in_smaller_calls(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one user of a million items would have an array of as many numbers for each of 256 queries."""
    ids = model.bundle.items.ids_of(np.arange(5000))
    histories = [ids[:3000], ids[:10], ids[2000:], *([one] for one in ids[:50]), [], ids[:4000] * 2]
    whole = model.search(histories, m=5, exclude_seen=True)
    sizes = []
    search = model.engine.search

    def noted(queries: QueryBatch, params: SearchParams) -> SearchResult:
        assert params.exclude_BE is not None
        sizes.append(params.exclude_BE.size)
        return search(queries, params)

    monkeypatch.setattr("espalier.model.MAX_EXCLUDED", 4096)
    monkeypatch.setattr(model.engine, "search", noted)
    assert model.search(histories, m=5, exclude_seen=True).equals(whole)
    assert max(sizes) == 4000, "a list alone may be longer"
    assert len(sizes) == 5
    for b, history in enumerate(histories):
        own = [item for query, item in zip(whole["query"].to_pylist(), whole["item"].to_pylist(), strict=True) if query == b]
        assert not {*history} & {*own}


def test_a_filter_leaves_items_that_pass_alone(model: Model) -> None:
    found = model.search(HISTORIES, m=20, filter={"section": ["libs"]}, exclude_filter={"section": ["perl"]}, fields=["section"])
    assert found.num_rows == 80
    assert set(found.column("section").to_pylist()) == {"libs"}
    for libs in (np.array(["libs"]), [np.str_("libs")], (np.array("libs"),)):
        assert model.search(HISTORIES, m=20, filter={"section": libs}, exclude_filter={"section": ["perl"]}, fields=["section"]) == found


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"queries": ["nginx"]}, r"queries\[0\]\.history"),
        ({"queries": [["nginx"], 3]}, r"queries\[1\]\.history"),
        ({"queries": [["nginx"]], "m": 10**6}, "m: got 1000000, expected 1 to"),
        ({"queries": [["nginx"]], "beam_size": -1}, "beam_size"),
        ({"queries": [["nginx"]], "m": 0}, "m: got 0, expected 1 to"),
        ({"queries": [["nginx"]], "m": True}, "m: got true, expected 1 to"),
        ({"queries": [["nginx"]], "m": "5"}, "m: got '5', expected 1 to"),
        ({"queries": [["nginx"]], "exclude_filter": {"section": 5}}, "exclude_filter.section"),
        ({"queries": "nginx"}, "queries: got 'nginx', expected a list of queries"),
        ({"queries": 5}, "queries: got 5, expected a list of queries"),
        ({"queries": [["nginx"]], "filter": 5}, "filter: got 5, expected a dictionary"),
        ({"queries": [["nginx"]], "fields": "title"}, "fields: got 'title', expected a list of columns"),
        ({"queries": [["nginx"]], "filter": {"colour": ["red"]}}, "filter.colour"),
        ({"queries": [["nginx"]], "fields": ["colour"]}, "fields"),
    ],
)
def test_what_is_wrong_is_named(model: Model, asked: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidQuery, match=field):
        model.search(**asked)


@pytest.mark.parametrize("name", ["ms", "beam_sizes"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], ": got [], expected at least one number"),
        (5, ": got 5, expected a list of numbers"),
        ([10, -3], "[1]: got -3, expected 1 to"),
        (["a"], "[0]: got 'a', expected 1 to"),
        ([2.5], "[0]: got 2.5, expected 1 to"),
    ],
)
def test_what_is_measured_with_is_checked(model: Model, name: str, value: Any, said: str) -> None:
    with pytest.raises(InvalidQuery, match=f"^{name}{re.escape(said)}"):
        model.evaluate(**{name: value})


def test_a_model_is_measured_with_arrays_of_numbers(model: Model) -> None:
    beams: Any = np.array([5, 8])
    measured = model.evaluate(beam_sizes=[*beams, 5], ms=beams - 3)  # each once
    assert measured.select(["beam_size", "m"]).to_pylist() == [{"beam_size": beam, "m": m} for beam in (5, 8) for m in (2, 5)]


FEATURES, VECTOR = "queries[0].features", "queries[0].vector"


@pytest.mark.parametrize(
    ("kind", "queries", "said"),
    [
        ("features", np.zeros(6), "queries: got 'float64[6]', expected a matrix of numbers, [B, 6]"),
        ("features", sp.coo_array(np.ones(6)), "queries: got 'float64[6]', expected a matrix"),
        ("features", None, "queries: got None, expected a list of queries"),
        ("features", [0.5] * 6, f"{FEATURES}: got 0.5, expected a pair"),
        ("features", [(1, 2)], f"{FEATURES}.indices: got 1, expected a list of whole numbers"),
        ("features", [([1.5], [1.0])], f"{FEATURES}.indices: got [1.5], expected a list of whole numbers"),
        ("features", [([1], ["a"])], f"{FEATURES}.values: got ['a'], expected a list of numbers"),
        ("vector", np.zeros(4), f"{VECTOR}: got np.float64(0.0), expected a list of numbers"),
        ("vector", np.zeros((2, 4, 1)), f"{VECTOR}: got array("),
        ("vector", [[[1, 2], [3]]], f"{VECTOR}: got [[1, 2], [3]], expected a list of numbers"),
        ("vector", [["a"] * 4], f"{VECTOR}: got ['a', 'a', 'a', 'a'], expected a list of numbers"),
        ("vector", [[0.5] * 4, [2.0**127] * 4], "queries[1].vector: got 1.7014118346046923e+38, expected numbers whose scores are finite"),
    ],
)
def test_what_is_wrong_with_numbers_is_named(tmp_path: Path, kind: str, queries: Any, said: str) -> None:
    rng = np.random.default_rng(0)
    tree = random_tree(rng, 2, 3)
    if kind == "vector":
        bundle = make_bundle(tmp_path, rng, tree, "vector")
    else:
        bundle = make_linear_bundle(tmp_path, rng, tree, Ranking(own="log_activation", gamma=1), width=6)
    with pytest.raises(InvalidQuery, match=f"^{re.escape(said)}"):
        Model(bundle, "cpu", "reference", frame="arrow").search(queries, m=2)


def test_why_an_item_did_not_come(model: Model) -> None:
    found = model.search([HISTORIES[0]], m=1000, beam_size=1000)
    first, second, *_, last = found.column("item").to_pylist()
    rows = {row["item"]: row for row in model.explain(HISTORIES[0], [first, second, last, "no such package"], m=1).to_pylist()}
    score = pytest.approx(found["score"][0].as_py())
    assert rows[first] == {"item": first, "outcome": "returned", "rank": 1, "score": score, "level": None, "cut": None}
    assert (rows[second]["outcome"], rows[second]["level"]) == ("pruned", model.bundle.tree.height)
    assert rows["no such package"]["outcome"] == "unknown"
    last_that_came = model.search([HISTORIES[0]], m=1).column("item").to_pylist()
    assert last_that_came == [first]
    batch, _ = encode_histories(history_kind(model), model.bundle.items, [HISTORIES[0]])
    keys = model.engine.search(batch, SearchParams.uniform(1, model.bundle.manifest.search.beam_size, 3)).keys_BM[0]
    (below,) = model.explain(HISTORIES[0], [last], m=3, beam_size=1000).to_pylist()
    assert below["cut"] == pytest.approx(float(keys[2]), abs=1e-4)
    narrow = model.explain(HISTORIES[0], [last], m=1, beam_size=1).to_pylist()[0]
    assert narrow["outcome"] == "pruned"
    assert 1 <= narrow["level"] < model.bundle.tree.height


@pytest.mark.parametrize("trees", [1, 3])
def test_an_item_that_a_tree_scored_is_below_m_where_trees_are_merged(tmp_path: Path, trees: int) -> None:
    stacked = Model(with_stacking(tmp_path, 3, trees=trees)[0], "cpu", frame="arrow")
    query, ids = ([1, 3], [0.5, 2.0]), stacked.bundle.items.column("id").to_pylist()
    found = {row["outcome"]: row for row in stacked.explain(query, ids, m=2, beam_size=2).to_pylist()}
    assert found.keys() == {"returned", "below_m", "pruned"}
    scored = {*stacked.search([query], m=len(ids), beam_size=2).column("item").to_pylist()}
    assert found["below_m"]["item"] in scored
    assert found["pruned"]["item"] not in scored


@pytest.mark.parametrize("nothing", [0.0, 1e-60])
def test_a_feature_of_value_0_changes_nothing(tmp_path: Path, nothing: float) -> None:
    """Stacking reads how many features a query has. 1e-60 is 0 as float32."""
    stacked = Model(with_stacking(tmp_path, 3)[0], "cpu", frame="arrow")
    numbers, values = [1, 4, 6, 7, 8], [1.0, 0.5, nothing, nothing, nothing]
    sparse = sp.csr_array((np.array(values), np.array(numbers), [0, 5]), shape=(1, F))
    expected = stacked.search([(numbers[:2], values[:2])], 5)
    for queries in ([(numbers, values)], sparse, sparse.toarray()):
        assert stacked.search(queries, 5).equals(expected)


def test_an_item_of_the_history_that_the_model_leaves_out_was_not_cut(tmp_path: Path) -> None:
    """A wider beam never finds it: it was said to be pruned, as if one could."""
    rng = np.random.default_rng(7)
    tree = random_tree(rng, 3, 3)
    memory = random_memory(rng, tree.item_count, 5)
    leaving_out_the_last = replace(memory, left_out=np.arange(BUCKETS) == 0)
    lists = Model(make_bundle(tmp_path, rng, tree, "product", memory=leaving_out_the_last), "cpu", frame="arrow")
    history = ["item-1", "item-2"]
    outcomes = lists.explain(history, history, m=tree.item_count, beam_size=64).column("outcome").to_pylist()
    assert outcomes == ["returned", "excluded"]


def test_figures_are_those_of_training(model: Model) -> None:
    (row,) = model.evaluate(ms=[50]).to_pylist()
    assert row["queries"] == 1000
    assert row["recall"] == pytest.approx(0.76, abs=0.02)  # as its manifest and `evaluate` of the trainer say
    held = model.held_out().to_pylist()
    found = model.search([one["history"] for one in held], m=3)
    lists = np.array(found.column("item").to_pylist()).reshape(len(held), 3)
    ranks = [
        next((1 / (i + 1) for i, item in enumerate(own) if item in one["relevant"]), 0.0) for own, one in zip(lists, held, strict=True)
    ]
    (top,) = model.evaluate(ms=[3]).to_pylist()
    assert top["mrr"] == pytest.approx(np.mean(ranks))
    assert top["hit_rate"] == pytest.approx(np.mean(np.array(ranks) > 0))
    assert top["coverage"] == pytest.approx(len(np.unique(lists)) / len(model.bundle.items))
    wide = model.evaluate(beam_sizes=[50, 400], ms=[10, 50]).to_pylist()
    assert [(one["beam_size"], one["m"]) for one in wide] == [(50, 10), (50, 50), (400, 10), (400, 50)]
    assert wide[0]["recall"] < wide[2]["recall"]


def test_a_log_is_halved_by_user_to_measure_on_it(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    first = model.search([["nginx"]], m=1).column("item").to_pylist()
    log = pl.DataFrame({"who": ["a", "b", "a", "b"], "what": ["nginx", "perl", first[0], "no such package"], "when": [1, 1, 2, 2]})
    (row,) = model.evaluate(log, user="who", item="what", ms=[1]).to_pylist()
    assert (row["queries"], row["recall"]) == (1, 1.0)  # nothing that is known is to be found for b
    left_out = "1 of 2 relevant items (50.0%) and 1 of 2 test queries of the log are left out: the model lacks items"
    assert [record.getMessage() for record in caplog.records] == [left_out]
    turned = log.with_columns(when=pl.Series([2, 2, 1, 1]))
    (row,) = model.evaluate(turned, user="who", item="what", time="when", ms=[1]).to_pylist()
    assert row["queries"] == 1
    three = pa.table({"user": ["a"] * 3, "item": ["nginx", first[0], "libgl1"]})  # the larger half is relevant, as in training
    assert model.evaluate(three, ms=[1])["hit_rate"][0].as_py() == 1.0
    with pytest.raises(InvalidInput, match=r"column user: got 'nobody', expected one of .*: say which with user="):
        model.evaluate(log, user="nobody", item="what")


def test_a_long_unknown_id_takes_its_own_memory_only(model: Model) -> None:
    log = pa.table({"user": ["a"] * 2003, "item": ["nginx"] * 1002 + ["perl"] * 1000 + ["x" * 10_000]})
    model.evaluate(log, ms=[1])
    tracemalloc.start()
    try:
        model.evaluate(log, ms=[1])
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def test_a_packed_log_is_measured_and_files_beside_it_stay(model: Model, tmp_path: Path) -> None:
    ids = ["nginx", "postgresql", "perl", "python3"]
    pq.write_table(pa.table({"user": ["u"] * len(ids), "item": ids}), tmp_path / "log.parquet")
    (tmp_path / "log.parquet.gz").write_bytes(gzip.compress((tmp_path / "log.parquet").read_bytes()))
    (tmp_path / "unzipped.parquet").write_text("of somebody else")
    assert model.evaluate(tmp_path / "log.parquet.gz").equals(model.evaluate(tmp_path / "log.parquet"))
    assert (tmp_path / "unzipped.parquet").read_text() == "of somebody else"


def test_what_is_no_id_is_named_and_whole_floats_are_integers(model: Model) -> None:
    wrong: list[tuple[Any, str]] = [
        (True, "true"),
        (1.5, "1.5"),
        (np.float32("inf"), "inf"),
        (2.0**53, "9007199254740992.0"),
        (["a"], r"\['a'\]"),
    ]
    for value, text in wrong:
        with pytest.raises(InvalidQuery, match=rf"^queries\[1\]\.history\[2\]: got {text}, expected strings or whole numbers"):
            model.search([["nginx"], ["nginx", None, value]])
        with pytest.raises(InvalidQuery, match=rf"^items\[0\]: got {text}, expected strings"):
            model.explain(["nginx"], [value])
    no_item: Any = float("nan")
    with pytest.raises(InvalidQuery, match=r"^items\[0\]: got nan, expected strings"):
        model.explain(["nginx"], [no_item])
    whole = model.search([["nginx", "perl"]] * 3, m=5)
    assert model.search([["nginx", empty, "perl"] for empty in (None, float("nan"), np.float32("nan"))], m=5).equals(whole)
    asked: Any = [3, np.int64(3), 3.0, np.float32(3)]
    assert model.explain(["nginx"], asked).column("item").to_pylist() == ["3"] * 4


def test_held_out_queries_of_one_version_measure_another(model: Model, tmp_path: Path) -> None:
    held = model.held_out()
    assert held.column_names == ["history", "relevant"]
    assert held.column("history").to_pylist() == model.bundle.heldout().column("history").to_pylist(), "also what it does not read"
    model.save(tmp_path / "books/1")
    other = espalier.open(tmp_path / "books", "cpu", frame="arrow")
    assert other.evaluate(held).equals(model.evaluate())
    assert other.evaluate(held.slice(0, 10), ms=[5]).column("queries").to_pylist() == [10]
    lists = [[*one, "an item of tomorrow"] for one in held.column("relevant").to_pylist()]
    more = pa.table({"history": held.column("history"), "relevant": lists})
    (row,), (before,) = (model.evaluate(table, ms=[50]).to_pylist() for table in (more, held))
    assert row["queries"] == before["queries"]
    assert row["recall"] < before["recall"], "what it does not know it misses"
    found = model.search([["libgl1"]], m=1).column("item").to_pylist()
    asked = pa.table({"history": [["libgl1"], None], "relevant": [[*found, "unknown", "unknown"], None]})
    (row,) = model.evaluate(asked, ms=[10]).to_pylist()
    assert (row["recall"], row["queries"]) == (0.5, 1), "an item counts once"
    numbers = pa.table({"history": [[1, 2]], "relevant": [[3]]})
    assert model.evaluate(numbers, ms=[10]).column("recall").to_pylist() == [0], "as text"


def test_rows_and_states_give_the_scores(model: Model) -> None:
    rows_ID, states_BS = model.item_rows(), model.states(HISTORIES[:2])
    assert rows_ID.shape == (len(model.bundle.items), model.bundle.graph_scorer.node_dim)
    assert states_BS.shape[0] == 2
    logits = states_BS[:, : rows_ID.shape[1]] @ rows_ID.T
    for b in range(2):  # what the scorer alone puts first is near the front of what the whole search finds
        best = model.bundle.items.ids_of(np.argsort(-logits[b])[:3])
        assert set(best) & set(model.search([HISTORIES[b]], m=100, beam_size=1000).column("item").to_pylist())
