"""Answers that are none, by whatever a stranger sends: each is an error of the client's own, and memory stays bounded."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from espalier_client import Client, ClientError, InvalidAnswer, Query, RequestFailed, Retry, ServiceFailed, Unavailable
from tests.client.stub import Driver, Pieces, Stub, answer_to, asking, ids, refuse

NESTED = b"[" * 200_000
RIGHT = json.dumps(answer_to({"queries": [{"history": ["a"]}]})).encode()
NO_ANSWER = "expected an answer of the retrieval service, got another"
LONG = (NESTED, b'{"a":' * 200_000, b'{"x": 1' + b"0" * 5000 + b"}")
OTHERS = (b"<html>", b"[]", b"null", b"{}", b'{"results": 1}', b'{"results": []}', b"\xff", *LONG)
ENCODINGS = ("gzip", "br", "GZIP", "identity, gzip", "nonsense")
LOCATIONS = ("mailto:x", "http://[", "http://a:b:c", "//\xe4..\xe4", "http://x:99999/", "data:,", "\xff", "http://127.0.0.1:1/")
UNREADABLE = (NESTED, b'{"title": ' + b"[" * 500 + b"]" * 500 + b', "detail": {"a": 1}, "errors": [7]}', b"\xff", b"5")
BROKEN = "500 Internal Server Error"
CASES: list[tuple[type[ClientError], str, int, dict[str, str], bytes]] = [
    *((InvalidAnswer, NO_ANSWER, 200, {}, content) for content in OTHERS),
    *((InvalidAnswer, "no number of JSON", 200, {}, RIGHT.replace(b"0.5", number)) for number in (b"NaN", b"Infinity", b"-Infinity")),
    *((InvalidAnswer, "an answer of the type", 200, {"Content-Type": of}, RIGHT) for of in ("text/html", "text/plain", "", "\xe4;")),
    *((InvalidAnswer, "not compressed", 200, {"Content-Encoding": of}, RIGHT) for of in ENCODINGS),
    *((ServiceFailed, BROKEN, 500, {}, content) for content in UNREADABLE),
    (ServiceFailed, BROKEN, 500, {"Content-Encoding": "gzip"}, gzip.compress(b"[]")),
    *((RequestFailed, "307 Temporary Redirect", 307, {"Location": to}, b"{}") for to in LOCATIONS),
    *((RequestFailed, f"{status} ", status, {"Location": LOCATIONS[-1]}, b"{}") for status in (301, 302, 303, 308)),
    *((RequestFailed, f"{status} ", status, {}, b"") for status in (304, 600, 999)),
]


def reply(content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> httpx.Response:
    written = [(name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
    return httpx.Response(status, headers=written, stream=Pieces([content]))


@pytest.mark.parametrize("case", CASES, ids=map(str, range(len(CASES))))
def test_what_is_no_answer_is_an_error_and_not_asked_again(
    driver: Driver, case: tuple[type[ClientError], str, int, dict[str, str], bytes]
) -> None:
    kind, said, status, headers, content = case
    for ask in (lambda: driver.retrieve([Query()]), lambda: [*driver.retrieve_stream(asking("a"))]):
        stub = Stub([reply(content, status, headers)])
        driver.open(stub, api_key="s3cret-key")
        with pytest.raises(kind, match=said) as raised:
            ask()
        assert type(raised.value) is kind
        assert len(str(raised.value)) < 500
        assert [request.headers["Accept-Encoding"] for request in stub.requests] == ["identity"]
        driver.close()


@pytest.mark.parametrize("status", [204, 205])
def test_a_status_without_an_answer_is_an_error(driver: Driver, status: int) -> None:
    with pytest.raises(InvalidAnswer, match=NO_ANSWER):
        driver.open(Stub([reply(b"", status)])).retrieve([Query()])


@pytest.mark.parametrize("status", ["1e999", "200", "399", "600", "true", '"422"', "null", "-1", "[]", "400"])
def test_a_line_of_a_stream_has_a_status_of_a_refusal(driver: Driver, status: str) -> None:
    driver.open(Stub([reply(f'{{"title": "x", "status": {status}}}'.encode())]))
    if status == "400":
        assert ids(driver.retrieve_stream(asking("a"))) == [400]
    else:
        with pytest.raises(InvalidAnswer):
            list(driver.retrieve_stream(asking("a")))


@pytest.mark.parametrize("media_type", ["application/json", "Application/JSON; charset=utf-8", "application/x-ndjson"])
def test_what_is_an_answer_is_read(driver: Driver, media_type: str) -> None:
    driver.open(Stub([reply(RIGHT, 200, {"Content-Type": media_type, "Content-Encoding": "identity"})]))
    assert ids([driver.retrieve([Query()])]) == ["a"]


# -- as long as it likes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 500])
def test_an_answer_or_a_refusal_without_end_is_left(driver: Driver, status: int) -> None:
    taken = 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield b"x" * 0x10000

    limit = 1_000_000 if status == 200 else 1 << 40
    driver.open(lambda _: httpx.Response(status, stream=Pieces(endless())), max_answer_bytes=limit)
    said = r"at most 1000000 bytes \(max_answer_bytes\), got more" if status == 200 else BROKEN
    for ask in (lambda: driver.retrieve([Query()]), lambda: [*driver.retrieve_stream(asking("a"))]):
        taken = 0
        with pytest.raises(InvalidAnswer if status == 200 else ServiceFailed, match=said):
            ask()
        assert taken < 20


def test_the_longest_answer_is_counted_to_the_byte(driver: Driver) -> None:
    lines = (RIGHT + b"\n") * 3
    asked: list[tuple[bytes, int, Callable[[], Any]]] = [
        (RIGHT, len(RIGHT), lambda: driver.retrieve([Query()])),
        (lines, len(RIGHT), lambda: [*driver.retrieve_stream(asking(*"abc"))]),
    ]
    for content, most, ask in asked:
        driver.open(Stub([reply(content)]), max_answer_bytes=most)
        ask()
        driver.close()
        driver.open(Stub([reply(content)]), max_answer_bytes=most - 1)
        with pytest.raises(InvalidAnswer, match="max_answer_bytes"):
            ask()
        driver.close()
    with pytest.raises(ValueError, match="max_answer_bytes: got 0, expected at least 1"):
        driver.open(Stub(), max_answer_bytes=0)


def test_a_refusal_fits_into_a_line_of_a_log(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "espalier_client")
    wrong = [{"field": "\r\n", "value": "\ud800", "expected": "y" * 9000}]
    refused = refuse(503, {"X-Request-Id": "i" * 5000}, title="a\nb\x1b[31m", detail="x" * 500_000, errors=wrong)
    with pytest.raises(Unavailable) as raised:
        driver.open(Stub([refused] * 2), retries=1).retrieve([Query()])
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
    right = (
        right
        if problem
        else answer_to({"queries": [{"history": ["a", "b"]}]})
        | {"ready": True, "reasons": [], "ids": [], "removed": 1, "unknown": [], "items": []}
    )
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
