"""One HTTP/1.1 connection: uvicorn's protocol over httptools, with limits that apply before the application runs.

This subclass exists because uvicorn and h11 do not limit the size and time of a head, the time of a body, or the time that a client may
leave an answer unread. Here a head has a largest size, a largest number of headers and a time limit. One request is parsed at a time;
further requests stay in the socket. A client that does not read its answer is cut off. If a request was answered before its end, the
connection reads on for a moment: closing it at once would reset it and lose the answer (RFC 9112, section 9.6).

The parser is fed the bytes of one message and no more. This class finds the end of the head itself, takes the length of the body from the
head and counts chunks (chunked_body.py). If the parser disagrees, the request is malformed and the connection ends.

Knows bytes, sockets and times. Does not know routes, except PROBES.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any, cast

import httptools
import orjson
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from ..http.chunked_body import ChunkedBody, MalformedChunk
from ..http.connections import Connections
from ..problems import problem, send_problem

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10
"""Largest size of the request line and the headers together."""
MAX_HEADERS = 100
PROBES = frozenset({"/livez", "/readyz", "/metrics"})
"""Paths that are answered on the reserve of connections, so that a full service does not look dead."""
LINGER_S = 5.0
"""Time for which a connection reads on after an early answer."""
TURN_BYTES = 64 << 10
"""Bytes of one connection that are parsed before other connections have their turn."""
CLOSE_S = 1.0
"""Time in which a TLS client that has read its whole answer must close its side, too."""
PROGRESS_BYTES = 16 << 10
"""A client makes progress when it reads this much of its answer."""
SKIPPED_BYTES = 64 << 10
"""If at most this much of a body is unread after the answer, it is skipped and the connection is kept."""
TOO_MANY_CONNECTIONS = "Too many connections."
CONNECTION = "espalier.connection"
"""The key of the connection in the ASGI scope."""

_END_OF_HEAD = re.compile(rb"\n\r?\n")
_UPGRADE = re.compile(rb"(?i)\nupgrade(?=[ \t]*:)")


class _FlowControl(FlowControl):
    """uvicorn's flow control, except that the application cannot resume reading while bytes of a later request wait."""

    later_bytes_wait = False

    def resume_reading(self) -> None:
        if not self.later_bytes_wait:
            super().resume_reading()


class _AnswerTransport:
    """The transport that uvicorn answers on. Closing it ends the connection only after the request has been read."""

    __slots__ = ("_connection", "_transport", "is_closing", "write")

    def __init__(self, connection: Connection, transport: asyncio.Transport) -> None:
        self._connection, self._transport = connection, transport
        self.write, self.is_closing = transport.write, transport.is_closing

    def close(self) -> None:
        self._connection.finish()


