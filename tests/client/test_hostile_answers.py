"""Answers that are none, by whatever a stranger sends: each is an error of the client's own, and memory stays bounded."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
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
    Query,
    Readiness,
    RequestFailed,
    Retry,
    ServiceFailed,
    Unavailable,
)
from tests.client.rude_server import HEAD, KINDS, READY, SOON, Connection, Server, answer, behaving, call, in_turn, response, saying
from tests.client.stub import asking

METHODS: list[tuple[str, Any]] = [("ready", ()), ("models", ()), ("retrieve", ([Query()],)), ("retrieve_stream", (asking("a"),))]
NESTED = b"[" * 200_000
RIGHT = json.dumps(answer("a")).encode()
PROBLEM = '{{"title": "x", "status": {}}}'

NO_HTTP = [
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
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"X-A: a\r\n" * 100_000,
    b"HTTP/1.1 200 OK\r\n" + b"X-A: a\r\n" * 100_000,
    b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 500_000,
    b"\x00" * 200_000,
]
NO_ANSWER = "expected an answer of the retrieval service, got another"
OTHERS = (b"<html>", b"[]", b"null", b"{}", b'{"results": 1}', b'{"results": []}')
NO_ANSWERS: list[tuple[bytes, str]] = [
    *(
        (response(content), NO_ANSWER)
        for content in (*OTHERS, NESTED, b'{"results": ' + NESTED, b'{"a":' * 200_000, b'{"x": 1' + b"0" * 5000 + b"}", b"\xff")
    ),
    *((response(RIGHT.replace(b"0.5", number)), "no number of JSON") for number in (b"NaN", b"Infinity", b"-Infinity")),
    *((response(RIGHT, 200, media_type), "expected an answer of the type") for media_type in ("text/html", "text/plain", "", "\xe4;")),
    *(
        (response(RIGHT, 200, "application/json", f"Content-Encoding: {encoding}"), "expected an answer that is not compressed")
        for encoding in ("gzip", "br", "GZIP", "identity, gzip", "nonsense")
    ),
]
NO_STATUSES = ("1e999", "200", "399", "600", "true", '"422"', "null", "-1", "[]")


@in_turn("content", NO_HTTP)
def test_what_is_no_http_is_an_error_of_the_client(kind: str, content: bytes) -> None:
    for method, arguments in (METHODS[0], METHODS[-1]):
        with behaving(saying(content)) as server, pytest.raises((ConnectionFailed, InvalidAnswer)) as raised:
            call(kind, server.address, method, *arguments, retry=Retry(retries=1, backoff_s=0))
        assert len(str(raised.value)) < 1000


@in_turn("wrong", NO_ANSWERS)
def test_what_is_no_answer_is_an_error_and_not_asked_again(kind: str, wrong: tuple[bytes, str]) -> None:
    content, said = wrong
    for method, arguments in METHODS[2:]:
        with behaving(saying(content)) as server:
            with pytest.raises(InvalidAnswer, match=said) as raised:
                call(kind, server.address, method, *arguments)
            assert len(str(raised.value)) < 500
            assert len(server.requests) == 1
            assert b"\r\nAccept-Encoding: identity\r\n" in server.requests[0]


@in_turn("status", NO_STATUSES)
def test_a_line_of_a_stream_with_a_status_that_is_none_is_no_answer(kind: str, status: str) -> None:
    line = PROBLEM.format(status).encode()
    with behaving(saying(response(line, 200, "application/x-ndjson"))) as server, pytest.raises(InvalidAnswer):
        call(kind, server.address, "retrieve_stream", asking("a"))
    with behaving(saying(response(PROBLEM.format(400).encode()))) as server:
        (refused,) = call(kind, server.address, "retrieve_stream", asking("a"))
        assert refused.status == 400


@in_turn("media_type", ["application/json", "Application/JSON; charset=utf-8", "application/x-ndjson"])
def test_what_is_an_answer_is_read(kind: str, media_type: str) -> None:
    with behaving(saying(response(READY, 200, media_type, "Content-Encoding: identity"))) as server:
        assert call(kind, server.address, "ready") == Readiness(True, ())
    with behaving(saying(response(RIGHT, 200, media_type))) as server:
        got = call(kind, server.address, "retrieve", [Query()])
    assert isinstance(got, Answer)
    assert [item.id for item in got.results[0].items] == ["a"]


UNREADABLE: list[tuple[bytes, tuple[str, ...]]] = [
    (NESTED, ()),
    (b'{"title": ' + b"[" * 500 + b"]" * 500 + b', "detail": {"a": 1}, "errors": [7]}', ()),
    (b"\xff", ()),
    (b"5", ()),
    (gzip.compress(b"[]"), ("Content-Encoding: gzip",)),
]


@in_turn("refusal", UNREADABLE)
def test_a_refusal_that_cannot_be_read_tells_its_status(kind: str, refusal: tuple[bytes, tuple[str, ...]]) -> None:
    content, headers = refusal
    for method, arguments in METHODS[2:]:
        refused = response(content, 500, "application/problem+json", *headers)
        with behaving(saying(refused)) as server, pytest.raises(ServiceFailed) as raised:
            call(kind, server.address, method, *arguments)
        error = raised.value
        assert (error.status, error.title, error.detail, error.errors) == (500, "Internal Server Error", "", ())


LOCATIONS = ["mailto:x", "http://[", "http://a:b:c", "//\xe4..\xe4", "http://x:99999/", "data:,", "\xff", "http://127.0.0.1:1/"]


@in_turn("redirect", [*((307, location) for location in LOCATIONS), *((status, LOCATIONS[-1]) for status in (301, 302, 303, 308))])
def test_a_redirect_is_a_refusal_wherever_it_leads(kind: str, redirect: tuple[int, str]) -> None:
    status, location = redirect
    with behaving(saying(response(b"{}", status, "text/html", f"Location: {location}"))) as server:
        with pytest.raises(RequestFailed) as raised:
            call(kind, server.address, "retrieve", [Query()], api_key="s3cret-key")
        assert (type(raised.value), raised.value.status, len(server.requests)) == (RequestFailed, status, 1)


@in_turn("status", [100, 101, 199, 204, 205, 304, 600, 999])
def test_a_status_without_an_answer_is_an_error(kind: str, status: int) -> None:
    with behaving(saying(f"HTTP/1.1 {status} Odd\r\nContent-Length: 0\r\n\r\n".encode())) as server, pytest.raises(ClientError):
        call(kind, server.address, "retrieve", [Query()], retry=SOON)


# -- as long as it likes --------------------------------------------------------------------------------------------------


def flooding(head: bytes, chunked: bool = False) -> Callable[[Server, Connection], None]:
    """200 MB after a head; a client that read on to the end of what it does not want would let it finish."""

    def behave(server: Server, connection: Connection) -> None:
        connection.request()
        connection.socket.sendall(head + (b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 100000000000") + b"\r\n\r\n")
        piece = b"x" * 0x10000
        for _ in range(3000):
            connection.socket.sendall(b"10000\r\n%s\r\n" % piece if chunked else piece)
        connection.finished = True

    return behave


@KINDS
@pytest.mark.parametrize("method", [METHODS[0], METHODS[-1]], ids=["ready", "retrieve_stream"])
def test_an_answer_without_end_is_left(kind: str, method: tuple[str, Any]) -> None:
    name, arguments = method
    with behaving(flooding(HEAD, chunked=name == "ready")) as server:
        with pytest.raises(InvalidAnswer, match=r"expected an answer of at most 1000000 bytes \(max_answer_bytes\), got more"):
            call(kind, server.address, name, *arguments, max_answer_bytes=1_000_000)
        assert not server.connections[0].finished


@KINDS
def test_a_refusal_without_end_is_left_and_tells_its_status(kind: str) -> None:
    for method, arguments in METHODS[2:]:
        with behaving(flooding(HEAD.replace(b"200 OK", b"500 Oops"))) as server:
            with pytest.raises(ServiceFailed):
                call(kind, server.address, method, *arguments, max_answer_bytes=1 << 40)
            assert not server.connections[0].finished


@KINDS
def test_the_longest_answer_is_counted_to_the_byte(kind: str) -> None:
    with behaving(saying(response(READY))) as server:
        assert call(kind, server.address, "ready", max_answer_bytes=len(READY)) == Readiness(True, ())
        with pytest.raises(InvalidAnswer, match="max_answer_bytes"):
            call(kind, server.address, "ready", max_answer_bytes=len(READY) - 1)
    with behaving(saying(response((RIGHT + b"\n") * 3, 200, "application/x-ndjson"))) as server:
        assert len(call(kind, server.address, "retrieve_stream", asking(*"abc"), max_answer_bytes=len(RIGHT))) == 3
        with pytest.raises(InvalidAnswer, match="max_answer_bytes"):
            call(kind, server.address, "retrieve_stream", asking(*"abc"), max_answer_bytes=len(RIGHT) - 1)
    for client in (Client, AsyncClient):
        with pytest.raises(ValueError, match="max_answer_bytes: got 0, expected at least 1"):
            client("http://service", max_answer_bytes=0)


@KINDS
def test_a_refusal_fits_into_a_line_of_a_log(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "espalier_client")
    problem = {"title": "a\nb\x1b[31m", "detail": "x" * 500_000, "errors": [{"field": "\r\n", "value": "\ud800", "expected": "y" * 9000}]}
    content = json.dumps(problem).encode()
    refused = response(content, 503, "application/problem+json", f"X-Request-Id: {'i' * 5000}")
    with behaving(saying(refused)) as server, pytest.raises(Unavailable) as raised:
        call(kind, server.address, "retrieve", [Query()], retry=Retry(retries=1, backoff_s=0))
    error = raised.value
    assert (error.title, error.errors[0].field, error.errors[0].value) == ("a b [31m", "  ", " ")
    assert error.request_id is not None
    assert max(len(str(error)), len(error.errors[0].expected), len(error.request_id)) < 2500
    (logged,) = [record.getMessage() for record in caplog.records if record.name == "espalier_client"]
    assert len(logged) < 2500
    assert all(text.isprintable() for text in (str(error), logged))


# -- whatever a document holds --------------------------------------------------------------------------------------------

NAMES = ["items", "id", "score", "results", "timing", "status", "title", "errors", "ready", "reasons", "versions", "fields"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=10,
)


@given(document=JSON, path=st.lists(st.integers(0, 9), max_size=4), status=st.sampled_from([200, 422, 429, 503]), problem=st.booleans())
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
            *(client.models, client.ready),
            lambda: client.removed("a"),
            lambda: client.set_removed("a", []),
            lambda: client.complete("a", ""),
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
