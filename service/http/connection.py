"""One HTTP/1.1 connection: uvicorn's protocol over httptools, within limits that hold before any application runs.

uvicorn and h11 do not limit the size and time of a head, the time of a body, or how long a client may leave an answer unread; that is why
this subclass exists. A head has a largest size, a largest number of headers and a time in which it must be complete. One request is parsed
at a time: further requests stay in the socket. A client that takes nothing of its answer is cut off. A connection whose request was
answered early reads on for a moment, because closing it at once would reset it and lose the answer (RFC 9112, section 9.6).

The parser is fed the bytes of one message and no more. This class finds the end of the head itself, takes the length of the body from the
head and counts chunks (chunked_body.py). Where the parser disagrees, the request is malformed and the connection ends.

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
"""Request line and headers together."""
MAX_HEADERS = 100
PROBES = frozenset({"/livez", "/readyz", "/metrics"})
"""Routes that may be asked over the reserve of connections, so that a full service does not look dead."""
LINGER_S = 5.0
"""How long a connection reads on after an early answer."""
TURN_BYTES = 64 << 10
"""Bytes of one connection that are parsed before the others have their turn."""
CLOSE_S = 1.0
"""How long a client with TLS that has all of its answer may take to close, too."""
PROGRESS_BYTES = 16 << 10
"""A client that takes this much of its answer makes progress."""
SKIPPED_BYTES = 64 << 10
"""An unread rest of a body up to this size is skipped, and the connection is kept."""
TOO_MANY = "Too many connections."
CONNECTION = "espalier.connection"
"""Key of the scope under which an application finds its connection."""

_END_OF_HEAD = re.compile(rb"\n\r?\n")
_UPGRADE = re.compile(rb"(?i)\nupgrade(?=[ \t]*:)")


class _FlowControl(FlowControl):
    """uvicorn's, which the application cannot resume while bytes of a later request wait."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class _AnswerTransport:
    """The transport as uvicorn sees it while it answers: closing it ends the connection only when the request has been read."""

    __slots__ = ("_connection", "_transport", "is_closing", "write")

    def __init__(self, connection: Connection, transport: asyncio.Transport) -> None:
        self._connection, self._transport = connection, transport
        self.write, self.is_closing = transport.write, transport.is_closing

    def close(self) -> None:
        self._connection.finish()


