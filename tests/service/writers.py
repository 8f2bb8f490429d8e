"""Another host's service as a host sees it that follows: the changes feed over HTTP, of operations in memory or of a real service."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractContextManager
from typing import Protocol
from urllib.parse import parse_qs, urlsplit

import httpx

from espalier.live.operations import ItemBody, Operation
from service.http.live_routes import change_json
from tests.http_servers import answering
from tests.service.running import Running


class Answers(Protocol):
    def answer(self, path: str, key: str | None) -> tuple[int, bytes]: ...


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
        page = {"changes": list(map(change_json, new)), "sequence": end, "dropped": self.dropped, "journal": self.identity}
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


def serving(writer: Answers, port: int = 0) -> AbstractContextManager[str]:
    """A writer's address. At the end the requests under way are answered."""
    return answering(lambda received: writer.answer(received.path, received.headers.get("Authorization")), port, keep_alive=False)
