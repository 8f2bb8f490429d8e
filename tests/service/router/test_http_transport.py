"""The router over HTTP: kept connections, replicas that break, hang or say something else, and names that stand for several."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from espalier.shards.messages import Pin
from service.router.config import RouterConfig
from service.router.connections import HttpTransport
from service.router.transport import MAX_COUNTED, MAX_LISTED, MasksWanted, ReplicaFailed, answer_body, parse_shard_list
from service.tls import Certificates
from service.watch.logs import MAX_PLAIN
from tests.http_servers import reserved_port
from tests.service.own_time import OwnTime
from tests.service.running import Json

pytestmark = pytest.mark.real_time
MOST = 1000
"""Bytes of the largest answer here."""


class Server:
    """A server of the test. connections: how many were made, ended: of these; heads: of every request."""

    def __init__(self, *answers: bytes | None) -> None:
        """answers: one for each request of a connection, the last for all others; None: it closes the connection."""
        self.answers, self.connections, self.ended, self.address = answers, 0, 0, ""
        self.heads: list[bytes] = []

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            count = 0
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                answer = self.answers[min(count, len(self.answers) - 1)]
                count += 1
                if answer is None:
                    break
                writer.write(answer.replace(b"BODY", body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.ended += 1
            writer.close()


OK = b"HTTP/1.1 200 OK\r\nContent-Type: x\r\ncontent-length: 4\r\n\r\nBODY"


@asynccontextmanager
async def serving(*answers: bytes | None, **config: float) -> AsyncIterator[tuple[Server, HttpTransport]]:
    server = Server(*answers)
    listening = await asyncio.start_server(server.talk, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()[:2]
    server.address = f"http://{host}:{port}"
    patient = {"connect_timeout_s": 20, "shards": (server.address,), "key": "a-key-of-routers"}
    transport = HttpTransport(RouterConfig.model_validate(patient | config))
    async with listening:
        try:
            yield server, transport
        finally:
            await transport.close()


async def test_a_kept_connection_carries_key_and_origin_and_is_made_anew_closed_or_forgotten() -> None:
    async with serving(OK) as (server, transport):
        for body in (b"abcd", b"efgh"):
            assert await transport.send(server.address, body, MOST, 5, {"X-Request-Id": "r-1\r\nEvil: 1"}) == body
        assert server.connections == 1
        head = server.heads[0].decode()
        assert head.startswith("POST /internal/search HTTP/1.1\r\n")
        assert "Authorization: Bearer a-key-of-routers\r\n" in head
        assert "X-Request-Id: r-1Evil:1\r\n" in head
    async with serving(OK, None) as (server, transport):
        for _ in range(3):
            assert await transport.send(server.address, b"abcd", MOST, 5, {}) == b"abcd"
        assert server.connections == 3
    async with serving(OK) as (server, transport):
        giving_up = asyncio.create_task(transport.send(server.address, b"abcd", MOST, 5, {}))
        await asyncio.sleep(0)
        giving_up.cancel()
        await asyncio.gather(giving_up, return_exceptions=True)
        assert await transport.send(server.address, b"efgh", MOST, 5, {}) == b"efgh"
    async with serving(OK) as (server, transport):
        await transport.send(server.address, b"abcd", MOST, 5, {})
        transport.forget(server.address)
        async with asyncio.timeout(5):
            while not server.ended:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "connection"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 400\r\n\r\nabc", "late"),
        (b"HTT", "late"),
        (b"SSH-2.0-OpenSSH_9\r\n\r\n", "garbage"),
        (b"SSH-2.0-OpenSSH_9\r\n", "garbage"),
        (b"\x15", "garbage"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nabcd\r\n0\r\n\r\n", "garbage"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1001\r\n\r\n", "garbage"),
        (b"x" * 20_000, "garbage"),
        (b"HTTP/1.1 410 Gone\r\ncontent-length: 0\r\n\r\n", "not_served"),
        (b"HTTP/1.1 413 Large\r\ncontent-length: 0\r\n\r\n", "refused"),
        (b"HTTP/1.1 422 No\r\ncontent-length: 0\r\n\r\n", "refused"),
        (b"HTTP/1.1 429 Full\r\ncontent-length: 0\r\n\r\n", "full"),
        (b"HTTP/1.1 503 Not ready\r\ncontent-length: 0\r\n\r\n", "full"),
        (b"HTTP/1.1 504 Late\r\ncontent-length: 0\r\n\r\n", "late"),
        (b"HTTP/1.1 500 Broken\r\ncontent-length: 0\r\n\r\n", "broken"),
        (b"HTTP/1.1 302 Elsewhere\r\nlocation: http://127.0.0.1/\r\ncontent-length: 0\r\n\r\n", "broken"),
        (b"HTTP/1.1 409 Masks\r\ncontent-length: 2\r\n\r\n[]", "garbage"),
    ],
)
async def test_every_way_to_fail_has_a_reason(answer: bytes | None, reason: str) -> None:
    async with serving(answer) as (server, transport):
        with pytest.raises(ReplicaFailed) as failed:
            await transport.send(server.address, b"abcd", MOST, 0.3 if reason == "late" else 20, {})
        assert failed.value.reason == reason


async def test_the_longest_answer_is_read_lacking_masks_are_named_and_a_look_may_fail() -> None:
    async with serving(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n" + b"x" * MOST) as (server, transport):
        assert await transport.send(server.address, b"abcd", MOST, 5, {}) == b"x" * MOST
    async with serving(b'HTTP/1.1 409 Masks\r\ncontent-length: 9\r\n\r\n["a","b"]') as (server, transport):
        with pytest.raises(MasksWanted) as wanted:
            await transport.send(server.address, b"", MOST, 5, {})
        assert wanted.value.digests == ("a", "b")
    async with serving(b"HTTP/1.1 200 OK\r\ncontent-length: 5000000\r\n\r\n") as (server, transport):
        with pytest.raises(ReplicaFailed) as failed:
            await transport.served_shards(server.address, 5)
        assert failed.value.reason == "garbage"
    with pytest.raises(ReplicaFailed) as failed:
        await transport.served_shards(server.address, 1)
    assert failed.value.reason == "connection"


async def test_connections_to_one_address_are_bounded() -> None:
    async with serving(b"HTTP/1.1 200 OK\r\n", connections=2) as (server, transport):
        sent = [asyncio.create_task(transport.send(server.address, b"", MOST, 0.3, {})) for _ in range(3)]
        found = await asyncio.gather(*sent, return_exceptions=True)
        assert sorted(error.reason for error in found if isinstance(error, ReplicaFailed)) == ["full", "late", "late"]


async def test_a_look_finds_out_what_a_replica_holds_while_as_much_as_may_be_is_asked_of_it() -> None:
    held = listed(SHARD)
    async with serving(b"HTTP/1.1 200 OK\r\n", connections=1) as (server, transport):
        searching = asyncio.create_task(transport.send(server.address, b"", MOST, 5, {}))
        async with asyncio.timeout(5):
            while not server.heads:
                await asyncio.sleep(0.01)
        server.answers = (b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(held) + held,)
        assert len(await transport.served_shards(server.address, 5)) == 1
        searching.cancel()
        await asyncio.gather(searching, return_exceptions=True)


@pytest.mark.parametrize("address", ["http://a..b:80", "https://.b:80", f"http://{'a' * 64}.b:80"])
async def test_a_host_that_no_name_can_be_is_a_failed_connection(address: str) -> None:
    transport = HttpTransport(RouterConfig.model_validate({"shards": (address,), "connect_timeout_s": 20}))
    with pytest.raises(ReplicaFailed, match=r"label") as failed:
        await transport.served_shards(address, 20)
    assert failed.value.reason == "connection"


async def test_reading_certificates_takes_no_time_from_a_connection() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, OwnTime)

    def read_slowly() -> ssl.SSLContext:
        loop.passed_s += 30
        return ssl.create_default_context()

    with reserved_port() as port:
        address = f"https://127.0.0.1:{port}"
        transport = HttpTransport(RouterConfig(shards=(address,), connect_timeout_s=20), Certificates([], read_slowly, "certificates"))
        with pytest.raises(ReplicaFailed) as failed:
            await transport.served_shards(address, 60)
    assert failed.value.reason == "connection"  # nobody listens there


async def test_a_name_may_stand_for_several_addresses() -> None:
    transport = HttpTransport(RouterConfig(shards=("dns+http://localhost:8001",)))
    assert set(await transport.addresses("dns+http://localhost:8001")) <= {"http://127.0.0.1:8001", "http://[::1]:8001"}
    assert await transport.addresses("http://localhost:8001") == ("http://localhost:8001",)
    with pytest.raises(ReplicaFailed) as failed:
        await transport.addresses("dns+http://nobody.invalid:8001")
    assert failed.value.reason == "connection"


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 4\r\n\r\nBODY", b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nBODYmore"],
)
async def test_a_connection_that_is_not_kept_is_closed_here(answer: bytes) -> None:
    async with serving(answer) as (server, transport):
        for _ in range(3):
            assert await transport.send(server.address, b"abcd", MOST, 5, {}) == b"abcd"
        async with asyncio.timeout(5):
            while server.ended < 3:
                await asyncio.sleep(0.01)


# -- what replicas may say that they hold ---------------------------------------------------------------------------------


SHARD: Json = {"of": "books", "version": 1, "digest": "d" * 64, "index": 0, "count": 2, "engine": "compiled-cpu"}


def listed(*shards: Any, **more: Any) -> bytes:
    return orjson.dumps({"shards": shards, **more})


@pytest.mark.parametrize(
    "changed",
    [
        {"count": 300_000_000},
        {"of": "books\nforged"},
        {"of": "x" * 100},
        {"digest": "d"},
        {"version": 0},
        {"version": 1 << 63},
        {"index": -1},
        {"index": None},
        {"count": True},
        {"ready": 1},
    ],
)
def test_a_shard_that_cannot_be_is_garbage(changed: Json) -> None:
    assert len(parse_shard_list(listed(SHARD))) == 1
    with pytest.raises(ReplicaFailed) as failed:
        parse_shard_list(listed(SHARD, SHARD | changed))
    assert failed.value.reason == "garbage"
    assert "shards.1" in str(failed.value)


def test_a_replica_may_say_more_and_hold_no_more_than_so_many_layouts() -> None:
    without = {name: value for name, value in SHARD.items() if name != "engine"}
    for document in (listed(without), listed(SHARD | {"engine": None, "items": 5}, process="p" * 1000)):
        assert parse_shard_list(document) == {Pin("books", 1, "d" * 64, 0, 2)}
    many = [SHARD | {"version": version, "count": 4096} for version in range(1, MAX_COUNTED // 4096 + 1)]
    assert len(parse_shard_list(listed(*many))) == len(many)
    with pytest.raises(ReplicaFailed, match="expected at most"):
        parse_shard_list(listed(SHARD, *many))


@pytest.mark.parametrize("document", [b"no JSON", b"\xed\xa0\x80", b"[]", b"{}", listed(*[SHARD] * MAX_LISTED, SHARD), listed(1)])
def test_what_is_no_list_of_shards_is_garbage(document: bytes) -> None:
    with pytest.raises(ReplicaFailed, match="a list of shards was expected") as failed:
        parse_shard_list(document)
    assert failed.value.reason == "garbage"


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, b"\x1b[31m\nfake log line\n" * 50),
        (503, "\x9b2J\u2028".encode() * 100),
        (409, b'[0, "\n\x1b[31m"]'),
        (409, orjson.dumps([["\n\x1b"] * 1000])),
    ],
)
def test_what_a_replica_says_can_neither_end_a_line_of_the_log_nor_act_on_a_terminal(status: int, body: bytes) -> None:
    with pytest.raises(ReplicaFailed) as failed:
        answer_body(status, body)
    assert str(failed.value).isprintable()
    assert len(str(failed.value)) <= MAX_PLAIN
