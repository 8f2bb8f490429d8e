"""Raw connections to a service under attack: bytes go out, and answers, the end of the connection, or silence come back.

Knows sockets and the form of HTTP/1.1 answers. Does not know what an attack is about.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

SLACK_S = 4.0
"""How much later than a time-out of the service its consequence may be seen: a busy machine must not decide."""
STALL_S = 1.0
"""A connection that takes no byte for so long is not being read."""
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Answer(NamedTuple):
    """One complete answer; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Seen(NamedTuple):
    """Whether a service did what it should under an attack, and what it did."""

    ok: bool
    told: str


@dataclass(frozen=True)
class Limits:
    """Settings of the attacked service, under the names of service/settings.py."""

    head_timeout_s: float = 3.0
    keep_alive_s: float = 3.0
    body_timeout_s: float = 3.0
    write_timeout_s: float = 4.0
    stream_idle_s: float = 4.0
    max_connections: int = 512
    max_answer_values: int = 200_000
    mask_cache_bytes: int = 64 << 20

    def environment(self) -> dict[str, str]:
        return {f"ESPALIER_{name.upper()}": f"{value}" for name, value in vars(self).items()}


@dataclass
class Target:
    """Where to attack and with what.

    ids, fields  items of the catalogue, and the columns of its table, with which answers become large
    spell_s      how long an attack goes on that has no end of its own
    stop         set when the attack has to end: its time is up, or the service takes too much memory
    """

    port: int
    ids: Sequence[str]
    fields: Sequence[str]
    filter_column: str
    limits: Limits = field(default_factory=Limits)
    spell_s: float = 6.0
    stop: threading.Event = field(default_factory=threading.Event)
    wires: list[Wire] = field(default_factory=list)

    def connect(self, receive_buffer: int | None = None) -> Wire:
        """A new connection. Raises OSError where there is none to be had."""
        wire = Wire(self.port, receive_buffer)
        self.wires.append(wire)
        return wire

    def connect_many(self, count: int, receive_buffer: int | None = None) -> list[Wire]:
        """As many of so many connections as are to be had."""
        found = []
        for _ in range(count):
            if self.stop.is_set():
                break
            with contextlib.suppress(OSError):
                found.append(self.connect(receive_buffer))
        return found

    def close(self) -> None:
        """End all connections."""
        for wire in self.wires:
            wire.close()
        self.wires.clear()

    def wait(self, seconds: float) -> None:
        """Hold what is held, unless told to stop."""
        self.stop.wait(seconds)

    def hold(self, wires: Sequence[Wire], seconds: float) -> None:
        """Hold connections and read nothing, until the other side has given all of them up or the time is over."""
        give_up = time.monotonic() + seconds
        while time.monotonic() < give_up and not self.stop.is_set() and not all(wire.given_up() for wire in wires):
            self.wait(0.05)

    def retrieval(self, queries: int = 1, m: int = 10, fields: Sequence[str] = (), **rest: Any) -> bytes:
        """A body of POST /retrieve."""
        histories = [{"history": [self.ids[(7 * i + j) % len(self.ids)] for j in range(3)]} for i in range(queries)]
        return orjson.dumps({"queries": histories, "m": m, "fields": list(fields), "timeout_ms": 60_000, **rest})

    def largest(self) -> bytes:
        """A body whose answer is about as large as the service permits, however it counts the columns of a row."""
        columns = len(self.fields) + 2
        return self.retrieval(min(256, int(0.99 * self.limits.max_answer_values / (1000 * columns))), 1000, self.fields)

    def too_large(self) -> bytes:
        """A body of a few kilobytes that asks for 256 × 1000 items with all their fields."""
        return self.retrieval(256, 1000, self.fields)


