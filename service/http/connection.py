"""One HTTP/1.1 connection: uvicorn's protocol over httptools, within limits that hold before any application runs.

A head has a largest size, a largest number of headers and a time in which it must be complete. One request is parsed at a time: what a
client sends ahead stays in the socket. A client that takes nothing is cut off. A connection whose request was answered early reads on for
a moment, because closing it at once would reset it and lose the answer (RFC 9112, section 9.6).

The parser is fed the bytes of one message and no more, so that the parts of this file know where they are: where a head ends is looked
for here, the length of a body is what the head said, and chunks are counted (chunked_body.py). A parser that sees it otherwise is an error,
and the connection ends.

Knows bytes, sockets and times. Does not know routes, but for PROBES.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
import orjson
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from service.http.chunked_body import ChunkedBody, MalformedChunk
from service.problems import problem, send_problem

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10
"""Request line and headers together."""
MAX_HEADERS = 100
PROBES = frozenset({"/livez", "/readyz", "/metrics"})
"""What may still be asked over the reserve of connections, so that a full service is not taken for a dead one."""
RESERVE = 32
"""Connections above the limit, for PROBES alone, where the limit is at least four times as high."""
LINGER_S = 5.0
"""How long a connection reads on after an early answer."""
GRACE_S = 0.25
"""How long a connection may be silent or idle before it makes room for another one."""
TURN_BYTES = 64 << 10
"""What is parsed of one connection before the others have their turn."""
PROGRESS_BYTES = 16 << 10
"""What a client has to take of an answer for it to count as progress."""
SKIPPED_BYTES = 64 << 10
"""An unread rest of a body up to this size is skipped, and the connection is kept."""
TOO_MANY = "Too many connections."
CONNECTION = "espalier.connection"
"""Key of the scope under which an application finds its connection."""

_END_OF_HEAD = re.compile(rb"\n\r?\n")
_UPGRADE = re.compile(rb"(?i)\nupgrade(?=[ \t]*:)")


@dataclass
class Connections:
    """What the connections of one process share.

    most             connections at a time; RESERVE more may ask for PROBES
    head_timeout_s   from the opening of a connection, or the first byte of a request, to the end of the head
    keep_alive_s     that a connection may be idle between two requests
    write_timeout_s  that a client may take nothing of an answer
    refused          told one of metrics.REFUSALS for every connection that is refused or cut off
    """

    most: int
    head_timeout_s: float
    keep_alive_s: float
    write_timeout_s: float
    refused: Callable[[str], None] = lambda reason: None
    open: set[Connection] = field(default_factory=set)
    silent: dict[Connection, None] = field(default_factory=dict)
    """Those that have not sent a whole head yet, oldest first."""
    idle: dict[Connection, None] = field(default_factory=dict)
    """Those that wait for another request, for longest first."""

    @property
    def reserve(self) -> int:
        """Connections above the limit, for PROBES alone."""
        return min(RESERVE, max(self.most // 4, 1))

    def make(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], _loop: asyncio.AbstractEventLoop | None = None
    ) -> Connection:
        """A connection, as uvicorn asks for one."""
        return Connection(self, config, server_state, app_state, _loop)

    def check(self, now: float) -> None:
        """Cut off what is over its time; to be called about once a second. `now` is the event loop's time."""
        for connection in list(self.open):
            connection.check(now)

    def admit(self, connection: Connection, now: float) -> bool:
        """Count a connection in. False where there are too many, so that it may ask for PROBES alone.

        Those that have waited for longer than GRACE_S make room: the ones that never asked anything first, oldest first.
        """
        while len(self.open) >= self.most and (crowded_out := self._longest_waiting(now)) is not None:
            self.forget(crowded_out)
            self.refused("crowded_out")
            crowded_out.abort()
        full = len(self.open) >= self.most
        self.open.add(connection)
        self.silent[connection] = None
        return not full

    def forget(self, connection: Connection) -> None:
        """Count a connection out."""
        self.open.discard(connection)
        self.silent.pop(connection, None)
        self.idle.pop(connection, None)

    def _longest_waiting(self, now: float) -> Connection | None:
        for waiting in (self.silent, self.idle):
            for connection in waiting:
                if now - connection.since < GRACE_S:
                    break
                if not connection.unsent:  # else it is sending, and cut off where its client does not take it
                    return connection
        return None


