"""A server that does with a connection as it likes, and calls of both clients to it."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import pytest

from espalier_client import (
    AsyncClient,
    Client,
    Retry,
)

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CLIENTS = ("Client", "AsyncClient")
KINDS = pytest.mark.parametrize("kind", CLIENTS)


def in_turn(name: str, values: Sequence[Any]) -> pytest.MarkDecorator:
    """A test of each value, with the two clients in turn: what both share needs no test twice."""
    return pytest.mark.parametrize(("kind", name), list(zip(cycle(CLIENTS), values, strict=False)), ids=map(str, range(len(values))))


READY = b'{"ready": true, "reasons": []}'


SOON = Retry(retries=0, deadline_s=0.3)
"""In true seconds: for what waits inside of one operation."""


LONG_S = 60.0
"""Longer than anything here waits."""


def call(kind: str, url: str, method: str, *arguments: Any, **options: Any) -> Any:
    """The outcome of a method of either client; a stream's as a list."""
    if kind == "Client":
        with Client(url, **options) as client:
            outcome = getattr(client, method)(*arguments)
            return list(outcome) if method == "retrieve_stream" else outcome

    async def run() -> Any:
        async with AsyncClient(url, **options) as client:
            outcome = getattr(client, method)(*arguments)
            return [one async for one in outcome] if method == "retrieve_stream" else await outcome

    return asyncio.run(run())


@dataclass
class Clock:
    """Time as the server lets it pass."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Connection:
    """One connection of a client; `gone` once the test is over."""

    socket: socket.socket
    gone: threading.Event
    clock: Clock
    finished: bool = False
    received: bytes = b""
    body_bytes: int = 0

    def drip(self, content: bytes) -> None:
        """A byte now and then: a second of the clock apart, and a moment in truth, so that they are not read as one."""
        for at in range(len(content)):
            self.clock.now_s += 1
            self.socket.sendall(content[at : at + 1])
            if self.gone.wait(0.002):
                return
        self.finished = True

    def head(self) -> bytes:
        """The head of the next request; what has come of its body is kept."""
        while b"\r\n\r\n" not in self.received:
            self._more()
        head, _, self.received = self.received.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        self.body_bytes = int(length[1]) if length else 0
        return head + b"\r\n\r\n"

    def request(self) -> bytes:
        """The next request, its body too."""
        head = self.head()
        while len(self.received) < self.body_bytes:
            self._more()
        body, self.received = self.received[: self.body_bytes], self.received[self.body_bytes :]
        return head + body

    def lines(self) -> Iterator[bytes]:
        """The lines of a body, each read when it is asked for."""
        while self.body_bytes:
            while b"\n" not in self.received:
                self._more()
            line, _, self.received = self.received.partition(b"\n")
            self.body_bytes -= len(line) + 1
            yield line

    def _more(self) -> None:
        more = self.socket.recv(1 << 16)
        if not more:
            raise ConnectionResetError
        self.received += more


@dataclass
class Server:
    address: str
    clock: Clock = field(default_factory=Clock)
    connections: list[Connection] = field(default_factory=list)
    requests: list[bytes] = field(default_factory=list)


@contextmanager
def behaving(behave: Callable[[Server, Connection], None], receive_bytes: int | None = None) -> Iterator[Server]:
    """A server on a socket where each connection is treated so."""
    gone = threading.Event()
    threads = []
    with socket.socket() as listener:
        if receive_bytes is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = Server(f"http://127.0.0.1:{listener.getsockname()[1]}")

        def treat(connection: Connection) -> None:
            with connection.socket, suppress(OSError):  # the client has had enough
                behave(server, connection)

        def accept() -> None:
            while True:
                accepted, _ = listener.accept()
                if gone.is_set():
                    accepted.close()
                    return
                server.connections.append(Connection(accepted, gone, server.clock))
                threads.append(threading.Thread(target=treat, args=(server.connections[-1],)))
                threads[-1].start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield server
        finally:
            gone.set()
            socket.create_connection(listener.getsockname()).close()
            accepting.join()
            for connection in server.connections:
                with suppress(OSError):  # it is closed
                    connection.socket.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()


def saying(content: bytes) -> Callable[[Server, Connection], None]:
    """Answers each request with these bytes, and closes the connection."""

    def behave(server: Server, connection: Connection) -> None:
        server.requests.append(connection.request())
        connection.socket.sendall(content)

    return behave


def response(content: bytes, status: int = 200, media_type: str = "application/json", *headers: str) -> bytes:
    lines = [
        f"HTTP/1.1 {status} Reason",
        f"Content-Length: {len(content)}",
        f"Content-Type: {media_type}",
        "Connection: close",
        *headers,
        "",
        "",
    ]
    return "\r\n".join(lines).encode("latin-1") + content


def answer(*ids: str) -> dict[str, Any]:
    stages = ("queue_ms", "encode_ms", "search_ms", "serialise_ms", "total_ms", "ms_per_query", "batch")
    items = [{"id": id, "score": 0.5} for id in ids]
    results = [{"items": items, "complete": True, "beam_size": 1, "unknown": []}]
    return {"model": "books", "version": 3, "engine": "fake", "results": results, "timing": dict.fromkeys(stages, 1)}
