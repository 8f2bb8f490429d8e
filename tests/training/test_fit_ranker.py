"""`fit-ranker` and `evaluate --rerank`: a ranker learns from what its model retrieves, and becomes part of a new version."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import polars as pl
import pytest

from benchmarks.random_bundles import make_bundle, make_linear_bundle, random_tree
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.engines.reference import ReferenceEngine
from espalier.errors import InvalidConfig, InvalidData
from espalier.manifest import Ranking
from espalier.metrics import ndcg_at_m
from espalier.queries import HistoryKind, pad_histories
from espalier.rank_features import HISTORY, LEAF, RETRIEVAL, TEXT
from espalier.rerank.features import CallerFeatures, RankFeatures
from espalier.rerank.ranker import Reranker, verify_ranker
from espalier.search import NO_ITEM
from espalier.tree import complete_tree
from tests.service.running import run
from tests.training.commands import command, written_toml
from tests.training.shop import write_shop
from training.evaluate import LabelledQueries, Rerank, measure
from training.inspect import inspect
from training.rankers import second_stage
from training.rankers.candidates import retrieve
from training.rankers.graded_queries import GradedQueries, QuerySplit, equally_relevant
from training.rankers.judgements import from_judgements
from training.rankers.log_queries import from_log
from training.rankers.second_stage import StageConfig, add_ranker, collect, default_features, features_of
from training.specification.ranker import HighwayConfig, LinearRankerConfig, ranker_config

ITEMS = 64
QUICK = LinearRankerConfig(learning_rate=0.05, max_epochs=6)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A model of random weights, whose items have a number that it knows nothing of."""
    rng = np.random.default_rng(3)
    columns = {"worth": rng.permutation(ITEMS).astype(float), "maker": ["x"] * ITEMS}
    folder = tmp_path_factory.mktemp("models")
    return make_bundle(folder, rng, complete_tree(rng.permutation(ITEMS), 4), integer=False, columns=columns, max_m=32, beam_size=64)


def graded_queries(bundle: Bundle, count: int, seed: int, seen: bool = False) -> GradedQueries:
    """Queries to which the items of much worth are relevant, with grades."""
    rng, kind = np.random.default_rng(seed), bundle.manifest.query
    assert isinstance(kind, HistoryKind)
    histories = [rng.integers(0, ITEMS, 4) for _ in range(count)]
    worth = np.array(bundle.items.values("worth", np.arange(ITEMS)))
    items = [np.flatnonzero((worth > 40) & (rng.random(ITEMS) < 0.8)) for _ in range(count)]
    return GradedQueries(
        pad_histories(kind, histories), items, [1 + (worth[rows] > 55).astype(np.float32) for rows in items], histories if seen else None
    )


def split_of(bundle: Bundle) -> QuerySplit:
    return QuerySplit(graded_queries(bundle, 60, 1), graded_queries(bundle, 10, 2), graded_queries(bundle, 30, 3))


# -- candidates ------------------------------------------------------------------------------------------------------


def test_candidates_are_what_the_model_retrieves_with_their_grades(bundle: Bundle) -> None:
    graded = graded_queries(bundle, 70, 4)
    engine, features = ReferenceEngine(bundle), RankFeatures(bundle, ("attribute.worth", "retrieval.log_position"))
    found = retrieve(engine, features, graded, 12, 64)
    assert len(found.ranking) == 70
    assert found.rows_BM.shape == (70, 12)
    for b in range(70):
        own = found.ranking.rows_of(b)
        grade_of = dict(zip(graded.items[b].tolist(), graded.grades[b].tolist(), strict=True))
        assert found.ranking.grades_R[own].tolist() == [grade_of.get(row, 0) for row in found.rows_BM[b].tolist()]
        assert found.ranking.features_RF[own, 0].tolist() == bundle.items.values("worth", found.rows_BM[b])
        assert found.ranking.features_RF[own, 1] == pytest.approx(np.log(np.arange(1, 13)))
    equal = replace(found, grades=[np.ones_like(grades) for grades in found.grades])
    assert equal.quality(None, 10)["ndcg"] == pytest.approx(float(ndcg_at_m(found.rows_BM, found.relevant, 10).mean()))
    perfect = found.quality(found.ranking.grades_R, 12)
    assert perfect["recall"] == pytest.approx(found.quality(None, 12)["recall"])
    assert perfect["ndcg"] > found.quality(None, 12)["ndcg"]


