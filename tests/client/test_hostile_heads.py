"""Heads that lie about what follows."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from espalier_client import (
    AsyncClient,
    Client,
    ClientError,
    ConnectionFailed,
    InvalidAnswer,
    Overloaded,
    Query,
    RequestFailed,
    Retry,
)
from tests.client.rude_server import KINDS, READY, SOON, asking, behaving, call, in_turn, response, saying


@in_turn(
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
)
def test_what_is_no_http_is_an_error_of_the_client(kind: str, content: bytes) -> None:
    for method, arguments in (("ready", ()), ("retrieve_stream", (asking("a"),))):
        with behaving(saying(content)) as server, pytest.raises((ConnectionFailed, InvalidAnswer)) as raised:
            call(kind, server.address, method, *arguments, retry=Retry(retries=1, backoff_s=0))
        assert len(str(raised.value)) < 1000


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


@in_turn("value", ["1e400", "inf", "0x10", "\xb2", "1,5", "-3", "", "9" * 5000, "soon"])
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