class Connection(HttpToolsProtocol):
    """See the file's docstring.

    for_customers  whether it came to the customers' address of a service that has another address for operators (routes.py)
    since          when it became silent or idle
    complete       whether the current request has been parsed to its end
    """

    def __init__(
        self,
        shared: Connections,
        for_customers: bool,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._shared, self.for_customers = shared, for_customers
        self._tcp_transport: asyncio.Transport | None = None  # below TLS
        self._unparsed = bytearray()  # received bytes that are not parsed yet
        self._scanned = 0  # leading bytes of `_unparsed` that were searched for the end of a head
        self._body_left: int | ChunkedBody | None = None  # the rest of the body; None: a head is next
        self.complete = True
        self._message_began = False  # whether a message began in the piece that is being parsed
        self._refusal: tuple[int, str, str] | None = None  # arguments of `_refuse`, when a callback of the parser stops it
        self._probes_only = False  # because there are too many connections
        self._lingering = False
        self._client_gone: asyncio.Future[None] | None = None  # while the answer is held back
        self._stalled_since: float | None = None  # while writing is paused: when the client last made progress
        self._closing_since: float | None = None  # when the end of the connection began
        self._unsent_at_progress = 0  # unsent bytes at the client's last progress
        self.since = self.loop.time()
        self._part_began_at: float | None = None  # time of the first byte of an incomplete head, or of a skipped body's rest

    # -- the transport's side -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn narrows it
        shared = self._shared
        super().connection_made(transport)
        self.flow = self._flow = _FlowControl(transport)
        self._answer_transport = cast(asyncio.Transport, _AnswerTransport(self, transport))
        if shared.admit(self, self.since):
            return
        self._probes_only, self.app = True, self._answer_probes
        if len(shared.open) > shared.limit + shared.reserve:
            self._refuse(503, "too_many", TOO_MANY_CONNECTIONS)
        if len(shared.open) > shared.limit + 2 * shared.reserve:
            shared.forget(self)
            transport.close()

    def begin_after_tls(self, transport: asyncio.Transport, tcp_transport: asyncio.Transport) -> None:
        """Begin after a TLS handshake. tcp_transport: the transport below TLS."""
        self._tcp_transport = tcp_transport
        self.connection_made(transport)

    def shutdown(self) -> None:
        self._end_hold()
        if self.idle:
            self._close()
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_hold()
        self._shared.forget(self)
        super().connection_lost(exc)
        self._unparsed.clear()

    def pause_writing(self) -> None:
        self._stalled_since, self._unsent_at_progress = self.loop.time(), self.unsent
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stalled_since = None
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
        is_between_requests = not self._unparsed and self._body_left is None and self.idle
        if is_between_requests:  # mostly a whole request, which needs no buffer
            end_of_head = _END_OF_HEAD.search(data)
            if end_of_head is not None and (end := end_of_head.end()) <= MAX_HEAD_BYTES:
                if not self._parse_head(data[:end]) or len(data) == end:
                    return
                data = data[end:]
                if self._body_left == len(data) <= TURN_BYTES:
                    self._body_left = 0
                    self._parse(data)
                    return
        self._unparsed += data
        self._advance()

    # -- time -----------------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no request is being read or answered."""
        return self._lingering or self.cycle is None or self.cycle.response_complete

    @property
    def unsent(self) -> int:
        """Bytes of answers that the operating system has not accepted yet."""
        tcp_bytes = 0 if self._tcp_transport is None else self._tcp_transport.get_write_buffer_size()
        return self.transport.get_write_buffer_size() + tcp_bytes

    @property
    def is_gone(self) -> bool:
        """Whether the client can no longer receive an answer."""
        return self.transport.is_closing()

    def check(self, now: float) -> None:
        shared, unsent = self._shared, self.unsent
        if self._closing_since is None and self.transport.is_closing():  # the client has closed its side
            self._closing_since = now
        if unsent <= self._unsent_at_progress - PROGRESS_BYTES or not unsent:
            self._unsent_at_progress = unsent
            self._stalled_since = now if self._stalled_since is not None else None
            self._closing_since = now if self._closing_since is not None and unsent else self._closing_since
        self._unsent_at_progress = max(self._unsent_at_progress, unsent)
        if self._closing_since is not None:
            if now - self._closing_since > (LINGER_S if self._lingering and not unsent else shared.write_timeout_s):
                self.abort()
        elif self._stalled_since is not None:
            if now - self._stalled_since > shared.write_timeout_s:
                self.cut_off()
        elif self.idle and self._part_began_at is not None:
            if now - self._part_began_at > shared.head_timeout_s:
                self._refuse(408, "head_too_slow", f"The request was not complete within {shared.head_timeout_s:g} s.")
        elif self.idle and now - self.since > (shared.head_timeout_s if self.cycle is None else shared.keep_alive_s):
            self._close()

    def cut_off(self) -> None:
        """End the connection of a client that does not read its answer."""
        self._shared.refused("not_read")
        self.abort()

    def abort(self) -> None:
        """End the connection at once; unsent bytes are lost."""
        if self.cycle is not None:
            self.abandon_answer()
        self.transport.abort()

    def abandon_answer(self) -> None:
        """Let the current answer end unfinished without an error in the log, because no client waits for it."""
        self.cycle.disconnected = True
        self.cycle.message_event.set()

    # -- bytes to messages ----------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Parse the received bytes, up to the end of one request."""
        parsed = 0
        while self._unparsed and not self._lingering:
            if parsed >= TURN_BYTES:
                self._stop_reading()
                self.loop.call_soon(self._continue)
                return
            is_head = self._body_left is None
            size = self._head_size() if is_head else self._body_size()
            if size is None:
                break
            piece = bytes(self._unparsed[:size])
            del self._unparsed[:size]
            parsed += size
            if not (self._parse_head(piece) if is_head else self._parse(piece)):
                return
        if self._unparsed and self._body_left is None and not self.idle:
            self._stop_reading()

    def _head_size(self) -> int | None:
        """Size of the next head in bytes. None if it is incomplete, too large, or follows a request that is not answered yet."""
        unparsed = self._unparsed
        if not self.idle or self.transport.is_closing():
            return None  # one request at a time
        if not self._scanned and not unparsed.strip(b"\r\n"):  # empty lines between requests are ignored
            unparsed.clear()
            return None
        if self._part_began_at is None:
            self._part_began_at = self.loop.time()
        end_of_head = _END_OF_HEAD.search(unparsed, max(self._scanned - 3, 0))
        size = len(unparsed) if end_of_head is None else end_of_head.end()
        if size > MAX_HEAD_BYTES:
            self._refuse(431, "head_too_large", f"The head of the request has more than {MAX_HEAD_BYTES} bytes.")
            return None
        self._scanned = size if end_of_head is None else 0
        return None if end_of_head is None else size

    def _body_size(self) -> int | None:
        """Number of received bytes that belong to the current body, at most TURN_BYTES. None if a chunk is malformed."""
        if isinstance(self._body_left, ChunkedBody):
            try:
                return self._body_left.take(self._unparsed[:TURN_BYTES])
            except MalformedChunk as error:
                self._malformed(str(error))
                return None
        size = min(self._body_left or 0, len(self._unparsed), TURN_BYTES)
        self._body_left = (self._body_left or 0) - size
        return size

    def _stop_reading(self) -> None:
        """Read nothing until `_resume_reading`."""
        if not self.transport.is_closing():
            self._flow.later_bytes_wait = True
            self._flow.pause_reading()

    def _resume_reading(self) -> None:
        self._flow.later_bytes_wait = False
        if not self.transport.is_closing():
            self._flow.resume_reading()

    def _continue(self) -> None:
        """Parse the bytes that an earlier turn left."""
        if not self.transport.is_closing():
            self._resume_reading()
            self._advance()

    def _parse_head(self, head: bytes) -> bool:
        """Feed the parser a whole head. Returns False if the connection ends.

        The header Upgrade is renamed first: this server speaks no other protocol and may ignore it (RFC 9110, section 7.8), but the parser
        would take the body for the other protocol's.
        """
        return self._parse(_UPGRADE.sub(b"\nx-upgrade", head) if b"pgrade" in head or b"PGRADE" in head else head)

    def _parse(self, piece: bytes) -> bool:
        """Feed the parser a part of one message. Returns False if the connection ends."""
        self._message_began = False
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:  # CONNECT, or an upgrade that was not renamed: the parser does not parse the body
            self._malformed("This server neither upgrades nor is a proxy.")
            return False
        except httptools.HttpParserError:
            if self._refusal is not None:
                self._refuse(*self._refusal)
            else:
                self._malformed("The request is not HTTP/1.1.")
            return False
        is_whole = self._body_left.done if isinstance(self._body_left, ChunkedBody) else self._body_left == 0
        if self._body_left is not None and is_whole != self.complete:
            self._malformed("The body is not as long as the head says.")
            return False
        if self.complete:
            self._body_left = None
        return True

    def on_message_begin(self) -> None:
        if self._message_began or self._body_left is not None:
            raise ValueError("a second message where one was expected")
        self._message_began, self.complete = True, False
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
        self.headers = []  # trailers are not headers
        self._body_left, self._part_began_at = body, None
        self._shared.silent.pop(self, None)
        self._shared.idle.pop(self, None)
        self.cycle.transport = self._answer_transport
        if self._probes_only:
            self.cycle.keep_alive = False
        self.scope[CONNECTION] = self  # type: ignore[literal-required]  # uvicorn's type has only its own keys

    def on_message_complete(self) -> None:
        self.complete, self._part_began_at = True, None
        super().on_message_complete()

    # -- after an answer ------------------------------------------------------------------------------------------------

    def hold(self, client_gone: asyncio.Future[None]) -> bool:
        """Hold the answer back until `take_back`; until then the connection does not count. Returns False if too many are held.

        client_gone  gets its result if the client leaves or the service stops meanwhile
        """
        is_held = self._shared.hold(self)
        self._client_gone = client_gone if is_held else None
        return is_held

    def take_back(self) -> None:
        self._client_gone = None
        self._shared.take_back(self, self.loop.time())

    def _end_hold(self) -> None:
        if self._client_gone is not None and not self._client_gone.done():
            self._client_gone.set_result(None)

    @property
    def _has_long_rest(self) -> bool:
        """Whether more of the body is unread than is skipped after an answer."""
        is_long = self.expect_100_continue or not isinstance(self._body_left, int) or self._body_left > SKIPPED_BYTES
        return not self.complete and is_long

    def on_whole_answer(self) -> None:
        """An answer begins that reads no more of the body. If that ends the connection, its head says so."""
        if self._has_long_rest:
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing() or self._lingering:
            return
        self.since = self.loop.time()
        self._shared.idle[self] = None
        if self._has_long_rest:
            self.finish()
            return
        if not self.complete:
            self._part_began_at = self.since  # the rest of the body has the time limit of a head
        self._resume_reading()
        if self._unparsed:
            self._advance()

    def finish(self) -> None:
        """End the connection once the client has received the written bytes."""
        if self.complete and not self._unparsed:
            self._close()
        else:
            self._linger()

    def _close(self) -> None:
        self._closing_since = self.loop.time()
        self.transport.close()
        if self._tcp_transport is not None:
            self.loop.call_later(CLOSE_S, self._end_tls)

    def _end_tls(self) -> None:
        """Abort the connection when all is sent: TLS would wait for the client to close, too, which an idle client may never do."""
        if self in self.connections:
            if self.unsent:
                self.loop.call_later(CLOSE_S, self._end_tls)
            else:
                self.abort()

    def _linger(self) -> None:
        """Close this side, and read on until the client closes its side or LINGER_S have passed."""
        if self._lingering or self.transport.is_closing():
            return
        self._lingering, self._closing_since = True, self.loop.time()
        if self in self._shared.open:  # like an idle connection, it may be closed to make room for others
            self.since = self._closing_since
            self._shared.silent.pop(self, None)
            self._shared.idle[self] = None
        self._unparsed.clear()
        self._resume_reading()
        if not self.transport.can_write_eof():  # TLS, which could not read on
            return
        try:
            self.transport.write_eof()
        except OSError:  # the client has gone
            self.abort()

    def _malformed(self, detail: str) -> None:
        self._refuse(400, "malformed", detail)

    def _refuse(self, status: int, reason: str, detail: str) -> None:
        """Answer with a problem document, unless an answer is under way, and end the connection."""
        self._shared.refused(reason)
        if self._lingering or self.transport.is_closing():
            return
        if self.idle:
            may_answer = self._body_left is None
        else:
            may_answer = not self.cycle.response_started
            self.cycle.disconnected = True  # the application's answer is not needed any more
            self.cycle.waiting_for_100_continue = False
            self.cycle.message_event.set()
        if may_answer:
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
        await send_problem(send, problem(503, TOO_MANY_CONNECTIONS), {"Retry-After": "1", "Connection": "close"})
