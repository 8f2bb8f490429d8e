"""A stub of the service in memory, and both clients driven over it in the same way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from espalier_client import (
    Answer,
    AsyncClient,
    Client,
    Delete,
    ItemOutcome,
    Put,
    Query,
    Request,
    RequestFailed,
    Retry,
)
from tests.http_servers import Received, answering

Json = dict[str, Any]


Handler = Callable[[httpx.Request], httpx.Response]


URL = "http://service"
KEY = "s3cret-key"


FACETS: Json = {"column": "section", "values": [{"value": "libs", "count": 3}]}
NODE: Json = {"node": 2, "children": [5, 6], "items": [{"id": "b1", "title": "One"}]}


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


def written(line: Json) -> Json:
    """The answer to a line of a bulk: the number in its id is its sequence."""
    return {"id": line["id"], "status": 200, "sequence": int(line["id"][1:]), "outcome": "deleted" if line.get("delete") else "inserted"}


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
            case "GET", ["models", _, "candidate"]:
                return httpx.Response(200, json={"candidate": None, "versions": [], "shadow": None})
            case ("GET", ["models", name]) | ("POST" | "PUT" | "DELETE", ["models", name, "load" | "unload" | "default" | "candidate"]):
                return httpx.Response(200, json=described | {"name": name})
            case "GET", ["models", _, "items"]:  # completion
                return httpx.Response(200, json={"items": [{"id": "b1", "title": "One"}, {"id": "b2", "title": None}]})
            case "GET", ["models", _, "facets"]:
                return httpx.Response(200, json=FACETS)
            case "GET", ["models", _, "tree"]:
                return httpx.Response(200, json={"item": "b1", "nodes": [0, 2, 5]})
            case "GET", ["models", _, "tree", _]:
                return httpx.Response(200, json=NODE)
            case "PUT" | "DELETE", ["models", _, "items", *rest]:
                outcome = "inserted" if request.method == "PUT" else "deleted"
                placed = {"version": 3, "parent": 9, "by": "events"} if request.method == "PUT" else None
                return httpx.Response(200, json={"sequence": 41, "outcome": outcome, "visible": True, "placed": placed, "unknown": ["b9"]})
            case "GET", ["models", _, "items", *rest]:
                known = {"id": "/".join(rest), "sequence": 41, "live": True, "at": "2027-01-15T08:00:01Z", "placed": None}
                return httpx.Response(200, json=known | {"fields": {"title": "New"}, "events": [["b1"]], "source_version": 7})
            case "POST", ["models", _, "items"]:
                return httpx.Response(200, content=b"".join(dump(written(json.loads(line))) for line in body.splitlines()))
            case "GET", ["models", _, "changes"]:
                put = {"sequence": 4, "id": "b1", "kind": "put", "at": "2027-01-15T08:00:01Z", "text": "words", "source_version": 7}
                delete = {"sequence": 6, "id": "b2", "kind": "delete", "at": "2027-01-15T08:00:02Z"}
                return httpx.Response(200, json={"changes": [put, delete], "sequence": 6, "journal": "j1"})
            case "PUT" | "DELETE", ["models", _, "removed", *rest] if rest:
                facts = {"changed": True, "known": False, "total": 3, "etag": '"abc"'}
                return httpx.Response(200, json={"id": "/".join(rest), "removed": request.method == "PUT"} | facts)
            case "PUT", ["models", _, "removed"]:
                return httpx.Response(200, json={"removed": 1, "unknown": json.loads(body)["ids"][1:], "etag": '"abc"'})
            case "GET", ["models", _, "removed"]:
                return httpx.Response(200, json={"ids": ["b1"], "etag": '"abc"'})
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


class Driver:
    """One of the two clients over a handler in memory; time passes only in its pauses, whose random part is at its longest."""

    def __init__(self, runner: asyncio.Runner | None) -> None:
        self.runner = runner
        self.now_s = 0.0
        self.late_s = 0.0
        """By how much a pause takes longer than it should."""
        self.pauses_s: list[float] = []

    def open(
        self,
        handler: Handler | None,
        api_key: str | None = None,
        timeout_s: float = 10.0,
        url: str = URL,
        max_answer_bytes: int = 1 << 26,
        **retry: Any,
    ) -> Driver:
        """Anew, without what was before. handler: in place of the network; None for the network."""
        if "client" in vars(self):
            self.close()
        self.now_s, self.pauses_s = 0.0, []
        policy = Retry(**{"clock": lambda: self.now_s, "draw": lambda low, high: high} | retry)
        transport = None if handler is None else httpx.MockTransport(handler)
        options: Json = {"api_key": api_key, "timeout_s": timeout_s, "max_answer_bytes": max_answer_bytes, "retry": policy}
        self.client: Client | AsyncClient
        if self.runner is None:
            self.client = Client(url, transport=transport, sleep=self._sleep, **options)
        else:
            self.client = AsyncClient(url, transport=transport, sleep=self._async_sleep, **options)
        return self

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *arguments, **rest: self._wait(getattr(self.client, method)(*arguments, **rest))

    def retrieve_stream(self, requests: Iterable[Request], **rest: Any) -> Generator[Answer | RequestFailed, None, None]:
        return self._each(self.client.retrieve_stream(requests, **rest))

    def bulk(self, name: str, operations: Iterable[Put | Delete], **rest: Any) -> Iterator[ItemOutcome | RequestFailed]:
        return self._each(self.client.bulk(name, operations, **rest))

    def _each(self, outcomes: Any) -> Generator[Any, None, None]:
        if isinstance(self.client, Client):
            yield from outcomes
            return
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
        self.now_s += seconds + self.late_s

    async def _async_sleep(self, seconds: float) -> None:
        self._sleep(seconds)


def asking(*ids: str) -> list[Request]:
    """One request per id."""
    return [Request([Query(history=[id])]) for id in ids]


def ids(outcomes: Iterable[Answer | RequestFailed]) -> list[str | int]:
    """What answered each: the first item, or the status."""
    return [outcome.status if isinstance(outcome, RequestFailed) else outcome.results[0].items[0].id for outcome in outcomes]


@contextmanager
def serving(stub: Handler) -> Iterator[str]:
    """A handler behind a socket; gives its address."""

    def answer(received: Received) -> tuple[int, bytes]:
        request = httpx.Request(received.method, f"{URL}{received.path}", headers=[*received.headers.items()], content=received.body)
        response = stub(request)
        return response.status_code, response.content

    with answering(answer) as address:
        yield address
