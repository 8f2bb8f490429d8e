"""The client before servers that drip, flood, nest and lie: each call ends in time, with an answer or with an error of its own."""

from __future__ import annotations

import asyncio
import gc
import gzip
import itertools
import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier_client import (
    Answer,
    AsyncClient,
    Client,
    ClientError,
    ConnectionFailed,
    InvalidAnswer,
    Overloaded,
    Query,
    Readiness,
    Request,
    RequestFailed,
    Retry,
    ServiceFailed,
    TimedOut,
    Unavailable,
)

KINDS = pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
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


def asking(*ids: str) -> list[Request]:
    return [Request([Query(history=[id])]) for id in ids]


# -- a server that does as it likes ---------------------------------------------------------------------------------------


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

    def drip(self, content: bytes) -> None:
        """A byte now and then: a second of the clock apart, and a moment in truth, so that they are not read as one."""
        for at in range(len(content)):
            self.clock.now_s += 1
            self.socket.sendall(content[at : at + 1])
            if self.gone.wait(0.002):
                return
        self.finished = True

    def request(self) -> bytes:
        """The next request, its body too."""
        got = b""
        while b"\r\n\r\n" not in got:
            got += self._more()
        head, _, body = got.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        while length and len(body) < int(length[1]):
            body += self._more()
        return head + b"\r\n\r\n" + body

    def _more(self) -> bytes:
        more = self.socket.recv(1 << 16)
        if not more:
            raise ConnectionResetError
        return more


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


# -- the deadline ---------------------------------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
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


# -- the way to the service -----------------------------------------------------------------------------------------------


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


@KINDS
def test_each_address_of_a_name_is_tried(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with behaving(saying(response(READY))) as server:
        port = int(server.address.rpartition(":")[2])
        real = socket.getaddrinfo

        def getaddrinfo(host: Any, *arguments: Any, **rest: Any) -> Any:
            if host not in ("two.test", b"two.test"):
                return real(host, *arguments, **rest)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("127.0.0.2", "127.0.0.1")]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        assert call(kind, f"http://two.test:{port}", "ready") == Readiness(True, ())


