"""A client of a route that answers line by line: it decides when it sends a line and when it takes an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import orjson
from starlette.types import Message

from tests.service.own_time import settled
from tests.service.running import Json, Running

LINES = {"Content-Type": "application/x-ndjson"}


class Conversation:
    """asked: how often the application wanted more of the body. offered: how often it sent something. fails: what sending raises."""

    def __init__(self, running: Running, path: str, headers: Mapping[str, str] = LINES) -> None:
        self._sent, self._got, self._taking = asyncio.Queue[Message](), asyncio.Queue[Message](), asyncio.Event()
        self._taking.set()
        self.asked = self.offered = 0
        self.fails: Exception | None = None
        named = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": named, "state": {}}
        self.task = asyncio.create_task(running.app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        self.asked += 1
        return await self._sent.get()

    async def _send(self, message: Message) -> None:
        self.offered += 1
        await self._taking.wait()
        if self.fails is not None:
            raise self.fails
        await self._got.put(message)

    def say(self, *lines: bytes, more: bool = True) -> None:
        """A message for each line; the last one ends the body unless there is `more`."""
        for line in lines:
            self._sent.put_nowait({"type": "http.request", "body": line + b"\n", "more_body": True})
        if not more:
            self._sent.put_nowait({"type": "http.request", "body": b"", "more_body": False})

    def say_piece(self, body: bytes) -> None:
        self._sent.put_nowait({"type": "http.request", "body": body, "more_body": True})

    def take(self, takes: bool) -> None:
        if takes:
            self._taking.set()
        else:
            self._taking.clear()

    async def leave(self) -> None:
        self._sent.put_nowait({"type": "http.disconnect"})
        await settled()

    async def head(self) -> int:
        status: int = (await self._got.get())["status"]
        return status

    @property
    def silent(self) -> bool:
        """Whether nothing more of the answer has come."""
        return self._got.empty()

    async def ended(self) -> None:
        """The answer has been sent to its end."""
        while self._got.empty():
            await asyncio.sleep(0)

    async def answers(self) -> AsyncIterator[Json]:
        while (message := await self._got.get()).get("body") != b"":
            for text in message.get("body", b"").splitlines():
                yield orjson.loads(text)


def documents(answer: httpx.Response) -> list[Json]:
    """Of an answer that is whole."""
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson"), answer.text
    return [orjson.loads(text) for text in answer.content.splitlines()]


def sent(running: Running, path: str, body: bytes, **headers: Any) -> list[Json]:
    return documents(running.client.post(path, content=body, headers=LINES | headers))
