"""The client, over a stub of the service: in memory, and over sockets where the connection itself matters."""

from __future__ import annotations

import ast
import asyncio
import inspect
import itertools
import json
import logging
import pickle
import re
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import espalier_client
from espalier_client import (
    Answer,
    AsyncClient,
    Client,
    ClientError,
    Completion,
    ConnectionFailed,
    InvalidAnswer,
    Item,
    NotAllowed,
    Overloaded,
    Query,
    Readiness,
    Removal,
    RemovedItem,
    Request,
    RequestFailed,
    Result,
    Retry,
    TimedOut,
    Timing,
    Unavailable,
    Version,
    WrongValue,
)
from espalier_client.messages import Options
from espalier_client.stream import CHUNK_BYTES, CHUNK_LINES
from tests import ROOT

Json = dict[str, Any]
Handler = Callable[[httpx.Request], httpx.Response]

KEY = "s3cret-key"
URL = "http://service"


# -- the stub -------------------------------------------------------------------------------------------------------------


def answer_to(request: Json) -> Json:
    """An answer that names what was asked: the history's items are the items."""
    results = [
        {
            "items": [{"id": id, "score": 0.5, "fields": dict.fromkeys(request.get("fields", []), id)} for id in query.get("history", [])],
            "complete": True,
            "beam_size": request.get("beam_size", 100),
            "degraded": False,
            "unknown": [],
        }
        for query in request["queries"]
    ]
    stages = ("queue_ms", "encode_ms", "search_ms", "serialise_ms", "total_ms", "ms_per_query")
    timing = dict.fromkeys(stages, 0.25) | {"batch": len(results)}
    return {"model": "books", "version": 3, "engine": "fake", "results": results, "timing": timing}


def problem(status: int, **rest: Any) -> Json:
    return {"type": "about:blank", "title": "Title", "status": status, "detail": "What happened."} | rest


def refuse(status: int, headers: dict[str, str] | None = None, **rest: Any) -> httpx.Response:
    document = json.dumps(problem(status, **rest))
    return httpx.Response(status, headers={"Content-Type": "application/problem+json"} | (headers or {}), content=document)


@dataclass
class Stub:
    """A retrieval service that remembers what it was sent; `failures` are what it does first, instead of answering."""

    failures: list[httpx.Response | Exception] = field(default_factory=list)
    requests: list[httpx.Request] = field(default_factory=list)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, Exception):
                raise failure
            if isinstance(failure.stream, Pieces):
                return failure
            return httpx.Response(failure.status_code, headers=failure.headers, content=failure.content)  # each is sent once
        return self.answer(request)

    def answer(self, request: httpx.Request) -> httpx.Response:
        body = request.content
        described = {
            "name": "books",
            "state": "ready",
            "version": 3,
            "versions": [
                {"version": 1, "state": "failed", "engine": None, "reason": "it is broken"},
                {"version": 3, "state": "ready", "engine": "onnx-cpu", "reason": None},
            ],
            "tree": {"items": 5},
        }
        match request.method, request.url.path.split("/")[1:]:
            case "POST", ["retrieve"]:
                asked = json.loads(body)
                wrong = [{"field": "m", "value": "1000000", "expected": "at most 1000"}]
                return refuse(422, errors=wrong) if asked.get("m", 0) > 1000 else httpx.Response(200, json=answer_to(asked))
            case "POST", ["retrieve", "stream"]:
                return httpx.Response(200, content=b"".join(dump(answer_to(json.loads(line))) for line in body.splitlines()))
            case "GET", ["models"]:
                return httpx.Response(200, json={"models": [described]})
            case ("GET", ["models", name]) | ("POST", ["models", name, "load" | "unload" | "default"]):
                return httpx.Response(200, json=described | {"name": name})
            case "GET", ["models", _, "items"]:
                return httpx.Response(200, json={"items": [{"id": "b1", "title": "One"}, {"id": "b2", "title": None}]})
            case "PUT" | "DELETE", ["models", _, "removed", *rest] if rest:
                facts = {"changed": True, "known": False, "total": 3, "etag": '"abc"'}
                return httpx.Response(200, json={"id": "/".join(rest), "removed": request.method == "PUT"} | facts)
            case "PUT", ["models", _, "removed"]:
                return httpx.Response(200, json={"removed": 1, "unknown": json.loads(body)["ids"][1:]})
            case "GET", ["models", _, "removed"]:
                return httpx.Response(200, json={"ids": ["b1"]})
            case "GET", ["readyz"]:
                return httpx.Response(200, json={"ready": True, "reasons": []})
        return refuse(404)

    @property
    def bodies(self) -> list[Json]:
        return [json.loads(request.content) for request in self.requests]

    @property
    def lines(self) -> list[list[str]]:
        """Per streaming request the first id of each line."""
        return [[json.loads(line)["queries"][0]["history"][0] for line in request.content.splitlines()] for request in self.requests]


def dump(document: Json) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode() + b"\n"


