"""The two clients, synchronous and asynchronous. They send and wait; calls.py, messages.py, retry.py and stream.py do everything else.

Both have the same methods, with and without `await`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine, Generator, Iterable
from contextlib import aclosing
from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from espalier_client import calls, stream
from espalier_client.calls import Body, Call, check_timeout_s
from espalier_client.certificates import Certificates
from espalier_client.errors import ClientError, RequestFailed
from espalier_client.items import Delete, Put
from espalier_client.messages import Request
from espalier_client.retry import Attempts, Retry
from espalier_client.stream import RETRIEVALS, Chunks, Delivery, Line, Outcome, Route, Written

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=Callable[..., Any])
Sent = TypeVar("Sent", bound=Request | Put | Delete)

MAX_ANSWER_BYTES = 1 << 26
"""64 MiB: more than twice the answer to 256 queries for 1000 items each."""

_RETRY = Retry()


def _sync(build: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    """The method of `Client` that sends the call from `build`."""

    def method(client: Client, /, *arguments: P.args, **options: P.kwargs) -> T:
        return client._call(build(*arguments, **options))

    return _described(method, build)


def _async(build: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """The method of `AsyncClient` that sends the call from `build`."""

    async def method(client: AsyncClient, /, *arguments: P.args, **options: P.kwargs) -> T:
        return await client._call(build(*arguments, **options))

    return _described(method, build)


def _described(method: M, build: Callable[..., Any]) -> M:
    """The method with the name, docstring and parameters of `build`, for help() and editors."""
    functools.update_wrapper(method, build)
    signature, self_parameter = inspect.signature(build), inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    # inspect.signature reads this attribute.
    method.__signature__ = signature.replace(parameters=[self_parameter, *signature.parameters.values()])  # type: ignore[attr-defined]
    return method


class Client:
    """Talks to one retrieval service; may be shared by threads. Use it in a `with` statement, or `close` it.

    `timeout_s`: longest wait of an attempt for a connection, and for each piece of the answer. `retry`: when and how often a request is
    sent again, and the longest time of a whole call, which is checked before each attempt and between the pieces of an answer.
    `max_answer_bytes`: the longest accepted answer, and the longest line of a stream's answer. `certificates`: for https with CAs other
    than the system's, or if the service requires a client certificate. `transport` and `sleep` are for tests and special needs: your own
    transport must keep httpx's time-outs.

    Every method raises a ClientError (errors.py) when it fails, and ValueError or TypeError for arguments that cannot be sent.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 10.0,
        retry: Retry = _RETRY,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        certificates: Certificates | None = None,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._timeout_s = check_timeout_s(timeout_s)
        self._max_answer_bytes = _check_bytes(max_answer_bytes)
        hooks: dict[str, list[Callable[..., Any]]] = {"request": [partial(_look, certificates)], "response": [_forget_redirect]}
        self._http = httpx.Client(**_identity(base_url, api_key, certificates), transport=transport, event_hooks=hooks)
        self._retry = retry
        self._sleep = sleep

    def retrieve_stream(self, requests: Iterable[Request], *, chunk_lines: int = stream.CHUNK_LINES) -> Generator[Outcome, None, None]:
        """The outcome of each request, in order. A request that fails does not end the stream.

        `requests` is read at most `chunk_lines` (or 64 KiB) ahead of the answers that the caller takes. Choose 1 if a request depends on
        earlier answers, or if requests are rare. Raises a ClientError if the stream cannot continue; all requests up to the last yielded
        outcome are done.
        """
        return self._delivered(requests, Chunks(chunk_lines), RETRIEVALS)

    def bulk(
        self, name: str, operations: Iterable[Put | Delete], *, chunk_lines: int = stream.BULK_LINES
    ) -> Generator[Written, None, None]:
        """Put and delete many items: the outcome of each, in order. An operation that fails does not end the others. Needs a write key.

        `operations` is read at most `chunk_lines` (or 512 KiB; 64 KiB if `chunk_lines` is above 256) ahead of the outcomes that the caller
        takes. Raises a ClientError if the stream cannot continue; all operations up to the last yielded outcome are done.
        """
        return self._delivered(operations, stream.chunks_of_writes(chunk_lines), stream.writes(name))

    retrieve = _sync(calls.retrieve)
    put_item = _sync(calls.put_item)
    get_item = _sync(calls.get_item)
    delete_item = _sync(calls.delete_item)
    changes = _sync(calls.changes)
    models = _sync(calls.models)
    model = _sync(calls.model)
    complete = _sync(calls.complete)
    facets = _sync(calls.facets)
    node = _sync(calls.node)
    item_path = _sync(calls.item_path)
    ready = _sync(calls.ready)
    load = _sync(calls.load)
    unload = _sync(calls.unload)
    set_default = _sync(calls.set_default)
    set_candidate = _sync(calls.set_candidate)
    drop_candidate = _sync(calls.drop_candidate)
    trial = _sync(calls.trial)
    set_removed = _sync(calls.set_removed)
    remove_item = _sync(calls.remove_item)
    restore_item = _sync(calls.restore_item)
    removed = _sync(calls.removed)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({str(self._http.base_url)!r})"

    def _call(self, call: Call[T]) -> T:
        attempts = Attempts(call, self._retry, self._timeout_s)
        while True:
            try:
                with self._http.stream(**attempts.arguments()) as response:
                    return call.read(response, self._content(call, attempts, response))
            except (httpx.RequestError, ClientError) as error:
                pause_s = attempts.failed(error)
            self._sleep(pause_s)

    def _content(self, call: Call[T], attempts: Attempts, response: httpx.Response) -> bytes:
        body = Body(call, response, self._max_answer_bytes)
        if body.wanted:
            for piece in response.iter_bytes():
                attempts.check()
                if not body.take(piece):
                    break
        return body.content

    def _delivered(self, requests: Iterable[Sent], chunks: Chunks, route: Route[T]) -> Generator[T | RequestFailed, None, None]:
        for request in requests:
            for lines in chunks.add(request):
                yield from self._deliver(lines, route)
        for lines in chunks.flush():
            yield from self._deliver(lines, route)

    def _deliver(self, lines: list[Line], route: Route[T]) -> Generator[T | RequestFailed, None, None]:
        delivery = Delivery(lines, route, self._retry, self._timeout_s, self._max_answer_bytes)
        while not delivery.done:
            if delivery.pause_s:
                self._sleep(delivery.pause_s)
            try:
                with self._http.stream(**delivery.arguments()) as response:
                    if not response.is_success:
                        raise delivery.call.refusal(response, self._content(delivery.call, delivery.attempts, response))
                    delivery.accept(response)
                    for piece in response.iter_bytes():
                        delivery.attempts.check()
                        yield from delivery.take(piece)
                yield from delivery.end()
            except (httpx.RequestError, ClientError) as error:
                delivery.pause_s = delivery.attempts.failed(error)


