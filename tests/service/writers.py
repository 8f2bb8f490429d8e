"""Another host's service as a host sees it that follows: the changes feed over HTTP, of operations in memory or of a real service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

import httpx

from espalier.live.operations import ItemBody, Operation
from tests.http_servers import listening
from tests.service.running import Running


class Answers(Protocol):
    def answer(self, path: str, key: str | None) -> tuple[int, bytes]: ...


def written(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def change_of(operation: Operation) -> dict[str, Any]:
    body = operation.body
    change: dict[str, Any] = {"sequence": operation.sequence, "id": operation.id, "kind": operation.kind, "at": written(operation.at)}
    for name in ("fields", "text", "like", "events", "users"):
        if getattr(body, name):
            change[name] = getattr(body, name)
    if body.valid_until is not None:
        change["valid_until"] = written(body.valid_until)
    if body.evidence_from is not None:
        sequence, at = body.evidence_from
        change["evidence_from"] = {"sequence": sequence, "at": written(at)}
    if operation.source_version is not None:
        change["source_version"] = operation.source_version
    return change


class Writer:
    """A service with nothing but the feed, two operations a page."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.sequence: int | None = None
        self.identity = "first"
        self.dropped = 0
        self.asked: list[tuple[int, str | None]] = []

    def answer(self, path: str, key: str | None) -> tuple[int, bytes]:
        parts = urlsplit(path)
        after = int(parse_qs(parts.query)["after"][0])
        self.asked.append((after, key))
        assert parts.path == "/models/books/changes"
        new = [operation for operation in self.operations if operation.sequence > after][:2]
        end = max((operation.sequence for operation in self.operations), default=0)
        end = end if self.sequence is None else self.sequence
        page = {"changes": list(map(change_of, new)), "sequence": end, "dropped": self.dropped, "journal": self.identity}
        return 200, json.dumps(page).encode()

    def put(self, *ids: str) -> None:
        for item_id in ids:
            body = ItemBody(like=("a",))
            self.operations.append(Operation(len(self.operations) + 1, item_id, "put", body, at=1.7e9 + len(self.operations)))


class RealWriter:
    """A service that runs in this process."""

    def __init__(self, running: Running) -> None:
        self.running = running

    def answer(self, path: str, key: str | None) -> tuple[int, bytes]:
        return asyncio.run(self._answer(path, key))  # the test's thread may be using the service's own loop

    async def _answer(self, path: str, key: str | None) -> tuple[int, bytes]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.running.app), base_url="http://test") as client:
            answer = await client.get(path, headers={} if key is None else {"Authorization": key})
        return answer.status_code, answer.content


@contextmanager
def serving(writer: Answers, port: int = 0) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = writer.answer(self.path, self.headers.get("Authorization"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = False  # closing waits for requests under way
    with listening(server) as address:
        yield address