@KINDS
@pytest.mark.parametrize("host", ["nobody.invalid", "x" * 70 + ".test"])
def test_a_name_without_an_address_is_a_failed_connection(kind: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def getaddrinfo(name: Any, *arguments: Any, **rest: Any) -> Any:
        if name in ("nobody.invalid", b"nobody.invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(name, *arguments, **rest)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(ConnectionFailed) as raised:
        call(kind, f"http://{host}", "ready", retry=Retry(retries=0))
    assert raised.value.sent is False


@KINDS
def test_a_port_where_nobody_listens_is_a_failed_connection(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionFailed) as raised:
        call(kind, f"http://127.0.0.1:{port}", "ready", retry=Retry(retries=0))
    assert (type(raised.value), raised.value.sent) == (ConnectionFailed, False)


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
def test_large_requests_and_answers_go_through_tls(kind: str, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    content = json.dumps(answer(*(f"{n}-".ljust(1000, "x") for n in range(2000)))).encode()
    with behaving(over_tls(certificate, saying(response(content)))) as server:
        got = call(kind, server.address.replace("http:", "https:"), "retrieve", [Query(text="x" * 3_000_000)])
        assert len(got.results[0].items) == 2000
        assert server.requests[0].endswith(b"x" * 1000 + b'"}]}')


@KINDS
def test_the_deadline_holds_within_tls(kind: str, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))

    def behave(server: Server, connection: Connection) -> None:
        connection.request()
        connection.drip(HEAD + b"X-Padding: " + b"x" * 50_000)

    with behaving(over_tls(certificate, behave)) as server:
        with pytest.raises(TimedOut):
            call(kind, server.address.replace("http:", "https:"), "ready", retry=Retry(deadline_s=30, clock=server.clock))
        assert not server.connections[0].finished


@KINDS
def test_a_certificate_that_nobody_vouches_for_is_a_failed_connection(
    kind: str, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with behaving(over_tls(certificate, saying(response(READY)))) as server:
        with pytest.raises(ConnectionFailed, match="CERTIFICATE_VERIFY_FAILED"):
            call(kind, server.address.replace("http:", "https:"), "ready", retry=Retry(retries=0))
        assert server.requests == []


# -- answers that are none ------------------------------------------------------------------------------------------------


def answer(*ids: str) -> dict[str, Any]:
    stages = ("queue_ms", "encode_ms", "search_ms", "serialise_ms", "total_ms", "ms_per_query", "batch")
    items = [{"id": id, "score": 0.5} for id in ids]
    results = [{"items": items, "complete": True, "beam_size": 1, "unknown": []}]
    return {"model": "books", "version": 3, "engine": "fake", "results": results, "timing": dict.fromkeys(stages, 1)}


NESTED = b"[" * 200_000
METHODS: list[tuple[str, Any]] = [("ready", ()), ("models", ()), ("retrieve", ([Query()],)), ("retrieve_stream", (asking("a"),))]


@KINDS
@pytest.mark.parametrize(("method", "arguments"), METHODS)
@pytest.mark.parametrize(
    "content",
    [NESTED, b'{"results": ' + NESTED, b'{"a":' * 200_000, b'{"x": 1' + b"0" * 5000 + b"}", b"\xff"],
)
def test_json_that_cannot_be_read_is_no_answer(kind: str, method: str, arguments: Any, content: bytes) -> None:
    with behaving(saying(response(content))) as server:
        with pytest.raises(InvalidAnswer, match="expected an answer of the retrieval service, got another") as raised:
            call(kind, server.address, method, *arguments)
        assert len(str(raised.value)) < 500
        assert len(server.requests) == 1


@KINDS
@pytest.mark.parametrize("method", ["retrieve", "retrieve_stream"])
@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity"])
def test_a_number_that_json_does_not_have_is_no_answer(kind: str, method: str, number: bytes) -> None:
    content = json.dumps(answer("a")).encode()
    arguments = asking("a") if method == "retrieve_stream" else [Query()]
    with behaving(saying(response(content))) as server:
        call(kind, server.address, method, arguments)
    with behaving(saying(response(content.replace(b"0.5", number)))) as server, pytest.raises(InvalidAnswer, match="no number of JSON"):
        call(kind, server.address, method, arguments)


@KINDS
@pytest.mark.parametrize("method", ["retrieve", "retrieve_stream"])
@pytest.mark.parametrize(
    "content", [NESTED, b'{"title": ' + b"[" * 500 + b"]" * 500 + b', "detail": {"a": 1}, "errors": [7]}', b"\xff", b"5"]
)
def test_a_refusal_that_cannot_be_read_tells_its_status(kind: str, method: str, content: bytes) -> None:
    with behaving(saying(response(content, 500, "application/problem+json"))) as server, pytest.raises(ServiceFailed) as raised:
        call(kind, server.address, method, asking("a") if method == "retrieve_stream" else [Query()])
    assert (raised.value.status, raised.value.title, raised.value.detail, raised.value.errors) == (500, "Internal Server Error", "", ())


@KINDS
@pytest.mark.parametrize("status", [b"1e999", b"200", b"true", b'"422"', b"null", b"-1", b"[]"])
def test_a_line_of_a_stream_with_a_status_that_is_none_is_no_answer(kind: str, status: bytes) -> None:
    line = b'{"title": "x", "status": ' + status + b"}\n"
    with behaving(saying(response(line, 200, "application/x-ndjson"))) as server, pytest.raises(InvalidAnswer):
        call(kind, server.address, "retrieve_stream", asking("a"))


@KINDS
@pytest.mark.parametrize("media_type", ["text/html", "application/problem+json", "", "\xe4;"])
@pytest.mark.parametrize("method", ["ready", "retrieve_stream"])
def test_an_answer_of_another_type_is_none(kind: str, method: str, media_type: str) -> None:
    content = READY if method == "ready" else json.dumps(answer("a")).encode()
    with (
        behaving(saying(response(content, 200, media_type))) as server,
        pytest.raises(InvalidAnswer, match="expected an answer of the type"),
    ):
        call(kind, server.address, method, *([asking("a")] if method == "retrieve_stream" else []))


@KINDS
@pytest.mark.parametrize("media_type", ["application/json", "Application/JSON; charset=utf-8"])
def test_the_type_of_an_answer_may_have_parameters(kind: str, media_type: str) -> None:
    with behaving(saying(response(READY, 200, media_type))) as server:
        assert call(kind, server.address, "ready") == Readiness(True, ())


@KINDS
@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "deflate", "GZIP", "identity, gzip", "nonsense"])
def test_what_is_compressed_is_not_unpacked(kind: str, encoding: str) -> None:
    content = gzip.compress(READY)
    with behaving(saying(response(content, 200, "application/json", f"Content-Encoding: {encoding}"))) as server:
        with pytest.raises(InvalidAnswer, match="expected an answer that is not compressed"):
            call(kind, server.address, "ready")
        assert b"\r\nAccept-Encoding: identity\r\n" in server.requests[0]
    for status, expected in ((502, ServiceFailed), (503, Unavailable)):
        packed = response(gzip.compress(b"[]"), status, "application/json", f"Content-Encoding: {encoding}")
        with behaving(saying(packed)) as server, pytest.raises(expected):
            call(kind, server.address, "ready", retry=Retry(retries=0))


@KINDS
@pytest.mark.parametrize(("method", "arguments"), METHODS)
@pytest.mark.parametrize("chunked", [False, True])
def test_an_answer_without_end_is_left(kind: str, method: str, arguments: Any, chunked: bool) -> None:
    """One that ends would be read to its end: its sender would not notice that nobody wants it."""

    def behave(server: Server, connection: Connection) -> None:
        connection.request()
        framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 100000000000"
        connection.socket.sendall(HEAD + framing + b"\r\n\r\n")
        piece = b"x" * 0x10000
        for _ in range(3000):  # 200 MB
            connection.socket.sendall(b"10000\r\n%s\r\n" % piece if chunked else piece)
        connection.finished = True

    with behaving(behave) as server:
        with pytest.raises(InvalidAnswer, match=r"expected an answer of at most 1000000 bytes \(max_answer_bytes\), got more"):
            call(kind, server.address, method, *arguments, max_answer_bytes=1_000_000)
        assert not server.connections[0].finished


@KINDS
def test_the_longest_answer_is_counted_to_the_byte(kind: str) -> None:
    line = json.dumps(answer("a")).encode()
    with behaving(saying(response(READY))) as server:
        assert call(kind, server.address, "ready", max_answer_bytes=len(READY)) == Readiness(True, ())
        with pytest.raises(InvalidAnswer, match="max_answer_bytes"):
            call(kind, server.address, "ready", max_answer_bytes=len(READY) - 1)
    with behaving(saying(response((line + b"\n") * 3, 200, "application/x-ndjson"))) as server:
        assert len(call(kind, server.address, "retrieve_stream", asking(*"abc"), max_answer_bytes=len(line))) == 3
        with pytest.raises(InvalidAnswer, match="max_answer_bytes"):
            call(kind, server.address, "retrieve_stream", asking(*"abc"), max_answer_bytes=len(line) - 1)


@KINDS
def test_a_refusal_without_end_is_left_and_tells_its_status(kind: str) -> None:
    def behave(server: Server, connection: Connection) -> None:
        connection.request()
        connection.socket.sendall(HEAD.replace(b"200 OK", b"500 Oops") + b"Content-Length: 100000000000\r\n\r\n")
        for _ in range(3000):
            connection.socket.sendall(b"x" * 0x10000)
        connection.finished = True

    for method, arguments in (("retrieve", [Query()]), ("retrieve_stream", asking("a"))):
        with behaving(behave) as server:
            with pytest.raises(ServiceFailed):
                call(kind, server.address, method, arguments, max_answer_bytes=1 << 40)
            assert not server.connections[0].finished


@pytest.mark.parametrize("value", [0, -1])
def test_the_longest_answer_is_checked(value: int) -> None:
    for client in (Client, AsyncClient):
        with pytest.raises(ValueError, match=f"max_answer_bytes: got {value}, expected at least 1"):
            client("http://service", max_answer_bytes=value)


# -- heads that lie -------------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/9.9 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnonsense",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"X-A: a\r\n" * 100_000,
        b"HTTP/1.1 200 OK\r\n" + b"X-A: a\r\n" * 100_000,
        b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 500_000,
        b"HTTP/1.1 200 " + b"a" * 500_000,
        b"\x00" * 200_000,
    ],
    ids=range(19),
)
@pytest.mark.parametrize(("method", "arguments"), [("ready", ()), ("retrieve_stream", (asking("a"),))])
def test_what_is_no_http_is_an_error_of_the_client(kind: str, method: str, arguments: Any, content: bytes) -> None:
    with behaving(saying(content)) as server, pytest.raises((ConnectionFailed, InvalidAnswer)) as raised:
        call(kind, server.address, method, *arguments, retry=Retry(retries=1, backoff_s=0))
    assert len(str(raised.value)) < 1000