class Wire:
    """One connection, which never blocks. `ended` once the other side has closed or reset it."""

    def __init__(self, port: int, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        try:
            if receive_buffer is not None:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            self.socket.settimeout(5)
            self.socket.connect(("127.0.0.1", port))
            self.socket.setblocking(False)
        except OSError:
            self.socket.close()
            raise
        self.held = bytearray()
        self.ended = False

    def fileno(self) -> int:
        return self.socket.fileno()

    def push(self, data: bytes | memoryview) -> int:
        """Send what the kernel takes now: a number of bytes."""
        try:
            return self.socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self.ended = True
            return 0

    def pull(self, most: int = 1 << 18) -> int:
        """Read what there is now: a number of bytes."""
        try:
            data = self.socket.recv(most)
        except BlockingIOError:
            return 0
        except OSError:
            self.ended = True
            return 0
        self.ended = self.ended or not data
        self.held += data
        return len(data)

    def send(self, data: bytes, within_s: float = 5.0) -> bool:
        """Send all of it. False where the other side ended the connection or took no more."""
        give_up, left = time.monotonic() + within_s, memoryview(data)
        while left and not self.ended and time.monotonic() < give_up:
            sent = self.push(left)
            left = left[sent:]
            if not sent and not self.ended:
                ready([], [self], 0.05)
        return not left

    def until(self, done: Callable[[], bool], within_s: float) -> bool:
        """Read until `done` or the end of the connection. Whether `done`."""
        give_up = time.monotonic() + within_s
        while not done():
            left_s = give_up - time.monotonic()
            if self.ended or left_s <= 0:
                return False
            if ready([self], [], left_s)[0]:
                self.pull()
        return True

    def given_up(self) -> bool:
        """Whether the other side closed or reset the connection, as far as that can be known without reading."""
        if self.ended:
            return True
        poll = select.poll()
        poll.register(self, select.POLLRDHUP)
        return bool(poll.poll(0))

    def status(self, within_s: float) -> str:
        """The status of the answer that begins to arrive; nothing of it is read. Empty where none does."""
        give_up = time.monotonic() + within_s
        while not self.ended and (left_s := give_up - time.monotonic()) > 0:
            if ready([self], [], left_s)[0]:
                with contextlib.suppress(OSError):
                    start = self.socket.recv(12, socket.MSG_PEEK)
                    if len(start) == 12:
                        return start[9:].decode("latin-1")
                    if not start:
                        return ""
                time.sleep(0.001)
        return ""

    def answers(self, count: int = 1, within_s: float = 10.0) -> list[Answer]:
        """The complete answers once there are `count`, or the connection has ended, or the time is over."""
        found: list[Answer] = []
        seen = -1

        def enough() -> bool:
            nonlocal found, seen
            if len(self.held) != seen:
                seen = len(self.held)
                found = parsed(bytes(self.held), self.ended)
            return len(found) >= count

        self.until(enough, within_s)
        return parsed(bytes(self.held), self.ended)

    def outcome(self, within_s: float = 10.0) -> str:
        """The status of the first answer, else `closed` or `silence`."""
        found = self.answers(1, within_s)
        return str(found[0].status) if found else "closed" if self.ended else "silence"

    def ends(self, within_s: float) -> bool:
        """Read on, and forget what is read, until the other side ends the connection. Whether it does in time."""

        def forget() -> bool:
            self.held.clear()
            return False

        self.until(forget, within_s)
        return self.ended

    def no_more(self) -> None:
        """Close our sending half."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Go without a farewell."""
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        self.close()

    def close(self) -> None:
        self.ended = True
        self.socket.close()


def ready(reading: Sequence[Wire], writing: Sequence[Wire], within_s: float) -> tuple[list[Wire], list[Wire]]:
    """Those that can be read and those that can be written, once there is one. (select() ends at 1024 descriptors.)"""
    poll = select.poll()
    wanted: dict[int, int] = {}
    wires = {wire.fileno(): wire for wire in (*reading, *writing)}
    for wires_of, event in ((reading, select.POLLIN), (writing, select.POLLOUT)):
        for wire in wires_of:
            wanted[wire.fileno()] = wanted.get(wire.fileno(), 0) | event
    for descriptor, events in wanted.items():
        poll.register(descriptor, events)
    found = poll.poll(max(within_s, 0) * 1000)
    failed = select.POLLERR | select.POLLHUP
    return (
        [wires[fd] for fd, event in found if event & (select.POLLIN | failed) and wanted[fd] & select.POLLIN],
        [wires[fd] for fd, event in found if event & (select.POLLOUT | failed) and wanted[fd] & select.POLLOUT],
    )


def post(body: bytes, path: str = "/retrieve", kind: str = "application/json") -> bytes:
    """A whole POST request."""
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def parsed(data: bytes, ended: bool = False) -> list[Answer]:
    """The complete answers in what a connection gave. One without a length is complete when the connection has ended."""
    found: list[Answer] = []
    while True:
        head, separator, rest = data.partition(b"\r\n\r\n")
        if not separator or not head.startswith(b"HTTP/1."):
            return found
        first, *lines = head.decode("latin-1").split("\r\n")
        status = int(first.split(" ", 2)[1])
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if 100 <= status < 200:
            data = rest
            continue
        if "content-length" in headers:
            size = int(headers["content-length"])
            if len(rest) < size:
                return found
            body, data = rest[:size], rest[size:]
        elif "chunked" in headers.get("transfer-encoding", ""):
            unchunked = _unchunked(rest)
            if unchunked is None:
                return found
            body, data = unchunked
        elif ended:
            body, data = rest, b""
        else:
            return found
        found.append(Answer(status, headers, body))


def _unchunked(data: bytes) -> tuple[bytes, bytes] | None:
    """A chunked body and what follows it; None where it is incomplete."""
    body = bytearray()
    while True:
        line, separator, rest = data.partition(b"\r\n")
        if not separator:
            return None
        size = int(line, 16)
        if len(rest) < size + 2:
            return None
        body += rest[:size]
        data = rest[size + 2 :]
        if size == 0:
            return bytes(body), data


def flood(target: Target, wires: Sequence[Wire], block: bytes, most: int, heed: bool = True) -> list[int]:
    """Send `block` over and over, up to `most` bytes a connection; the bytes that each took.

    heed  stop on a connection when something is answered there; otherwise nothing is read
    Ends early when the target says stop, or when no connection has taken a byte for STALL_S.
    """
    view = memoryview(block)
    sent = dict.fromkeys(wires, 0)
    answered: set[Wire] = set()
    moved = time.monotonic()
    while not target.stop.is_set() and time.monotonic() - moved < STALL_S:
        going = [wire for wire in wires if not wire.ended and wire not in answered and sent[wire] < most]
        if not going:
            break
        readable, writable = ready(going if heed else [], going, 0.1)
        answered |= set(readable)
        for wire in writable:
            if wire not in answered and (taken := wire.push(view[sent[wire] % len(block) :])):
                sent[wire] += taken
                moved = time.monotonic()
    return [sent[wire] for wire in wires]


def drip(target: Target, wires: Sequence[Wire], piece: bytes, every_s: float, seconds: float) -> None:
    """Send a piece on every connection from time to time, until all have ended or the time is over. Reads what comes back."""
    give_up = time.monotonic() + seconds
    while not target.stop.is_set() and time.monotonic() < give_up and not all(wire.ended for wire in wires):
        for wire in wires:
            if not wire.ended:
                wire.push(piece)
                wire.pull()
        target.wait(every_s)


def tally(outcomes: Iterable[object]) -> str:
    """`2 × 408, 1 × silence`."""
    counted: dict[str, int] = {}
    for outcome in outcomes:
        counted[str(outcome)] = counted.get(str(outcome), 0) + 1
    return ", ".join(f"{count} × {outcome}" for outcome, count in sorted(counted.items())) or "nothing"
