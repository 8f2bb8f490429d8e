"""What goes wrong: arguments that cannot be sent, statuses, and a key that is shown nowhere."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from datetime import datetime

import httpx
import pytest

import espalier_client
from espalier_client import (
    AsyncClient,
    Client,
    ConnectionFailed,
    InvalidAnswer,
    NotAllowed,
    Overloaded,
    Put,
    Query,
    Request,
    RequestFailed,
    Retry,
    TimedOut,
    WrongValue,
)
from tests.client.stub import KEY, URL, Driver, Json, Stub, refuse, serving


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
    for given in wrong:
        with pytest.raises(ValueError, match=f"{name}: got"):
            Retry(**given)
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
        wrong = [{"field": "queries[0].m", "value": "0", "expected": "at least 1"}]
        stub = Stub([refuse(status, {"X-Request-Id": "the-id", "Retry-After": "7"}, errors=wrong)])
        with pytest.raises(RequestFailed) as raised:
            driver.open(stub, retries=0).retrieve([Query()])
        error = raised.value
        assert type(error) is getattr(espalier_client, kind)
        assert (error.status, error.title, error.detail, error.request_id) == (status, "Title", "What happened.", "the-id")
        assert (error.errors, error.retry_after_s) == ((WrongValue("queries[0].m", "0", "at least 1"),), 7.0)
        assert str(error) == f"{status} Title: What happened. (request the-id)"
        driver.close()


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