class Pieces(httpx.SyncByteStream, httpx.AsyncByteStream):
    """The body of an answer, piece by piece; an exception among them is raised in its place."""

    def __init__(self, pieces: Iterable[bytes | Exception]) -> None:
        self.pieces = pieces
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        for piece in self.pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece

    def close(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.closed = True


# -- both clients, driven in the same way ---------------------------------------------------------------------------------


class Driver:
    """One of the two clients over a handler in memory; time passes only in its pauses, whose random part is at its longest."""

    def __init__(self, runner: asyncio.Runner | None) -> None:
        self.runner = runner
        self.now_s = 0.0
        self.pauses_s: list[float] = []

    def open(self, handler: Handler, api_key: str | None = None, timeout_s: float = 10.0, url: str = URL, **retry: Any) -> Driver:
        options: Json = {"clock": lambda: self.now_s, "draw": lambda low, high: high} | retry
        transport = httpx.MockTransport(handler)
        policy = Retry(**options)
        self.client: Client | AsyncClient
        if self.runner is None:
            self.client = Client(url, api_key=api_key, timeout_s=timeout_s, retry=policy, transport=transport, sleep=self._sleep)
        else:
            self.client = AsyncClient(url, api_key=api_key, timeout_s=timeout_s, retry=policy, transport=transport, sleep=self._async_sleep)
        return self

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *arguments, **rest: self._wait(getattr(self.client, method)(*arguments, **rest))

    def retrieve_stream(self, requests: Iterable[Request], **rest: Any) -> Iterator[Answer | RequestFailed]:
        if isinstance(self.client, Client):
            yield from self.client.retrieve_stream(requests, **rest)
            return
        outcomes = self.client.retrieve_stream(requests, **rest)
        try:
            while True:
                try:
                    yield self._wait(anext(outcomes))
                except StopAsyncIteration:
                    return
        finally:
            self._wait(outcomes.aclose())

    def _wait(self, result: Any) -> Any:
        if self.runner is None:
            return result

        async def finish() -> Any:
            return await result

        return self.runner.run(finish())

    def _sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.now_s += seconds

    async def _async_sleep(self, seconds: float) -> None:
        self._sleep(seconds)


@pytest.fixture(params=["Client", "AsyncClient"])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    if request.param == "Client":
        driver = Driver(None)
        yield driver
        driver.close()
    else:
        with asyncio.Runner() as runner:
            driver = Driver(runner)
            yield driver
            driver.close()


def asking(*ids: str) -> list[Request]:
    """One request per id."""
    return [Request([Query(history=[id])]) for id in ids]


def ids(outcomes: Iterable[Answer | RequestFailed]) -> list[str | int]:
    """What answered each: the first item, or the status."""
    return [outcome.status if isinstance(outcome, RequestFailed) else outcome.results[0].items[0].id for outcome in outcomes]


# -- the surface ----------------------------------------------------------------------------------------------------------


def test_the_public_surface() -> None:
    assert espalier_client.__all__ == [
        *("Answer", "AsyncClient", "Client", "ClientError", "Completion", "Conflict", "ConnectionFailed", "DeadlineExceeded"),
        *("InvalidAnswer", "InvalidRequest", "Item", "Model", "NotAllowed", "NotFound", "Overloaded", "Query", "Readiness", "Removal"),
        *("RemovedIds", "RemovedItem"),
        *("Request", "RequestFailed", "Result", "Retry", "ServiceFailed", "TimedOut", "Timing", "Unavailable", "Version", "WrongValue"),
    ]
    methods = [name for name in vars(Client) if not name.startswith("_")]
    assert methods == [
        *("retrieve", "retrieve_stream", "models", "model", "complete", "ready"),
        *("load", "unload", "set_default", "set_removed", "remove_item", "restore_item", "removed", "close"),
    ]


def test_both_clients_take_the_same() -> None:
    def shape(kind: type, method: str) -> list[tuple[str, Any, Any]]:
        parameters = inspect.signature(getattr(kind, method)).parameters.values()
        return [(one.name, one.kind, one.default) for one in parameters if one.name != "sleep"]

    for method in ["__init__", *(name for name in vars(Client) if not name.startswith("_"))]:
        assert shape(Client, method) == shape(AsyncClient, method), method


def test_retrieve_takes_every_field_of_a_request() -> None:
    assert list(Options.__annotations__) == [one.name for one in fields(Request) if one.name != "queries"]


@pytest.mark.parametrize("path", sorted((ROOT / "espalier_client").glob("*.py")), ids=lambda path: path.name)
def test_nothing_is_imported_but_httpx_and_what_is_below_it(path: Path) -> None:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} - sys.stdlib_module_names <= {"httpx", "httpcore", "espalier_client"}


# -- one request ----------------------------------------------------------------------------------------------------------


def test_retrieve(driver: Driver) -> None:
    stub = Stub()
    answer = driver.open(stub).retrieve([Query(history=["b1", "b2"]), Query()], m=5, beam_size=7, fields=["title"])
    items = (Item("b1", 0.5, {"title": "b1"}), Item("b2", 0.5, {"title": "b2"}))
    results = (Result(items, True, 7, False, ()), Result((), True, 7, False, ()))
    assert answer == Answer("books", 3, "fake", results, Timing(0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 2))
    (request,) = stub.requests
    assert (request.method, str(request.url)) == ("POST", f"{URL}/retrieve")
    assert request.headers["Content-Type"] == "application/json"
    assert "Authorization" not in request.headers
    assert stub.bodies == [{"queries": [{"history": ["b1", "b2"]}, {"history": []}], "m": 5, "beam_size": 7, "fields": ["title"]}]


