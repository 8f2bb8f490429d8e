"""What a shard refuses: messages that are wrong or ask for too much, and those that are for another shard."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.memory_lists import MemoryLists
from espalier.queries import HistoryKind, QueryBatch, VectorKind
from espalier.search import SearchParams
from espalier.shards.messages import MEDIA_TYPE, MaskBits, ShardAnswer, ShardQuery, encode_query
from service.models.probe import Probe
from service.shards import search as search_module
from tests.service.running import Json, Running, bearer, problem, run, total
from tests.service.shards.cutting import cut, post, queries_of, query_for, search, whole_bundle

MAX_QUERIES, MAX_VALUES = 8, 200


class Limited(NamedTuple):
    """A service of two shards with low limits."""

    service: Running
    whole: Bundle
    shards: list[Bundle]

    def query(self, batch: int = 2, beam_size: int = 3, m: int = 4, shard: int = 0, **more: Any) -> ShardQuery:
        params = SearchParams.uniform(batch, beam_size, m)
        return query_for(self.whole, self.shards[shard], queries_of(self.whole, batch), params, **more)

    def taken(self, query: ShardQuery) -> ShardAnswer:
        return search(self.service, query)

    def refused(self, query: ShardQuery | bytes, status: int = 422) -> Json:
        answer = post(self.service, query)
        assert answer.status_code == status, answer.text
        return problem(answer)

    def error(self, query: ShardQuery) -> Json:
        """What is said of the first field that is wrong."""
        found: Json = self.refused(query)["errors"][0]
        return found

    def metric(self, name: str, **labels: str) -> float:
        return total(self.service.app.state.service.metrics, name, **labels) or 0.0

    def refusals(self, reason: str) -> float:
        return self.metric("espalier_shard_refused_total", reason=reason)

    def bits(self, number: int, shard: int = 0) -> MaskBits:
        return MaskBits(np.full((self.shards[shard].tree.item_count + 7) // 8, number, np.uint8))


@pytest.fixture(scope="module")
def limited(whole: Bundle, shards: list[Bundle]) -> Iterator[Limited]:
    folder = shards[0].path.parent.parent
    limits: dict[str, Any] = {"max_queries": MAX_QUERIES, "max_search_values": MAX_VALUES, "max_search_bytes": 100_000, "max_explained": 2}
    with run(folder, partial(open_engine, device="cpu"), mask_cache_bytes=3 * shards[0].tree.node_count, **limits) as service:
        yield Limited(service, whole, shards)


Changed = Callable[[ShardQuery], ShardQuery]


def but(**changed: Any) -> Changed:
    return lambda query: replace(query, **changed)


def history(rows: int, length: int = 5) -> QueryBatch:
    return QueryBatch(HistoryKind(length=length), np.full((2, length), rows))


@pytest.mark.parametrize(
    ("asked", "change"),
    [
        ({"beam_size": 64}, but()),
        ({"batch": MAX_QUERIES, "m": MAX_VALUES // MAX_QUERIES}, but()),
        ({}, but(trace=True)),
        # Numbers that the shard does not hold are harmless: nobody reads them here.
        ({}, but(memory=MemoryLists(np.array([0, 2, 3]), np.array([-5, 1 << 60, 7]), np.ones(3, np.float32)), queries=history(1 << 60))),
    ],
)
def test_what_is_within_the_limits_is_answered(limited: Limited, asked: dict[str, int], change: Changed) -> None:
    query = change(limited.query(**asked))
    answer = limited.taken(query)
    assert answer.result.count_B.min() >= 4
    assert (answer.pin, answer.engine, answer.batch, answer.engine_ms > 0) == (query.pin, "compiled-cpu", len(query.queries), True)


@pytest.mark.parametrize(
    ("field", "asked", "change"),
    [
        ("beam_size", {"beam_size": 65}, but()),
        *(("m", {}, but(m_B=np.array([4, m]))) for m in (0, -1, 1025, 1 << 62)),
        ("queries", {"batch": MAX_QUERIES + 1}, but()),
        ("m", {"batch": MAX_QUERIES, "m": MAX_VALUES // MAX_QUERIES + 1}, but()),
        ("m", {"batch": MAX_QUERIES, "beam_size": 26}, but(frontier=True)),
        ("trace", {"batch": 3}, but(trace=True)),
        ("states", {}, but(states_BLS=None)),
        ("states_BLS", {}, but(states_BLS=np.zeros((2, 1, 4), np.float32))),
        ("states_BLS", {}, but(states_BLS=np.zeros((2, 4, 9), np.float32))),
        ("states", {}, but(states_BLS=np.full((2, 4, 4), np.inf, np.float32))),
        ("states", {}, but(states_BLS=np.full((2, 4, 4), np.nan, np.float32))),
        ("exclude", {}, but(exclude_BE=np.full((2, 1), 1 << 40))),
        ("exclude", {}, but(exclude_BE=np.full((2, 1), -2))),
        ("queries", {}, but(queries=history(1 << 40), memory=None)),
        ("queries", {}, but(queries=history(-2))),
        ("kind", {}, but(queries=history(-1, length=4))),
        ("kind", {}, but(queries=QueryBatch(VectorKind(width=4), np.zeros((2, 4), np.float32)))),
        ("memory.values", {}, but(memory=MemoryLists(np.array([0, 0, 1]), np.array([9]), np.array([3e38], np.float32)))),
        ("masks", {}, but(masks=("0", None), sent_masks={(bits := MaskBits(np.zeros(99, np.uint8))).digest: bits})),
    ],
)
def test_what_is_beyond_them_or_does_not_fit_the_shard_is_refused_by_its_name(
    limited: Limited, field: str, asked: dict[str, int], change: Changed
) -> None:
    before = limited.refusals("invalid")
    assert limited.error(change(limited.query(**asked)))["field"] == field
    assert limited.refusals("invalid") == before + 1


def test_memory_may_be_large_where_its_weight_is_small(tmp_path: Path) -> None:
    """Half of the largest key, divided by the weight, is more than a float32 holds."""
    whole = whole_bundle(tmp_path / "whole", "product memory", key_weight=1e-3)
    shards = cut(whole, tmp_path / "shards")
    with run(tmp_path / "shards", partial(open_engine, device="cpu")) as service:
        memory = MemoryLists(np.array([0, 0, 1]), np.array([shards[0].tree.node_count - 1]), np.array([3e38], np.float32))
        one = Limited(service, whole, shards)
        assert one.taken(one.query(memory=memory)).result.count_B.min() >= 4


def test_masks_are_bounded_and_asked_for_where_a_shard_lacks_them(limited: Limited) -> None:
    sent = {one.digest: one for one in map(limited.bits, range(4))}
    error = limited.error(limited.query(4, masks=tuple(sent), sent_masks=sent))
    assert error == {"field": "sent", "value": '"4 masks"', "expected": "at most 3"}
    three = dict(list(sent.items())[:3])
    limited.taken(limited.query(4, masks=(*three, None), sent_masks=three))
    assert limited.error(limited.query(2, masks=(None, None), sent_masks=three))["expected"] == "at most 2"
    assert limited.metric("espalier_shard_mask_bytes", model="0") == 3 * limited.shards[0].tree.node_count
    one, other = limited.bits(255, shard=1), limited.bits(15)
    limited.taken(limited.query(masks=(other.digest, None), sent_masks={other.digest: other}))
    before = limited.refusals("unknown_masks")
    answer = post(limited.service, limited.query(shard=1, masks=(one.digest, other.digest), sent_masks={one.digest: one}))
    assert answer.status_code == 409
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == [other.digest]
    assert limited.refusals("unknown_masks") == before + 1
    limited.taken(limited.query(shard=1, masks=(one.digest, one.digest)))


@pytest.mark.parametrize(
    "changed", [{"of": "films"}, {"version": 2}, {"digest": "0" * 64}, {"index": 1 << 40}, {"index": -1}, {"count": 3}, {"of": "x" * 9999}]
)
def test_another_shard_version_or_layout_is_not_served(limited: Limited, changed: dict[str, Any]) -> None:
    before, query = limited.refusals("not_served"), limited.query()
    refusal = limited.refused(replace(query, pin=replace(query.pin, **changed)), 410)
    assert refusal["detail"].endswith("is not served here.")
    assert len(refusal["detail"]) < 300
    assert limited.refusals("not_served") == before + 1


def test_a_body_has_a_largest_size_of_its_own(limited: Limited) -> None:
    limited.refused(b"\0" * 100_000)
    limited.refused(b"\0" * 100_001, 413)
    client, json = limited.service.client, {"content-type": "application/json"}
    assert client.post("/retrieve", content=b" " * (1 << 20), headers=json).status_code == 422  # that of other routes is as it was


def test_a_deadline_that_has_passed_is_504_also_where_it_passes_while_the_answer_is_written(
    limited: Limited, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, passed_s = search_module._encode, [0.0]

    def written_late(*given: Any) -> bytes:
        passed_s[0] = 3600.0
        return written(*given)

    before = limited.refusals("late")
    limited.refused(limited.query(timeout_ms=1e-6), 504)
    monkeypatch.setattr(search_module, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + passed_s[0]))
    limited.taken(limited.query())
    monkeypatch.setattr(search_module, "_encode", written_late)
    limited.refused(limited.query(), 504)
    assert limited.refusals("late") == before + 2


def test_answers_that_are_being_made_hold_a_share_of_the_memory(limited: Limited) -> None:
    served, before = limited.service.app.state.service.registry.shards, limited.refusals("full")
    with served.room(4 * MAX_VALUES - 7):
        limited.taken(limited.query(batch=1, m=7))
        limited.refused(limited.query(batch=1, m=8), 429)
    assert limited.refusals("full") == before + 1
    limited.taken(limited.query(batch=1, m=8))


def test_random_bytes_in_a_message_are_never_an_error_of_the_service(limited: Limited) -> None:
    bits = replace(limited.bits(60), open_nodes=(np.array([3]),))
    memory = MemoryLists(np.array([0, 1, 2]), np.array([9, 30]), np.ones(2, np.float32))
    full = limited.query(masks=(bits.digest, None), sent_masks={bits.digest: bits}, memory=memory)
    bodies = [encode_query(replace(query, frontier=True)) for query in (full, limited.query())]
    rng = np.random.default_rng(0)
    statuses = set()
    logging.disable(logging.CRITICAL)
    try:
        for number in range(200):
            body = bytearray(bodies[number % 2])
            begin = int.from_bytes(body[:8], "little") + 8 if number % 4 < 2 else 0
            for _ in range(int(rng.integers(1, 5))):
                body[rng.integers(begin, len(body))] = rng.integers(0, 256)
            statuses.add(post(limited.service, bytes(body)).status_code)
    finally:
        logging.disable(logging.NOTSET)
    assert 422 in statuses
    assert statuses <= {200, 409, 410, 422, 504}


# -- what a shard leaves to its router, and whose requests it takes -------------------------------------------------------


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
    assert refusal["detail"] == '"1" is shard 1 of 2 of books version 1: a part of a catalogue. Ask the router of "books" instead.'
    if "model" in more.get("json", {}):
        more["json"]["model"] = "books"
    right = service.client.request(method, path.replace("/1/", "/books/"), **more)
    assert right.status_code != 409 or "router" not in right.text


@pytest.mark.parametrize("path", ["/models", "/models/1", "/models/1/items?prefix=item", "/models/1/tree/0", "/readyz", "/metrics"])
def test_what_a_shard_can_say_of_itself_it_says(service: Running, path: str) -> None:
    assert service.client.get(path).status_code == 200


def test_a_shard_takes_no_live_items_and_no_probe(service: Running) -> None:
    registry = service.app.state.service.registry
    whole, shard = (registry.entries[name].loaded.live for name in ("books", "1"))
    assert whole.refused is None
    assert shard.refused == "version 1 on compiled-cpu takes no live items"
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