@pytest.mark.parametrize("m", [5, 10, 16])
def test_ndcg_counts_grades_and_relevant_items_that_were_not_retrieved(bundle: Bundle, m: int) -> None:
    graded = graded_queries(bundle, 20, 4)
    found = retrieve(ReferenceEngine(bundle), RankFeatures(bundle, RETRIEVAL), graded, 12, 64)
    discount, values = 1 / np.log2(np.arange(2, 99)), []
    for rows, items, grades in zip(found.rows_BM, graded.items, graded.grades, strict=True):
        gain_of = dict(zip(items.tolist(), (2.0**grades - 1).tolist(), strict=True))
        gains, best = [gain_of.get(row, 0.0) for row in rows[:m].tolist()], sorted(gain_of.values(), reverse=True)[:m]
        values.append(discount[: len(gains)] @ gains / (discount[: len(best)] @ best))
    assert found.quality(None, m)["ndcg"] == pytest.approx(np.mean(values))


def test_queries_without_candidates_count_as_not_answered(bundle: Bundle) -> None:
    """With features of the caller, only judged items are candidates, and of every second query these are never retrieved."""
    graded, rng = graded_queries(bundle, 20, 4), np.random.default_rng(0)
    engine, features = ReferenceEngine(bundle), RankFeatures(bundle, (*RETRIEVAL, "item.price"))
    retrieved = retrieve(engine, RankFeatures(bundle, RETRIEVAL), graded, 12, 64).rows_BM
    items = [np.setdiff1d(np.arange(ITEMS), retrieved[b])[:3] if b % 2 else graded.items[b] for b in range(20)]
    grades = [np.ones(len(rows), np.float32) for rows in items]
    judged = [CallerFeatures({}, {int(row): {"price": float(rng.random())} for row in rows}) for rows in items]
    asked = replace(graded, items=items, grades=grades, caller_features=judged)
    found = retrieve(engine, features, asked, 12, 64)
    answered = retrieve(engine, features, asked.take(np.arange(0, 20, 2)), 12, 64)
    assert len(found.ranking) == len(answered.ranking) > 5
    assert found.unanswered == 10 + answered.unanswered
    for name, value in answered.quality(None, 10).items():
        assert found.quality(None, 10)[name] == pytest.approx(value / 2)


def test_what_was_seen_is_no_candidate(bundle: Bundle) -> None:
    graded = graded_queries(bundle, 20, 5, seen=True)
    found = retrieve(ReferenceEngine(bundle), RankFeatures(bundle, ("history.seen",)), graded, 32, 64)
    assert graded.seen is not None
    for rows, seen in zip(found.rows_BM, graded.seen, strict=True):
        assert not np.isin(rows, seen).any()
    assert np.isnan(found.ranking.features_RF).all()


def test_queries_that_retrieve_nothing_drop_out(bundle: Bundle) -> None:
    graded = graded_queries(bundle, 3, 6)
    graded = replace(graded, seen=[np.arange(ITEMS), np.empty(0, np.int64), np.empty(0, np.int64)])
    found = retrieve(ReferenceEngine(bundle), RankFeatures(bundle, RETRIEVAL), graded, 8, 64)
    assert len(found.ranking) == len(found.relevant) == 2
    with pytest.raises(InvalidData, match="at least one that retrieves something"):
        retrieve(ReferenceEngine(bundle), RankFeatures(bundle, RETRIEVAL), graded.take(np.array([0])), 8, 64)


# -- rankers ---------------------------------------------------------------------------------------------------------