def test_everything_that_can_be_asked_is_sent(driver: Driver) -> None:
    stub = Stub()
    queries = [Query(vector=np.array([0.5, 2], np.float32), exclude=(id for id in ("b1",))), Query(history=["b2"], exclude_seen=True)]
    options: Json = {
        "model": "books",
        "version": 3,
        "m": 5,
        "beam_size": 7,
        "filter": {"section": ["games"], "price": {"min": 1, "max": 2}},
        "exclude_filter": {"brand": ["x"]},
        "min_score": 0.0,
        "timeout_ms": 50,
        "fields": ["title"],
        "rerank": True,
        "explain": True,
        "explain_items": ["b3"],
    }
    assert list(options) == list(Options.__annotations__)
    driver.open(stub).retrieve(queries, **options)
    sent = [{"vector": [0.5, 2.0], "exclude": ["b1"]}, {"history": ["b2"], "exclude_seen": True}]
    assert stub.bodies == [options | {"queries": sent}]


def test_an_answer_may_hold_more_than_the_client_knows_and_leave_out_what_is_optional(driver: Driver) -> None:
    document = answer_to({"queries": [{"history": ["b1"]}]}) | {"new": 1}
    document["timing"]["rerank_ms"] = 1
    document["results"][0] |= {"explain": {"levels": []}, "new": 1, "items": [{"id": "b1", "score": 1.0, "fields": None, "new": 1}]}
    del document["results"][0]["degraded"]
    result = driver.open(lambda _: httpx.Response(200, json=document)).retrieve([Query()]).results[0]
    assert result == Result((Item("b1", 1.0, {}),), True, 100, False, (), {"levels": []})


@pytest.mark.parametrize("content", [b"<html>", b"[]", b"null", b"{}", b'{"results": 1}', b"\xff", json.dumps({"results": []}).encode()])
def test_what_is_no_answer_is_an_error_and_not_asked_again(driver: Driver, content: bytes) -> None:
    stub = Stub([httpx.Response(200, content=content)])
    with pytest.raises(InvalidAnswer, match="POST /retrieve: expected an answer of the retrieval service"):
        driver.open(stub).retrieve([Query()])
    assert len(stub.requests) == 1


@pytest.mark.parametrize(
    ("method", "arguments", "sent", "body"),
    [
        ("models", (), "GET /models", None),
        ("model", ("a/b c",), "GET /models/a%2Fb%20c", None),
        ("complete", ("books", "a&b", 3), "GET /models/books/items?prefix=a%26b&limit=3", None),
        ("ready", (), "GET /readyz", None),
        ("load", ("books", 4), "POST /models/books/load", {"version": 4, "default": True}),
        ("unload", ("books", 3), "POST /models/books/unload", {"version": 3}),
        ("set_default", ("books", 3), "POST /models/books/default", {"version": 3}),
        ("set_removed", ("books", ["b1", "b9"]), "PUT /models/books/removed", {"ids": ["b1", "b9"]}),
        ("remove_item", ("books", "b/9 ü%2F"), "PUT /models/books/removed/b%2F9%20%C3%BC%252F", None),
        ("restore_item", ("books", "b9"), "DELETE /models/books/removed/b9", None),
        ("removed", ("books",), "GET /models/books/removed", None),
    ],
)
def test_every_route(driver: Driver, method: str, arguments: tuple[Any, ...], sent: str, body: Json | None) -> None:
    stub = Stub()
    driver.open(stub, url=f"{URL}/prefix/", api_key=KEY)
    expected: Any = {
        "complete": (Completion("b1", "One"), Completion("b2", None)),
        "ready": Readiness(True, ()),
        "set_removed": Removal(1, ("b9",)),
        "remove_item": RemovedItem("b/9 ü%2F", True, True, False, 3, '"abc"'),
        "restore_item": RemovedItem("b9", False, True, False, 3, '"abc"'),
        "removed": ("b1",),
    }.get(method)
    stub.answer, plain = lambda request: plain(without_prefix(request)), stub.answer  # type: ignore[method-assign]
    got = getattr(driver, method)(*arguments)
    if expected is not None:
        assert got == expected
    else:
        model = got[0] if method == "models" else got
        assert (model.state, model.version, model.description["tree"]) == ("ready", 3, {"items": 5})
        assert model.versions == (Version(1, "failed", None, "it is broken"), Version(3, "ready", "onnx-cpu", None))
    (request,) = stub.requests
    assert f"{request.method} {request.url.raw_path.decode()}" == sent.replace(" /", " /prefix/")
    assert request.headers["Authorization"] == f"Bearer {KEY}"
    assert (json.loads(request.content) if request.content else None) == body


