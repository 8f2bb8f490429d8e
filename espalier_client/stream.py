"""A stream of requests or writes, as consecutive requests of HTTP with some lines each.

One HTTP request for the whole stream would be simpler, but could deadlock. httpx sends the whole body before it reads the answer. The
service answers while it reads, and stops reading when nobody takes its answers. If the answers exceed the buffers in between, each side
waits for the other. With chunks of at most CHUNK_BYTES this cannot happen: a server receives that much of a body before the application
reads it (uvicorn: 64 KiB). A longer line is sent alone; the service reads all of it before it answers. The service itself queues BULK_LINES
writes, so a chunk of at most BULK_LINES writes may have BULK_BYTES: a few large commits cost less than many small ones.

Chunks also bound how much is sent again after a broken connection, and how far the caller's requests are read ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import httpx

from espalier_client import items, messages
from espalier_client.calls import NDJSON, Call, model_path
from espalier_client.errors import ConnectionFailed, InvalidAnswer, Overloaded, RequestFailed, Unavailable, from_problem, plain
from espalier_client.items import Delete, ItemOutcome, Put
from espalier_client.messages import UNREADABLE, Answer, Request, from_bytes
from espalier_client.retry import Attempts, Retry

CHUNK_LINES = 64
BULK_LINES = 256
"""The number of writes that the service commits together."""
CHUNK_BYTES = 1 << 16
BULK_BYTES = 1 << 19
"""Half of the largest body that the service reads without waiting: it queues no more bytes of lines."""

Outcome = Answer | RequestFailed
Written = ItemOutcome | RequestFailed
T = TypeVar("T")


class Line(NamedTuple):
    """A line to send. item: the id of the item that it writes; None for a retrieval."""

    content: bytes
    item: str | None = None


class Route(NamedTuple, Generic[T]):
    """The path that lines are sent to, and the parser of a line of the answer."""

    path: str
    parse: Callable[[Any], T]


RETRIEVALS: Route[Answer] = Route("/retrieve/stream", messages.answer)


def writes(name: str) -> Route[ItemOutcome]:
    """The bulk route of a model."""
    return Route(model_path(name, "items"), items.line_outcome)


class Chunks:
    """Gathers lines into chunks of at most `max_lines` lines and `max_bytes` bytes; a longer line is its own chunk."""

    def __init__(self, max_lines: int, max_bytes: int = CHUNK_BYTES) -> None:
        if max_lines < 1:
            raise ValueError(f"chunk_lines: got {max_lines}, expected at least 1")
        self._max_lines, self._max_bytes = max_lines, max_bytes
        self._lines: list[Line] = []
        self._bytes = 0

    def add(self, request: Request | Put | Delete) -> Iterator[list[Line]]:
        """Add a request. Yields the chunks that are then complete: none, the lines before it, the lines up to it, or both."""
        line = Line(request.to_bytes() + b"\n", None if isinstance(request, Request) else request.id)
        if self._bytes + len(line.content) > self._max_bytes:
            yield from self.flush()
        self._lines.append(line)
        self._bytes += len(line.content)
        if len(self._lines) == self._max_lines:  # at once: the next request may come late, or depend on an answer
            yield from self.flush()

    def flush(self) -> Iterator[list[Line]]:
        """The last chunk, if it has lines."""
        lines, self._lines, self._bytes = self._lines, [], 0
        if lines:
            yield lines


def chunks_of_writes(max_lines: int) -> Chunks:
    return Chunks(max_lines, BULK_BYTES if max_lines <= BULK_LINES else CHUNK_BYTES)


class Delivery(Generic[T]):
    """One chunk, until each of its lines has its outcome.

    The next attempt sends the lines without an answer, because the connection broke, and the lines that were answered with 429 or 503.
    Outcomes are yielded in the order of the lines. Each outcome resets the count and the clock of the attempts, so that a caller who takes
    answers slowly does not use up the time for sending. No line of an answer may be longer than `max_bytes`.

    Writes of one item keep their order: a refused write is not sent again if the chunk has a later write of the same item, which may have
    been done. After a broken connection all following lines are sent again, in order, so the last write wins.
    """

    def __init__(self, lines: Sequence[Line], route: Route[T], retry: Retry, timeout_s: float, max_bytes: int) -> None:
        self._lines = lines
        self._parse_answer = route.parse
        last = {line.item: i for i, line in enumerate(lines)}
        self._superseded = {i for i, line in enumerate(lines) if line.item is not None and last[line.item] > i}
        self._max_bytes = max_bytes
        self.call = Call("POST", route.path, from_bytes, b"", media_type=NDJSON)
        self.attempts = Attempts(self.call, retry, timeout_s)
        self._pending = list(range(len(lines)))  # the lines of the present attempt
        self._outcomes: dict[int, T | RequestFailed] = {}  # outcomes that wait for the outcome of an earlier line
        self._yielded = 0
        self._answered: list[RequestFailed | None] = []  # for each answered pending line its refusal, if it may be temporary
        self._partial: list[bytes] = []  # the start of a line of the answer
        self._partial_bytes = 0
        self._request_id = self.call.request_id
        self.pause_s = 0.0

    @property
    def done(self) -> bool:
        return self._yielded == len(self._lines)

    def arguments(self) -> dict[str, Any]:
        """Begin an attempt. Returns the arguments of httpx's `stream`."""
        self._pending = [line for line in self._pending if line >= self._yielded and line not in self._outcomes]
        self._answered = []
        self._partial, self._partial_bytes = [], 0
        self._request_id = self.call.request_id
        self.pause_s = 0.0
        body = b"".join(self._lines[line].content for line in self._pending)
        return self.attempts.arguments() | {"content": body}

    def accept(self, response: httpx.Response) -> None:
        """Check the head of an answer to the chunk. Raises InvalidAnswer."""
        self.call.check(response)
        self._request_id = plain(response.headers.get("X-Request-Id", self.call.request_id), 200)

    def take(self, piece: bytes) -> Iterator[T | RequestFailed]:
        """Add a piece of the answer. Yields the outcomes that are then known."""
        # Split by hand: httpx's iter_lines also splits at U+2028 and others, which may occur in a JSON string.
        *line_ends, line_start = piece.split(b"\n")
        for line_end in line_ends:
            self._keep(line_end)
            line = b"".join(self._partial)
            self._partial, self._partial_bytes = [], 0
            yield from self._take_line(line)
        self._keep(line_start)

    def end(self) -> Iterator[T | RequestFailed]:
        """End the answer. Yields the outcomes that are then known. Sets `pause_s` if some lines must be sent again."""
        yield from self._take_line(b"".join(self._partial))
        if len(self._answered) < len(self._pending):
            detail = f"{self.call}: the answer ended after {len(self._answered)} of {len(self._pending)} lines"
            raise ConnectionFailed(detail, True, self._request_id)
        refusals = [refused for refused in self._answered if refused is not None]
        if not refusals:
            return
        pause_s = self.attempts.pause_s(max(refusals, key=lambda refused: refused.retry_after_s or 0.0))
        if pause_s is None:
            for line, refused in zip(self._pending, self._answered, strict=True):
                if refused is not None:
                    self._outcomes[line] = refused
            yield from self._ready_outcomes()
        else:
            self.pause_s = pause_s

    def _keep(self, fragment: bytes) -> None:
        self._partial_bytes += len(fragment)
        if self._partial_bytes > self._max_bytes:
            raise self.call.too_long(self._max_bytes)
        self._partial.append(fragment)

    def _take_line(self, line: bytes) -> Iterator[T | RequestFailed]:
        if not line.strip():
            return
        if len(self._answered) == len(self._pending):
            raise InvalidAnswer(f"{self.call}: expected {len(self._pending)} lines, got more")
        outcome = self._parse(line)
        number = self._pending[len(self._answered)]
        if isinstance(outcome, Overloaded | Unavailable) and number not in self._superseded:
            self._answered.append(outcome)
            return
        self._outcomes[number] = outcome
        self._answered.append(None)
        yield from self._ready_outcomes()
        self.attempts.restart()

    def _parse(self, line: bytes) -> T | RequestFailed:
        try:
            document = from_bytes(line)
            if isinstance(document, Mapping) and "results" not in document and {"status", "title"} <= document.keys():
                return from_problem(_status(document["status"]), document, self._request_id)
            return self._parse_answer(document)
        except UNREADABLE as error:
            raise self.call.misread(error) from error

    def _ready_outcomes(self) -> Iterator[T | RequestFailed]:
        """The known outcomes of the next lines, in order."""
        while self._yielded in self._outcomes:
            outcome = self._outcomes.pop(self._yielded)
            self._yielded += 1
            yield outcome


def _status(value: object) -> int:
    if isinstance(value, int) and 400 <= value <= 599:
        return value
    raise ValueError("the status of a problem is a number from 400 to 599")
