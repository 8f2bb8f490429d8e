"""One connection during its TLS handshake. It counts as a connection, and the handshake has the time limit of a request's head.

The TLS servers of asyncio report a connection only after its handshake, and keep the certificate they started with.
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
"""The event loop sets no time limit on closing: connection.py ends a connection whose client reads nothing."""
NO_LIMIT = 1 << 30
"""Bytes of answers that may wait in TLS. Its own limit would not tell when the transport below is full; _FlowRelay does."""


class Handshake(asyncio.Protocol):
    """Hands its transport over to the connection from `factory` after the handshake.

    since   when it was opened
    unsent  bytes of answers: none
    """

    unsent = 0

    def __init__(self, shared: Connections, certificates: Certificates, factory: Callable[..., Connection], **options: Any) -> None:
        self._shared, self._certificates = shared, certificates
        self._connection = factory(**options)
        self._open_connections: set[Any] = options["server_state"].connections  # the server waits for these when it stops
        self.since = self._connection.since
        self._received = b""
        self._lost = self._aborted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._open_connections.add(self)
        shared = self._shared
        if not shared.admit(self, self.since) and len(shared.open) > shared.limit + 2 * shared.reserve:
            shared.refused("too_many")
            self.abort()
            return
        self._task = self._connection.loop.create_task(self._secure())

    async def _secure(self) -> None:
        loop, timeout_s = self._connection.loop, self._shared.head_timeout_s
        times_s: dict[str, Any] = {"ssl_handshake_timeout": timeout_s, "ssl_shutdown_timeout": NEVER_S}
        if self._aborted or self._transport.is_closing():
            return
        if self._received:
            loop.call_soon(self._feed)
        try:
            context = self._certificates.current()
            tls_transport: Any = await loop.start_tls(self._transport, self, context, server_side=True, **times_s)
        except OSError:  # not TLS, no certificate, too slow, or the client has gone
            tls_transport = None
        if tls_transport is None or self._lost or self._aborted:
            if not self._aborted:
                self._shared.refused("handshake")
            self.abort()
            return
        self._forget()
        tls_transport.set_write_buffer_limits(NO_LIMIT)
        tls_transport.set_read_buffer_limits(TURN_BYTES)
        tls_transport.set_protocol(self._connection)
        self._connection.begin_after_tls(tls_transport, self._transport)
        self._transport.set_protocol(_FlowRelay(self._transport.get_protocol(), self._connection))
        if self._received:
            self._connection.data_received(self._received)

    def data_received(self, data: bytes) -> None:
        """Keep bytes that arrive before start_tls has begun, or with the end of the handshake."""
        self._received += data

    def _feed(self) -> None:
        """Pass the bytes that arrived before TLS to it. TLS reads nothing before this call."""
        protocol: Any = self._transport.get_protocol()
        while self._received and protocol is not self:
            buffer = memoryview(protocol.get_buffer(len(self._received)))
            count = min(len(buffer), len(self._received))
            buffer[:count] = self._received[:count]
            self._received = self._received[count:]
            protocol.buffer_updated(count)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._forget()

    def check(self, now: float) -> None:
        """Nothing to check: start_tls has the same time limit."""

    def shutdown(self) -> None:
        """End the handshake, because the server stops."""
        self.abort()

    def abort(self) -> None:
        self._aborted = True
        self._forget()
        self._transport.abort()

    def _forget(self) -> None:
        self._open_connections.discard(self)
        self._shared.forget(self)


class _FlowRelay(asyncio.BufferedProtocol):
    """Stands between TLS and its transport, and tells the connection, too, when the transport's buffer is full.

    The TLS of asyncio writes all of its bytes as soon as the transport accepts any, and does not report the size of the transport's buffer.
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