def without_prefix(request: httpx.Request) -> httpx.Request:
    path = request.url.raw_path.decode().removeprefix("/prefix")
    path = re.sub(r"/models/a%2Fb%20c", "/models/books", path)
    return httpx.Request(request.method, f"{URL}{path}", content=request.content)


def test_not_being_ready_is_an_answer(driver: Driver) -> None:
    loading = httpx.Response(503, json={"ready": False, "reasons": ["books is loading"]})
    assert driver.open(Stub([loading])).ready() == Readiness(False, ("books is loading",))
    assert driver.pauses_s == []


def test_a_503_that_says_nothing_of_readiness_is_an_error(driver: Driver) -> None:
    with pytest.raises(Unavailable):
        driver.open(lambda _: refuse(503), retries=0).ready()


# -- arguments that cannot be sent ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_name_that_would_change_the_path_is_refused(driver: Driver, name: str) -> None:
    with pytest.raises(ValueError, match="expected the name of a model"):
        driver.open(Stub()).model(name)


def test_a_string_is_no_list_of_ids(driver: Driver) -> None:
    with pytest.raises(TypeError, match="history: got 'b1', expected a list"):
        Query(history="b1")
    with pytest.raises(TypeError, match="fields: got 'title', expected a list"):
        Request([Query()], fields="title")
    with pytest.raises(TypeError, match="ids: got 'b1', expected a list"):
        driver.open(Stub()).set_removed("books", "b1")


def test_what_json_does_not_have_is_refused(driver: Driver) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        driver.open(Stub()).retrieve([Query(vector=[float("nan")])])


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", ""])
def test_an_address_is_checked(url: str) -> None:
    with pytest.raises(ValueError, match=f"base_url: got '{url}', expected http://host:port"):
        Client(url)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_timeouts_are_checked(value: float) -> None:
    with pytest.raises(ValueError, match="timeout_s: got"):
        Client(URL, timeout_s=value)


@pytest.mark.parametrize("name", ["retries", "backoff_s", "max_backoff_s", "deadline_s"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_retry_settings_are_checked(name: str, value: float) -> None:
    setting: Json = {name: value}
    with pytest.raises(ValueError, match=f"{name}: got"):
        Retry(**setting)


# -- errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statuses", "kind"),
    [
        ((400, 413, 415, 422), "InvalidRequest"),
        ((401, 403), "NotAllowed"),
        ((404,), "NotFound"),
        ((409,), "Conflict"),
        ((429,), "Overloaded"),
        ((500, 502), "ServiceFailed"),
        ((503,), "Unavailable"),
        ((504,), "DeadlineExceeded"),
        ((301, 405, 408, 499, 599), "RequestFailed"),
    ],
)
def test_each_status_has_its_error(driver: Driver, statuses: tuple[int, ...], kind: str) -> None:
    for status in statuses:
        wrong = [{"field": "queries[0].m", "value": "0", "expected": "at least 1"}]
        stub = Stub([refuse(status, {"X-Request-Id": "the-id", "Retry-After": "7"}, errors=wrong)])
        with pytest.raises(RequestFailed) as raised:
            driver.open(stub, retries=0).retrieve([Query()])
        error = raised.value
        assert type(error) is getattr(espalier_client, kind)
        assert (error.status, error.title, error.detail, error.request_id) == (status, "Title", "What happened.", "the-id")
        assert (error.errors, error.retry_after_s) == ((WrongValue("queries[0].m", "0", "at least 1"),), 7.0)
        assert str(error) == f"{status} Title: What happened. (request the-id)"
        driver.close()


def test_an_error_page_of_a_proxy_tells_its_status(driver: Driver) -> None:
    stub = Stub([httpx.Response(502, html="<h1>Bad Gateway</h1>"), httpx.Response(502, json=["no problem document"])])
    driver.open(stub)
    for _ in range(2):
        with pytest.raises(RequestFailed) as raised:
            driver.retrieve([Query()])
        sent_id = stub.requests[-1].headers["X-Request-Id"]
        assert str(raised.value) == f"502 Bad Gateway (request {sent_id})"


def test_errors_survive_pickling() -> None:
    wrong = (WrongValue("m", "0", "at least 1"),)
    for error in (Overloaded(429, "Too Many", "x", wrong, "id", 2.0), TimedOut("slow", True, "id"), InvalidAnswer("html")):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), copy.args, vars(copy), str(copy)) == (type(error), error.args, vars(error), str(error))


# -- the key --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "two words", "line\nbreak", "clé"])
def test_a_key_that_no_header_can_hold_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(ValueError, match="api_key: expected printable ASCII") as raised:
        Client(URL, api_key=key)
    assert not key or key not in str(raised.value)


def test_an_address_with_a_password_is_refused_without_being_shown() -> None:
    with pytest.raises(ValueError, match="a password in it") as raised:
        AsyncClient("http://me:s3cret@host")
    assert "s3cret" not in str(raised.value)


