"""Admin routes, deadlines and overload, what is logged, and what web pages may do."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from service.watch.logs import BURST, JsonFormatter
from tests.http_servers import Received, answering
from tests.service.conversation import Conversation
from tests.service.own_time import pass_time, settled
from tests.service.running import Json, Running, bearer, counted, problem, run, small_model

ADMIN = "admin-key-00000001"
COLD: Json = {"history": []}


@pytest.mark.settings(admin_keys=ADMIN, body_timeout_s=60)
async def test_an_admin_body_that_does_not_come_is_not_waited_for(running: Running) -> None:
    headers = {"Content-Type": "application/json"} | bearer(ADMIN)
    talk = Conversation(running, "/models/books/load", headers)
    await pass_time(59)
    assert not talk.task.done()
    await pass_time(2)
    assert await talk.head() == 408


# -- deadlines and overload over HTTP ---------------------------------------------------------------------------------------


@pytest.mark.settings(timeout_ms=50)
def test_a_deadline_that_only_the_client_wanted_is_no_failure_of_the_service(running: Running) -> None:
    """In the metrics, and so in the error budget; the client gets 504 as ever, alone and in a stream."""
    running.engines["books"].go.clear()
    for only_client, timeout_ms in ((True, 1e-9), (True, 20), (False, 50), (False, 60), (False, None)):
        before = counted(running)
        body = {"model": "books", "queries": [COLD]} | ({} if timeout_ms is None else {"timeout_ms": timeout_ms})
        assert running.client.post("/retrieve", json=body).status_code == 504
        line = json.dumps(body).encode() + b"\n"
        streamed = running.client.post("/retrieve/stream", content=line, headers={"Content-Type": "application/x-ndjson"})
        assert streamed.json()["status"] == 504
        names = [f'espalier_requests_total{{model="books",status="{status}"}}' for status in ("504-client", "504")]
        grown = [counted(running).get(name, 0) - before.get(name, 0) for name in names]
        assert grown == ([2, 0] if only_client else [0, 2]), timeout_ms


def test_a_flood_of_short_deadlines_writes_few_lines(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    flood = BURST + 15
    with run(models, log_requests="failed") as running:
        for _ in range(flood):
            assert running.client.post("/retrieve", json={"model": "books", "queries": [COLD], "timeout_ms": 1e-9}).status_code == 504
        running.engines["books"].failure = RuntimeError("no")
        running.client.post("/retrieve", json={"model": "books", "queries": [COLD]})
    lines = [record.getMessage() for record in caplog.records if record.name == "service.requests"]
    written = [line for line in lines if "status=504" in line]
    left_out = [int(line.rpartition("left_out=")[2]) for line in lines if "left_out=" in line]
    assert BURST <= len(written) < flood
    assert len(written) + sum(left_out) == flood
    assert sum("status=500" in line for line in lines) == 1


def test_a_deadline_holds_while_a_mask_is_made(running: Running) -> None:
    filters = running.app.state.service.registry.choose("books", None).filters
    made, let_go = filters.mask, threading.Event()

    def slow(conditions: Any) -> Any:
        let_go.wait(10)
        return made(conditions)

    filters.mask = slow
    body: Json = {"model": "books", "queries": [COLD], "filter": {"title": ["Title 1"]}, "timeout_ms": 20}
    answer = running.client.post("/retrieve", json=body)
    let_go.set()
    assert answer.status_code == problem(answer)["status"] == 504
    assert running.client.post("/retrieve", json=body | {"m": 10**6}).status_code == 422


BODY: Json = {"model": "books", "queries": [COLD]}


async def overloaded(running: Running) -> list[asyncio.Task[httpx.Response]]:
    """Two requests, of which the engine has one and holds it."""
    engine, http = running.engines["books"], running.client.http
    engine.go.clear()
    busy = [asyncio.create_task(http.post("/retrieve", json=BODY))]
    assert await asyncio.to_thread(engine.started.wait, 10)
    busy.append(asyncio.create_task(http.post("/retrieve", json=BODY)))
    await settled()
    assert running.app.state.service.registry.choose("books", None).batcher.depth == 1
    return busy


async def answered(running: Running, busy: list[asyncio.Task[httpx.Response]]) -> None:
    running.engines["books"].go.set()
    assert [(await task).status_code for task in busy] == [200, 200]


@pytest.fixture
def one_version(tmp_path: Path) -> Iterator[Running]:
    """A body is not needed to know whose queue it is for."""
    small_model(tmp_path)
    with run(tmp_path, max_queue=1) as running:
        yield running


async def test_in_overload_a_request_is_refused_before_its_body_is_parsed(one_version: Running) -> None:
    http, headers = one_version.client.http, {"Content-Type": "application/json"}
    busy = await overloaded(one_version)
    statuses = [(await http.post("/retrieve", content=b"{", headers=headers)).status_code]
    statuses += [(await http.post("/retrieve", json=BODY)).status_code]
    statuses += [(await http.post("/retrieve", content=b"{", headers=headers)).status_code]
    assert statuses == [422, 429, 429]
    await answered(one_version, busy)
    text = (await http.get("/metrics")).text
    assert 'espalier_shed_total{model="books"} 2.0' in text
    assert 'espalier_requests_total{model="books",status="429"} 2.0' in text


# -- logs and traces --------------------------------------------------------------------------------------------------------


def test_requests_are_logged_with_what_an_operator_asks(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"X-Request-Id": "abc", "traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    with run(models, log_requests="all") as running:
        running.client.post("/retrieve", json={"model": "books", "queries": [COLD] * 2, "m": 3, "beam_size": 9}, headers=headers)
        running.client.post("/retrieve", json={"model": "books"}, headers={"traceparent": "nonsense"})
    records = [record for record in caplog.records if record.name == "service.requests"]
    told = [orjson.loads(JsonFormatter().format(record)) for record in records]
    request = {"level": "INFO", "request_id": "abc", "trace_id": trace, "status": 200}
    assert (request | {"model": "books", "version": 1, "queries": 2, "m": 3, "beam_size": 9}).items() <= told[0].items()
    assert {"queue_ms", "encode_ms", "search_ms", "serialise_ms", "total_ms"} <= set(told[0])
    assert told[1]["status"] == 422
    assert "trace_id" not in told[1]


@pytest.mark.parametrize(("wanted", "logged"), [("none", []), ("failed", [500]), ("all", [200, 422, 500])])
def test_which_requests_are_logged_is_a_setting(models: Path, caplog: pytest.LogCaptureFixture, wanted: str, logged: list[int]) -> None:
    """A failure has a line of its own, with the exception."""
    caplog.set_level(logging.INFO)
    with run(models, log_requests=wanted) as running:
        running.retrieve(queries=[COLD])
        running.client.post("/retrieve", json={})
        running.engines["books"].failure = RuntimeError("no")
        running.client.post("/retrieve", json={"model": "books", "queries": [COLD]})
    found = [int(re.findall(r"status=(\d+)", record.getMessage())[0]) for record in caplog.records if record.name == "service.requests"]
    assert found == logged
    (failure,) = [orjson.loads(JsonFormatter().format(record)) for record in caplog.records if record.levelno == logging.ERROR]
    assert (failure["level"], failure["logger"]) == ("ERROR", "service.batching.batcher")
    assert failure["message"] == "an engine call of 1 requests failed"
    assert "RuntimeError: no" in failure["exception"]


def test_spans_reach_a_collector_within_the_callers_trace(models: Path) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    bodies: list[bytes] = []

    def collect(received: Received) -> tuple[int, bytes]:
        bodies.append(received.body)
        return 200, b""

    with (
        answering(collect, keep_alive=False) as address,
        run(models, otlp_endpoint=f"{address}/v1/traces") as running,
    ):  # its end sends what is left
        body = {"model": "books", "queries": [COLD]}
        running.client.post("/retrieve", json=body, headers={"traceparent": f"00-{trace}-{parent}-01"})
    exported = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    spans = {
        span.name: span for batch in exported for resource in batch.resource_spans for scope in resource.scope_spans for span in scope.spans
    }
    assert set(spans) == {"POST /retrieve", "encode", "queue", "search", "serialise"}
    root = spans.pop("POST /retrieve")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (trace, parent)
    for span in spans.values():
        assert span.parent_span_id == root.span_id
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano <= root.end_time_unix_nano


# -- web pages ----------------------------------------------------------------------------------------------------------------


def test_web_pages_of_other_origins_are_kept_out_unless_they_are_named(models: Path) -> None:
    asks = {"Origin": "https://shop.example", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    with run(models) as running:
        assert "access-control-allow-origin" not in running.client.request("OPTIONS", "/retrieve", headers=asks).headers
        assert "access-control-allow-origin" not in running.client.get("/models", headers=asks).headers
    with run(models, cors_origins=("HTTPS://Shop.example:443",)) as running:
        answer = running.client.request("OPTIONS", "/retrieve", headers=asks)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://shop.example")
        for method in ("PUT", "DELETE"):
            admin = {
                "Access-Control-Request-Method": method,
                "Access-Control-Request-Headers": "authorization, if-match, espalier-user, espalier-group",
            }
            answer = running.client.request("OPTIONS", "/models/books/removed/item-1", headers=asks | admin)
            assert answer.status_code == 200, answer.text
            assert method in answer.headers["access-control-allow-methods"]
        exposed = running.client.get("/models", headers={"Origin": "https://shop.example"}).headers["access-control-expose-headers"]
        assert "ETag" in exposed
        answer = running.client.request("OPTIONS", "/retrieve", headers=asks | {"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in answer.headers
