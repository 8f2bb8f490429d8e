"""Clients over real sockets: connections that end, back-pressure, servers that keep silent, proxies and certificates."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from espalier_client import AsyncClient, Client, ConnectionFailed, Query, Readiness, Retry, TimedOut
from tests.client.rude_server import (
    HEAD,
    KINDS,
    LONG_S,
    READY,
    SOON,
    Connection,
    Server,
    answer,
    behaving,
    call,
    in_turn,
    response,
    saying,
)
from tests.client.stub import asking


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


# -- servers that drip and keep silent ------------------------------------------------------------------------------------

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


# -- on the way -----------------------------------------------------------------------------------------------------------


@KINDS
def test_the_proxy_of_the_environment_is_used_where_it_is_meant(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with behaving(saying(response(READY))) as proxy, behaving(saying(response(READY))) as service:
        for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.setenv("HTTP_PROXY", proxy.address.replace("://", "://me:s3cret@"))
        assert call(kind, "http://service.test:81", "ready") == Readiness(True, ())
        (asked,) = proxy.requests
        assert asked.startswith(b"GET http://service.test:81/readyz HTTP/1.1\r\n")
        assert b"\r\nProxy-Authorization: Basic bWU6czNjcmV0\r\n" in asked
        for bypassed in ("127.0.0.1", "*", service.address.removeprefix("http://")):
            monkeypatch.setenv("NO_PROXY", bypassed)
            assert call(kind, service.address, "ready") == Readiness(True, ())
        assert (len(proxy.requests), len(service.requests)) == (1, 3)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of 127.0.0.1 and its key, in one file."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    key = path.with_name("key.pem")
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    words += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(path)]
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    subprocess.run(words, check=True, capture_output=True)
    path.write_text(path.read_text() + key.read_text())
    return path


def over_tls(certificate: Path, behave: Callable[[Server, Connection], None]) -> Callable[[Server, Connection], None]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    def wrapped(server: Server, connection: Connection) -> None:
        with context.wrap_socket(connection.socket, server_side=True) as connection.socket:
            behave(server, connection)

    return wrapped


@KINDS
def test_requests_and_answers_go_through_tls_where_the_certificate_is_vouched_for(
    kind: str, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with behaving(over_tls(certificate, saying(response(READY)))) as server:
        address = server.address.replace("http:", "https:")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert call(kind, address, "ready") == Readiness(True, ())
        monkeypatch.delenv("SSL_CERT_FILE")
        with pytest.raises(ConnectionFailed, match="CERTIFICATE_VERIFY_FAILED"):
            call(kind, address, "ready", retry=Retry(retries=0))
        assert len(server.requests) == 1