def test_the_key_is_not_shown(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    shown = []
    with serving(Stub([refuse(503), refuse(401)])) as url:
        driver.open(Stub())  # closed by the fixture
        client = Client(url, api_key=KEY, sleep=lambda _: None)
        with client, pytest.raises(NotAllowed) as refused:
            client.retrieve([Query()])
        shown += [repr(client), repr(vars(client)), repr(refused.value)]
    with pytest.raises(ConnectionFailed) as failed:
        driver.open(Stub([httpx.ConnectError("refused")]), api_key=KEY, retries=0).retrieve([Query()])
    cause = failed.value.__cause__
    assert isinstance(cause, httpx.ConnectError)
    shown += [repr(driver.client), repr(failed.value), str(failed.value), repr(cause.request.headers)]
    assert any(record.name.startswith("httpcore") for record in caplog.records)
    assert any("trying again" in record.getMessage() for record in caplog.records)
    assert not [text for text in [*shown, caplog.text] if KEY in text]


# -- retries --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "failure",
    [
        refuse(429),
        refuse(503),
        httpx.ConnectError("refused"),
        httpx.ConnectTimeout(""),
        httpx.ReadError("reset"),
        httpx.WriteError("broken pipe"),
        httpx.RemoteProtocolError("Server disconnected without sending a response."),
    ],
    ids=repr,
)
def test_what_may_pass_is_tried_again(driver: Driver, failure: httpx.Response | Exception) -> None:
    stub = Stub([failure, failure])
    assert driver.open(stub).retrieve([Query(history=["b1"])]).results[0].items[0].id == "b1"
    assert driver.pauses_s == [0.1, 0.2]
    assert len({request.headers["X-Request-Id"] for request in stub.requests}) == 1
    assert len({request.content for request in stub.requests}) == 1


@pytest.mark.parametrize(
    "failure", [refuse(422), refuse(401), refuse(500), refuse(504), httpx.ReadTimeout(""), httpx.WriteTimeout("")], ids=repr
)
def test_what_will_not_pass_is_not(driver: Driver, failure: httpx.Response | Exception) -> None:
    stub = Stub([failure])
    with pytest.raises(ClientError):
        driver.open(stub).retrieve([Query()])
    assert (len(stub.requests), driver.pauses_s) == (1, [])


def test_attempts_are_counted_and_pauses_grow_to_a_bound(driver: Driver) -> None:
    stub = Stub([refuse(503)] * 9)
    with pytest.raises(Unavailable):
        driver.open(stub, retries=5, backoff_s=1.0, max_backoff_s=6.0).retrieve([Query()])
    assert driver.pauses_s == [1, 2, 4, 6, 6]
    assert len(stub.requests) == 6


def test_pauses_are_drawn_from_zero_on(driver: Driver) -> None:
    drawn = []

    def draw(low: float, high: float) -> float:
        drawn.append((low, high))
        return low + 0.25 * (high - low)

    driver.open(Stub([refuse(503), refuse(429)]), backoff_s=1.0, draw=draw).retrieve([Query()])
    assert drawn == [(0, 1), (0, 2)]
    assert driver.pauses_s == [0.25, 0.5]


@pytest.mark.parametrize(
    ("value", "asked_s"), [("3", 3.0), ("0", 0.0), ("1.5", 1.5), ("Wed, 21 Oct 2026 07:28:00 GMT", 0), ("-1", 0), ("nan", 0)]
)
def test_no_attempt_before_the_service_asks_for_it(driver: Driver, value: str, asked_s: float) -> None:
    driver.open(Stub([refuse(429, {"Retry-After": value})])).retrieve([Query()])
    assert driver.pauses_s == [asked_s + 0.1]


def test_no_pause_that_ends_after_the_deadline(driver: Driver) -> None:
    stub = Stub([refuse(429, {"Retry-After": "4"}), refuse(429, {"Retry-After": "4"}), refuse(429, {"Retry-After": "4"})])
    with pytest.raises(Overloaded) as raised:
        driver.open(stub, deadline_s=10, backoff_s=0).retrieve([Query()])
    assert driver.pauses_s == [4, 4]
    assert raised.value.retry_after_s == 4


def test_repeated_attempts_wait_only_for_what_is_left(driver: Driver) -> None:
    stub = Stub([refuse(429, {"Retry-After": "4"}), refuse(429, {"Retry-After": "4"})])
    driver.open(stub, timeout_s=8, deadline_s=10, backoff_s=0).retrieve([Query()])
    assert [request.extensions["timeout"]["read"] for request in stub.requests] == [8, 6, 2]


def test_what_came_of_a_connection(driver: Driver) -> None:
    stub = Stub([httpx.ConnectError("refused"), httpx.ReadError(""), httpx.ReadTimeout("")])
    driver.open(stub, retries=0)
    for kind, sent, text in (
        (ConnectionFailed, False, "POST http://service/retrieve: refused"),
        (ConnectionFailed, True, "POST http://service/retrieve: ReadError"),
        (TimedOut, True, "POST http://service/retrieve: ReadTimeout"),
    ):
        with pytest.raises(ConnectionFailed) as raised:
            driver.retrieve([Query()])
        sent_id = stub.requests[-1].headers["X-Request-Id"]
        assert (type(raised.value), raised.value.sent, str(raised.value)) == (kind, sent, f"{text} (request {sent_id})")


CHANGES = [("load", 4), ("unload", 3), ("set_default", 3), ("set_removed", ["b1"]), ("remove_item", "b1"), ("restore_item", "b1")]