class Connection(HttpToolsProtocol):
    """See the file's docstring.

    for_customers  whether its address is that of customers beside one of operators (routes.py)
    since          when it became silent or idle
    complete       whether the current request has been parsed whole
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
        self._below: asyncio.Transport | None = None  # what TLS writes to
        self._ahead = bytearray()  # bytes received and not parsed
        self._searched = 0  # bytes of it in which no head ends
        self._body: int | ChunkedBody | None = None  # what is left of a body; None: the next bytes are a head's
        self.complete = True
        self._begun = False  # whether a message began in the piece that is being parsed
        self._refusal: tuple[int, str, str] | None = None  # why the parser is stopped from inside
        self._probes_only = False  # above the limit of connections
        self._lingering = False
        self._released: asyncio.Future[None] | None = None  # while the answer is held back
        self._stalled: float | None = None  # since when the client has taken nothing
        self._closing: float | None = None  # since when the connection is to end
        self._unsent = 0  # bytes, at the last progress
        self.since = self.loop.time()
        self._begun_at: float | None = None  # first byte of an incomplete head, or of the rest of a body to skip

    # -- the transport's side -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn narrows it
        shared = self._shared
        super().connection_made(transport)
        self.flow = self._flow = _FlowControl(transport)
        self._answer_transport = cast(asyncio.Transport, _AnswerTransport(self, transport))
        if shared.admit(self, self.since):
            return
        self._probes_only, self.app = True, self._answer_probes
        if len(shared.open) > shared.most + shared.reserve:
            self._refuse(503, "too_many", TOO_MANY)
        if len(shared.open) > shared.most + 2 * shared.reserve:
            shared.forget(self)
            transport.close()

    def secured(self, transport: asyncio.Transport, below: asyncio.Transport) -> None:
        """Begin after a TLS handshake. below: the transport without TLS."""
        self._below = below
        self.connection_made(transport)

    def shutdown(self) -> None:
        self._let_go()
        if self.idle:
            self._close()
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._let_go()
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
        if self._lingering:
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
        return self._lingering or self.cycle is None or self.cycle.response_complete

    @property
    def unsent(self) -> int:
        """Bytes of answers that the system has not taken yet."""
        return self.transport.get_write_buffer_size() + (self._below.get_write_buffer_size() if self._below is not None else 0)

    @property
    def gone(self) -> bool:
        """Whether nobody is there any more to take an answer."""
        return self.transport.is_closing()

    def check(self, now: float) -> None:
        shared, unsent = self._shared, self.unsent
        if self._closing is None and self.transport.is_closing():  # the client has closed its side
            self._closing = now
        if unsent <= self._unsent - PROGRESS_BYTES or not unsent:
            self._unsent = unsent
            self._stalled = now if self._stalled is not None else None
            self._closing = now if self._closing is not None and unsent else self._closing
        self._unsent = max(self._unsent, unsent)
        if self._closing is not None:
            if now - self._closing > (LINGER_S if self._lingering and not unsent else shared.write_timeout_s):
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
        """End the connection at once; unsent bytes are lost."""
        if self.cycle is not None:
            self.leave_answer()
        self.transport.abort()

    def leave_answer(self) -> None:
        """Nobody waits for the answer under way: it may end unfinished, which is else logged as an error."""
        self.cycle.disconnected = True
        self.cycle.message_event.set()

    # -- bytes to messages ----------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Parse the received bytes, up to the end of one request."""
        parsed = 0
        while self._ahead and not self._lingering:
            if parsed >= TURN_BYTES:
                self._hold()
                self.loop.call_soon(self._continue)
                return
            head = self._body is None
            size = self._head_size() if head else self._body_size()
            if size is None:
                break
            piece = bytes(self._ahead[:size])
            del self._ahead[:size]
            parsed += size
            if not (self._parse_head(piece) if head else self._parse(piece)):
                return
        if self._ahead and self._body is None and not self.idle:
            self._hold()

    def _head_size(self) -> int | None:
        """Bytes of the next head. None where it has not arrived whole, is too large, or has to wait for the end of a request."""
        ahead = self._ahead
        if not self.idle or self.transport.is_closing():
            return None  # one request at a time
        if not self._searched and not ahead.strip(b"\r\n"):  # line ends between requests mean nothing
            ahead.clear()
            return None
        if self._begun_at is None:
            self._begun_at = self.loop.time()
        found = _END_OF_HEAD.search(ahead, max(self._searched - 3, 0))
        size = len(ahead) if found is None else found.end()
        if size > MAX_HEAD_BYTES:
            self._refuse(431, "head_too_large", f"The head of the request has more than {MAX_HEAD_BYTES} bytes.")
            return None
        self._searched = size if found is None else 0
        return None if found is None else size

    def _body_size(self) -> int | None:
        """Received bytes that belong to the current body, at most TURN_BYTES. None where a chunk is malformed."""
        if isinstance(self._body, ChunkedBody):
            try:
                return self._body.take(self._ahead[:TURN_BYTES])
            except MalformedChunk as error:
                self._malformed(str(error))
                return None
        size = min(self._body or 0, len(self._ahead), TURN_BYTES)
        self._body = (self._body or 0) - size
        return size

    def _hold(self) -> None:
        """Read nothing until `_release`."""
        if not self.transport.is_closing():
            self._flow.held = True
            self._flow.pause_reading()

    def _release(self) -> None:
        self._flow.held = False
        if not self.transport.is_closing():
            self._flow.resume_reading()

    def _continue(self) -> None:
        """Parse what an earlier turn left."""
        if not self.transport.is_closing():
            self._release()
            self._advance()

    def _parse_head(self, head: bytes) -> bool:
        """Feed the parser a whole head. False when the connection ends.

        This server speaks no other protocol, so the header Upgrade is hidden from the parser, which would take the body for another
        protocol's (RFC 9110, section 7.8: a server may ignore it).
        """
        return self._parse(_UPGRADE.sub(b"\nx-upgrade", head) if b"pgrade" in head or b"PGRADE" in head else head)

    def _parse(self, piece: bytes) -> bool:
        """Feed the parser a part of one message. False when the connection ends."""
        self._begun = False
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:  # CONNECT, or an upgrade that was not hidden: the parser knows no body then
            self._malformed("This server neither upgrades nor is a proxy.")
            return False
        except httptools.HttpParserError:
            if self._refusal is not None:
                self._refuse(*self._refusal)
            else:
                self._malformed("The request is not HTTP/1.1.")
            return False
        is_whole = self._body.done if isinstance(self._body, ChunkedBody) else self._body == 0
        if self._body is not None and is_whole != self.complete:
            self._malformed("The body is not as long as the head says.")
            return False
        if self.complete:
            self._body = None
        return True

    def on_message_begin(self) -> None:
        if self._begun or self._body is not None:
            raise ValueError("a second message where one was expected")
        self._begun, self.complete = True, False
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
        self._body, self._begun_at = body, None
        self._shared.silent.pop(self, None)
        self._shared.idle.pop(self, None)
        self.cycle.transport = self._answer_transport
        if self._probes_only:
            self.cycle.keep_alive = False
        self.scope[CONNECTION] = self  # type: ignore[literal-required]  # uvicorn's type knows its own keys alone

    def on_message_complete(self) -> None:
        self.complete, self._begun_at = True, None
        super().on_message_complete()

    # -- after an answer ------------------------------------------------------------------------------------------------

    def hold(self, released: asyncio.Future[None]) -> bool:
        """Keep nobody out until `take_back`: the answer is held back. False where too many are.

        released  done when the answer need not be held back any more
        """
        held = self._shared.hold(self)
        self._released = released if held else None
        return held

    def take_back(self) -> None:
        self._released = None
        self._shared.take_back(self, self.loop.time())

    def _let_go(self) -> None:
        if self._released is not None and not self._released.done():
            self._released.set_result(None)

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing() or self._lingering:
            return
        self.since = self.loop.time()
        self._shared.idle[self] = None
        if not self.complete:
            if self.expect_100_continue or not isinstance(self._body, int) or self._body > SKIPPED_BYTES:
                self.finish()
                return
            self._begun_at = self.since  # the rest must arrive in the time of a head
        self._release()
        if self._ahead:
            self._advance()

    def finish(self) -> None:
        """End the connection after what has been written, so that the client gets it."""
        if self.complete and not self._ahead:
            self._close()
        else:
            self._linger()

    def _close(self) -> None:
        self._closing = self.loop.time()
        self.transport.close()
        if self._below is not None:
            self.loop.call_later(CLOSE_S, self._end_secured)

    def _end_secured(self) -> None:
        """TLS would wait for the client to close, too, which an idle one may never do."""
        if self in self.connections:
            if self.unsent:
                self.loop.call_later(CLOSE_S, self._end_secured)
            else:
                self.abort()

    def _linger(self) -> None:
        """Send the end of this side, and read on until the client has closed its own, or LINGER_S have passed."""
        if self._lingering or self.transport.is_closing():
            return
        self._lingering, self._closing = True, self.loop.time()
        if self in self._shared.open:  # it makes room for others, as idle connections do
            self.since = self._closing
            self._shared.silent.pop(self, None)
            self._shared.idle[self] = None
        self._ahead.clear()
        self._release()
        if not self.transport.can_write_eof():  # with TLS, which would read nothing after it
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
            unanswered = self._body is None
        else:
            unanswered = not self.cycle.response_started
            self.cycle.disconnected = True  # nobody waits for the application's answer
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
