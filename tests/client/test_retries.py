"""What is tried again, how often, and after which pauses."""

from __future__ import annotations

import http.client
import json
import socket
import socketserver
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from io import BufferedIOBase
from typing import Any

import httpx
import pytest

from espalier_client import ClientError, ConnectionFailed, Overloaded, Query, Readiness, TimedOut, Unavailable
from tests.client.stub import Driver, Pieces, Stub, answer_to, asking, dump, ids, refuse
from tests.http_servers import listening


@pytest.mark.parametrize(
    "failure",
    [
        refuse(429),
        refuse(503),
        httpx.ConnectError("refused"),
        httpx.ConnectTimeout(""),
        httpx.ReadError("reset"),
        httpx.WriteError("broken pipe"),
        httpx.RemoteProtocolError("Server disconnected without sending a response."),
    ],
    ids=repr,
)
def test_what_may_pass_is_tried_again(driver: Driver, failure: httpx.Response | Exception) -> None:
    stub = Stub([failure, failure])
    assert driver.open(stub).retrieve([Query(history=["b1"])]).results[0].items[0].id == "b1"
    assert driver.pauses_s == [0.1, 0.2]
    assert len({request.headers["X-Request-Id"] for request in stub.requests}) == 1
    assert len({request.content for request in stub.requests}) == 1


@pytest.mark.parametrize(
    "failure", [refuse(422), refuse(401), refuse(500), refuse(504), httpx.ReadTimeout(""), httpx.WriteTimeout("")], ids=repr
)
def test_what_will_not_pass_is_not(driver: Driver, failure: httpx.Response | Exception) -> None:
    stub = Stub([failure])
    with pytest.raises(ClientError):
        driver.open(stub).retrieve([Query()])
    assert (len(stub.requests), driver.pauses_s) == (1, [])


def test_attempts_are_counted_and_pauses_grow_to_a_bound(driver: Driver) -> None:
    stub = Stub([refuse(503)] * 9)
    with pytest.raises(Unavailable):
        driver.open(stub, retries=5, backoff_s=1.0, max_backoff_s=6.0).retrieve([Query()])
    assert driver.pauses_s == [1, 2, 4, 6, 6]
    assert len(stub.requests) == 6


def test_pauses_are_drawn_from_zero_on(driver: Driver) -> None:
    drawn = []

    def draw(low: float, high: float) -> float:
        drawn.append((low, high))
        return low + 0.25 * (high - low)

    driver.open(Stub([refuse(503), refuse(429)]), backoff_s=1.0, draw=draw).retrieve([Query()])
    assert drawn == [(0, 1), (0, 2)]
    assert driver.pauses_s == [0.25, 0.5]


DATE = "Wed, 21 Oct 2026 07:28:00 GMT"
NO_SECONDS = (DATE, "-1", "-3", "nan", "1e400", "inf", "0x10", "\xb2", "1,5", "", "9" * 5000, "soon")


@pytest.mark.parametrize(("value", "asked_s"), [("3", 3.0), ("0", 0.0), ("1.5", 1.5), *((value, None) for value in NO_SECONDS)])
def test_no_attempt_before_the_service_asks_for_it(driver: Driver, value: str, asked_s: float | None) -> None:
    """What is no number of seconds is as if nothing were said."""
    refused = httpx.Response(429, headers=[(b"Retry-After", value.encode("latin-1"))], content=b"{}")
    with pytest.raises(Overloaded) as raised:
        driver.open(Stub([refused] * 2), retries=1).retrieve([Query()])
    assert raised.value.retry_after_s == asked_s
    assert driver.pauses_s == [(asked_s or 0) + 0.1]


@pytest.mark.parametrize("value", ["31536000", "9" * 200, "9" * 200 + "." + "9" * 200])
def test_a_service_that_asks_for_a_year_is_not_waited_for(driver: Driver, value: str) -> None:
    with pytest.raises(Overloaded) as raised:
        driver.open(Stub([refuse(429, {"Retry-After": value})])).retrieve([Query()])
    assert (raised.value.retry_after_s, driver.pauses_s) == (31_536_000.0, [])


def test_attempts_wait_only_for_what_is_left_and_no_pause_ends_after_the_deadline(driver: Driver) -> None:
    stub = Stub([refuse(429, {"Retry-After": "4"})] * 3)
    with pytest.raises(Overloaded):
        driver.open(stub, timeout_s=8, deadline_s=10, backoff_s=0).retrieve([Query()])
    assert driver.pauses_s == [4, 4]
    assert [request.extensions["timeout"]["read"] for request in stub.requests] == [8, 6, 2]


def slow(driver: Driver, pieces: list[bytes], each_s: float) -> httpx.Response:
    """An answer whose pieces take their time."""

    def sent() -> Iterator[bytes]:
        for piece in pieces:
            driver.now_s += each_s
            yield piece

    return httpx.Response(200, stream=Pieces(sent()))


def test_the_deadline_is_checked_between_the_pieces_of_an_answer(driver: Driver) -> None:
    with pytest.raises(TimedOut, match=r"GET /readyz: no whole answer within 100 s \(deadline_s\)"):
        driver.open(Stub([slow(driver, [b" "] * 10_000, 1)]), deadline_s=100).ready()
    assert 100 <= driver.now_s <= 101


def test_the_deadline_of_a_stream_is_that_of_its_next_answer(driver: Driver) -> None:
    """Answers come one after the other for longer than the deadline, and then one that drips."""
    line = dump(answer_to({"queries": [{"history": ["a"]}]}))
    stub = Stub([slow(driver, [line] * 10 + [b" "] * 10, 20)])
    outcomes = driver.open(stub, retries=0, deadline_s=30).retrieve_stream(asking(*"abcdefghijk"))
    assert ids([next(outcomes) for _ in range(10)]) == ["a"] * 10
    with pytest.raises(TimedOut):
        next(outcomes)
    assert driver.now_s == 10 * 20 + 2 * 20