@pytest.mark.parametrize(("method", "argument"), CHANGES)
def test_a_change_is_tried_again_only_if_it_cannot_have_arrived(driver: Driver, method: str, argument: Any) -> None:
    stub = Stub([httpx.ConnectError("refused"), httpx.ConnectTimeout("")])
    getattr(driver.open(stub), method)("books", argument)
    assert len(stub.requests) == 3
    driver.close()
    for failure in (httpx.ReadError("reset"), httpx.RemoteProtocolError("closed"), refuse(503), refuse(429)):
        stub = Stub([failure])
        with pytest.raises(ClientError):
            getattr(driver.open(stub), method)("books", argument)
        assert len(stub.requests) == 1
        driver.close()


def test_loading_may_take_minutes_and_connecting_may_not(driver: Driver) -> None:
    stub = Stub()
    driver.open(stub, timeout_s=2)
    for method in ("load", "unload", "set_default"):
        getattr(driver, method)("books", 3)
        getattr(driver, method)("books", 3, timeout_s=30)
    driver.set_removed("books", [])
    timeouts = [request.extensions["timeout"] for request in stub.requests]
    assert [timeout["read"] for timeout in timeouts] == [600, 30] * 3 + [2]
    assert {timeout["connect"] for timeout in timeouts} == {2}
    with pytest.raises(ValueError, match="timeout_s: got 0"):
        driver.load("books", 3, timeout_s=0)


# -- streams --------------------------------------------------------------------------------------------------------------


