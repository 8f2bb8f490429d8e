"""What goes wrong: arguments that cannot be sent, statuses, and a key that is shown nowhere."""

from __future__ import annotations

import gzip
import json
import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import espalier_client
from espalier_client import (
    AsyncClient,
    Client,
    ClientError,
    ConnectionFailed,
    InvalidAnswer,
    NotAllowed,
    Overloaded,
    Put,
    Query,
    Request,
    RequestFailed,
    Retry,
    ServiceFailed,
    TimedOut,
    Unavailable,
    WrongValue,
)
from tests.client.stub import KEY, URL, Driver, Json, Pieces, Stub, answer_to, asking, ids, refuse, serving


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *((lambda client, name=name: client.model(name), "expected the name of a model") for name in ("", ".", "..")),
        (lambda client: client.set_removed("books", "b1"), "ids: got 'b1', expected a list"),
        (lambda client: client.retrieve([Query(vector=[float("nan")])]), "not JSON compliant"),
        (lambda client: client.put_item("books", "b9", if_none_match="41"), "if_none_match: got '41', expected an etag"),
        (lambda client: client.get_item("books", ""), "item_id: got ''"),
        (lambda client: client.load("books", 3, timeout_s=0), "timeout_s: got 0"),
        (lambda client: next(client.retrieve_stream([Request([Query()])], chunk_lines=0)), "chunk_lines: got 0, expected at least 1"),
        (lambda _: Query(history="b1"), "history: got 'b1', expected a list"),
        (lambda _: Request([Query()], fields="title"), "fields: got 'title', expected a list"),
        (lambda _: Put("b9", like="b1"), "like: got 'b1', expected a list"),
        *(
            (lambda _, name=name: Request([Query()], **dict[str, Any]({name: 5.0})), f"{name}: got 5.0, expected an integer")
            for name in ("version", "m", "beam_size", "min_sequence", "rerank")
        ),
        (lambda client: client.retrieve([Query()], m=np.float32(5)), r"m: got np.float32\(5.0\), expected an integer"),
        (lambda client: client.put_item("books", "b9", count="3"), "count: got '3', expected an integer"),
        (lambda client: client.delete_item("books", "b9", source_version=1.5), "source_version: got 1.5, expected an integer"),
        (lambda client: client.node("books", 2.5), "number: got 2.5, expected an integer"),
        (lambda client: client.load("books", "3"), "version: got '3', expected an integer"),
        (lambda client: client.load("books", True), "version: got True, expected an integer"),
        *(
            (lambda client, value=value: client.put_item("books", "b9", fields={"at": value}), "of the type .*, expected a value of JSON")
            for value in (object, b"1", np.array([1]), np.array([1.5, 2]))
        ),
        (lambda _: Put("b9", valid_until=datetime(2030, 1, 31)), "zone"),
    ],
)
def test_an_argument_that_cannot_be_meant_is_refused_by_name_and_not_sent(
    driver: Driver, given: Callable[[Driver], object], said: str
) -> None:
    stub = Stub()
    with pytest.raises((TypeError, ValueError), match=said):
        given(driver.open(stub))
    assert stub.requests == []


ADDRESSES = ["localhost:8000", "ftp://host", "http://", "", "http://a..b", f"http://{'x' * 64}.test"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(({"base_url": url}, f"base_url: got '{url}', expected http://host:port") for url in ADDRESSES),
        *(({"timeout_s": value}, "timeout_s: got") for value in (0, -1, float("nan"), float("inf"))),
    ],
)
def test_an_option_of_a_client_is_checked(options: Json, said: str) -> None:
    given: Json = {"base_url": URL} | options
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match=said):
            kind(**given)


@pytest.mark.parametrize("name", ["retries", "backoff_s", "max_backoff_s", "deadline_s"])
def test_retry_settings_are_checked(name: str) -> None:
    wrong: list[Json] = [{name: value} for value in (-1, float("nan"), float("inf"))]
    for options in wrong:
        with pytest.raises(ValueError, match=f"{name}: got"):
            Retry(**options)
    zero: Json = {name: 0}
    if name == "deadline_s":
        with pytest.raises(ValueError, match="deadline_s: got 0, expected a finite number above 0"):
            Retry(**zero)
    else:
        assert getattr(Retry(**zero), name) == 0


