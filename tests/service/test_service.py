"""The HTTP interface, over a fake engine."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from espalier.bundle import Bundle
from espalier.search import Engine
from service.app import create_app
from service.models.loading import EngineSource
from service.settings import Settings
from tests.service.conversation import Conversation
from tests.service.fake_engine import FakeEngine
from tests.service.models.registry import damage
from tests.service.running import ITEMS, LIMITS, Json, Running, ids, problem, run, started


@pytest.fixture(scope="module")
def shared(models: Path) -> Iterator[Running]:
    with run(models, max_history=50, max_queries=8, max_body_bytes=20_000) as running:
        yield running


def test_one_query(shared: Running) -> None:
    default = shared.retrieve(queries=[{"history": []}])["results"][0]
    assert (len(default["items"]), default["beam_size"]) == (LIMITS["m"], LIMITS["beam_size"])
    answer = shared.retrieve(queries=[{"history": ["item-3", "item-5"]}], m=3, beam_size=10)
    assert (answer["model"], answer["version"], answer["engine"]) == ("books", 1, "fake")
    assert answer["results"] == [
        {
            "items": [{"id": "item-0", "score": 1.0}, {"id": "item-1", "score": 0.5}, {"id": "item-2", "score": 0.33333334}],
            "complete": True,
            "beam_size": 10,
            "degraded": False,
            "unknown": [],
        }
    ]
    timing = answer["timing"]
    assert set(timing) == {"queue_ms", "encode_ms", "search_ms", "rerank_ms", "serialise_ms", "total_ms", "ms_per_query", "batch"}
    assert timing["batch"] == 1
    assert timing["ms_per_query"] == timing["search_ms"] > 0
    assert timing["total_ms"] >= timing["encode_ms"] + timing["search_ms"] + timing["serialise_ms"]
    queries, params = shared.engines["books"].calls[-1]
    assert queries.array.tolist() == [[-1, -1, -1, 3, 5]]
    assert (params.beam_size_B.tolist(), params.m_B.tolist(), params.exclude_BE) == ([10], [3], None)


def test_many_queries_each_with_its_own_exclusions(shared: Running) -> None:
    queries: list[Json] = [
        {"history": ["item-0", "item-1"], "exclude_seen": True},
        {"history": ["item-0"], "exclude": ["item-2", "item-0"]},
        {"history": ["item-0"], "exclude_seen": False},
        {"history": ["item-1"], "exclude": ["item-0"], "exclude_seen": True},
    ]
    answer = shared.retrieve(queries=queries, m=2)
    assert [ids(result) for result in answer["results"]] == [
        ["item-2", "item-3"],
        ["item-1", "item-3"],
        ["item-0", "item-1"],
        ["item-2", "item-3"],
    ]
    assert answer["timing"]["batch"] == 4
    assert answer["timing"]["ms_per_query"] == pytest.approx(answer["timing"]["search_ms"] / 4, abs=1e-4)


def test_unknown_ids_are_listed_and_models_say_what_they_take(shared: Running) -> None:
    query = {"history": ["gone", "item-7", "gone", "ünknown"], "exclude": ["item-1", "never", "gone"], "exclude_seen": True}
    result = shared.retrieve(queries=[query, {"history": ["item-1"]}], m=2)["results"]
    assert (result[0]["unknown"], result[1]["unknown"]) == (["gone", "ünknown", "never"], [])
    assert ids(result[0]) == ["item-0", "item-2"]
    assert shared.engines["books"].calls[-1][0].array[0].tolist() == [-1, -1, -1, -1, 7]
    for history in ([], ["gone"], [""]):  # a cold user gets items
        found = shared.retrieve(queries=[{"history": history}])["results"][0]
        assert (len(found["items"]), found["unknown"]) == (4, history)
        assert shared.engines["books"].calls[-1][0].array.tolist() == [[-1] * 5]
    listed = shared.client.get("/models").json()["models"]
    assert [entry["name"] for entry in listed] == ["books", "points"]
    books = shared.client.get("/models/books").json()
    assert books == listed[0]
    assert books["state"] == "ready"
    assert books["engine"] == "fake"
    assert books["query"] == {"kind": "history", "length": 5}
    assert books["search"] == LIMITS | {"min_beam_size": None}
    assert books["max_queries"] == 8
    assert books["tree"]["items"] == ITEMS
    assert books["fields"] == ["id", "title"]


def test_min_score_trims_fields_come_with_items_and_vectors_are_queries(shared: Running) -> None:
    result = shared.retrieve(queries=[{"history": []}, {"history": [], "exclude": ["item-0"]}], m=4, min_score=0.4)["results"]
    assert [ids(found) for found in result] == [["item-0", "item-1"], ["item-1", "item-2"]]
    assert [found["complete"] for found in result] == [True, True]
    result = shared.retrieve(queries=[{"history": []}, {"history": []}], m=2, fields=["title", "id"])["results"]
    for found in result:
        assert [item["fields"] for item in found["items"]] == [{"title": f"Title {i}", "id": f"item-{i}"} for i in range(2)]
    answer = shared.client.post("/retrieve", json={"model": "points", "queries": [{"vector": [1, 2.5, -3, 0]}], "m": 2})
    assert answer.status_code == 200
    queries, _ = shared.engines["points"].calls[-1]
    assert queries.array.tolist() == [[1, 2.5, -3, 0]]


COLD: Json = {"history": []}


NAN, INFINITY = float("nan"), float("inf")
WRONG: dict[str, list[Any]] = {
    "m": [0, "5", 5.5, 5.0, True, LIMITS["max_m"] + 1, 10**30],
    "beam_size": [0, LIMITS["max_beam_size"] + 1, []],
    "min_score": [1.1, -0.1, "0.5", NAN],
    "fields": ["title", ["title"] * 3],
    "version": [0],
    "model": [3, None],
    "timeout_ms": [0, -1, 1e9, INFINITY],
    "rerank": [True],
    "explain": [1],
    "explain_items": [["x"] * 9],
    "filter": [[]],
    "exclude_filter": [{"id": ["x"] * 1001}],
    "queries": [[], {}, [COLD] * 9, [{}] * 4097],
}
WRONG_INSIDE: list[tuple[Json, str]] = [
    ({"fields": ["title", "price"]}, "fields[1]"),
    ({"fields": ["__hash"]}, "fields[0]"),
    ({"filter": {"price": [1]}}, "filter.price"),
    ({"filter": {"title": "Title 1"}}, "filter.title"),
    ({"filter": {"title": []}}, "filter.title"),
    ({"filter": {"title": {"min": 1}}}, "filter.title"),
    ({"filter": {"title": ["Title 1", 2]}}, "filter.title[1]"),
    ({"exclude_filter": {"id": [None]}}, "exclude_filter.id[0]"),
    ({"\ud800": 1}, "body"),
    ({"queries": [{"history": ["\ud800"]}]}, "body"),
    ({"queries": [COLD, {"history": ["a", "b", "c", 4]}]}, "queries[1].history[3]"),
    ({"queries": [COLD, {"vector": [0, 0, 0, 0]}]}, "queries[1]"),
    ({"model": "points"}, "queries[0]"),
]
WRONG_QUERIES: list[tuple[Any, str]] = [
    (1, ""),
    (None, ""),
    ({}, ".history"),
    ({"history": [], "vector": []}, ""),
    ({"text": "a book"}, ""),
    *(({"history": wrong}, ".history") for wrong in (None, "item-1", ["x"] * 51)),
    ({"history": [True]}, ".history[0]"),
    ({"history": [], "exclude": ["x"] * 51}, ".exclude"),
    ({"history": [], "exclude": [None]}, ".exclude[0]"),
    *(({"history": [], "exclude_seen": wrong}, ".exclude_seen") for wrong in ("yes", 1)),
    ({"words": "a book"}, ".words"),
    ({"features": {"indices": [1], "values": [1.0]}}, ""),
    ({"features": {"indices": [1.5], "values": [1.0]}}, ".features.indices[0]"),
]
WRONG_VECTORS: list[tuple[Json, str]] = [
    *(({"vector": wrong}, ".vector") for wrong in ([1, 2, 3], [1, 2, 3, 1e300])),
    *(({"vector": wrong}, ".vector[3]") for wrong in ([1, 2, 3, "4"], [1, 2, 3, -INFINITY])),
    ({"vector": [1, 2, True, 4]}, ".vector[2]"),
    ({"vector": [1, NAN, 3, 4]}, ".vector[1]"),
    ({"vector": [1, 2, 3, 4], "exclude_seen": True}, ".exclude_seen"),
]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        *(({field: value}, field) for field, values in WRONG.items() for value in values),
        *WRONG_INSIDE,
        *(({"queries": [query]}, f"queries[0]{field}") for query, field in WRONG_QUERIES),
        *(({"model": "points", "queries": [query]}, f"queries[0]{field}") for query, field in WRONG_VECTORS),
    ],
)
def test_a_wrong_value_is_422_and_names_the_field(shared: Running, body: Json, field: str) -> None:
    content = json.dumps({"model": "books", "queries": [COLD]} | body)
    answer = shared.client.post("/retrieve", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == problem(answer)["status"] == 422, answer.text
    errors = problem(answer)["errors"]
    assert errors[0]["field"] == field
    assert all({"field", "expected"} <= set(error) <= {"field", "value", "expected"} for error in errors)


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({"m": True}, "m", "true"),
        ({"live": None}, "live", "null"),
        ({"filter": [None, {"a": False, "ü": 1.5}]}, "filter", '[null, {"a": false, "ü": 1.5}]'),
        ({"m": "it's"}, "m", '"it\'s"'),
        ({"fields": {"a": "x" * 300}}, "fields", '{"a": "' + "x" * 192 + "…"),
        ({"explain_nodes": True}, "explain_nodes", "true"),
        ({"rerank": True}, "rerank", "true"),
        ({"rerank": {"depth": 3}}, "rerank", '{"depth": 3}'),
        ({"partial": "maybe"}, "partial", '"maybe"'),
        ({"model": "points", "queries": [{"vector": [0.0], "exclude_seen": True}]}, "queries[0].exclude_seen", "true"),
    ],
)
def test_a_wrong_value_is_spelled_as_in_json(shared: Running, body: Json, field: str, value: str) -> None:
    document = problem(shared.client.post("/retrieve", json={"model": "books", "queries": [COLD]} | body))
    assert (document["errors"][0]["field"], document["errors"][0]["value"]) == (field, value)
    assert document["detail"].startswith(f"{field}: got {value}, expected ")
    assert "'" not in document["errors"][0]["expected"]


def test_all_wrong_values_and_all_models_are_listed(shared: Running) -> None:
    answer = shared.client.post("/retrieve", json={"queries": [COLD], "m": 0, "beam_size": "9", "oops": 1})
    assert [error["field"] for error in problem(answer)["errors"]] == ["m", "beam_size", "oops"]
    assert problem(answer)["errors"][1] == {"field": "beam_size", "value": '"9"', "expected": "a valid integer"}
    answer = shared.client.post("/retrieve", json={"queries": [COLD]})
    assert problem(answer)["errors"] == [{"field": "model", "expected": "one of books, points"}]
    assert problem(answer)["detail"] == "model is missing; expected one of books, points"


@pytest.mark.parametrize(("body", "named"), [({"model": "nobody"}, "books, points"), ({"model": "books", "version": 7}, "version 1")])
def test_a_model_or_version_that_is_not_there_is_404(shared: Running, body: Json, named: str) -> None:
    answer = shared.client.post("/retrieve", json={"queries": [COLD]} | body)
    assert answer.status_code == 404
    assert named in problem(answer)["detail"]


async def test_a_client_that_hangs_up_while_it_waits_never_reaches_the_engine(running: Running) -> None:
    engine = running.engines["books"]
    batcher = running.app.state.service.registry.choose("books", None).batcher
    engine.go.clear()
    stays = asking(running, "item-1")
    assert await asyncio.to_thread(engine.started.wait, 10)
    goes = asking(running, "item-2")
    while batcher.depth < 1:
        await asyncio.sleep(0)
    await goes.leave()
    assert await goes.head() == 499
    engine.go.set()
    assert await stays.head() == 200
    assert await asking(running, "item-3").head() == 200
    assert [queries.array[:, -1].tolist() for queries, _ in engine.calls] == [[1], [3]]
    assert 'espalier_requests_total{model="books",status="499"} 1.0' in (await running.client.http.get("/metrics")).text


async def test_a_client_that_hangs_up_inside_its_body_is_no_failure(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    goes = asking(running, "item-1", more=True)
    await goes.leave()
    assert await goes.head() == 499
    assert running.engines["books"].calls == []
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def asking(running: Running, item: str, more: bool = False) -> Conversation:
    """A request whose client stays until it leaves. more: the body has not come to its end."""
    talk = Conversation(running, "/retrieve", {"Content-Type": "application/json"})
    talk.say(orjson.dumps({"model": "books", "queries": [{"history": [item]}]}), more=more)
    return talk


def test_a_failure_is_500_for_that_call_only_and_shows_no_internals(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise IndexError("index 3 of secret")

    running.engines["books"].failure = RuntimeError("secret pointer 0xdead")
    failed = running.client.post("/retrieve", json={"model": "books", "queries": [COLD]})
    running.retrieve(queries=[COLD])
    monkeypatch.setattr("service.http.routes.describe", fail)
    unexpected = running.client.get("/models", headers={"X-Request-Id": "find-me"})
    for answer in (failed, unexpected):
        assert answer.status_code == problem(answer)["status"] == 500
        assert "secret" not in answer.text
    assert "secret pointer" in caplog.text
    assert unexpected.headers["x-request-id"] == "find-me"
    assert "request find-me failed" in caplog.text


def test_request_ids_are_kept_when_sane_and_made_otherwise(shared: Running) -> None:
    def given(value: str) -> str:
        return shared.client.get("/livez", headers={"X-Request-Id": value}).headers["x-request-id"]

    assert given("a1-B.c_9") == "a1-B.c_9"
    for strange in ("", "x" * 129, "a b", "<script>"):
        assert given(strange) not in ("", strange)
    made = [shared.client.get("/nowhere").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]


def test_the_service_is_live_before_it_is_ready(models: Path) -> None:
    let_go = threading.Event()

    def open_late(bundle: Bundle, device: str, engine: str | None, threads: int, precision: str) -> Engine:
        assert let_go.wait(10)
        return FakeEngine(bundle.tree.item_count)

    app = create_app(Settings(models=models), EngineSource(open_late))
    with started(app) as client:
        try:
            assert client.get("/livez").status_code == 200
            before = client.get("/readyz")
            assert before.status_code == 503
            assert before.json()["reasons"] == ["books version 1: loading", "points version 1: loading"]
            refused = client.post("/retrieve", json={"model": "books", "queries": [COLD]})
            assert refused.status_code == problem(refused)["status"] == 503
            assert "retry-after" in refused.headers
        finally:
            let_go.set()
        app.state.service.registry.wait_until_loaded()
        assert client.get("/readyz").json() == {"ready": True, "reasons": []}


def test_a_model_that_fails_does_not_stop_the_others(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models, tmp_path / "models")
    damage(tmp_path / "models" / "points" / "1")
    with run(tmp_path / "models") as running:
        ready = running.client.get("/readyz")
        assert ready.status_code == 503
        assert len(ready.json()["reasons"]) == 1
        assert "SHA-256" in ready.json()["reasons"][0]
        assert running.client.get("/models/points").json()["state"] == "failed"
        refused = running.client.post("/retrieve", json={"model": "points", "queries": [{"vector": [1, 2, 3, 4]}]})
        assert refused.status_code == 503
        running.retrieve(queries=[COLD])
    with run(tmp_path / "models", verify=False) as running:
        assert running.client.get("/readyz").status_code == 200


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("prefix=ITEM-3", ["item-3", "item-30", "item-31"]),
        ("prefix=title%202&limit=3", ["item-2", "item-20", "item-21"]),
        ("prefix=.%2A", []),
        ("limit=2", ["item-0", "item-1"]),
        ("", [f"item-{i}" for i in range(10)]),
    ],
)
def test_completion_over_ids_and_titles(shared: Running, query: str, found: Sequence[str]) -> None:
    answer = shared.client.get(f"/models/books/items?{query}").json()
    assert [item["id"] for item in answer["items"]] == found
    assert all(item["title"] == item["id"].replace("item-", "Title ") for item in answer["items"])


def test_metrics_have_the_designs_names_and_labels(models: Path) -> None:
    with run(models) as running:
        running.retrieve(queries=[COLD, COLD], m=8, beam_size=5)
        running.client.post("/retrieve", json={"model": "nobody", "queries": [COLD]})
        answer = running.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = set(answer.text.splitlines())
    assert lines >= {
        'espalier_requests_total{model="books",status="200"} 1.0',
        'espalier_requests_total{model="",status="404"} 1.0',
        'espalier_request_seconds_count{model="books"} 1.0',
        *(f'espalier_stage_seconds_count{{model="books",stage="{stage}"}} 1.0' for stage in ("queue", "encode", "search", "serialise")),
        'espalier_query_seconds_count{beam="4",engine="fake",model="books"} 1.0',
        'espalier_batch_queries_sum{model="books"} 2.0',
        'espalier_queue_depth{model="books"} 0.0',
        'espalier_incomplete_total{model="books"} 2.0',
        'espalier_model_info{engine="fake",model="books",version="1"} 1.0',
    }
    assert any(line.startswith('espalier_query_seconds_bucket{beam="4",engine="fake",le="1.5e-05"') for line in lines)