def test_a_stream_is_answered_in_order_by_requests_of_bounded_size(driver: Driver) -> None:
    stub = Stub()
    small = [f"b{n}" for n in range(2 * CHUNK_LINES + 3)]
    assert ids(driver.open(stub).retrieve_stream(asking(*small))) == small
    assert [len(lines) for lines in stub.lines] == [CHUNK_LINES, CHUNK_LINES, 3]
    assert {request.headers["Content-Type"] for request in stub.requests} == {"application/x-ndjson"}

    stub.requests.clear()
    large = [f"{n}-".ljust(CHUNK_BYTES // 3, "x") for n in range(5)]
    assert ids(driver.retrieve_stream(asking(*large))) == large
    assert [len(lines) for lines in stub.lines] == [2, 2, 1]
    assert all(len(request.content) <= CHUNK_BYTES for request in stub.requests)

    stub.requests.clear()
    huge = ["a", "b" * CHUNK_BYTES, "c"]
    assert ids(driver.retrieve_stream(asking(*huge))) == huge
    assert [len(lines) for lines in stub.lines] == [1, 1, 1]


def test_an_empty_stream_asks_nothing(driver: Driver) -> None:
    stub = Stub()
    assert list(driver.open(stub).retrieve_stream([])) == []
    assert stub.requests == []


def test_requests_are_read_no_further_than_needed(driver: Driver) -> None:
    read = []

    def requests() -> Iterator[Request]:
        for n in range(1000):
            read.append(n)
            yield Request([Query(history=[f"b{n}"])])

    outcomes = driver.open(Stub()).retrieve_stream(requests(), chunk_lines=4)
    assert read == []
    for n in range(8):
        assert ids([next(outcomes)]) == [f"b{n}"]
        assert len(read) == 4 * (n // 4 + 1)
    outcomes.close()  # type: ignore[attr-defined]


def test_a_request_may_depend_on_the_answer_before(driver: Driver) -> None:
    answers: list[str | int] = ["start"]

    def requests() -> Iterator[Request]:
        while len(answers) < 5:
            yield Request([Query(history=[f"after {answers[-1]}"])])

    for outcome in driver.open(Stub()).retrieve_stream(requests(), chunk_lines=1):
        answers += ids([outcome])
    assert answers[2] == "after after start"


def test_chunks_have_at_least_one_line(driver: Driver) -> None:
    with pytest.raises(ValueError, match="chunk_lines: got 0"):
        next(driver.open(Stub()).retrieve_stream(asking("b1"), chunk_lines=0))


def test_an_asynchronous_client_takes_asynchronous_requests() -> None:
    async def requests() -> AsyncIterator[Request]:
        for request in asking("a", "b"):
            yield request

    async def outcomes() -> list[str | int]:
        async with AsyncClient(URL, transport=httpx.MockTransport(Stub())) as client:
            return ids([outcome async for outcome in client.retrieve_stream(requests())])

    assert asyncio.run(outcomes()) == ["a", "b"]


def streamed(*pieces: bytes | Exception) -> httpx.Response:
    return httpx.Response(200, stream=Pieces(pieces), headers={"X-Request-Id": "the-id"})


def whole(status: int, headers: dict[str, str] | None = None) -> httpx.Response:
    """A refusal of a whole stream, whose document has yet to be read."""
    return httpx.Response(status, headers=headers, stream=Pieces([dump(problem(status))]))


def found(id: str) -> bytes:
    return dump(answer_to({"queries": [{"history": [id]}]}))


def test_a_line_that_fails_does_not_end_the_stream(driver: Driver) -> None:
    wrong = [{"field": "m", "value": "0", "expected": "at least 1"}]
    stub = Stub([streamed(found("a"), dump(problem(422, errors=wrong)), dump(problem(504)), found("d"))])
    outcomes = list(driver.open(stub).retrieve_stream(asking("a", "b", "c", "d")))
    assert ids(outcomes) == ["a", 422, 504, "d"]
    failed = outcomes[1]
    assert isinstance(failed, espalier_client.InvalidRequest)
    assert (failed.errors, failed.request_id) == ((WrongValue("m", "0", "at least 1"),), "the-id")
    assert len(stub.requests) == 1


@given(cuts=st.lists(st.integers(0, 2000)), names=st.lists(st.text(min_size=1).map(lambda name: name.encode(errors="replace").decode())))
def test_an_answer_may_be_cut_anywhere_and_hold_any_letter(cuts: list[int], names: list[str]) -> None:
    body = b"".join(map(found, names)).rstrip(b"\n")
    at = [0, *sorted(cut for cut in cuts if cut < len(body)), len(body)]
    pieces = [body[start:end] for start, end in itertools.pairwise(at)]
    with Client(URL, transport=httpx.MockTransport(lambda _: streamed(*pieces))) as client:
        assert ids(client.retrieve_stream(asking(*names), chunk_lines=len(names) + 1)) == names


@given(names=st.lists(st.text(st.characters(), min_size=1), min_size=1, max_size=5))
def test_each_request_is_one_line_whatever_its_letters(names: list[str]) -> None:
    for request, name in zip(asking(*names), names, strict=True):
        assert request.to_bytes().splitlines() == [request.to_bytes()]
        assert json.loads(request.to_bytes())["queries"] == [{"history": [name]}]


@pytest.mark.parametrize(
    "end",
    [[httpx.ReadError("reset")], [httpx.RemoteProtocolError("incomplete chunked read")], [found("c")[:20], httpx.ReadError("reset")], []],
)
def test_only_the_lines_without_an_answer_are_sent_again(driver: Driver, end: list[bytes | Exception]) -> None:
    stub = Stub([streamed(found("a"), dump(problem(422)), *end)])
    assert ids(driver.open(stub).retrieve_stream(asking("a", "b", "c", "d"))) == ["a", 422, "c", "d"]
    assert stub.lines == [["a", "b", "c", "d"], ["c", "d"]]
    assert driver.pauses_s == [0.1]


def test_answers_are_handed_out_as_they_come(driver: Driver) -> None:
    came: list[str] = []

    def pieces() -> Iterator[bytes]:
        for id in "abc":
            came.append(id)
            yield found(id)

    driver.open(lambda _: httpx.Response(200, stream=Pieces(pieces())))
    for n, _ in enumerate(driver.retrieve_stream(asking(*"abc")), 1):
        assert len(came) == n


def test_a_stream_that_makes_no_progress_ends_with_the_failure(driver: Driver) -> None:
    stub = Stub([streamed(found("a"), httpx.ReadError("reset")), *[streamed(httpx.ReadError("reset")) for _ in range(9)]])
    outcomes = driver.open(stub, retries=2).retrieve_stream(asking("a", "b"))
    assert ids([next(outcomes)]) == ["a"]
    with pytest.raises(ConnectionFailed, match="reset"):
        next(outcomes)
    assert stub.lines == [["a", "b"], ["b"], ["b"]]


def test_progress_starts_the_count_and_the_clock_anew(driver: Driver) -> None:
    stub = Stub([streamed(found(id), httpx.ReadError("reset")) for id in "abcd"])
    got = []
    for outcome in driver.open(stub, retries=1, deadline_s=10).retrieve_stream(asking(*"abcde")):
        got.append(outcome)
        driver.now_s += 60  # the caller takes his time
    assert ids(got) == list("abcde")
    assert driver.pauses_s == [0.1] * 4


def test_lines_that_were_turned_away_are_sent_again_alone_and_keep_their_place(driver: Driver) -> None:
    stub = Stub([streamed(found("a"), dump(problem(429)), found("c"), dump(problem(503)), found("e"))])
    assert ids(driver.open(stub).retrieve_stream(asking(*"abcde"))) == list("abcde")
    assert stub.lines == [list("abcde"), ["b", "d"]]


def test_lines_that_are_turned_away_for_good_are_handed_out(driver: Driver) -> None:
    stub = Stub([streamed(found("a"), dump(problem(429)), found("c")), *[streamed(dump(problem(503))) for _ in range(2)]])
    assert ids(driver.open(stub, retries=2).retrieve_stream([*asking(*"abc"), *asking("d")], chunk_lines=3)) == ["a", 503, "c", "d"]
    assert stub.lines == [list("abc"), ["b"], ["b"], ["d"]]


def test_a_refusal_of_the_whole_request_is_tried_again_or_raised(driver: Driver) -> None:
    stub = Stub([whole(503, {"Retry-After": "2"}), streamed(found("a")), whole(401)])
    outcomes = driver.open(stub).retrieve_stream(asking("a", "b"), chunk_lines=1)
    assert ids([next(outcomes)]) == ["a"]
    assert driver.pauses_s == [2.1]
    with pytest.raises(NotAllowed, match="What happened"):
        next(outcomes)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (found("a") + found("b"), "expected 1 lines, got more"),
        (b"<html>\n", "expected an answer"),
        (b'{"title": "x"}\n', "expected an answer"),
    ],
)
def test_what_is_no_stream_of_answers_is_an_error(driver: Driver, content: bytes, text: str) -> None:
    stub = Stub([streamed(content)])
    with pytest.raises(InvalidAnswer, match=f"POST /retrieve/stream: {text}"):
        list(driver.open(stub).retrieve_stream(asking("a")))
    assert len(stub.requests) == 1


def test_a_stream_that_is_left_early_closes_its_connection(driver: Driver) -> None:
    answer = streamed(found("a"), found("b"))
    outcomes = driver.open(lambda _: answer).retrieve_stream(asking("a", "b"))
    next(outcomes)
    assert not answer.is_closed
    outcomes.close()  # type: ignore[attr-defined]
    assert answer.is_closed


# -- over sockets ---------------------------------------------------------------------------------------------------------


@contextmanager
def serving(stub: Handler, handler: type[BaseHTTPRequestHandler] | None = None) -> Iterator[str]:
    """A handler behind a socket; gives its address."""

    class Answering(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            response = stub(httpx.Request(self.command, f"{URL}{self.path}", headers=list(self.headers.items()), content=body))
            self.send_response(response.status_code)
            self.send_header("Content-Length", str(len(response.content)))
            self.end_headers()
            self.wfile.write(response.content)

        do_DELETE = do_GET = do_POST = do_PUT = answer

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), handler or Answering) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def run_async(url: str, use: Callable[[AsyncClient], Any], **options: Any) -> Any:
    async def run() -> Any:
        async with AsyncClient(url, **options) as client:
            return await use(client)

    return asyncio.run(run())


