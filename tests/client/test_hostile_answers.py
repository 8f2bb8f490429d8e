"""Answers that are none: each is an error of the client's own, and memory stays bounded."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from espalier_client import (
    AsyncClient,
    Client,
    InvalidAnswer,
    Query,
    Readiness,
    Retry,
    ServiceFailed,
    Unavailable,
)
from tests.client.rude_server import HEAD, KINDS, READY, Connection, Server, answer, asking, behaving, call, in_turn, response, saying

NESTED = b"[" * 200_000


METHODS: list[tuple[str, Any]] = [("ready", ()), ("models", ()), ("retrieve", ([Query()],)), ("retrieve_stream", (asking("a"),))]


@in_turn("content", [NESTED, b'{"results": ' + NESTED, b'{"a":' * 200_000, b'{"x": 1' + b"0" * 5000 + b"}", b"\xff"])
@pytest.mark.parametrize(("method", "arguments"), METHODS)
def test_json_that_cannot_be_read_is_no_answer(kind: str, method: str, arguments: Any, content: bytes) -> None:
    with behaving(saying(response(content))) as server:
        with pytest.raises(InvalidAnswer, match="expected an answer of the retrieval service, got another") as raised:
            call(kind, server.address, method, *arguments)
        assert len(str(raised.value)) < 500
        assert len(server.requests) == 1


@in_turn("number", [b"NaN", b"Infinity", b"-Infinity"])
@pytest.mark.parametrize("method", ["retrieve", "retrieve_stream"])
def test_a_number_that_json_does_not_have_is_no_answer(kind: str, method: str, number: bytes) -> None:
    content = json.dumps(answer("a")).encode()
    arguments = asking("a") if method == "retrieve_stream" else [Query()]
    with behaving(saying(response(content))) as server:
        call(kind, server.address, method, arguments)
    with behaving(saying(response(content.replace(b"0.5", number)))) as server, pytest.raises(InvalidAnswer, match="no number of JSON"):
        call(kind, server.address, method, arguments)


@in_turn("content", [NESTED, b'{"title": ' + b"[" * 500 + b"]" * 500 + b', "detail": {"a": 1}, "errors": [7]}', b"\xff", b"5"])
@pytest.mark.parametrize("method", ["retrieve", "retrieve_stream"])
def test_a_refusal_that_cannot_be_read_tells_its_status(kind: str, method: str, content: bytes) -> None:
    with behaving(saying(response(content, 500, "application/problem+json"))) as server, pytest.raises(ServiceFailed) as raised:
        call(kind, server.address, method, asking("a") if method == "retrieve_stream" else [Query()])
    assert (raised.value.status, raised.value.title, raised.value.detail, raised.value.errors) == (500, "Internal Server Error", "", ())


@in_turn("status", [b"1e999", b"200", b"true", b'"422"', b"null", b"-1", b"[]"])
def test_a_line_of_a_stream_with_a_status_that_is_none_is_no_answer(kind: str, status: bytes) -> None:
    line = b'{"title": "x", "status": ' + status + b"}\n"
    with behaving(saying(response(line, 200, "application/x-ndjson"))) as server, pytest.raises(InvalidAnswer):
        call(kind, server.address, "retrieve_stream", asking("a"))


@in_turn("media_type", ["text/html", "application/problem+json", "", "\xe4;"])
@pytest.mark.parametrize("method", ["ready", "retrieve_stream"])
def test_an_answer_of_another_type_is_none(kind: str, method: str, media_type: str) -> None:
    content = READY if method == "ready" else json.dumps(answer("a")).encode()
    with (
        behaving(saying(response(content, 200, media_type))) as server,
        pytest.raises(InvalidAnswer, match="expected an answer of the type"),
    ):
        call(kind, server.address, method, *([asking("a")] if method == "retrieve_stream" else []))


@in_turn("media_type", ["application/json", "Application/JSON; charset=utf-8"])
def test_the_type_of_an_answer_may_have_parameters(kind: str, media_type: str) -> None:
    with behaving(saying(response(READY, 200, media_type))) as server:
        assert call(kind, server.address, "ready") == Readiness(True, ())


@in_turn("encoding", ["gzip", "br", "zstd", "deflate", "GZIP", "identity, gzip", "nonsense"])
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
@pytest.mark.parametrize(("method", "arguments"), [METHODS[0], METHODS[-1]])
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
