"""Clients over real sockets: connections that end, and back-pressure."""

from __future__ import annotations

import asyncio
import json

from espalier_client import AsyncClient, Client, Readiness, Retry
from tests.client.rude_server import KINDS, READY, Connection, Server, answer, asking, behaving, call


@KINDS
def test_a_connection_that_the_service_closed_while_it_was_idle_is_replaced(kind: str) -> None:
    """The second request goes out on the kept connection, which the service closes without an answer."""

    def behave(server: Server, connection: Connection) -> None:
        while True:
            server.requests.append(connection.request())
            if len(server.requests) == 2:
                return
            connection.socket.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(READY), READY))

    def twice(address: str, retry: Retry) -> list[Readiness]:
        with Client(address, retry=retry) as client:
            return [client.ready(), client.ready()]

    async def twice_async(address: str, retry: Retry) -> list[Readiness]:
        async with AsyncClient(address, retry=retry) as client:
            return [await client.ready(), await client.ready()]

    with behaving(behave) as server:
        retry = Retry(backoff_s=0)
        answers = twice(server.address, retry) if kind == "Client" else asyncio.run(twice_async(server.address, retry))
        assert answers == [Readiness(True, ())] * 2
        assert (len(server.requests), len(server.connections)) == (3, 2)


@KINDS
def test_a_long_stream_and_a_service_with_back_pressure_do_not_wait_for_each_other(kind: str) -> None:
    """The service answers each line at once with a large one, and reads no further before that is taken."""
    names = [f"{n}-".ljust(4000, "x") for n in range(800)]
    padding = "x" * 20_000  # 3 MB there, 20 MB back: more than the buffers of both sides

    def behave(server: Server, connection: Connection) -> None:
        while True:
            connection.head()
            connection.socket.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for line in connection.lines():
                (name,) = json.loads(line)["queries"][0]["history"]
                content = json.dumps(answer(name) | {"padding": padding}).encode() + b"\n"
                connection.socket.sendall(b"%x\r\n%s\r\n" % (len(content), content))
            connection.socket.sendall(b"0\r\n\r\n")

    with behaving(behave, receive_bytes=1 << 16) as server:
        outcomes = call(kind, server.address, "retrieve_stream", asking(*names), timeout_s=60)
    assert [outcome.results[0].items[0].id for outcome in outcomes] == names