@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
def test_a_connection_that_the_service_closed_while_it_was_idle_is_replaced(kind: str) -> None:
    """The second request goes out on the kept connection, which the service closes without an answer."""
    content = json.dumps({"ready": True, "reasons": []}).encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content)
    served: list[int] = []

    def serve(listener: socket.socket) -> None:
        for connection_number in range(2):
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as requests:
                while requests.readline().strip():
                    while requests.readline().strip():
                        pass
                    served.append(connection_number)
                    if len(served) == 2:
                        break
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        retry = Retry(backoff_s=0)
        if kind == "Client":
            with Client(url, retry=retry) as client:
                answers = [client.ready(), client.ready()]
        else:

            async def twice(client: AsyncClient) -> list[Readiness]:
                return [await client.ready(), await client.ready()]

            answers = run_async(url, twice, retry=retry)
        thread.join()
    assert answers == [Readiness(True, ())] * 2
    assert served == [0, 0, 1]


class Eager(BaseHTTPRequestHandler):
    """Answers each line at once with a large one, and reads no further before that is taken."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        left = int(self.headers["Content-Length"])
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while left:
            line = self.rfile.readline()
            left -= len(line)
            answer = answer_to(json.loads(line)) | {"padding": "x" * 20_000}
            content = dump(answer)
            self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
def test_a_long_stream_and_a_service_with_back_pressure_do_not_wait_for_each_other(kind: str) -> None:
    names = [f"{n}-".ljust(4000, "x") for n in range(2500)]  # 10 MB there, 60 MB back: more than the buffers of both sides
    with serving(Stub(), Eager) as url:
        if kind == "Client":
            with Client(url, timeout_s=20) as client:
                assert ids(client.retrieve_stream(asking(*names))) == names
        else:

            async def stream(client: AsyncClient) -> list[str | int]:
                return ids([outcome async for outcome in client.retrieve_stream(asking(*names))])

            assert run_async(url, stream, timeout_s=20) == names


# -- the documentation ----------------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "client.md").read_text()


def test_the_code_of_the_documentation_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RETRIEVAL_KEY", KEY)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    stub = Stub()
    with serving(stub) as url:
        for block in blocks:
            assert "http://localhost:8000" in block
            exec(compile(block.replace("http://localhost:8000", url), "docs/client.md", "exec"), {"__name__": "docs"})
    printed = capsys.readouterr().out
    for expected in (
        "libsdl2-2.0-0 0.5",
        "['libc6', 'libgtk-3-0']",
        "['zlib1g'] ['zlib1g']",
        "m: got 1000000, expected at most 1000",
        "ready",
    ):
        assert expected in printed
    keys = {request.headers["Authorization"] for request in stub.requests if "Authorization" in request.headers}
    assert keys == {f"Bearer {KEY}", "Bearer an-admin-key"}


def test_every_error_and_every_option_is_described() -> None:
    described = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (.*?) \|", PAGE, re.MULTILINE))))
    errors = {name for name in espalier_client.__all__ if issubclass(getattr(espalier_client, name), Exception)}
    assert described == errors | set(Options.__annotations__)
    for name in (*Retry.__dataclass_fields__, *(name for name in vars(Client) if not name.startswith("_"))):
        assert name in {"clock", "draw", "close"} or name in PAGE, name