def test_a_ranker_learns_what_the_model_does_not_know(bundle: Bundle, tmp_path: Path) -> None:
    split = split_of(bundle)
    split = replace(split, test=equally_relevant(split.test.queries, split.test.items))  # evaluate knows no grades
    assert default_features(bundle, split) == (*RETRIEVAL, *LEAF, *HISTORY, "attribute.worth")
    added = add_ranker(
        bundle, open_engine(bundle, "cpu"), split, StageConfig(32, (), 1000, QUICK), tmp_path / "better" / "3", {"who": "us"}
    )
    ranker = added.manifest.ranker
    assert ranker is not None
    assert (added.manifest.name, added.manifest.version, ranker.depth, ranker.max_depth) == ("better", 3, 32, 32)
    assert ranker.training["config"]["loss"] == "elimination"
    assert ranker.training["who"] == "us"
    test = ranker.training["metrics"]["test"]
    assert test["reranked"]["ndcg"] > test["retrieved"]["ndcg"] + 0.2
    engine = open_engine(added, "cpu")
    (plain,) = measure(added, engine, LabelledQueries(split.test.queries, split.test.items), [64], [10])
    (ranked,) = measure(
        added, engine, LabelledQueries(split.test.queries, split.test.items), [64], [10], rerank=Rerank(Reranker(added), 32)
    )
    for row, expected in ((plain, test["retrieved"]), (ranked, test["reranked"])):
        assert (row["ndcg"], row["recall"]) == pytest.approx((expected["ndcg"], expected["recall"]), abs=1e-3)
    config = StageConfig(5, ("attribute.worth",), 1000, QUICK.model_copy(update={"max_epochs": 1}))
    shallow = add_ranker(bundle, engine, split, config, tmp_path / "shallow" / "1", {})
    assert shallow.manifest.ranker is not None
    test = shallow.manifest.ranker.training["metrics"]["test"]
    (row,) = measure(
        shallow, engine, LabelledQueries(split.test.queries, split.test.items), [64], [10], rerank=Rerank(Reranker(shallow), 5)
    )
    assert (plain["recall"], row["recall"]) == pytest.approx((test["retrieved"]["recall"], test["reranked"]["recall"]))
    assert (plain["ndcg"], row["ndcg"]) == pytest.approx((test["retrieved"]["ndcg"], test["reranked"]["ndcg"]))
    assert row["recall"] == plain["recall"] > 0
    assert verify_ranker(added, Reranker(added)) == 0  # it has no golden queries
    assert "ranker: of the best 32, at most 32, by retrieval.log_position, " in inspect(added)
    assert "ranker" not in inspect(bundle)
    assert added.manifest.files["scorer.onnx"] == bundle.manifest.files["scorer.onnx"]


def test_features_can_be_chosen(bundle: Bundle, tmp_path: Path) -> None:
    config = StageConfig(16, ("attribute.worth",), 20, QUICK.model_copy(update={"max_epochs": 1}))
    added = add_ranker(bundle, open_engine(bundle, "cpu"), split_of(bundle), config, tmp_path / "m" / "1", {})
    assert added.manifest.ranker is not None
    assert added.manifest.ranker.features == ("attribute.worth",)
    assert added.manifest.ranker.training["queries"] == 20
    for names, why in (
        (("attribute.maker",), "some of retrieval.log_position"),
        (("query.hour",), "some of"),
        (("history.worst",), "no feature of a candidate"),
    ):
        with pytest.raises(InvalidConfig, match=why):
            add_ranker(bundle, open_engine(bundle, "cpu"), split_of(bundle), replace(config, features=names), tmp_path / "m" / "9", {})
    hours = replace(
        split_of(bundle).test, caller_features=[CallerFeatures({"hour": 1.0}, {row: {"sale": 1.0} for row in range(ITEMS)})] * 30
    )
    sent = replace(split_of(bundle), test=hours)
    assert default_features(bundle, sent)[-2:] == ("query.hour", "item.sale")
    for out, wanted in (("2", "query.hour item.sale"), ("3", "item.sale"), ("4", "query.hour attribute.worth")):
        chosen = () if out == "2" else tuple(wanted.split())
        added = add_ranker(bundle, open_engine(bundle, "cpu"), sent, replace(config, features=chosen), tmp_path / "m" / out, {})
        assert added.manifest.ranker is not None
        assert set(wanted.split()) <= set(added.manifest.ranker.features)
    for depth in (1, 33):
        with pytest.raises(InvalidConfig, match="2 to 32"):
            add_ranker(bundle, open_engine(bundle, "cpu"), split_of(bundle), replace(config, depth=depth), tmp_path / "m" / "9", {})


