"""How requests of httpx reach the network: over httpcore's pools, as in httpx's own transports, and over network.py below them.

httpx's transports take no network backend, which is the one place where a deadline can be kept. A request names what is left of its call
as the extension DEADLINE. The proxies of the environment are honoured as httpx does it: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import getproxies, proxy_bypass

import httpcore
import httpx

from espalier_client.network import AsyncBackend, Backend, Left, within

DEADLINE = "espalier_client.left_s"

_KINDS: dict[type[Exception], type[httpx.TransportError]] = {
    httpcore.ConnectTimeout: httpx.ConnectTimeout,
    httpcore.ReadTimeout: httpx.ReadTimeout,
    httpcore.WriteTimeout: httpx.WriteTimeout,
    httpcore.PoolTimeout: httpx.PoolTimeout,
    httpcore.TimeoutException: httpx.TimeoutException,
    httpcore.ConnectError: httpx.ConnectError,
    httpcore.ReadError: httpx.ReadError,
    httpcore.WriteError: httpx.WriteError,
    httpcore.NetworkError: httpx.NetworkError,
    httpcore.ProxyError: httpx.ProxyError,
    httpcore.LocalProtocolError: httpx.LocalProtocolError,
    httpcore.RemoteProtocolError: httpx.RemoteProtocolError,
    httpcore.ProtocolError: httpx.ProtocolError,
    httpcore.UnsupportedProtocol: httpx.UnsupportedProtocol,
}


class Transport(httpx.BaseTransport):
    """Connections to one service."""

    def __init__(self, base_url: httpx.URL) -> None:
        self._pool = httpcore.ConnectionPool(network_backend=Backend(), **_pool_options(base_url))

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        left_s: Left | None = request.extensions.get(DEADLINE)
        with _errors_of_httpx(), within(left_s):
            response = self._pool.handle_request(_for_httpcore(request))
        return httpx.Response(response.status, headers=response.headers, stream=_Body(response, left_s), extensions=response.extensions)

    def close(self) -> None:
        self._pool.close()


class AsyncTransport(httpx.AsyncBaseTransport):
    """Connections to one service, asynchronous."""

    def __init__(self, base_url: httpx.URL) -> None:
        self._pool = httpcore.AsyncConnectionPool(network_backend=AsyncBackend(), **_pool_options(base_url))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        left_s: Left | None = request.extensions.get(DEADLINE)
        with _errors_of_httpx(), within(left_s):
            response = await self._pool.handle_async_request(_for_httpcore(request))
        return httpx.Response(
            response.status, headers=response.headers, stream=_AsyncBody(response, left_s), extensions=response.extensions
        )

    async def aclose(self) -> None:
        await self._pool.aclose()


class _Body(httpx.SyncByteStream):
    def __init__(self, response: httpcore.Response, left_s: Left | None) -> None:
        if not isinstance(response.stream, Iterable):
            raise TypeError(f"stream: got {type(response.stream).__name__}, expected one that can be read without await")
        self._response = response
        self._pieces = response.stream
        self._left_s = left_s

    def __iter__(self) -> Iterator[bytes]:
        pieces = iter(self._pieces)
        while True:
            with _errors_of_httpx(), within(self._left_s):  # not around the yield: the caller's own connections have their own time
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    def close(self) -> None:
        self._response.close()


class _AsyncBody(httpx.AsyncByteStream):
    def __init__(self, response: httpcore.Response, left_s: Left | None) -> None:
        if not isinstance(response.stream, AsyncIterable):
            raise TypeError(f"stream: got {type(response.stream).__name__}, expected one that is read with await")
        self._response = response
        self._pieces = response.stream
        self._left_s = left_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        pieces = aiter(self._pieces)
        while True:
            with _errors_of_httpx(), within(self._left_s):
                piece = await anext(pieces, None)
            if piece is None:
                return
            yield piece

    async def aclose(self) -> None:
        await self._response.aclose()


def _for_httpcore(request: httpx.Request) -> httpcore.Request:
    url = httpcore.URL(scheme=request.url.raw_scheme, host=request.url.raw_host, port=request.url.port, target=request.url.raw_path)
    content: Any = request.stream
    return httpcore.Request(request.method, url, headers=request.headers.raw, content=content, extensions=request.extensions)


def _pool_options(base_url: httpx.URL) -> dict[str, Any]:
    """What both pools take: httpx's limits, certificates where they are needed, and the environment's proxy."""
    limits = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=5.0)
    return {
        "ssl_context": httpx.create_ssl_context() if base_url.scheme == "https" else None,
        "proxy": _proxy(base_url),
        "max_connections": limits.max_connections,
        "max_keepalive_connections": limits.max_keepalive_connections,
        "keepalive_expiry": limits.keepalive_expiry,
    }


def _proxy(base_url: httpx.URL) -> httpcore.Proxy | None:
    """The proxy that the environment names for this address."""
    named = getproxies()
    address = named.get(base_url.scheme) or named.get("all")
    if not address or proxy_bypass(base_url.host) or proxy_bypass(base_url.netloc.decode("ascii")):
        return None
    proxy = httpx.Proxy(address if "://" in address else f"http://{address}")
    url = httpcore.URL(scheme=proxy.url.raw_scheme, host=proxy.url.raw_host, port=proxy.url.port, target=proxy.url.raw_path)
    certificates = httpx.create_ssl_context() if proxy.url.scheme == "https" else None
    return httpcore.Proxy(url, auth=proxy.raw_auth, headers=proxy.headers.raw, ssl_context=certificates)


@contextmanager
def _errors_of_httpx() -> Iterator[None]:
    try:
        yield
    except tuple(_KINDS) as error:
        kind = next(found for one in type(error).__mro__ if (found := _KINDS.get(one)) is not None)
        raise kind(str(error)) from error