class AsyncClient:
    """Talks to one retrieval service; may be shared by the tasks of one event loop. Use it in an `async with` statement, or `close` it.

    Arguments and methods are those of `Client`. With another event loop than asyncio's, pass its `sleep`.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 10.0,
        retry: Retry = _RETRY,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        certificates: Certificates | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._timeout_s = check_timeout_s(timeout_s)
        self._max_answer_bytes = _check_bytes(max_answer_bytes)
        hooks: dict[str, list[Callable[..., Any]]]
        hooks = {"request": [partial(_look_async, certificates)], "response": [_forget_redirect_async]}
        self._http = httpx.AsyncClient(**_identity(base_url, api_key, certificates), transport=transport, event_hooks=hooks)
        self._retry = retry
        self._sleep = sleep

    def retrieve_stream(
        self, requests: Iterable[Request] | AsyncIterable[Request], *, chunk_lines: int = stream.CHUNK_LINES
    ) -> AsyncGenerator[Outcome, None]:
        return self._delivered(requests, Chunks(chunk_lines), RETRIEVALS)

    def bulk(
        self, name: str, operations: Iterable[Put | Delete] | AsyncIterable[Put | Delete], *, chunk_lines: int = stream.BULK_LINES
    ) -> AsyncGenerator[Written, None]:
        return self._delivered(operations, stream.chunks_of_writes(chunk_lines), stream.writes(name))

    retrieve = _async(calls.retrieve)
    put_item = _async(calls.put_item)
    get_item = _async(calls.get_item)
    delete_item = _async(calls.delete_item)
    changes = _async(calls.changes)
    models = _async(calls.models)
    model = _async(calls.model)
    complete = _async(calls.complete)
    facets = _async(calls.facets)
    node = _async(calls.node)
    item_path = _async(calls.item_path)
    ready = _async(calls.ready)
    load = _async(calls.load)
    unload = _async(calls.unload)
    set_default = _async(calls.set_default)
    set_candidate = _async(calls.set_candidate)
    drop_candidate = _async(calls.drop_candidate)
    trial = _async(calls.trial)
    set_removed = _async(calls.set_removed)
    remove_item = _async(calls.remove_item)
    restore_item = _async(calls.restore_item)
    removed = _async(calls.removed)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({str(self._http.base_url)!r})"

    async def _call(self, call: Call[T]) -> T:
        attempts = Attempts(call, self._retry, self._timeout_s)
        while True:
            try:
                async with self._http.stream(**attempts.arguments()) as response:
                    return call.read(response, await self._content(call, attempts, response))
            except (httpx.RequestError, ClientError) as error:
                pause_s = attempts.failed(error)
            await self._sleep(pause_s)

    async def _content(self, call: Call[T], attempts: Attempts, response: httpx.Response) -> bytes:
        body = Body(call, response, self._max_answer_bytes)
        if body.wanted:
            async for piece in response.aiter_bytes():
                attempts.check()
                if not body.take(piece):
                    break
        return body.content

    async def _delivered(
        self, requests: Iterable[Sent] | AsyncIterable[Sent], gathered: Chunks, route: Route[T]
    ) -> AsyncGenerator[T | RequestFailed, None]:
        async with aclosing(_chunks(requests, gathered)) as chunks:
            async for lines in chunks:
                delivered = self._deliver(lines, route)
                async with aclosing(delivered) as outcomes:  # so that its connection ends with the stream
                    async for outcome in outcomes:
                        yield outcome

    async def _deliver(self, lines: list[Line], route: Route[T]) -> AsyncGenerator[T | RequestFailed, None]:
        delivery = Delivery(lines, route, self._retry, self._timeout_s, self._max_answer_bytes)
        while not delivery.done:
            if delivery.pause_s:
                await self._sleep(delivery.pause_s)
            try:
                async with self._http.stream(**delivery.arguments()) as response:
                    if not response.is_success:
                        raise delivery.call.refusal(response, await self._content(delivery.call, delivery.attempts, response))
                    delivery.accept(response)
                    async for piece in response.aiter_bytes():
                        delivery.attempts.check()
                        for outcome in delivery.take(piece):
                            yield outcome
                for outcome in delivery.end():
                    yield outcome
            except (httpx.RequestError, ClientError) as error:
                delivery.pause_s = delivery.attempts.failed(error)


async def _chunks(requests: Iterable[Sent] | AsyncIterable[Sent], chunks: Chunks) -> AsyncGenerator[list[Line], None]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            for lines in chunks.add(request):
                yield lines
    else:
        for request in requests:
            for lines in chunks.add(request):
                yield lines
    for lines in chunks.flush():
        yield lines


def _identity(base_url: str, api_key: str | None, certificates: Certificates | None) -> dict[str, Any]:
    """Arguments of both of httpx's clients about the service and the caller."""
    verify = True if certificates is None else certificates.context
    no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))  # the service sets no cookies, and a proxy's are not sent back
    return {"base_url": _base_url(base_url), "headers": _headers(api_key), "cookies": no_cookies, "verify": verify}


