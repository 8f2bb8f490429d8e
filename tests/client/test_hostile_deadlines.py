"""Servers that drip, flood and keep silent: each call of the client ends at its deadline."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from espalier_client import (
    AsyncClient,
    Client,
    Query,
    Retry,
    TimedOut,
)
from tests.client.rude_server import HEAD, KINDS, LONG_S, SOON, Connection, Server, answer, asking, behaving, call, response

DRIPS = {
    "the head": (b"", HEAD + b"X-Padding: " + b"x" * 50_000),
    "interim answers": (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 5000),
    "a body": (HEAD + b"Content-Length: 100000\r\n\r\n", b" " * 100_000),
    "chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n" * 10_000),
    "the head of a chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1;" + b"x" * 50_000),
    "the end of chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X-Padding: " + b"x" * 50_000),
    "an error": (HEAD.replace(b"200 OK", b"500 Oops") + b"Content-Length: 100000\r\n\r\n", b" " * 100_000),
}


@KINDS
@pytest.mark.parametrize(("method", "arguments"), [("ready", ()), ("retrieve", ([Query()],)), ("retrieve_stream", (asking("a"),))])
@pytest.mark.parametrize("what", DRIPS)
def test_the_deadline_holds_against_a_server_that_drips(kind: str, what: str, method: str, arguments: Any) -> None:
    """Each byte comes in time for the time-out of a single read."""
    at_once, slowly = DRIPS[what]

    def behave(server: Server, connection: Connection) -> None:
        connection.request()
        connection.socket.sendall(at_once)
        connection.drip(slowly)

    with behaving(behave) as server:
        with pytest.raises(TimedOut):
            call(kind, server.address, method, *arguments, retry=Retry(deadline_s=30, clock=server.clock))
        (connection,) = server.connections
        assert not connection.finished


def test_the_deadline_holds_against_a_server_that_takes_a_request_slowly() -> None:
    """The synchronous client alone sends piece by piece; the other one waits once for all of them."""

    def behave(server: Server, connection: Connection) -> None:
        while connection.socket.recv(1 << 16):
            connection.clock.now_s += 1
            if connection.gone.wait(0.001):
                return
        connection.finished = True

    with behaving(behave, receive_bytes=1 << 16) as server:
        with pytest.raises(TimedOut):
            call("Client", server.address, "retrieve", [Query(text="x" * 50_000_000)], retry=Retry(deadline_s=30, clock=server.clock))
        assert not server.connections[0].finished


@KINDS
@pytest.mark.parametrize(("scheme", "letters"), [("http", 1), ("http", 50_000_000), ("https", 1)], ids=["answer", "request", "handshake"])
def test_an_operation_waits_for_what_is_left_and_no_longer(kind: str, scheme: str, letters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking the name up took nearly all of the time; then nobody answers, nobody reads, or nobody shakes hands."""
    real = socket.getaddrinfo

    def behave(server: Server, connection: Connection) -> None:
        connection.gone.wait(LONG_S)

    with behaving(behave) as server:

        def getaddrinfo(host: Any, *arguments: Any, **rest: Any) -> Any:
            if host not in ("slow.test", b"slow.test"):
                return real(host, *arguments, **rest)
            server.clock.now_s += 999.8
            return real("127.0.0.1", *arguments, **rest)

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        address = server.address.replace("http://127.0.0.1", f"{scheme}://slow.test")
        with pytest.raises(TimedOut):
            call(kind, address, "retrieve", [Query(text="x" * letters)], timeout_s=1000, retry=Retry(deadline_s=1000, clock=server.clock))
    gc.collect()  # a connection that nobody closed is a warning here


@KINDS
def test_the_deadline_holds_over_a_handshake_that_drips(kind: str) -> None:
    """Two bytes of length say that 16 KiB of handshake follow."""
    with behaving(lambda server, connection: connection.drip(b"\x16\x03\x03\x3f\xff" + b"x" * 16_000)) as server:
        with pytest.raises(TimedOut):
            call(kind, server.address.replace("http:", "https:"), "ready", timeout_s=LONG_S, retry=SOON)
        assert not any(connection.finished for connection in server.connections)