class _Flow(FlowControl):
    """uvicorn's, which the application may not resume while bytes of a later request wait."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class _Out:
    """The transport as the application's answers see it: they may end the connection only when its request has been read."""

    __slots__ = ("_connection", "_transport", "is_closing", "write")

    def __init__(self, connection: Connection, transport: asyncio.Transport) -> None:
        self._connection, self._transport = connection, transport
        self.write, self.is_closing = transport.write, transport.is_closing

    def close(self) -> None:
        self._connection.finish()


class Connection(HttpToolsProtocol):
    """See the file's docstring.

    since  when it began to be silent or idle
    """

    def __init__(
        self,
        shared: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._shared = shared
        self._ahead = bytearray()  # received and not parsed
        self._looked = 0  # bytes of it in which no head ends
        self._body: int | ChunkedBody | None = None  # what is left of a body; None: the next bytes are a head's
        self._complete = True  # whether the current request has been parsed whole
        self._begun = False  # whether a message began in the piece that is being parsed
        self._refusal: tuple[int, str, str] | None = None  # why the parser is stopped from inside
        self._over = False  # above the limit: for PROBES alone
        self._lingers = False
        self._stalled: float | None = None  # since when the client takes nothing
        self._closing: float | None = None  # since when the connection is to end
        self._unsent = 0  # of the last progress
        self.since = self.loop.time()  # of being idle
        self._begun_at: float | None = None  # the first byte of a head, or of a rest to skip, that is not complete

    # -- the transport's side -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn narrows it
        shared = self._shared
        super().connection_made(transport)
        self.flow = self._flow = _Flow(transport)
        self._out = cast(asyncio.Transport, _Out(self, transport))
        if shared.admit(self, self.since):
            return
        self._over, self.app = True, self._answer_probes
        if len(shared.open) > shared.most + shared.reserve:
            self._refuse(503, "too_many", TOO_MANY)
        if len(shared.open) > shared.most + 2 * shared.reserve:
            shared.forget(self)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.forget(self)
        super().connection_lost(exc)
        self._ahead.clear()

    def pause_writing(self) -> None:
        self._stalled, self._unsent = self.loop.time(), self.unsent
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stalled = None
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._lingers:
            return
        between = not self._ahead and self._body is None and self.idle
        if between:  # mostly a whole request, which needs no buffer
            found = _END_OF_HEAD.search(data)
            if found is not None and (end := found.end()) <= MAX_HEAD_BYTES:
                if not self._parse_head(data[:end]) or len(data) == end:
                    return
                data = data[end:]
                if self._body == len(data) <= TURN_BYTES:
                    self._body = 0
                    self._parse(data)
                    return
        self._ahead += data
        self._advance()

    # -- time -----------------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return self._lingers or self.cycle is None or self.cycle.response_complete

    @property
    def complete(self) -> bool:
        """Whether the current request has arrived whole."""
        return self._complete

    @property
    def unsent(self) -> int:
        """Bytes of answers that the system has not taken yet."""
        return self.transport.get_write_buffer_size()

    @property
    def gone(self) -> bool:
        """Whether nobody is there any more to take an answer."""
        return self.transport.is_closing()

    def check(self, now: float) -> None:
        """Give up what has waited for too long."""
        shared, unsent = self._shared, self.unsent
        if self._closing is None and self.transport.is_closing():  # the client has closed its side
            self._closing = now
        if unsent <= self._unsent - PROGRESS_BYTES or not unsent:
            self._unsent = unsent
            self._stalled = now if self._stalled is not None else None
            self._closing = now if self._closing is not None and unsent else self._closing
        self._unsent = max(self._unsent, unsent)
        if self._closing is not None:
            if now - self._closing > (LINGER_S if self._lingers and not unsent else shared.write_timeout_s):
                self.abort()
        elif self._stalled is not None:
            if now - self._stalled > shared.write_timeout_s:
                self.cut_off()
        elif self.idle and self._begun_at is not None:
            if now - self._begun_at > shared.head_timeout_s:
                self._refuse(408, "head_too_slow", f"The request was not complete within {shared.head_timeout_s:g} s.")
        elif self.idle and now - self.since > (shared.head_timeout_s if self.cycle is None else shared.keep_alive_s):
            self._close()

    def cut_off(self) -> None:
        """End a connection whose client does not take its answer."""
        self._shared.refused("not_read")
        self.abort()

    def abort(self) -> None:
        """End the connection, and forget what it has not taken."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.abort()

    # -- bytes to messages ----------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Parse what has been received, up to the end of one request."""
        ahead, parsed = self._ahead, 0
        while ahead and not self._lingers:
            if parsed >= TURN_BYTES:
                self._hold()
                self.loop.call_soon(self._go_on)
                return
            if self._body is None:
                if not self.idle or self.transport.is_closing():
                    break  # one request at a time
                if not self._looked and not ahead.strip(b"\r\n"):  # line ends between requests mean nothing
                    ahead.clear()
                    break
                if self._begun_at is None:
                    self._begun_at = self.loop.time()
                found = _END_OF_HEAD.search(ahead, max(self._looked - 3, 0))
                size = len(ahead) if found is None else found.end()
                if size > MAX_HEAD_BYTES:
                    self._refuse(431, "head_too_large", f"The head of the request has more than {MAX_HEAD_BYTES} bytes.")
                    return
                if found is None:
                    self._looked = size
                    break
                self._looked = 0
                head = bytes(ahead[:size])
                del ahead[:size]
                parsed += size
                if not self._parse_head(head):
                    return
                continue
            if isinstance(self._body, int):
                size = min(self._body, len(ahead), TURN_BYTES)
                self._body -= size
            else:
                try:
                    size = self._body.take(ahead[:TURN_BYTES])
                except MalformedChunk as error:
                    self._malformed(str(error))
                    return
            piece = bytes(ahead[:size])
            del ahead[:size]
            parsed += size
            if not self._parse(piece):
                return
        if ahead and self._body is None and not self.idle:
            self._hold()

    def _hold(self) -> None:
        """Read nothing until `_release`."""
        if not self.transport.is_closing():
            self._flow.held = True
            self._flow.pause_reading()

    def _release(self) -> None:
        self._flow.held = False
        if not self.transport.is_closing():
            self._flow.resume_reading()

    def _go_on(self) -> None:
        """Parse what an earlier turn has left."""
        if not self.transport.is_closing():
            self._release()
            self._advance()

    def _parse_head(self, head: bytes) -> bool:
        """Feed the parser a whole head. False when the connection ends.

        There is nothing that this server could become, so a wish to upgrade is hidden from the parser: it would take the body for another
        protocol's (RFC 9110, section 7.8: a server may ignore it).
        """
        return self._parse(_UPGRADE.sub(b"\nx-upgrade", head) if b"pgrade" in head or b"PGRADE" in head else head)

    def _parse(self, piece: bytes) -> bool:
        """Feed the parser a part of one message. False when the connection ends."""
        self._begun = False
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:  # CONNECT, or a wish that was not hidden: the parser knows no body then
            self._malformed("This server neither upgrades nor is a proxy.")
            return False
        except httptools.HttpParserError:
            if self._refusal is not None:
                self._refuse(*self._refusal)
            else:
                self._malformed("The request is not HTTP/1.1.")
            return False
        if self._complete:
            if self._body and not (isinstance(self._body, ChunkedBody) and self._body.done):
                self._malformed("The body is not as long as the head says.")
                return False
            self._body = None
        elif self._body == 0 or (isinstance(self._body, ChunkedBody) and self._body.done):
            self._malformed("The body is not as long as the head says.")
            return False
        return True

    def on_message_begin(self) -> None:
        if self._begun or self._body is not None:
            raise ValueError("a second message where one was expected")
        self._begun, self._complete = True, False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if len(self.headers) > MAX_HEADERS:
            self._refusal = 431, "head_too_large", f"The head of the request has more than {MAX_HEADERS} headers."
            raise ValueError("too many headers")
        body: int | ChunkedBody = 0
        hosts = 0
        for name, value in self.headers:
            if name == b"content-length":
                body = int(value)
            elif name == b"transfer-encoding":
                body = ChunkedBody()
            elif name == b"host":
                hosts += 1
        if hosts != 1 and (hosts or self.parser.get_http_version() != "1.0"):
            self._refusal = 400, "malformed", f"Expected one Host header, got {hosts}."
            raise ValueError("not one host")
        super().on_headers_complete()
        self.headers = []  # what comes behind a body is no header
        self._body, self._begun_at = body, None
        self._shared.silent.pop(self, None)
        self._shared.idle.pop(self, None)
        self.cycle.transport = self._out
        if self._over:
            self.cycle.keep_alive = False
        self.scope[CONNECTION] = self  # type: ignore[literal-required]  # uvicorn's type knows its own keys alone

    def on_message_complete(self) -> None:
        self._complete, self._begun_at = True, None
        super().on_message_complete()

    # -- after an answer ------------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing() or self._lingers:
            return
        self.since = self.loop.time()
        self._shared.idle[self] = None
        if not self._complete:
            if self.expect_100_continue or not isinstance(self._body, int) or self._body > SKIPPED_BYTES:
                self.finish()
                return
            self._begun_at = self.since  # the rest must arrive in the time of a head
        self._release()
        if self._ahead:
            self._advance()

    def finish(self) -> None:
        """End the connection after what has been written, so that the client gets it."""
        if self._complete and not self._ahead:
            self._close()
        else:
            self._linger()

    def _close(self) -> None:
        self._closing = self.loop.time()
        self.transport.close()

    def _linger(self) -> None:
        """Send the end of this side, and read on until the client has closed its own, or LINGER_S have passed."""
        if self._lingers or self.transport.is_closing():
            return
        self._lingers, self._closing = True, self.loop.time()
        if self in self._shared.open:  # it makes room for others, as an idle one does
            self.since = self._closing
            self._shared.silent.pop(self, None)
            self._shared.idle[self] = None
        self._ahead.clear()
        self._release()
        try:
            self.transport.write_eof()
        except OSError:  # it has gone
            self.abort()

    def _malformed(self, detail: str) -> None:
        self._refuse(400, "malformed", detail)

    def _refuse(self, status: int, reason: str, detail: str) -> None:
        """Answer with a problem document, unless an answer is under way, and end the connection."""
        self._shared.refused(reason)
        if self._lingers or self.transport.is_closing():
            return
        if self.idle:
            unanswered = self._body is None
        else:
            unanswered = not self.cycle.response_started
            self.cycle.disconnected = True  # nobody waits for what the application may answer
            self.cycle.waiting_for_100_continue = False
            self.cycle.message_event.set()
        if unanswered:
            document = orjson.dumps(problem(status, detail))
            lines = [STATUS_LINE[status], *(b"%s: %s\r\n" % line for line in self.server_state.default_headers)]
            lines.append(b"content-type: application/problem+json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(document))
            self.transport.write(b"".join([*lines, document]))
        self._linger()

    async def _answer_probes(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application of a connection above the limit."""
        if scope["path"] in PROBES:
            await self.config.loaded_app(scope, receive, send)
            return
        self._shared.refused("too_many")
        await send_problem(send, problem(503, TOO_MANY), {"Retry-After": "1", "Connection": "close"})
