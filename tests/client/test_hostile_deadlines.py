"""Servers that drip, flood and keep silent: each call of the client ends."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from espalier_client import AsyncClient, Client, Query, Retry, TimedOut
from tests.client.rude_server import HEAD, KINDS, LONG_S, SOON, Connection, Server, answer, asking, behaving, call, in_turn, response

LONG_BODY = b"Content-Length: 100000\r\n\r\n"


def silent(_: Server, connection: Connection) -> None:
    connection.gone.wait(LONG_S)


@in_turn(
    "drips",
    [
        (head, method, arguments)
        for head in (HEAD, HEAD.replace(b"200 OK", b"500 Oops"))
        for method, arguments in (("ready", ()), ("retrieve", ([Query()],)), ("retrieve_stream", (asking("a"),)))
    ],
)
def test_the_deadline_holds_against_a_server_that_drips(kind: str, drips: tuple[bytes, str, Any]) -> None:
    """Each byte comes in time for the time-out of a single read."""
    head, method, arguments = drips

    def behave(server: Server, connection: Connection) -> None:
        connection.request()
        connection.socket.sendall(head + LONG_BODY)
        connection.drip(b" " * 100_000)

    with behaving(behave) as server:
        with pytest.raises(TimedOut):
            call(kind, server.address, method, *arguments, retry=Retry(deadline_s=30, clock=server.clock))
        (connection,) = server.connections
        assert not connection.finished


@KINDS
@pytest.mark.parametrize(("scheme", "letters"), [("http", 1), ("http", 20_000_000), ("https", 1)], ids=["answer", "request", "handshake"])
def test_an_operation_waits_for_what_is_left_and_no_longer(kind: str, scheme: str, letters: int) -> None:
    """Nobody answers, nobody reads, or nobody shakes hands."""
    with behaving(silent, receive_bytes=1 << 16) as server:
        address = server.address.replace("http:", f"{scheme}:")
        with pytest.raises(TimedOut):
            call(kind, address, "retrieve", [Query(text="x" * letters)], timeout_s=LONG_S, retry=SOON)
    gc.collect()  # a connection that nobody closed is a warning here


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
            connection.gone.wait(LONG_S)

    with behaving(behave) as server:
        with pytest.raises(TimedOut):
            call(kind, server.address, "retrieve", [Query()], timeout_s=LONG_S, retry=Retry(backoff_s=0, deadline_s=0.3))
        assert len(server.connections) == 2


def test_no_attempt_begins_after_the_deadline() -> None:
    """A pause took longer than it should have."""
    now_s, asked = [0.0], []

    def refuse(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(503, json={})

    def oversleep(seconds: float) -> None:
        now_s[0] += seconds + 60

    retry = Retry(deadline_s=30, clock=lambda: now_s[0])
    late = pytest.raises(TimedOut, match=r"no whole answer within 30 s \(deadline_s\)")
    with Client("http://service", transport=httpx.MockTransport(refuse), retry=retry, sleep=oversleep) as client, late:
        client.model("a")
    assert len(asked) == 1


@KINDS
def test_the_deadline_is_checked_between_the_pieces_of_an_answer(kind: str) -> None:
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


def test_what_may_take_minutes_is_not_held_to_the_deadline_of_the_rest() -> None:
    clock = itertools.count(0, 40)  # each look takes 40 s
    described = {"name": "a", "state": "ready", "versions": []}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=described))
    with Client("http://service", transport=transport, retry=Retry(deadline_s=30, clock=lambda: float(next(clock)))) as client:
        assert client.load("a", 1).name == "a"
        with pytest.raises(TimedOut):
            client.model("a")
