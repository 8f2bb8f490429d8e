"""What held-out queries and customers' queries a service shows, and that they are queries which it answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pytest

from benchmarks.random_bundles import make_linear_bundle
from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.manifest import Ranking
from espalier.tree import complete_tree
from service.http import console_routes
from service.http.console_routes import heldout_queries
from service.retrieval.schemas import Query
from service.watch.query_samples import MAX_BYTES, PER_REQUEST, QUERY_BYTES, QuerySamples, as_json
from tests.service.exported_models import HELD_OUT, exported
from tests.service.running import Json, Running, bearer, run

ADMIN = "an-admin-key-of-tests"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return exported(tmp_path_factory.mktemp("heldout"), np.random.default_rng(5))


@pytest.fixture(scope="module")
def measured(bundle: Bundle) -> Iterator[Running]:
    with run(bundle.path.parents[1], lambda opened: open_engine(opened, "cpu")) as started:
        yield started


def shown(running: Running, **params: int) -> list[Json]:
    answer = running.client.get("/models/books/heldout", params=params)
    assert answer.status_code == 200, answer.text
    found: list[Json] = answer.json()["queries"]
    return found


# -- held-out queries -----------------------------------------------------------------------------------------------------


def test_all_queries_come_with_what_they_should_find(measured: Running, bundle: Bundle) -> None:
    table = bundle.heldout().to_pylist()
    assert len(table) == HELD_OUT
    wanted = [
        {"query": {"history": row["history"]}, "relevant": row["relevant"], "recall": {m: row[f"recall@{m}"] for m in ("2", "5")}}
        for row in table
    ]
    assert shown(measured, limit=1000) == wanted
    assert shown(measured) == [wanted[i] for i in np.linspace(0, HELD_OUT - 1, 20).astype(int)]
    assert shown(measured, limit=1) == [wanted[0]]


def test_they_are_queries_that_the_service_takes_and_finds_what_it_found_at_export(measured: Running) -> None:
    for one in shown(measured, limit=5):
        items = measured.retrieve(queries=[one["query"]], m=5, beam_size=8)["results"][0]["items"]
        found = {item["id"] for item in items}
        assert len(found & set(one["relevant"])) / len(set(one["relevant"])) == pytest.approx(one["recall"]["5"])


def test_features_are_queries_too_and_unknown_relevant_items_are_left_out(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    features = [{"indices": [i], "values": [0.5]} for i in range(3)]
    kind = pa.struct({"indices": pa.list_(pa.int64()), "values": pa.list_(pa.float32())})
    relevant = [["item-1", "no-item"], ["no-item"], ["item-2"]]
    table = pa.table({"features": pa.array(features, kind), "relevant": pa.array(relevant)})
    make_linear_bundle(tmp_path, rng, complete_tree(rng.permutation(8), 2), Ranking(own="log_activation", gamma=1.0), heldout=table)
    with run(tmp_path, lambda opened: open_engine(opened, "cpu")) as running:
        found = running.client.get("/models/linear/heldout").json()["queries"]
        assert found == [
            {"query": {"features": features[0]}, "relevant": ["item-1"], "recall": {}},
            {"query": {"features": features[2]}, "relevant": ["item-2"], "recall": {}},
        ]
        body = {"model": "linear", "queries": [one["query"] for one in found]}
        assert running.client.post("/retrieve", json=body).status_code == 200


def test_the_list_ends_where_it_is_large(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = heldout_queries(bundle, 1000)
    monkeypatch.setattr(console_routes, "MAX_HELDOUT_BYTES", sum(map(len, whole[:3])))
    assert heldout_queries(bundle, 1000) == whole[:4]


# -- customers' queries: only where a setting asks for them, in memory, bounded --------------------------------------------


def query(**fields: object) -> Query:
    return Query.model_validate(fields)


@pytest.mark.settings(admin_keys=ADMIN, sample_queries=2)
def test_the_newest_queries_of_customers_are_kept(running: Running) -> None:
    def body(*items: str) -> Json:
        return {"model": "books", "queries": [{"history": [item]} for item in items]}

    def kept(params: str = "") -> Json:
        found: Json = running.client.get(f"/models/books/samples{params}", headers=bearer(ADMIN)).json()
        return found

    running.client.post("/retrieve", json=body("item-1", "item-2", "item-3"))
    running.client.post("/retrieve", json=body("item-4"), headers={"Espalier-Priority": "background"})
    running.client.post("/retrieve", json=body("item-5") | {"m": 10**6})  # is refused
    assert [one["query"] for one in kept()["queries"]] == [{"history": ["item-3"]}, {"history": ["item-2"]}]
    assert {one["version"] for one in kept()["queries"]} == {1}
    assert kept()["most"] == 2
    assert [one["query"] for one in kept("?limit=1")["queries"]] == [{"history": ["item-3"]}]
    assert kept("?version=2")["queries"] == []
    running.retrieve(queries=[kept()["queries"][0]["query"]])


def test_samples_are_bounded_in_number_bytes_and_by_request() -> None:
    samples = QuerySamples(10_000, lambda: 1.0)
    samples.note("books", 1, [query(text="x" * QUERY_BYTES)])  # too large
    samples.note("books", 1, [query(text=str(i)) for i in range(100)])
    assert len(samples.of("books", 1000)) == PER_REQUEST
    for _ in range(2 * MAX_BYTES // 60_000):
        samples.note("books", 1, [query(text="x" * 60_000)])
    kept = samples.of("books", 10_000)
    assert MAX_BYTES - 61_000 < sum(len(one.query) for one in kept) <= MAX_BYTES
    few = QuerySamples(3)
    for i in range(10):
        few.note("books", 1, [query(text=str(i))])
    assert [orjson.loads(one.query)["text"] for one in few.of("books", 10)] == ["9", "8", "7"]


def test_what_was_not_set_is_not_shown() -> None:
    samples = QuerySamples(1, lambda: 12.5)
    samples.note("books", 3, [query(history=["a"], exclude_seen=True)])
    kept = {"at": 12.5, "version": 3, "query": {"history": ["a"], "exclude_seen": True}}
    assert orjson.loads(as_json(samples.of("books", 1), 1)) == {"queries": [kept], "most": 1}