def test_no_attempt_begins_after_the_deadline(driver: Driver) -> None:
    stub, driver.late_s = Stub([refuse(503)] * 2), 60
    with pytest.raises(TimedOut, match=r"no whole answer within 30 s \(deadline_s\)"):
        driver.open(stub, deadline_s=30).model("a")
    assert len(stub.requests) == 1


@pytest.mark.parametrize(("looks_s", "may"), [(40.0, True), (700.0, False)])
def test_what_may_take_minutes_is_not_held_to_the_deadline_of_the_rest(driver: Driver, looks_s: float, may: bool) -> None:
    """Loading has ten minutes by itself, however short the deadline is."""

    def ticking() -> float:
        driver.now_s += looks_s
        return driver.now_s

    driver.open(Stub(), deadline_s=30, clock=ticking)
    calls: list[tuple[Callable[[], Any], bool]] = [(lambda: driver.load("a", 1), may), (lambda: driver.model("a"), False)]
    for call, passes in calls:
        with nullcontext() if passes else pytest.raises(TimedOut):
            call()


def test_what_came_of_a_connection(driver: Driver) -> None:
    stub = Stub([httpx.ConnectError("refused"), httpx.ReadError(""), httpx.ReadTimeout("")])
    driver.open(stub, retries=0)
    for kind, sent, text in (
        (ConnectionFailed, False, "POST http://service/retrieve: refused"),
        (ConnectionFailed, True, "POST http://service/retrieve: ReadError"),
        (TimedOut, True, "POST http://service/retrieve: ReadTimeout"),
    ):
        with pytest.raises(ConnectionFailed) as raised:
            driver.retrieve([Query()])
        sent_id = stub.requests[-1].headers["X-Request-Id"]
        assert (type(raised.value), raised.value.sent, str(raised.value)) == (kind, sent, f"{text} (request {sent_id})")


CHANGES = [("load", 4), ("unload", 3), ("set_default", 3), ("set_removed", ["b1"]), ("remove_item", "b1"), ("restore_item", "b1")]


@pytest.mark.parametrize(("method", "argument"), CHANGES)
def test_a_change_is_tried_again_only_if_it_cannot_have_arrived(driver: Driver, method: str, argument: Any) -> None:
    stub = Stub([httpx.ConnectError("refused"), httpx.ConnectTimeout("")])
    getattr(driver.open(stub), method)("books", argument)
    assert len(stub.requests) == 3
    driver.close()
    for failure in (httpx.ReadError("reset"), httpx.RemoteProtocolError("closed"), refuse(503), refuse(429)):
        stub = Stub([failure])
        with pytest.raises(ClientError):
            getattr(driver.open(stub), method)("books", argument)
        assert len(stub.requests) == 1
        driver.close()


def test_loading_may_take_minutes_and_connecting_may_not(driver: Driver) -> None:
    stub = Stub()
    driver.open(stub, timeout_s=2)
    for method in ("load", "unload", "set_default"):
        getattr(driver, method)("books", 3)
        getattr(driver, method)("books", 3, timeout_s=30)
    driver.set_removed("books", [])
    timeouts = [request.extensions["timeout"] for request in stub.requests]
    assert [timeout["read"] for timeout in timeouts] == [600, 30] * 3 + [2]
    assert {timeout["connect"] for timeout in timeouts} == {2}


# -- clients over real sockets: a connection that ends, and back-pressure -------------------------------------------------


Behaviour = Callable[[BufferedIOBase, Callable[[bytes], object]], None]


@contextmanager
def behaving(behave: Behaviour) -> Iterator[str]:
    """The address of a server that does this with each connection: what comes in, and how something goes out."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):  # the client has gone
                behave(self.rfile, self.wfile.write)

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    with listening(server) as address:
        yield address


def read_head(stream: BufferedIOBase) -> int | None:
    """The length of the body of the next request; None where there is none."""
    return int(http.client.parse_headers(stream).get("Content-Length", "0")) if stream.readline() else None


def test_a_connection_that_the_service_closed_while_it_was_idle_is_replaced(driver: Driver) -> None:
    """The second request goes out on the kept connection, which the service closes without an answer."""
    requests = []

    def behave(stream: BufferedIOBase, send: Callable[[bytes], object]) -> None:
        while read_head(stream) is not None:
            requests.append(stream)
            if len(requests) == 2:
                return
            ready = b'{"ready": true, "reasons": []}'
            send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(ready), ready))

    with behaving(behave) as address:
        driver.open(None, url=address)
        assert [driver.ready(), driver.ready()] == [Readiness(True, ())] * 2
        driver.close()
    first, second, third = requests
    assert first is second is not third


def test_a_long_stream_and_a_service_with_back_pressure_do_not_wait_for_each_other(driver: Driver) -> None:
    """The service answers each line at once with a large one, and reads no further before that is taken."""
    names = [f"{n}-".ljust(4000, "x") for n in range(800)]
    padding = "x" * 20_000  # 3 MB there, 20 MB back: more than the buffers of both sides

    def behave(stream: BufferedIOBase, send: Callable[[bytes], object]) -> None:
        while length := read_head(stream):
            send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while length:
                line = stream.readline()
                length -= len(line)
                content = json.dumps(answer_to(json.loads(line)) | {"padding": padding}).encode() + b"\n"
                send(b"%x\r\n%s\r\n" % (len(content), content))
            send(b"0\r\n\r\n")

    with behaving(behave) as address:
        assert ids(driver.open(None, url=address, timeout_s=60).retrieve_stream(asking(*names))) == names
        driver.close()
