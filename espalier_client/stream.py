"""A stream of requests, as consecutive requests of HTTP with some lines each.

One request of HTTP for the whole stream would be simpler and could dead-lock. httpx sends all of a body before it reads the answer; the
service answers while it reads and stops reading when nobody takes its answers. With more answers than the buffers in between hold, each
would wait for the other. A chunk of at most CHUNK_BYTES cannot: a server takes in that much of a body before the application asks for it
(uvicorn: 64 KiB). A single longer line is sent alone; the service has to read all of it before it has anything to answer.

It also bounds what has to be sent again when a connection breaks, and the caller's requests are read no further than needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx

from espalier_client import messages
from espalier_client.calls import NDJSON, Call
from espalier_client.errors import ClientError, ConnectionFailed, InvalidAnswer, Overloaded, RequestFailed, Unavailable, from_problem
from espalier_client.messages import Answer, Request
from espalier_client.retry import Attempts, Retry

CHUNK_LINES = 64
CHUNK_BYTES = 1 << 16

Outcome = Answer | RequestFailed


class Chunks:
    """Gathers lines into chunks of at most `max_lines` lines and CHUNK_BYTES bytes."""

    def __init__(self, max_lines: int) -> None:
        if max_lines < 1:
            raise ValueError(f"chunk_lines: got {max_lines}, expected at least 1")
        self._max_lines = max_lines
        self._lines: list[bytes] = []
        self._bytes = 0

    def add(self, request: Request) -> Iterator[list[bytes]]:
        """The chunks that are complete with this request: none, the lines before it, those with it, or both."""
        line = request.to_bytes() + b"\n"
        if self._bytes + len(line) > CHUNK_BYTES:
            yield from self.rest()
        self._lines.append(line)
        self._bytes += len(line)
        if len(self._lines) == self._max_lines:  # at once, since the next request may take its time, or depend on an answer
            yield from self.rest()

    def rest(self) -> Iterator[list[bytes]]:
        """The lines gathered so far, if any."""
        lines, self._lines, self._bytes = self._lines, [], 0
        if lines:
            yield lines


class Delivery:
    """One chunk, until each of its lines has its outcome.

    Lines that an attempt did not answer, because the connection broke, and those that it answered with 429 or 503 go into the next one.
    Outcomes are handed out in the order of the lines. Each line that gets its outcome starts the count and the clock of the attempts
    anew, so that a caller who takes his time over the answers does not use up the time for sending.
    """

    def __init__(self, lines: Sequence[bytes], retry: Retry, timeout_s: float) -> None:
        self._lines = lines
        self._retry = retry
        self._call = Call("POST", "/retrieve/stream", json.loads, b"", media_type=NDJSON)
        self._attempts = Attempts(self._call, retry, timeout_s)
        self._open = list(range(len(lines)))  # the lines that the attempt sends
        self._outcomes: dict[int, Outcome] = {}  # those that wait for the outcome of a line before theirs
        self._handed_out = 0
        self._answered: list[RequestFailed | None] = []  # per open line that was answered: the refusal that may be temporary
        self._partial: list[bytes] = []  # the start of a line of the answer
        self._request_id = self._call.request_id
        self.pause_s = 0.0

    @property
    def done(self) -> bool:
        return self._handed_out == len(self._lines)

    def arguments(self) -> dict[str, Any]:
        """What httpx's `stream` takes for the next attempt."""
        self._begin()
        body = b"".join(self._lines[line] for line in self._open)
        return self._call.arguments(self._attempts.timeout_s()) | {"content": body}

    def accept(self, response: httpx.Response) -> None:
        """Raises RequestFailed if the service refuses the whole chunk; the response must be read then."""
        if not response.is_success:
            raise self._call.refusal(response)
        self._request_id = response.headers.get("X-Request-Id", self._call.request_id)

    def take(self, piece: bytes) -> Iterator[Outcome]:
        """The outcomes that are known with this piece of the answer."""
        # Split by hand: httpx's iter_lines also splits at U+2028 and others, which may stand in a JSON string.
        *ends, rest = piece.split(b"\n")
        for end in ends:
            line = b"".join([*self._partial, end])
            self._partial = []
            yield from self._take_line(line)
        self._partial.append(rest)

    def end(self) -> Iterator[Outcome]:
        """The outcomes that are known with the end of the answer; sets `pause_s` if some lines have to be sent again."""
        yield from self._take_line(b"".join(self._partial))
        if len(self._answered) < len(self._open):
            detail = f"{self._call}: the answer ended after {len(self._answered)} of {len(self._open)} lines"
            raise ConnectionFailed(detail, True, self._request_id)
        refusals = [refused for refused in self._answered if refused is not None]
        if not refusals:
            return
        pause_s = self._attempts.pause_s(max(refusals, key=lambda refused: refused.retry_after_s or 0.0))
        if pause_s is None:
            for line, refused in zip(self._open, self._answered, strict=True):
                if refused is not None:
                    self._outcomes[line] = refused
            yield from self._hand_out()
        else:
            self.pause_s = pause_s

    def failed(self, error: httpx.RequestError | ClientError) -> None:
        """Sets `pause_s` if what is open is to be sent again; else raises what went wrong."""
        self.pause_s = self._attempts.failed(error)

    def _begin(self) -> None:
        """Forget the attempt before."""
        self._open = [line for line in self._open if line >= self._handed_out and line not in self._outcomes]
        self._answered = []
        self._partial = []
        self._request_id = self._call.request_id
        self.pause_s = 0.0

    def _take_line(self, line: bytes) -> Iterator[Outcome]:
        if not line.strip():
            return
        if len(self._answered) == len(self._open):
            raise InvalidAnswer(f"{self._call}: expected {len(self._open)} lines, got more")
        outcome = self._parse(line)
        if isinstance(outcome, Overloaded | Unavailable):
            self._answered.append(outcome)
            return
        self._outcomes[self._open[len(self._answered)]] = outcome
        self._answered.append(None)
        yield from self._hand_out()
        self._attempts.restart()

    def _parse(self, line: bytes) -> Outcome:
        try:
            document = json.loads(line)
            if isinstance(document, Mapping) and "results" not in document and {"status", "title"} <= document.keys():
                return from_problem(int(document["status"]), document, self._request_id)
            return messages.answer(document)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._call.misread(error) from error

    def _hand_out(self) -> Iterator[Outcome]:
        """The outcomes whose turn it is."""
        while self._handed_out in self._outcomes:
            outcome = self._outcomes.pop(self._handed_out)
            self._handed_out += 1
            yield outcome