def test_a_ranker_that_orders_worse_than_retrieval_is_said(bundle: Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    split = split_of(bundle)
    unwanted = [np.setdiff1d(np.arange(ITEMS), rows) for rows in split.test.items]
    config = StageConfig(32, ("attribute.worth",), 1000, QUICK)
    add_ranker(
        bundle,
        open_engine(bundle, "cpu"),
        replace(split, test=equally_relevant(split.test.queries, unwanted)),
        config,
        tmp_path / "m" / "1",
        {},
    )
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("test: the ranker orders worse than retrieval alone")


def test_a_split_without_a_relevant_item_is_named_before_training(
    bundle: Bundle, judged: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = StageConfig(16, ("attribute.worth",), 20, QUICK.model_copy(update={"max_epochs": 1}))
    split, engine = split_of(bundle), open_engine(bundle, "cpu")
    nothing = replace(split.test, items=[np.empty(0, np.int64)] * 30, grades=[np.empty(0, np.float32)] * 30)
    untested = add_ranker(bundle, engine, replace(split, test=nothing.take(np.empty(0, np.int64))), config, tmp_path / "m" / "1", {})
    assert untested.manifest.ranker is not None
    assert set(untested.manifest.ranker.training["metrics"]) == {"validation"}
    assert "test: not measured" in caplog.text
    monkeypatch.setattr(second_stage, "fit", lambda *_: pytest.fail("it trains"))
    for position, name in enumerate(("20 training", "30 validation", "30 test")):
        parts = [split.train, split.valid, split.test]
        parts[position] = nothing
        with pytest.raises(InvalidData, match=f"the model's log: got 'no relevant item in its {name} queries'"):
            add_ranker(bundle, engine, QuerySplit(*parts), config, tmp_path / "m" / "2", {})
    pl.read_parquet(judged).with_columns(pl.col("grade") * (pl.col("query_id") == 5)).write_parquet(tmp_path / "few.parquet")
    with pytest.raises(
        InvalidData, match=r"few\.parquet: got 'no relevant item in its \d+ \w+ queries', expected at least one: take more queries"
    ):
        add_ranker(bundle, engine, from_judgements(bundle, tmp_path / "few.parquet", 1), config, tmp_path / "m" / "2", {})


def test_columns_of_any_name_and_any_numbers_can_be_in_the_item_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    worth = np.random.default_rng(1).permutation(ITEMS).astype(float)
    columns = {
        "worth": worth,
        "unit price": worth,
        "x" * 65: worth,
        "hash": (worth * 1e15 + 2**60).astype(np.int64),
        "ratio": np.select([worth < 9, worth < 18, worth < 27], [np.inf, -np.inf, 1e39], worth),
    }
    rng, tree = np.random.default_rng(3), complete_tree(np.arange(ITEMS), 4)
    odd = make_bundle(tmp_path, rng, tree, integer=False, columns=columns, max_m=32, beam_size=64)
    config = StageConfig(32, (), 20, QUICK)
    added = add_ranker(odd, open_engine(odd, "cpu"), split_of(odd), config, tmp_path / "m" / "2", {})
    assert added.manifest.ranker is not None
    assert added.manifest.ranker.features == (*RETRIEVAL, *LEAF, *HISTORY, "attribute.worth", "attribute.hash", "attribute.ratio")
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"left out of the ranker's features: 'attribute.unit price', 'attribute.{'x' * 65}'. Expected" in warning


def test_options_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ranker.toml"
    file.write_text("hidden = 7\ndropout = 0.25\n")
    config = ranker_config(file, loss="plackett-luce", seed=4, kind=None)
    assert isinstance(config, HighwayConfig)
    assert (config.hidden, config.dropout, config.loss, config.seed) == (7, 0.25, "plackett-luce", 4)
    file.write_text('kind = "linear"\nhidden = 7')
    with pytest.raises(InvalidConfig, match="hidden: got 7, expected no such key here: it is one of kind 'highway'"):
        ranker_config(file, loss="plackett-luce")


@pytest.fixture
def quick(tmp_path: Path) -> Path:
    file = tmp_path / "quick.toml"
    file.write_text("max_epochs = 2\n")
    return file


@pytest.fixture
def said_by(caplog: pytest.LogCaptureFixture) -> Callable[..., tuple[int, str]]:
    """Runs `python -m training …`; its exit status, and what it said."""
    caplog.set_level(logging.INFO)

    def call(*arguments: object) -> tuple[int, str]:
        caplog.clear()
        outcome = command(*arguments)
        return outcome.status, outcome.out + outcome.err + caplog.text

    return call


# -- commands --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def judged(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Judgements that depend on the hour, which comes with the query, and on a discount, which comes with its items."""
    rng, rows = np.random.default_rng(8), []
    for query in range(120):
        history = [f"item-{i}" for i in rng.integers(0, ITEMS, 3)]
        hour, discount = float(rng.integers(0, 24)), rng.random(ITEMS)
        for item in range(ITEMS):
            if item % 5:
                rows.append(
                    (query, history, f"item-{item}", float(discount[item] > 0.7), hour, float(discount[item]) if item % 7 else None)
                )
        rows.append((query, history, "gone", 1.0, hour, 0.5))
    file = tmp_path_factory.mktemp("judged") / "judged.parquet"
    pl.DataFrame(rows, schema=["query_id", "history", "item", "grade", "query.hour", "item.discount"], orient="row").write_parquet(file)
    return file


def test_judgements_are_read(bundle: Bundle, judged: Path) -> None:
    split = from_judgements(bundle, judged, 1)
    assert [len(part) for part in (split.train, split.valid, split.test)] == [96, 12, 12]
    assert default_features(bundle, split)[-2:] == ("query.hour", "item.discount")
    sent = split.train.caller_features_of(0)
    assert set(sent.query) == {"hour"}
    assert all(sent.items[row]["discount"] > 0.7 for row in split.train.items[0].tolist() if row in sent.items)
    assert not any("discount" in numbers for row, numbers in sent.items.items() if row % 7 == 0)


@pytest.mark.parametrize(("names", "all_are_candidates"), [(("item.discount", "leaf.norm"), False), (("query.hour", "leaf.norm"), True)])
def test_that_an_item_has_a_value_does_not_tell_that_it_was_judged(
    bundle: Bundle, judged: Path, names: tuple[str, ...], all_are_candidates: bool
) -> None:
    split = from_judgements(bundle, judged, 1)
    train, *_ = collect(bundle, open_engine(bundle, "cpu"), features_of(bundle, names, split), split, StageConfig(32, names, 96, QUICK))
    rows = train.rows_BM[train.rows_BM != NO_ITEM]
    assert (rows % 5 == 0).any() == all_are_candidates  # these were not judged
    assert (rows % 7 == 0).any()  # these were judged without a discount
    assert len(rows) == len(train.ranking.grades_R)


@pytest.mark.parametrize(
    ("kind", "queries", "expected"),
    [
        ("vector", [[0.5] * 4], None),
        ("vector", [[0.5] * 4, [0.5] * 5], r"query_id 1, vector: got '5 numbers', expected 4 numbers"),
        ("vector", [[0.5, None, 1.0, 1.0]], r"row 0 \(from 0\), vector: got .*, expected lists of numbers, without null"),
        ("vector", ["a"], "vector: got 'String', expected a column of lists of numbers"),
        ("features", [{"indices": [1], "values": [2.0]}], None),
        ("features", [{"indices": [1, 2], "values": [2.0]}], r"query_id 0, features\.values: got '1 numbers', expected 2"),
        ("features", [{"indices": [None], "values": [2.0]}], r"row 0 \(from 0\), features: got .*, without null"),
        ("features", [{"idx": [1]}], r"row 0 \(from 0\), features: got .*, expected structs of two lists, indices"),
    ],
)
def test_queries_of_judgements_are_checked(tmp_path: Path, kind: str, queries: list[Any], expected: str | None) -> None:
    rng = np.random.default_rng(1)
    if kind == "vector":
        bundle = make_bundle(tmp_path, rng, complete_tree(rng.permutation(8), 2), kind="vector", name="vectors")
    else:
        bundle = make_linear_bundle(tmp_path, rng, random_tree(rng, 3, 2), Ranking(own="log_activation", gamma=1))
    rows = [{"query_id": q, kind: queries[q % len(queries)], "query.q": q, "item": "item-1", "grade": 1} for q in range(20)]
    pl.DataFrame(rows).write_parquet(tmp_path / "judged.parquet")
    with nullcontext() if expected is None else pytest.raises(InvalidData, match=expected):
        assert len(from_judgements(bundle, tmp_path / "judged.parquet", 1).train) == 16


def test_ids_of_histories_that_the_catalogue_lacks_are_counted(
    bundle: Bundle, judged: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pl.read_parquet(judged).with_columns(pl.lit(["item-1", "X1"]).alias("history")).write_parquet(tmp_path / "some.parquet")
    from_judgements(bundle, tmp_path / "some.parquet", 1)
    assert "some.parquet, history: 120 of 240 are not in the catalogue" in caplog.text


def test_a_query_under_several_ids_is_in_one_split(bundle: Bundle, tmp_path: Path) -> None:
    rows = [
        {"query_id": f"{q}-{copy}", "history": [f"item-{q}"], "query.hour": copy // 2, "item": "item-1", "grade": 1.0}
        for copy in range(4)
        for q in range(20)
    ]
    pl.DataFrame(rows).write_parquet(tmp_path / "repeated.parquet")
    split = from_judgements(bundle, tmp_path / "repeated.parquet", 1)
    keys = [
        [(part.queries.array[b].tobytes(), part.caller_features_of(b).query["hour"]) for b in range(len(part))]
        for part in (split.train, split.valid, split.test)
    ]
    assert [len(part) for part in keys] == [64, 8, 8]
    assert sum(len(set(part)) for part in keys) == len(set().union(*keys)) == 40
    pl.DataFrame(rows).with_columns(history=["item-1"]).write_parquet(tmp_path / "few.parquet")
    with pytest.raises(InvalidData, match="got '2 different queries', expected at least 10"):
        from_judgements(bundle, tmp_path / "few.parquet", 1)


def test_from_judgements_to_an_answer(bundle: Bundle, judged: Path, tmp_path: Path, said_by: Callable[..., tuple[int, str]]) -> None:
    options = tmp_path / "ranker.toml"
    options.write_text("max_epochs = 8\nlearning_rate = 0.5\n")
    out = tmp_path / "models" / "shop" / "1"
    given = ("--model", bundle.path, "--out", out, "--judgements", judged, "--config", options)
    status, said = said_by("fit-ranker", *given, "--depth", 32, "--function", "linear")
    assert status == 0, said
    assert f"wrote {out}" in said
    with run(tmp_path / "models", lambda opened: open_engine(opened, "cpu")) as running:
        query = {"history": ["item-1"], "item_features": {"item-3": {"discount": 1.0}, "item-4": {"discount": 0.0}}}
        body = {"model": "shop", "queries": [query], "m": 32, "rerank": True}
        answer = running.client.post("/retrieve", json=body)
        places = [item["id"] for item in answer.json()["results"][0]["items"]]
        assert isinstance(answer, httpx.Response)
    before = {name: places.index(name) for name in ("item-3", "item-4") if name in places}
    assert before.get("item-3", -1) < before.get("item-4", 99)

    file = tmp_path / "rows.json"
    status, said = said_by("evaluate", "--model", out, "--beam", 64, "--m", "5,10", "--rerank", "--json", file)
    assert status == 0, said
    assert "best 32 re-ranked" in said
    (warning,) = json.loads(file.read_text())["warnings"]
    assert warning.startswith("re-ranked without query.hour, item.discount: held-out queries have no")
    assert f"WARNING: {warning}" in said
    rows = json.loads(file.read_text())["rows"]
    assert [(row["m"], row["rerank_depth"]) for row in rows] == [(5, 32), (10, 32)]
    assert all(row["rerank_ms_per_query"] > 0 and 0 <= row["ndcg"] <= 1 for row in rows)
    status, _ = said_by("evaluate", "--model", out, "--beam", 64, "--m", "5,10", "--json", file)
    assert all("rerank_depth" not in row and "ndcg" in row for row in json.loads(file.read_text())["rows"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["evaluate", "--rerank"], "--rerank: got true, expected a model with a ranker"),
        (["evaluate", "--depth", 3], "--depth: got 3, expected --rerank with it"),
        (["fit-ranker", "--out", "models/x/0"], "a version number of at least 1"),
        (
            ["fit-ranker", "--out", "OUT", "--judgements", "JUDGED", "--users", "validation"],
            "--users: got 'validation', expected no such option",
        ),
        (["fit-ranker", "--out", "OUT", "--judgements", "nowhere.parquet"], "a readable Parquet file"),
        (["fit-ranker", "--out", "OUT", "--judgements", "JUDGED", "--seed", 2**70], "seed: got 1180591620717411303424, expected"),
        (["fit-ranker", "--out", "OUT", "--judgements", "JUDGED", "--config", "WIDE"], "hidden: got 4097, expected"),
        (["fit-ranker", "--out", "OUT", "--judgements", "JUDGED", "--depth", 400], "--depth: got 400, expected 2 to 32"),
        (["fit-ranker", "--out", "OUT"], "expected a model that was trained here"),
    ],
)
def test_wrong_options_are_named(
    bundle: Bundle, judged: Path, tmp_path: Path, arguments: list[Any], expected: str, said_by: Callable[..., tuple[int, str]]
) -> None:
    places = {"OUT": tmp_path / "m" / "1", "JUDGED": judged, "WIDE": written_toml(tmp_path / "wide.toml", {"hidden": 4097})}
    status, said = said_by(*(places.get(argument, argument) for argument in arguments), "--model", bundle.path)
    assert status == 1
    assert expected in said


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (pl.col("grade").cast(pl.String), "a column of numbers"),
        (pl.lit(-1.0).alias("grade"), r"row 0 \(from 0\), grade: got -1.0, expected a number from 0 to 32"),
        (pl.lit(1030.0).alias("grade"), r"row 0 \(from 0\), grade: got 1030.0, expected a number from 0 to 32"),
        (pl.lit("item-1").alias("item"), "item: got .item-1., expected each item once for a query"),
        (pl.lit("0").alias("query_id"), "at least 10"),
        (
            pl.when(pl.int_range(pl.len()) != 3).then("query_id").alias("query_id"),
            r"row 3 \(from 0\), query_id: got null, expected a value",
        ),
        (pl.concat_list("query_id").alias("query_id"), r"query_id: got 'List\(.*\)', expected a column of texts or numbers"),
        (pl.concat_list("item").alias("item"), r"item: got 'List\(String\)', expected a column of ids"),
        (pl.lit("item-1").alias("history"), "history: got 'String', expected a column of lists of item ids"),
        (pl.lit([["item-1"]]).alias("history"), r"history: got 'List\(List\(String\)\)', expected a column of lists of item ids"),
        (pl.lit(None).alias("history"), r"row 0 \(from 0\), history: got null, expected a value"),
        (
            pl.lit(["item-1", None]).alias("history"),
            r"row 0 \(from 0\), history: got \['item-1', None\], expected lists of item ids, without null",
        ),
        (pl.lit(["X1", "X2"]).alias("history"), r"history: got \['X1', 'X2', 'X1'\], expected ids of the catalogue's items"),
        (pl.lit([1, 2]).alias("history"), r"history: got \['1', '2', '1'\], expected ids of the catalogue's items"),
        (pl.when(pl.int_range(pl.len()) != 3).then("item").alias("item"), r"row 3 \(from 0\), item: got null, expected a value"),
        (
            pl.when(pl.int_range(pl.len()) == 1).then(["nobody"]).otherwise("history").alias("history"),
            "query_id .*, history: got .*nobody.*, expected the same in all rows of a query",
        ),
        (
            pl.when(pl.int_range(pl.len()) == 1).then(99.0).otherwise("query.hour").alias("query.hour"),
            r"query_id .*, query\.hour: got .*99\.0.*, expected the same in all rows of a query",
        ),
        (pl.col("item").alias("query.name"), "query.name"),
        (pl.lit("nothing").alias("item"), "item: got .*nothing.*, expected ids of the catalogue's items, such as 'item-"),
        (
            pl.when(pl.int_range(pl.len()) == 1).then(np.inf).otherwise(1.0).alias("item.x"),
            r"row 1 \(from 0\), item\.x: got inf, expected a finite 32-bit number",
        ),
        (pl.lit(1e39).alias("item.x"), r"row 0 \(from 0\), item\.x: got 1e\+39, expected a finite 32-bit number"),
    ],
)
def test_wrong_judgements_are_named(bundle: Bundle, judged: Path, tmp_path: Path, change: pl.Expr, expected: str) -> None:
    frame = pl.read_parquet(judged).with_columns(change)
    if expected == "at least 10":
        frame = frame.unique("item", keep="first", maintain_order=True).with_columns(history=["item-1"])
    frame.write_parquet(tmp_path / "wrong.parquet")
    with pytest.raises(InvalidData, match=expected):
        from_judgements(bundle, tmp_path / "wrong.parquet", 1)
    pl.read_parquet(judged).drop("grade").write_parquet(tmp_path / "lacking.parquet")
    with pytest.raises(InvalidData, match="a column 'grade'"):
        from_judgements(bundle, tmp_path / "lacking.parquet", 1)


def test_from_a_log_of_histories(tmp_path: Path, quick: Path, said_by: Callable[..., tuple[int, str]]) -> None:
    rng = np.random.default_rng(4)
    lines = ["user,item"]
    for user in range(120):
        items = rng.permutation(12)[:10]
        lines += [f"u{user},i{item * 4 + user % 4}" for item in (*items, *items[:3])]  # three are bought twice
    log = tmp_path / "log.csv"
    log.write_text("\n".join(lines) + "\n")
    raw = {
        "kind": "otm-robust",
        "name": "any",
        "data": {"log": str(log)},
        "instances": {"windows": [8]},
        "scorer": {"kind": "product", "node_dim": 8},
        "optimiser": {"steps": 20, "batch": 30},
        "search": {"beam_size": 48, "m": 10, "max_beam_size": 64, "max_m": 48},
    }
    model = tmp_path / "models" / "songs" / "1"
    status, said = said_by("fit", "--config", written_toml(tmp_path / "model.toml", raw), "--out", model)
    assert status == 0, said
    out = model.parent / "2"
    common = ("fit-ranker", "--model", model, "--config", quick, "--depth", 30)
    status, said = said_by(*common, "--out", out)  # whose lists it learns from is not said
    assert status == 0, said
    assert "the ranker learns from 6 validation users, 6 choose when it ends" in said
    ranked = Bundle.open(out)
    assert ranked.manifest.ranker is not None
    assert (ranked.manifest.ranker.training["users"], ranked.manifest.ranker.training["queries"]) == ("validation", 6)
    assert len(ranked.golden()) > 0
    assert verify_ranker(ranked, Reranker(ranked)) < 1e-3
    split = from_log(ranked, None, "validation", False)
    whole = from_log(ranked, None, "training", True)
    assert (len(split.train) + len(split.valid), len(split.test)) == (12, 12)
    assert (len(whole.train), len(whole.valid), len(whole.test)) == (96, 12, 12)
    for part in (whole.train, whole.test):
        assert part.seen is not None
        assert not any(np.isin(items, seen).any() for items, seen in zip(part.items, part.seen, strict=True))
    log.write_text("\n".join(lines[:-10]) + "\n")
    status, said = said_by(*common, "--out", model.parent / "3")
    assert status == 1
    assert "the one that the model was trained on" in said


def test_from_a_log_of_texts(tmp_path: Path, quick: Path, said_by: Callable[..., tuple[int, str]]) -> None:
    shop = tmp_path / "models" / "shop"
    config = write_shop(tmp_path, data={"own_texts": []}, tree={"branching": 3, "max_leaf": 4}, search={"max_m": 18})
    status, said = said_by("fit", "--config", config, "--out", shop / "1")
    assert status == 0, said
    status, said = said_by("fit-ranker", "--model", shop / "1", "--out", shop / "2", "--config", quick, "--depth", 12)
    assert status == 0, said
    assert "training queries, which the model was trained on" in said
    ranker = Bundle.open(shop / "2").manifest.ranker
    assert ranker is not None
    assert ranker.training["users"] == "training"
    columns = ("title", "colour")
    assert ranker.features == (*RETRIEVAL, *(prefix + column for column in columns for prefix in TEXT), "attribute.price")
    for option in (("--users", "validation"), ("--exclude-seen",)):
        status, said = said_by("fit-ranker", "--model", shop / "1", "--out", shop / "3", *option)
        assert status == 1
        assert option[0] in said
    bundle = Bundle.open(shop / "1")
    rows = [
        {"query_id": spelling(f"red{q} lamp"), "text": spelling(f"red{q} lamp"), "item": bundle.items.ids_of(np.arange(1))[0], "grade": 1}
        for spelling in (str, str.upper, "{}!".format)
        for q in range(9)
    ]
    pl.DataFrame(rows).write_parquet(tmp_path / "spelt.parquet")
    with pytest.raises(InvalidData, match="got '9 different queries'"):
        from_judgements(bundle, tmp_path / "spelt.parquet", 1)