@pytest.mark.parametrize(
    ("statuses", "kind"),
    [
        ((400, 413, 415, 422), "InvalidRequest"),
        ((401, 403), "NotAllowed"),
        ((404, 410), "NotFound"),
        ((409, 412), "Conflict"),
        ((429,), "Overloaded"),
        ((500, 502), "ServiceFailed"),
        ((503,), "Unavailable"),
        ((504,), "DeadlineExceeded"),
        ((507,), "CatalogueFull"),
        ((301, 405, 408, 499, 599), "RequestFailed"),
    ],
)
def test_each_status_has_its_error(driver: Driver, statuses: tuple[int, ...], kind: str) -> None:
    for status in statuses:
        wrong = [{"field": "queries[0].m", "value": "0", "expected": "at least 1"}, {"field": "ids", "expected": "a list"}]
        stub = Stub([refuse(status, {"X-Request-Id": "the-id", "Retry-After": "7"}, errors=wrong)])
        with pytest.raises(RequestFailed) as raised:
            driver.open(stub, retries=0).retrieve([Query()])
        error = raised.value
        assert type(error) is getattr(espalier_client, kind)
        assert (error.status, error.title, error.detail, error.request_id) == (status, "Title", "What happened.", "the-id")
        assert error.errors == (WrongValue("queries[0].m", "0", "at least 1"), WrongValue("ids", None, "a list"))
        assert [str(wrong) for wrong in error.errors] == ["queries[0].m: got 0, expected at least 1", "ids is missing; expected a list"]
        assert error.retry_after_s == 7.0
        assert str(error) == f"{status} Title: What happened. (request the-id)"


def test_an_error_page_of_a_proxy_tells_its_status(driver: Driver) -> None:
    stub = Stub([httpx.Response(502, html="<h1>Bad Gateway</h1>"), httpx.Response(502, json=["no problem document"])])
    driver.open(stub)
    for _ in range(2):
        with pytest.raises(RequestFailed) as raised:
            driver.retrieve([Query()])
        sent_id = stub.requests[-1].headers["X-Request-Id"]
        assert str(raised.value) == f"502 Bad Gateway (request {sent_id})"


def test_errors_survive_pickling() -> None:
    wrong = (WrongValue("m", "0", "at least 1"),)
    for error in (Overloaded(429, "Too Many", "x", wrong, "id", 2.0), TimedOut("slow", True, "id"), InvalidAnswer("html")):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), copy.args, vars(copy), str(copy)) == (type(error), error.args, vars(error), str(error))


@pytest.mark.parametrize("key", ["", "two words", "line\nbreak", "clé"])
def test_a_key_that_no_header_can_hold_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(ValueError, match="api_key: expected printable ASCII") as raised:
        Client(URL, api_key=key)
    assert not key or key not in str(raised.value)


def test_an_address_with_a_password_is_refused_without_being_shown() -> None:
    with pytest.raises(ValueError, match="a password in it") as raised:
        AsyncClient("http://me:s3cret@host")
    assert "s3cret" not in str(raised.value)


def test_the_key_is_not_shown(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    shown = []
    with serving(Stub([refuse(503), refuse(401)])) as url:
        driver.open(Stub())  # closed by the fixture
        client = Client(url, api_key=KEY, sleep=lambda _: None)
        with client, pytest.raises(NotAllowed) as refused:
            client.retrieve([Query()])
        shown += [repr(client), repr(vars(client)), repr(refused.value)]
    with pytest.raises(ConnectionFailed) as failed:
        driver.open(Stub([httpx.ConnectError("refused")]), api_key=KEY, retries=0).retrieve([Query()])
    cause = failed.value.__cause__
    assert isinstance(cause, httpx.ConnectError)
    shown += [repr(driver.client), repr(failed.value), str(failed.value), repr(cause.request.headers)]
    assert any(record.name.startswith("httpcore") for record in caplog.records)
    assert any("trying again" in record.getMessage() for record in caplog.records)
    assert not [text for text in [*shown, caplog.text] if KEY in text]


# -- answers that are none, by whatever a stranger sends: each is an error of the client's own, and memory stays bounded --


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
    (ServiceFailed, BROKEN, 500, {"Content-Encoding": "gzip"}, gzip.compress(b"[]", mtime=0)),
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
        driver.open(Stub([reply(content)]), max_answer_bytes=most - 1)
        with pytest.raises(InvalidAnswer, match="max_answer_bytes"):
            ask()
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
            lambda: client.facets("a", "b"),
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
