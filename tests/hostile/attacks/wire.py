"""Raw connections: bytes go out, and answers, the end of the connection, or silence come back.

Knows sockets and the form of HTTP/1.1 answers. Does not know what is attacked.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

LIVEZ = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Answer(NamedTuple):
    """One complete answer; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


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
        needed = 0

        def enough() -> bool:
            nonlocal found, needed
            if len(self.held) >= needed:
                found, needed = _parsed(bytes(self.held), self.ended)
            return len(found) >= count

        self.until(enough, within_s)
        return parsed(bytes(self.held), self.ended)

    def outcome(self, within_s: float = 10.0) -> str:
        """The status of the first answer, else `closed` or `silence`."""
        found = self.answers(1, within_s)
        return str(found[0].status) if found else "closed" if self.ended else "silence"

    def ask(self, request: bytes, within_s: float = 10.0) -> str:
        """The outcome of another request on this connection."""
        self.held.clear()
        self.send(request)
        return self.outcome(within_s)

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


def head(length: int | None, extra: str = "", path: str = "/retrieve", kind: str = "application/json", method: str = "POST") -> bytes:
    """The head of a request with a body of this length, or in chunks. extra: whole lines."""
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{extra}{framing}\r\n\r\n".encode()


def post(body: bytes, path: str = "/retrieve", kind: str = "application/json") -> bytes:
    """A whole POST request."""
    return head(len(body), path=path, kind=kind) + body


def parsed(data: bytes, ended: bool = False) -> list[Answer]:
    """The complete answers in what a connection gave. One without a length is complete when the connection has ended."""
    return _parsed(data, ended)[0]


def _parsed(data: bytes, ended: bool) -> tuple[list[Answer], int]:
    """The complete answers, and the least number of bytes with which there may be another one."""
    found: list[Answer] = []
    at = 0
    while True:
        begin = data.find(b"\r\n\r\n", at) + 4
        if begin < 4 or not data.startswith(b"HTTP/1.", at):
            return found, len(data) + 1
        first, *lines = data[at : begin - 4].decode("latin-1").split("\r\n")
        status = int(first.split(" ", 2)[1])
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if 100 <= status < 200:
            at = begin
            continue
        if "content-length" in headers:
            end = begin + int(headers["content-length"])
            if len(data) < end:
                return found, end
            body = data[begin:end]
        elif "chunked" in headers.get("transfer-encoding", ""):
            unchunked = _unchunked(data, begin)
            if unchunked is None:
                return found, len(data) + 1
            body, end = unchunked
        elif ended:
            body, end = data[begin:], len(data)
        else:
            return found, len(data) + 1
        found.append(Answer(status, headers, body))
        at = end


def _unchunked(data: bytes, at: int) -> tuple[bytes, int] | None:
    """A chunked body that begins there, and where it ends; None where it is incomplete."""
    body = bytearray()
    while True:
        begin = data.find(b"\r\n", at) + 2
        if begin < 2:
            return None
        size = int(data[at : begin - 2], 16)
        at = begin + size + 2
        if len(data) < at:
            return None
        body += data[begin : begin + size]
        if size == 0:
            return bytes(body), at
