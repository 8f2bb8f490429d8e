"""One connection until its TLS handshake is done: it counts among the connections, and has the time of a request's head.

The event loop's own TLS servers show a connection to nobody before its handshake is done, and have one certificate for all.
Knows transports and contexts. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from ..http.connection import TURN_BYTES, Connection
from ..http.connections import Connections
from ..tls import Certificates

NEVER_S = 86_400.0
"""The event loop ends no connection that is being closed: connection.py does, by what its client takes."""
NO_LIMIT = 1 << 30
"""Bytes of answers that may wait in TLS: it does not say when the transport below takes no more (_Below)."""


class Handshake(asyncio.Protocol):
    """Becomes the connection that `make` makes.

    since   when it was opened
    unsent  bytes of answers: none
    """

    unsent = 0

    def __init__(self, shared: Connections, certificates: Certificates, make: Callable[..., Connection], **given: Any) -> None:
        self._shared, self._certificates = shared, certificates
        self._connection = make(**given)
        self._begun: set[Any] = given["server_state"].connections  # what the server waits for when it stops
        self.since = self._connection.since
        self._received = b""
        self._lost = self._ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._begun.add(self)
        shared = self._shared
        if not shared.admit(self, self.since) and len(shared.open) > shared.most + 2 * shared.reserve:
            shared.refused("too_many")
            self.abort()
            return
        self._task = self._connection.loop.create_task(self._secure())

    async def _secure(self) -> None:
        loop, timeout_s = self._connection.loop, self._shared.head_timeout_s
        times_s: dict[str, Any] = {"ssl_handshake_timeout": timeout_s, "ssl_shutdown_timeout": NEVER_S}
        if self._ended or self._transport.is_closing():
            return
        if self._received:
            loop.call_soon(self._feed)
        try:
            context = self._certificates.current()
            secured: Any = await loop.start_tls(self._transport, self, context, server_side=True, **times_s)
        except OSError:  # no TLS, no certificate, too late, or gone
            secured = None
        if secured is None or self._lost or self._ended:
            if not self._ended:
                self._shared.refused("handshake")
            self.abort()
            return
        self._forget()
        secured.set_write_buffer_limits(NO_LIMIT)
        secured.set_read_buffer_limits(TURN_BYTES)
        secured.set_protocol(self._connection)
        self._connection.secured(secured, self._transport)
        self._transport.set_protocol(_Below(self._transport.get_protocol(), self._connection))
        if self._received:
            self._connection.data_received(self._received)

    def data_received(self, data: bytes) -> None:
        """Bytes that come before start_tls has begun, or with the end of the handshake."""
        self._received += data

    def _feed(self) -> None:
        """Give TLS what came before it. It begins after this, and reads nothing before."""
        protocol: Any = self._transport.get_protocol()
        while self._received and protocol is not self:
            buffer = memoryview(protocol.get_buffer(len(self._received)))
            taken = min(len(buffer), len(self._received))
            buffer[:taken] = self._received[:taken]
            self._received = self._received[taken:]
            protocol.buffer_updated(taken)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._forget()

    def check(self, now: float) -> None:
        """start_tls has the same time."""

    def shutdown(self) -> None:
        """The server stops."""
        self.abort()

    def abort(self) -> None:
        self._ended = True
        self._forget()
        self._transport.abort()

    def _forget(self) -> None:
        self._begun.discard(self)
        self._shared.forget(self)


class _Below(asyncio.BufferedProtocol):
    """Between TLS and its transport: the connection learns, too, when the transport takes no more.

    The event loop's TLS writes all that it has as soon as the transport takes anything, and tells nobody what the transport then holds.
    """

    def __init__(self, tls: Any, connection: Connection) -> None:
        self._tls, self._connection, self._paused = tls, connection, False

    def get_buffer(self, sizehint: int) -> memoryview:
        buffer: memoryview = self._tls.get_buffer(sizehint)
        return buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._tls.buffer_updated(nbytes)

    def eof_received(self) -> bool | None:
        stays_open: bool | None = self._tls.eof_received()
        return stays_open

    def connection_lost(self, exc: Exception | None) -> None:
        self._tls.connection_lost(exc)

    def pause_writing(self) -> None:
        self._paused = True
        self._tls.pause_writing()
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._paused = False
        self._tls.resume_writing()  # which may write enough for another pause
        if not self._paused:
            self._connection.resume_writing()