@KINDS
@pytest.mark.parametrize(
    "location", ["mailto:x", "http://[", "http://a:b:c", "//\xe4..\xe4", "http://x:99999/", "data:,", "\xff", "http://127.0.0.1:1/"]
)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_a_refusal_wherever_it_leads(kind: str, location: str, status: int) -> None:
    with behaving(saying(response(b"{}", status, "text/html", f"Location: {location}"))) as server:
        with pytest.raises(RequestFailed) as raised:
            call(kind, server.address, "retrieve", [Query()], api_key="s3cret-key")
        assert (type(raised.value), raised.value.status, len(server.requests)) == (RequestFailed, status, 1)


@KINDS
@pytest.mark.parametrize("status", [100, 101, 199, 204, 205, 304, 600, 999])
def test_a_status_without_an_answer_is_an_error(kind: str, status: int) -> None:
    with behaving(saying(f"HTTP/1.1 {status} Odd\r\nContent-Length: 0\r\n\r\n".encode())) as server, pytest.raises(ClientError):
        call(kind, server.address, "retrieve", [Query()], retry=SOON)


@KINDS
@pytest.mark.parametrize(
    ("value", "asked_s"), [("31536000", 31_536_000.0), ("9" * 200, 31_536_000.0), ("9" * 200 + "." + "9" * 200, 31_536_000.0)]
)
def test_a_service_that_asks_for_a_year_is_not_waited_for(kind: str, value: str, asked_s: float) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    with behaving(saying(response(b"{}", 429, "application/problem+json", f"Retry-After: {value}"))) as server:
        with pytest.raises(Overloaded) as raised:
            call(kind, server.address, "retrieve", [Query()], sleep=slept.append if kind == "Client" else sleep)
        assert (raised.value.retry_after_s, slept, len(server.requests)) == (asked_s, [], 1)


