"""The two clients, synchronous and asynchronous. They send and wait; calls.py, messages.py, retry.py and stream.py decide everything else.

Both do the same, with and without `await`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import aclosing
from http.cookiejar import CookieJar, DefaultCookiePolicy
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import httpx

from espalier_client import calls
from espalier_client.calls import Body, Call, check_timeout_s
from espalier_client.errors import ClientError, RequestFailed
from espalier_client.items import Changes, Delete, ItemOptions, ItemOutcome, LiveItem, Put
from espalier_client.messages import (
    Answer,
    Completion,
    Document,
    Model,
    Options,
    Query,
    Readiness,
    Removal,
    RemovedIds,
    RemovedItem,
    Request,
)
from espalier_client.retry import Attempts, Retry
from espalier_client.stream import (
    BULK_LINES,
    CHUNK_LINES,
    RETRIEVALS,
    Chunks,
    Delivery,
    Line,
    Outcome,
    Route,
    Written,
    chunks_of_writes,
    writes,
)

T = TypeVar("T")
Sent = TypeVar("Sent", bound=Request | Put | Delete)

LOADING_S = 600.0
"""How long admin calls wait that may load a version."""

MAX_ANSWER_BYTES = 1 << 26
"""64 MiB: more than twice the answer to 256 queries for 1000 items each."""

_RETRY = Retry()


class Client:
    """Talks to one retrieval service; may be shared by threads. Use it in a `with` statement, or `close` it.

    `timeout_s`: how long an attempt waits for a connection, and for each piece of the answer. `retry`: when and how often a request is
    sent again, and how long a call may take as a whole. The deadline is checked before each attempt and between the pieces of an answer.
    `max_answer_bytes`: the longest accepted answer, and the longest line of a stream's answer. `transport` and `sleep` are for tests and
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
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._timeout_s = check_timeout_s(timeout_s)
        self._max_answer_bytes = _check_bytes(max_answer_bytes)
        hooks = {"response": [_forget_redirect]}
        self._http = httpx.Client(**_identity(base_url, api_key), transport=transport, event_hooks=hooks)
        self._retry = retry
        self._sleep = sleep

    def retrieve(self, queries: Iterable[Query], **options: Unpack[Options]) -> Answer:
        """The best items for each query. `options` are the fields of `Request`."""
        return self._call(calls.retrieve(Request(queries, **options)))

    def retrieve_stream(self, requests: Iterable[Request], *, chunk_lines: int = CHUNK_LINES) -> Generator[Outcome, None, None]:
        """The outcome of each request, in their order; one that fails does not end the stream.

        `requests` is read at most `chunk_lines` (or 64 KiB) ahead of the answers that the caller takes. Choose 1 where a request depends on
        the answers before it, or where requests are rare. Raises a ClientError where the stream cannot go on; all requests up to the last
        yielded outcome are done.
        """
        return self._delivered(requests, Chunks(chunk_lines), RETRIEVALS)

    def put_item(
        self, name: str, item_id: str, *, if_match: str | None = None, if_none_match: str | None = None, **options: Unpack[ItemOptions]
    ) -> ItemOutcome:
        """Put an item into a running model, or change one. `options` are the fields of `Put`. Needs a write key.

        `if_match`: the `etag` of the item that the change was made from; `if_none_match` "*": only insert. Raises Conflict where that does
        not hold. Without a condition the call is sent again when its connection breaks: the same item twice is `unchanged`.
        """
        return self._call(calls.put_item(name, Put(item_id, **options), if_match, if_none_match))

    def get_item(self, name: str, item_id: str) -> LiveItem:
        """An item as it is now, trained or live. Needs a write key."""
        return self._call(calls.get_item(name, item_id))

    def delete_item(self, name: str, item_id: str, *, source_version: int | None = None, if_match: str | None = None) -> ItemOutcome:
        """Delete an item, trained or live; one that is deleted already is `unchanged`. Needs a write key."""
        return self._call(calls.delete_item(name, item_id, source_version, if_match))

    def bulk(self, name: str, operations: Iterable[Put | Delete], *, chunk_lines: int = BULK_LINES) -> Generator[Written, None, None]:
        """Put and delete many items: the outcome of each, in their order; one that fails does not end the rest. Needs a write key.

        `operations` is read at most `chunk_lines` (or 512 KiB; 64 KiB where they are more than 256) ahead of the outcomes that the caller
        takes. Raises a ClientError where it cannot go on; all operations up to the last yielded outcome are done.
        """
        return self._delivered(operations, chunks_of_writes(chunk_lines), writes(name))

    def changes(self, name: str, after: int = 0, limit: int = 1000) -> Changes:
        """What happened to a model's live catalogue after a sequence, at most `limit` operations. Needs an admin key."""
        return self._call(calls.changes(name, after, limit))

    def models(self) -> tuple[Model, ...]:
        """Every model of the service, ready or not."""
        return self._call(calls.models())

    def model(self, name: str) -> Model:
        """One model."""
        return self._call(calls.model(name))

    def complete(self, name: str, prefix: str, limit: int = 10) -> tuple[Completion, ...]:
        """Items of a model whose id or title starts with `prefix`."""
        return self._call(calls.complete(name, prefix, limit))

    def facets(
        self, name: str, column: str, *, filter: Mapping[str, Any] | None = None, limit: int = 20, version: int | None = None
    ) -> Document:
        """How many items that a query may get have each value of a column; `filter` as in a request, but for that column itself."""
        return self._call(calls.facets(name, column, filter, limit, version))

    def node(self, name: str, number: int = 0, *, tree: int = 0, limit: int = 50, version: int | None = None) -> Document:
        """A node of a tree (of a forest the `tree`-th, counted from 0), its children, some of its items, and what is typical of them."""
        return self._call(calls.node(name, number, tree, limit, version))

    def item_path(self, name: str, item_id: str, *, tree: int = 0, version: int | None = None) -> tuple[int, ...]:
        """The nodes from the root of a tree to an item's leaf."""
        return self._call(calls.item_path(name, item_id, tree, version))

    def ready(self) -> Readiness:
        """Whether the service is ready, and the reasons if it is not, which is not an error."""
        return self._call(calls.ready())

    def load(self, name: str, version: int, *, default: bool = True, timeout_s: float = LOADING_S) -> Model:
        """Open, verify and warm up a version while the others serve; `default`: then make it the default. Needs an admin key.

        Returns once that is done, which may take minutes; it waits for `timeout_s`, as the next two do. A failed load changes nothing.
        """
        return self._call(calls.load(name, version, default, timeout_s))

    def unload(self, name: str, version: int, *, timeout_s: float = LOADING_S) -> Model:
        """Drop a version that is not the default, once its requests are answered. Needs an admin key."""
        return self._call(calls.unload(name, version, timeout_s))

    def set_default(self, name: str, version: int, *, timeout_s: float = LOADING_S) -> Model:
        """Make a version the default, after loading it where needed. Needs an admin key."""
        return self._call(calls.set_default(name, version, timeout_s))

    def set_removed(self, name: str, ids: Iterable[str], *, if_match: str | None = None) -> Removal:
        """Keep these items, and no others, out of every answer of a model. Needs an admin key.

        `if_match`: the `etag` of the list that these ids were made from; raises Conflict if the list has changed since.
        """
        return self._call(calls.set_removed(name, ids, if_match))

    def remove_item(self, name: str, item_id: str) -> RemovedItem:
        """Keep one more item out of every answer of a model, whatever else is removed meanwhile. Needs an admin key."""
        return self._call(calls.remove_item(name, item_id))

    def restore_item(self, name: str, item_id: str) -> RemovedItem:
        """Let answers of a model hold an item again. Needs an admin key."""
        return self._call(calls.restore_item(name, item_id))

    def removed(self, name: str) -> RemovedIds:
        """The items that are kept out of every answer of a model. Needs an admin key."""
        return self._call(calls.removed(name))

    def close(self) -> None:
        """Close the connections."""
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
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._timeout_s = check_timeout_s(timeout_s)
        self._max_answer_bytes = _check_bytes(max_answer_bytes)
        hooks = {"response": [_forget_redirect_async]}
        self._http = httpx.AsyncClient(**_identity(base_url, api_key), transport=transport, event_hooks=hooks)
        self._retry = retry
        self._sleep = sleep

    async def retrieve(self, queries: Iterable[Query], **options: Unpack[Options]) -> Answer:
        return await self._call(calls.retrieve(Request(queries, **options)))

    def retrieve_stream(
        self, requests: Iterable[Request] | AsyncIterable[Request], *, chunk_lines: int = CHUNK_LINES
    ) -> AsyncGenerator[Outcome, None]:
        return self._delivered(requests, Chunks(chunk_lines), RETRIEVALS)

    async def put_item(
        self, name: str, item_id: str, *, if_match: str | None = None, if_none_match: str | None = None, **options: Unpack[ItemOptions]
    ) -> ItemOutcome:
        return await self._call(calls.put_item(name, Put(item_id, **options), if_match, if_none_match))

    async def get_item(self, name: str, item_id: str) -> LiveItem:
        return await self._call(calls.get_item(name, item_id))

    async def delete_item(self, name: str, item_id: str, *, source_version: int | None = None, if_match: str | None = None) -> ItemOutcome:
        return await self._call(calls.delete_item(name, item_id, source_version, if_match))

    def bulk(
        self, name: str, operations: Iterable[Put | Delete] | AsyncIterable[Put | Delete], *, chunk_lines: int = BULK_LINES
    ) -> AsyncGenerator[Written, None]:
        return self._delivered(operations, chunks_of_writes(chunk_lines), writes(name))

    async def changes(self, name: str, after: int = 0, limit: int = 1000) -> Changes:
        return await self._call(calls.changes(name, after, limit))

    async def models(self) -> tuple[Model, ...]:
        return await self._call(calls.models())

    async def model(self, name: str) -> Model:
        return await self._call(calls.model(name))

    async def complete(self, name: str, prefix: str, limit: int = 10) -> tuple[Completion, ...]:
        return await self._call(calls.complete(name, prefix, limit))

    async def facets(
        self, name: str, column: str, *, filter: Mapping[str, Any] | None = None, limit: int = 20, version: int | None = None
    ) -> Document:
        return await self._call(calls.facets(name, column, filter, limit, version))

    async def node(self, name: str, number: int = 0, *, tree: int = 0, limit: int = 50, version: int | None = None) -> Document:
        return await self._call(calls.node(name, number, tree, limit, version))

    async def item_path(self, name: str, item_id: str, *, tree: int = 0, version: int | None = None) -> tuple[int, ...]:
        return await self._call(calls.item_path(name, item_id, tree, version))

    async def ready(self) -> Readiness:
        return await self._call(calls.ready())

    async def load(self, name: str, version: int, *, default: bool = True, timeout_s: float = LOADING_S) -> Model:
        return await self._call(calls.load(name, version, default, timeout_s))

    async def unload(self, name: str, version: int, *, timeout_s: float = LOADING_S) -> Model:
        return await self._call(calls.unload(name, version, timeout_s))

    async def set_default(self, name: str, version: int, *, timeout_s: float = LOADING_S) -> Model:
        return await self._call(calls.set_default(name, version, timeout_s))

    async def set_removed(self, name: str, ids: Iterable[str], *, if_match: str | None = None) -> Removal:
        return await self._call(calls.set_removed(name, ids, if_match))

    async def remove_item(self, name: str, item_id: str) -> RemovedItem:
        return await self._call(calls.remove_item(name, item_id))

    async def restore_item(self, name: str, item_id: str) -> RemovedItem:
        return await self._call(calls.restore_item(name, item_id))

    async def removed(self, name: str) -> RemovedIds:
        return await self._call(calls.removed(name))

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


def _identity(base_url: str, api_key: str | None) -> dict[str, Any]:
    """What both of httpx's clients are told of the service and of its caller."""
    no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))  # the service sets none, and a proxy's are not sent back
    return {"base_url": _base_url(base_url), "headers": _headers(api_key), "cookies": no_cookies}


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
