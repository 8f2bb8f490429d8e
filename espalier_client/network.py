"""Network operations that end with the deadline of the call they belong to.

Knows httpcore's backends and sockets; nothing of HTTP. httpcore gives each read and each write a time-out of its own, so a server that
sends a byte now and then can keep a call going for ever. Here every operation is bounded by the time that is left of its call. `within`
names the call; a context variable holds it, because httpcore only passes a time-out along, and in some places (SOCKS) not even that.

The synchronous client looks up host names in a thread, since the system's resolver takes no time-out. One exception is left: a synchronous
client that speaks TLS through a proxy that it also reaches over TLS. There httpcore's stream loops by itself, and the deadline is only
checked between its operations.
"""

from __future__ import annotations

import ipaddress
import queue
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import httpcore

Left = Callable[[], float]
"""Returns the seconds left of a call."""

_LEFT: ContextVar[Left | None] = ContextVar("espalier_client_left_s", default=None)


@contextmanager
def within(left_s: Left | None) -> Iterator[None]:
    """Bound the operations inside by the time left of a call; None: by their own time-outs only."""
    token = _LEFT.set(left_s)
    try:
        yield
    finally:
        _LEFT.reset(token)


def _allowed(timeout_s: float | None, late: type[httpcore.TimeoutException]) -> float | None:
    """Seconds that an operation may take. Raises `late` where none are left."""
    left_s = _LEFT.get()
    if left_s is None:
        return timeout_s
    remaining_s = left_s()
    if remaining_s <= 0:
        raise late("the deadline of the call has passed")
    return remaining_s if timeout_s is None else min(timeout_s, remaining_s)


class Stream(httpcore.NetworkStream):
    """A connection of the synchronous client.

    `direct`: whether what is written goes straight to the socket of `inner`, as it does but for TLS inside of TLS.
    """

    def __init__(self, inner: httpcore.NetworkStream, direct: bool = True) -> None:
        self._inner = inner
        self._socket: socket.socket | None = inner.get_extra_info("socket") if direct else None

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, _allowed(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if self._socket is None:
            self._inner.write(buffer, _allowed(timeout, httpcore.WriteTimeout))
            return
        # httpcore's own loop restarts the time-out with each piece that the peer takes.
        rest = memoryview(buffer)
        try:
            while rest:
                self._socket.settimeout(_allowed(timeout, httpcore.WriteTimeout))
                rest = rest[self._socket.send(rest) :]
        except TimeoutError as error:
            raise httpcore.WriteTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.WriteError(str(error)) from error

    def close(self) -> None:
        self._inner.close()

    def start_tls(self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None) -> Stream:
        nested = isinstance(self.get_extra_info("socket"), ssl.SSLSocket)
        try:
            inner = self._inner.start_tls(ssl_context, server_hostname, _allowed(timeout, httpcore.ConnectTimeout))
        except BaseException:  # httpcore leaves closing to the stream
            self.close()
            raise
        return Stream(inner, direct=not nested)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class Backend(httpcore.NetworkBackend):
    """Makes the connections of the synchronous client."""

    def __init__(self) -> None:
        self._inner = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> Stream:
        refused: Exception = httpcore.ConnectError(f"{host} has no address")
        for address in _addresses(host, port, _allowed(timeout, httpcore.ConnectTimeout)):
            allowed_s = _allowed(timeout, httpcore.ConnectTimeout)
            try:
                return Stream(self._inner.connect_tcp(address, port, allowed_s, local_address, socket_options))
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                refused = error
        raise refused


class AsyncStream(httpcore.AsyncNetworkStream):
    """A connection of the asynchronous client. Its operations end in time."""

    def __init__(self, inner: httpcore.AsyncNetworkStream) -> None:
        self._inner = inner

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return await self._inner.read(max_bytes, _allowed(timeout, httpcore.ReadTimeout))

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._inner.write(buffer, _allowed(timeout, httpcore.WriteTimeout))

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def start_tls(self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None) -> AsyncStream:
        try:
            return AsyncStream(await self._inner.start_tls(ssl_context, server_hostname, _allowed(timeout, httpcore.ConnectTimeout)))
        except BaseException:  # httpcore leaves closing to the stream, and the stream does not close
            await self.aclose()
            raise

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class AsyncBackend(httpcore.AsyncNetworkBackend):
    """Makes the connections of the asynchronous client."""

    def __init__(self) -> None:
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> AsyncStream:
        allowed_s = _allowed(timeout, httpcore.ConnectTimeout)
        return AsyncStream(await self._inner.connect_tcp(host, port, allowed_s, local_address, socket_options))


def _addresses(host: str, port: int, timeout_s: float | None) -> list[str]:
    """The addresses of a name, in the resolver's order. Raises httpcore.ConnectError and ConnectTimeout."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return [host]
    answers: queue.SimpleQueue[list[str] | Exception] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answers.put(list(dict.fromkeys(str(address[0]) for *_, address in found)))
        except (OSError, UnicodeError) as error:
            answers.put(error)

    threading.Thread(target=look_up, name="espalier-client-resolver", daemon=True).start()
    try:
        answer = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise httpcore.ConnectTimeout(f"{host} was not looked up in time") from None
    if isinstance(answer, Exception):
        raise httpcore.ConnectError(f"{host}: {answer}") from answer
    return answer
