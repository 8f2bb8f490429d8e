"""The two clients, synchronous and asynchronous. They send and wait; calls.py, messages.py, retry.py and stream.py decide everything else.

Both do the same, with and without `await`.
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


def _sent(build: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    """The method of `Client` that sends what `build` makes of its arguments."""

    def method(client: Client, /, *arguments: P.args, **options: P.kwargs) -> T:
        return client._call(build(*arguments, **options))

    return _described(method, build)


def _awaited(build: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """The method of `AsyncClient` that sends what `build` makes of its arguments."""

    async def method(client: AsyncClient, /, *arguments: P.args, **options: P.kwargs) -> T:
        return await client._call(build(*arguments, **options))

    return _described(method, build)


def _described(method: M, build: Callable[..., Any]) -> M:
    """With the name, the documentation and the parameters of `build`, for help() and editors."""
    functools.update_wrapper(method, build)
    signature, own = inspect.signature(build), inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    # Where inspect looks for it.
    method.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]
    return method


class Client:
    """Talks to one retrieval service; may be shared by threads. Use it in a `with` statement, or `close` it.

    `timeout_s`: how long an attempt waits for a connection, and for each piece of the answer. `retry`: when and how often a request is
    sent again, and how long a call may take as a whole. The deadline is checked before each attempt and between the pieces of an answer.
    `max_answer_bytes`: the longest accepted answer, and the longest line of a stream's answer. `certificates`: for https, where the
    system's CAs do not do, or the service wants a certificate of the client. `transport` and `sleep` are for tests and
    special needs: a transport of your own must keep httpx's time-outs.

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
        """The outcome of each request, in their order; one that fails does not end the stream.

        `requests` is read at most `chunk_lines` (or 64 KiB) ahead of the answers that the caller takes. Choose 1 where a request depends on
        the answers before it, or where requests are rare. Raises a ClientError where the stream cannot go on; all requests up to the last
        yielded outcome are done.
        """
        return self._delivered(requests, Chunks(chunk_lines), RETRIEVALS)

    def bulk(
        self, name: str, operations: Iterable[Put | Delete], *, chunk_lines: int = stream.BULK_LINES
    ) -> Generator[Written, None, None]:
        """Put and delete many items: the outcome of each, in their order; one that fails does not end the rest. Needs a write key.

        `operations` is read at most `chunk_lines` (or 512 KiB; 64 KiB where they are more than 256) ahead of the outcomes that the caller
        takes. Raises a ClientError where it cannot go on; all operations up to the last yielded outcome are done.
        """
        return self._delivered(operations, stream.chunks_of_writes(chunk_lines), stream.writes(name))

    retrieve = _sent(calls.retrieve)
    put_item = _sent(calls.put_item)
    get_item = _sent(calls.get_item)
    delete_item = _sent(calls.delete_item)
    changes = _sent(calls.changes)
    models = _sent(calls.models)
    model = _sent(calls.model)
    complete = _sent(calls.complete)
    facets = _sent(calls.facets)
    node = _sent(calls.node)
    item_path = _sent(calls.item_path)
    ready = _sent(calls.ready)
    load = _sent(calls.load)
    unload = _sent(calls.unload)
    set_default = _sent(calls.set_default)
    set_candidate = _sent(calls.set_candidate)
    drop_candidate = _sent(calls.drop_candidate)
    trial = _sent(calls.trial)
    set_removed = _sent(calls.set_removed)
    remove_item = _sent(calls.remove_item)
    restore_item = _sent(calls.restore_item)
    removed = _sent(calls.removed)

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
        for lines in chunks.rest():
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
                delivery.failed(error)


class AsyncClient:
    """Talks to one retrieval service; may be shared by the tasks of one event loop. Use it in an `async with` statement, or `close` it.

    `Client` says what the arguments and the methods mean. Another event loop than asyncio's brings its own `sleep`.
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

    retrieve = _awaited(calls.retrieve)
    put_item = _awaited(calls.put_item)
    get_item = _awaited(calls.get_item)
    delete_item = _awaited(calls.delete_item)
    changes = _awaited(calls.changes)
    models = _awaited(calls.models)
    model = _awaited(calls.model)
    complete = _awaited(calls.complete)
    facets = _awaited(calls.facets)
    node = _awaited(calls.node)
    item_path = _awaited(calls.item_path)
    ready = _awaited(calls.ready)
    load = _awaited(calls.load)
    unload = _awaited(calls.unload)
    set_default = _awaited(calls.set_default)
    set_candidate = _awaited(calls.set_candidate)
    drop_candidate = _awaited(calls.drop_candidate)
    trial = _awaited(calls.trial)
    set_removed = _awaited(calls.set_removed)
    remove_item = _awaited(calls.remove_item)
    restore_item = _awaited(calls.restore_item)
    removed = _awaited(calls.removed)

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
                delivery.failed(error)


async def _chunks(requests: Iterable[Sent] | AsyncIterable[Sent], chunks: Chunks) -> AsyncGenerator[list[Line], None]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            for lines in chunks.add(request):
                yield lines
    else:
        for request in requests:
            for lines in chunks.add(request):
                yield lines
    for lines in chunks.rest():
        yield lines


def _identity(base_url: str, api_key: str | None, certificates: Certificates | None) -> dict[str, Any]:
    """What both of httpx's clients are told of the service and of its caller."""
    verify = True if certificates is None else certificates.context
    no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))  # the service sets none, and a proxy's are not sent back
    return {"base_url": _base_url(base_url), "headers": _headers(api_key), "cookies": no_cookies, "verify": verify}


def _base_url(text: str) -> httpx.URL:
    url = httpx.URL(text)
    if url.userinfo:  # it would be sent in the place of the key, and printed with the address
        raise ValueError("base_url: got an address with a user or a password in it, expected http://host:port")
    labels = url.raw_host.removesuffix(b".").split(b".")
    if url.scheme not in {"http", "https"} or not all(0 < len(label) < 64 for label in labels):  # longer ones cannot be looked up
        raise ValueError(f"base_url: got {text!r}, expected http://host:port or https://host")
    return url


def _check_bytes(value: int) -> int:
    if value < 1:
        raise ValueError(f"max_answer_bytes: got {value!r}, expected at least 1")
    return value


def _look(certificates: Certificates | None, request: httpx.Request) -> None:
    """Before a request, which may need a new connection."""
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
        "Accept-Encoding": "identity",  # a kilobyte of brotli unpacks to a gigabyte before httpx lets anybody look
        "User-Agent": "espalier-client",
    }
    if api_key is not None:
        if not api_key or not all("!" <= letter <= "~" for letter in api_key):  # httpx would print it in its error
            raise ValueError("api_key: expected printable ASCII characters without spaces (the value is not shown)")
        headers["Authorization"] = f"Bearer {api_key}"
    return headers