def _base_url(text: str) -> httpx.URL:
    url = httpx.URL(text)
    if url.userinfo:  # it would replace the key, and be printed with the address
        raise ValueError("base_url: got an address with a user or a password in it, expected http://host:port")
    labels = url.raw_host.removesuffix(b".").split(b".")
    if url.scheme not in {"http", "https"} or not all(0 < len(label) < 64 for label in labels):  # DNS has no longer labels
        raise ValueError(f"base_url: got {text!r}, expected http://host:port or https://host")
    return url


def _check_bytes(value: int) -> int:
    if value < 1:
        raise ValueError(f"max_answer_bytes: got {value!r}, expected at least 1")
    return value


def _look(certificates: Certificates | None, request: httpx.Request) -> None:
    """Check the certificates before a request, which may need a new connection."""
    if certificates is not None:
        certificates.look()


async def _look_async(certificates: Certificates | None, request: httpx.Request) -> None:
    _look(certificates, request)


def _forget_redirect(response: httpx.Response) -> None:
    """Redirects are not followed, so httpx must not make a request of one: building one fails for some addresses."""
    response.headers.pop("Location", None)


async def _forget_redirect_async(response: httpx.Response) -> None:
    _forget_redirect(response)


def _headers(api_key: str | None) -> dict[str, str]:
    headers = {
        "Accept": "application/json, application/x-ndjson, application/problem+json",
        "Accept-Encoding": "identity",  # a kilobyte of brotli unpacks to a gigabyte before httpx returns a piece
        "User-Agent": "espalier-client",
    }
    if api_key is not None:
        if not api_key or not all("!" <= letter <= "~" for letter in api_key):  # httpx would print it in its error
            raise ValueError("api_key: expected printable ASCII characters without spaces (the value is not shown)")
        headers["Authorization"] = f"Bearer {api_key}"
    return headers
