"""What a shard leaves to its router, and whose requests it takes."""

from __future__ import annotations

import logging
import shutil
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
from tests.service.shards.cutting import cut, queries_of, query_for

open_cpu = partial(open_engine, device="cpu")
KEYS = {"admin": "admin-key-of-the-test", "write": "write-key-of-the-test", "retrieve": "retrieve-key-of-it"}


@pytest.fixture(scope="module")
def folder(whole: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two shards and a model that is whole."""
    folder = tmp_path_factory.mktemp("models")
    cut(whole, folder)
    shutil.copytree(whole.path.parent, folder / "books")
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
        ("POST", "/retrieve/stream", LINE),
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
    refusal = answer.json() if path == "/retrieve/stream" else problem(answer)  # of its only line
    assert refusal["status"] == 409
    assert refusal["detail"] == "'1' is shard 1 of 2 of books version 1: a part of a catalogue. Ask the router of 'books' instead."
    if "model" in more.get("json", {}):
        more["json"]["model"] = "books"
    right = service.client.request(method, path.replace("/1/", "/books/"), **more)
    assert right.status_code != 409 or "router" not in right.text


@pytest.mark.parametrize("path", ["/models", "/models/1", "/models/1/items?prefix=item", "/models/1/tree/0", "/readyz", "/metrics"])
def test_what_a_shard_can_say_of_itself_it_says(service: Running, path: str) -> None:
    assert service.client.get(path).status_code == 200


def test_a_shard_takes_no_live_items_though_its_engine_would(service: Running) -> None:
    registry = service.app.state.service.registry
    whole, shard = (registry.entries[name].loaded.live for name in ("books", "1"))
    assert whole.refused is None
    assert shard.refused == "version 1 on compiled-cpu takes no live items"


def test_the_probe_leaves_shards_out(service: Running) -> None:
    registry = service.app.state.service.registry
    assert Probe(registry, service.app.state.service.metrics, 1.0).ready() == [("books", 1)]


def test_a_search_is_logged_under_the_routers_request_id_and_trace(whole: Bundle, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    more = {"content-type": MEDIA_TYPE, "x-request-id": "from-a-router", "traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    query = query_for(whole, Bundle.open(folder / "1" / "1"), queries_of(whole), SearchParams.uniform(3, 4, 5))
    with run(folder, open_cpu, log_requests="all") as service, caplog.at_level(logging.INFO, "service.requests"):
        answer = service.client.post("/internal/search", content=encode_query(query), headers=more)
    assert answer.headers["x-request-id"] == "from-a-router"
    fields = next(vars(record)["fields"] for record in caplog.records if record.name == "service.requests")
    wanted = {"request_id": "from-a-router", "trace_id": trace, "path": "/internal/search", "status": 200, "model": "1", "version": 1}
    wanted |= {"queries": 3, "m": 5, "beam_size": 4}
    assert wanted.items() <= fields.items()
    assert {"queue_ms", "encode_ms", "search_ms", "serialise_ms"} <= fields.keys()