@KINDS
def test_the_deadline_holds_over_a_proxy_that_drips(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def behave(server: Server, connection: Connection) -> None:
        server.requests.append(connection.request())
        connection.drip(b"HTTP/1.1 200 Connected\r\nX-Padding: " + b"x" * 50_000)

    with behaving(behave) as server:
        monkeypatch.setenv("https_proxy", server.address)
        monkeypatch.delenv("no_proxy", raising=False)
        with pytest.raises(TimedOut):
            call(kind, "https://service.test", "ready", retry=Retry(deadline_s=30, clock=server.clock))
        assert server.requests[0].startswith(b"CONNECT service.test:443 ")
        assert not server.connections[0].finished


@KINDS
def test_the_deadline_holds_over_a_name_that_is_looked_up_for_ever(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = threading.Event()
    looked_up: list[object] = []

    def getaddrinfo(host: Any, *_: Any, **__: Any) -> Any:
        looked_up.append(host)
        gone.wait(LONG_S)
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    async def ask() -> None:
        async with AsyncClient("http://slow.test", timeout_s=LONG_S, retry=SOON) as client:
            try:
                await client.ready()
            finally:
                gone.set()  # the event loop waits for its threads

    try:
        with pytest.raises(TimedOut) as raised:
            call(kind, "http://slow.test", "ready", timeout_s=LONG_S, retry=SOON) if kind == "Client" else asyncio.run(ask())
    finally:
        gone.set()
    assert raised.value.sent is False
    assert [one.decode() if isinstance(one, bytes) else one for one in looked_up] == ["slow.test"]


@KINDS
def test_the_deadline_of_a_stream_is_that_of_its_next_answer(kind: str) -> None:
    """Answers come one after the other for longer than the deadline, and then one that drips."""
    line = json.dumps(answer("a")).encode() + b"\n"
    taken = threading.Semaphore(0)
    got: list[Any] = []

    def behave(server: Server, connection: Connection) -> None:
        connection.request()
        connection.socket.sendall(HEAD.replace(b"json", b"x-ndjson") + b"Connection: close\r\n\r\n")
        for _ in range(10):
            server.clock.now_s += 20
            connection.socket.sendall(line)
            taken.acquire(timeout=LONG_S)
        connection.drip(line[:-1] + b" " * 50_000)

    def keep(outcome: Any) -> None:
        got.append(outcome)
        taken.release()

    def take(retry: Retry) -> None:
        with Client(server.address, retry=retry) as client:
            for outcome in client.retrieve_stream(asking(*"abcdefghijk")):
                keep(outcome)

    async def take_async(retry: Retry) -> None:
        async with AsyncClient(server.address, retry=retry) as client:
            async for outcome in client.retrieve_stream(asking(*"abcdefghijk")):
                keep(outcome)

    with behaving(behave) as server:
        retry = Retry(retries=0, deadline_s=30, clock=server.clock)
        with pytest.raises(TimedOut):
            take(retry) if kind == "Client" else asyncio.run(take_async(retry))
    assert len(got) == 10


@KINDS
def test_no_attempt_outlives_the_deadline_of_all(kind: str) -> None:
    """The first attempt fails at once; the second gets what is left, not a time-out of its own."""

    def behave(server: Server, connection: Connection) -> None:
        connection.request()
        if len(server.connections) == 1:
            connection.socket.sendall(response(b"{}", 503))
        else:
            connection.drip(HEAD + b"X-Padding: " + b"x" * 50_000)

    with behaving(behave) as server:
        with pytest.raises(TimedOut):
            call(kind, server.address, "retrieve", [Query()], retry=Retry(backoff_s=0, deadline_s=30, clock=server.clock))
        assert [connection.finished for connection in server.connections] == [False, False]


@KINDS
def test_a_transport_of_ones_own_is_held_to_the_deadline_between_pieces(kind: str) -> None:
    clock = itertools.count()
    taken = []

    class Endless(httpx.SyncByteStream, httpx.AsyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            for n in range(10_000):
                taken.append(n)
                yield b" "

        async def __aiter__(self) -> Any:
            for piece in self:
                yield piece

    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=Endless()))
    retry = Retry(deadline_s=100, clock=lambda: next(clock))
    with pytest.raises(TimedOut, match=r"GET /readyz: no whole answer within 100 s \(deadline_s\)"):
        call(kind, "http://service", "ready", transport=transport, retry=retry)
    assert len(taken) < 200


def test_a_deadline_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="deadline_s: got 0, expected a finite number above 0"):
        Retry(deadline_s=0)


def test_what_may_take_minutes_is_not_held_to_the_deadline_of_the_rest() -> None:
    clock = itertools.count(0, 40)  # each look takes 40 s
    described = {"name": "a", "state": "ready", "versions": []}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=described))
    with Client("http://service", transport=transport, retry=Retry(deadline_s=30, clock=lambda: float(next(clock)))) as client:
        assert client.load("a", 1).name == "a"
        with pytest.raises(TimedOut):
            client.model("a")