@KINDS
@pytest.mark.parametrize("value", ["1e400", "inf", "0x10", "\xb2", "1,5", "-3", "", "9" * 5000, "soon"])
def test_a_time_that_is_none_is_as_if_none_were_given(kind: str, value: str) -> None:
    with behaving(saying(response(b"{}", 429, "application/problem+json", f"Retry-After: {value}"))) as server:
        with pytest.raises(Overloaded) as raised:
            call(kind, server.address, "retrieve", [Query()], retry=Retry(retries=2, backoff_s=0))
        assert (raised.value.retry_after_s, len(server.requests)) == (None, 3)


@KINDS
def test_cookies_are_not_kept(kind: str) -> None:
    cookies = [f"Set-Cookie: c{n}={'x' * 100}; Max-Age=99999" for n in range(50)]
    requests = []

    def handler(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(200, content=READY, headers=[("Set-Cookie", cookie.partition(": ")[2]) for cookie in cookies])

    def twice() -> None:
        with Client("http://service", transport=httpx.MockTransport(handler)) as client:
            client.ready(), client.ready()

    async def twice_async() -> None:
        async with AsyncClient("http://service", transport=httpx.MockTransport(handler)) as client:
            await client.ready(), await client.ready()

    twice() if kind == "Client" else asyncio.run(twice_async())
    assert ["Cookie" in request.headers for request in requests] == [False, False]


# -- texts of a stranger --------------------------------------------------------------------------------------------------


@KINDS
def test_a_refusal_fits_into_a_line_of_a_log(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "espalier_client")
    problem = {"title": "a\nb\x1b[31m", "detail": "x" * 500_000, "errors": [{"field": "\r\n", "value": "\ud800", "expected": "y" * 9000}]}
    content = json.dumps(problem).encode()
    with behaving(saying(response(content, 503, "application/problem+json", f"X-Request-Id: {'i' * 5000}"))) as server:
        patient = Retry(retries=1, backoff_s=0)
        with pytest.raises(Unavailable) as raised:
            call(kind, server.address, "retrieve", [Query()], retry=patient)
    error = raised.value
    assert (error.title, error.errors[0].field, error.errors[0].value) == ("a b [31m", "  ", " ")
    assert str(error).isprintable()
    assert error.request_id is not None
    assert max(len(str(error)), len(error.errors[0].expected), len(error.request_id)) < 2500
    (logged,) = [record.getMessage() for record in caplog.records if record.name == "espalier_client"]
    assert logged.isprintable()
    assert len(logged) < 2500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["items", "id", "score", "results", "timing", "status", "title", "errors", "ready", "reasons", "versions", "fields"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)


@given(
    document=JSON, path=st.lists(st.integers(0, 9), max_size=4), status=st.sampled_from([200, 422, 429, 500, 503]), problem=st.booleans()
)
def test_any_document_is_an_answer_or_an_error_of_the_client(document: Any, path: Sequence[int], status: int, problem: bool) -> None:
    """A right document in which one value, wherever it is, has become another."""
    right: Any = {"type": "x", "title": "x", "status": 429, "errors": [{"field": "a", "value": "b", "expected": "c"}]}
    right = right if problem else answer("a", "b") | {"ready": True, "reasons": [], "ids": [], "removed": 1, "unknown": [], "items": []}
    content = json.dumps(replaced(right, path, document)).encode()
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=content))
    with Client("http://service", transport=transport, retry=Retry(retries=0)) as client:
        asked: list[Callable[[], Any]] = [
            lambda: client.retrieve([Query()]),
            lambda: list(client.retrieve_stream(asking("a"))),
            *(
                client.models,
                client.ready,
                lambda: client.removed("a"),
                lambda: client.set_removed("a", []),
                lambda: client.complete("a", ""),
            ),
        ]
        for ask in asked:
            with suppress(ClientError):  # any other error ends the test
                assert ask() is not None


def replaced(document: Any, path: Sequence[int], value: Any) -> Any:
    """A copy of a document with another value at a place; a path that leads further than the document ends there."""
    if not path or not isinstance(document, dict | list) or not document:
        return value
    if isinstance(document, list):
        at = path[0] % len(document)
        return [replaced(one, path[1:], value) if n == at else one for n, one in enumerate(document)]
    name = list(document)[path[0] % len(document)]
    return document | {name: replaced(document[name], path[1:], value)}


def test_an_answer_is_still_an_answer() -> None:
    with behaving(saying(response(json.dumps(answer("a", "b")).encode()))) as server:
        got = call("Client", server.address, "retrieve", [Query()])
    assert isinstance(got, Answer)
    assert [item.id for item in got.results[0].items] == ["a", "b"]
