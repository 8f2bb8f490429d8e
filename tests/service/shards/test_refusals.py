"""What a shard leaves to its router, and whose requests it takes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.search import SearchParams
from espalier.shards.messages import MEDIA_TYPE, encode_query
from service.models.probe import Probe
from tests.service.running import Running, bearer, problem, run
from tests.service.shards.cutting import cut, queries_of, query_for, whole_bundle

open_cpu = partial(open_engine, device="cpu")
KEYS = {"admin": "admin-key-of-the-test", "write": "write-key-of-the-test", "retrieve": "retrieve-key-of-it"}
INTERNAL = "internal-key-of-the-test"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return whole_bundle(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def folder(whole: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two shards and a model that is whole."""
    folder = tmp_path_factory.mktemp("models")
    cut(whole, folder)
    whole_bundle(folder)
    return folder


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Running]:
    with run(folder, open_cpu, admin_keys=(KEYS["admin"],), write_keys=(KEYS["write"],)) as running:
        yield running


ITEM: dict[str, Any] = {"json": {"fields": {}, "events": [["item-1"]]}}
LINE: dict[str, Any] = {"content": b'{"queries": [{"history": []}], "model": "1"}\n', "headers": {"content-type": "application/x-ndjson"}}


@pytest.mark.parametrize(
    ("method", "path", "more"),
    [
        ("POST", "/retrieve", {"json": {"model": "1", "queries": [{"history": []}]}}),
        ("POST", "/retrieve", {"json": {"model": "1", "version": 1, "queries": [{"history": []}]}}),
        ("POST", "/models/1/frontier", {"json": {"beam_size": [3]}}),
        ("GET", "/models/1/heldout", {}),
        ("PUT", "/models/1/items/new", ITEM),
        ("GET", "/models/1/items/new", {}),
        ("DELETE", "/models/1/items/item-1", {}),
        ("POST", "/models/1/items", {"content": b"", "headers": {"content-type": "application/x-ndjson"}}),
        ("GET", "/models/1/changes", {}),
        ("PUT", "/models/1/removed", {"json": {"ids": ["item-1"]}}),
        ("PUT", "/models/1/removed/item-1", {}),
        ("DELETE", "/models/1/removed/item-1", {}),
    ],
)
def test_what_needs_the_whole_catalogue_is_left_to_the_router(service: Running, method: str, path: str, more: dict[str, Any]) -> None:
    more = more | {"headers": more.get("headers", {}) | bearer(KEYS["admin"])}
    answer = service.client.request(method, path, **more)
    assert answer.status_code == 409, answer.text
    assert problem(answer)["detail"] == (
        "'1' is shard 1 of 2 of books version 1: a part of a catalogue. Ask the router of 'books' instead."
    )
    if "model" in more.get("json", {}):
        more["json"]["model"] = "books"
    right = service.client.request(method, path.replace("/1/", "/books/"), **more)
    assert right.status_code != 409 or "router" not in right.text


def test_each_line_of_a_stream_is_refused(service: Running) -> None:
    answer = service.client.post("/retrieve/stream", **LINE)
    assert answer.json()["status"] == 409


@pytest.mark.parametrize("path", ["/models", "/models/1", "/models/1/items?prefix=item", "/models/1/tree/0", "/readyz", "/metrics"])
def test_what_a_shard_can_say_of_itself_it_says(service: Running, path: str) -> None:
    assert service.client.get(path).status_code == 200


def test_the_probe_leaves_shards_out(service: Running) -> None:
    registry = service.app.state.service.registry
    assert Probe(registry, service.app.state.service.metrics, 1.0).ready() == [("books", 1)]


def asked(service: Running, whole: Bundle, folder: Path, key: str | None) -> tuple[int, int]:
    """The statuses of a search and of the list of shards."""
    query = query_for(whole, Bundle.open(folder / "1" / "1"), queries_of(whole), SearchParams.uniform(3, 4, 4))
    headers = {} if key is None else bearer(key)
    found = service.client.post("/internal/search", content=encode_query(query), headers=headers | {"content-type": MEDIA_TYPE})
    return found.status_code, service.client.get("/internal/shards", headers=headers).status_code


def test_without_any_key_routers_need_none(whole: Bundle, folder: Path) -> None:
    with run(folder, open_cpu) as service:
        assert asked(service, whole, folder, None) == (200, 200)


def test_where_there_are_keys_and_no_internal_one_these_routes_are_off(service: Running, whole: Bundle, folder: Path) -> None:
    for key in (None, KEYS["write"], KEYS["admin"]):
        assert asked(service, whole, folder, key) == (403, 403)
    assert "ESPALIER_INTERNAL_KEYS" in service.client.get("/internal/shards").json()["detail"]


def test_an_internal_key_searches_shards_and_nothing_else(whole: Bundle, folder: Path) -> None:
    keys: dict[str, Any] = {f"{role}_keys": (key,) for role, key in KEYS.items()}
    with run(folder, open_cpu, internal_keys=(f"router:{INTERNAL}",), **keys) as service:
        assert asked(service, whole, folder, INTERNAL) == (200, 200)
        assert asked(service, whole, folder, KEYS["admin"]) == (200, 200)
        assert asked(service, whole, folder, None) == (401, 401)
        for role in ("write", "retrieve"):
            assert asked(service, whole, folder, KEYS[role]) == (403, 403)
        body = {"model": "books", "queries": [{"history": []}]}
        assert service.client.post("/retrieve", json=body, headers=bearer(INTERNAL)).status_code == 403
        refused = service.client.post("/models/books/default", json={"version": 1}, headers=bearer(INTERNAL))
        assert problem(refused)["detail"] == "This key may search shards; this route needs an admin key."
        assert service.client.get("/models", headers=bearer(KEYS["retrieve"])).json()["keys"] == ["admin", "internal", "retrieve", "write"]


def test_an_internal_key_alone_leaves_retrieval_open(whole: Bundle, folder: Path) -> None:
    with run(folder, open_cpu, internal_keys=(INTERNAL,)) as service:
        assert asked(service, whole, folder, None) == (401, 401)
        assert service.client.post("/retrieve", json={"model": "books", "queries": [{"history": []}]}).status_code == 200


def test_a_search_is_logged_under_the_routers_request_id_and_trace(whole: Bundle, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    more = {"content-type": MEDIA_TYPE, "x-request-id": "from-a-router", "traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    query = query_for(whole, Bundle.open(folder / "1" / "1"), queries_of(whole), SearchParams.uniform(3, 4, 5))
    with run(folder, open_cpu, log_requests="all") as service, caplog.at_level(logging.INFO, "service.requests"):
        answer = service.client.post("/internal/search", content=encode_query(query), headers=more)
    assert answer.headers["x-request-id"] == "from-a-router"
    fields = next(vars(record)["fields"] for record in caplog.records if record.name == "service.requests")
    assert {
        name: fields[name] for name in ("request_id", "trace_id", "path", "status", "model", "version", "queries", "m", "beam_size")
    } == {
        "request_id": "from-a-router",
        "trace_id": trace,
        "path": "/internal/search",
        "status": 200,
        "model": "1",
        "version": 1,
        "queries": 3,
        "m": 5,
        "beam_size": 4,
    }
    assert {"queue_ms", "encode_ms", "search_ms", "serialise_ms"} <= fields.keys()
