"""The two loops of a load test over raw keep-alive HTTP/1.1 sockets. In a closed loop, each client waits for its answer before its next
request. In an open loop, requests start at random times, whether the service keeps up or not.

Locust and HTTP clients are not used: they take more processor time per request than the service, and would measure themselves. Knows
sockets, bytes and clocks. Does not know the content of requests and answers.
"""

from __future__ import annotations

import re
import select
import selectors
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import orjson

from .target import ServiceRefused

Address = tuple[str, int]
GRACE_S = 10.0
"""How long a loop waits for answers after its end."""
STALL_S = 70.0
"""How long a loop without an end waits for one answer: more than the service's default limit of deadlines."""


class Answered(NamedTuple):
    """One request and its answer. (A tuple: a hundred thousand of them must not cause garbage collections in the loop.)

    number   its index among the requests that were sent
    began    when it was due (open loop) or sent (closed loop), in seconds of time.perf_counter()
    late_s   how much later than due it was sent, because the loop or all connections were busy
    seconds  from `began` to the whole answer
    status   0 if the server closed the connection instead of answering, or did not answer in time
    body     the result of `keep`
    """

    number: int
    began: float
    late_s: float
    seconds: float
    status: int
    body: bytes


def request_bytes(path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None, method: str = "POST") -> bytes:
    content = orjson.dumps(body)
    lines = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(content)), **(headers or {})}
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"
    return head.encode() + content


def closed_loop(
    address: Address,
    requests: Sequence[bytes],
    concurrency: int,
    seconds: float,
    keep: Callable[[bytes], bytes] = bytes,
    grace_s: float = GRACE_S,
    count: int | None = None,
) -> list[Answered]:
    """Run `concurrency` clients, each of which sends its next request when it has its answer; at most `count` requests.

    At the end the loop waits at most `grace_s` for answers. Requests without an answer get the status 0.
    """
    load = _Load(address, keep)
    answered: list[Answered] = []
    sent = 0
    try:
        end = time.perf_counter() + seconds
        while (now := time.perf_counter()) < end and (count is None or sent < count):
            while load.connections < concurrency:
                load.connect()
            while load.free and (count is None or sent < count):
                load.send(requests[sent % len(requests)], sent, now)
                sent += 1
            answered += load.receive(min(end - now, 1.0))
            if count is not None:
                answered += load.give_up(now - STALL_S)
        end = time.perf_counter() + grace_s
        while load.busy and time.perf_counter() < end:
            answered += load.receive(0.1)
        return answered + load.unanswered()
    finally:
        load.close()


def each_once(address: Address, requests: Sequence[bytes], concurrency: int, keep: Callable[[bytes], bytes] = bytes) -> list[Answered]:
    """Send every request once, with `concurrency` clients. The results are in the order of the answers."""
    return closed_loop(address, requests, concurrency, float("inf"), keep, count=len(requests))


def open_loop(
    address: Address,
    requests: Sequence[bytes],
    per_s: float,
    seconds: float,
    seed: int = 0,
    connections: int = 512,
    keep: Callable[[bytes], bytes] = bytes,
    grace_s: float = GRACE_S,
) -> list[Answered]:
    """Send requests at random times (Poisson, `per_s` on average), each on a free connection. Latencies count from the due time.

    A request waits while all of `connections` are busy. Requests without an answer `grace_s` after the end, sent or not, get the status 0.
    """
    due_times = deque(arrivals(per_s, seconds, seed))
    load = _Load(address, keep)
    answered: list[Answered] = []
    sent = 0
    try:
        began = time.perf_counter()
        while due_times or load.busy:
            now = time.perf_counter() - began
            while due_times and due_times[0] <= now and (load.free or len(load.busy) < connections):
                if not load.free:
                    load.connect()
                load.send(requests[sent % len(requests)], sent, began + due_times.popleft())
                sent += 1
            if now > seconds + grace_s:
                answered += load.receive(0.0)  # answers that arrived while this process was stalled
                unsent = [Answered(sent + i, began + due, now - due, now - due, 0, b"") for i, due in enumerate(due_times)]
                return answered + load.unanswered() + unsent
            can_send = due_times and (load.free or len(load.busy) < connections)
            answered += load.receive(max(due_times[0] - (time.perf_counter() - began), 0.0) if can_send else 0.01)
        return answered + load.unanswered()
    finally:
        load.close()


def arrivals(per_s: float, seconds: float, seed: int) -> list[float]:
    """When the requests of an open loop are due, in seconds from its start: `per_s` · `seconds` of them, at least one."""
    gaps_s = np.random.default_rng(seed).exponential(1 / per_s, max(1, round(per_s * seconds)))
    times: list[float] = np.cumsum(gaps_s).tolist()
    return times


def percentiles_ms(answered: Sequence[Answered], percentages: Sequence[float] = (50, 99)) -> tuple[float, ...]:
    """Percentiles of latency; NaN without answers."""
    if not answered:
        return (float("nan"),) * len(percentages)
    return tuple((np.percentile([answer.seconds for answer in answered], percentages) * 1e3).tolist())


def statuses(answered: Sequence[Answered]) -> dict[str, int]:
    return {str(status): count for status, count in sorted(Counter(answer.status for answer in answered).items())}


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    answer: bytearray = field(default_factory=bytearray)
    number: int = 0
    began: float = 0.0
    late_s: float = 0.0


class _Load:
    """Connections to one service, each with at most one request in flight."""

    def __init__(self, address: Address, keep: Callable[[bytes], bytes]) -> None:
        self._address, self._keep = address, keep
        self._selector = selectors.EpollSelector()
        self._lost: list[Answered] = []
        self.free: list[_Connection] = []
        self.busy: set[_Connection] = set()

    @property
    def connections(self) -> int:
        return len(self.free) + len(self.busy)

    def connect(self) -> None:
        try:
            connection = _Connection(socket.create_connection(self._address, timeout=GRACE_S))
        except OSError as error:
            raise ServiceRefused(f"{self._address[0]}:{self._address[1]}: no connection ({error}); is the service running?") from error
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        self.free.append(connection)

    def send(self, request: bytes, number: int, began: float) -> None:
        connection = self.free.pop()
        connection.number, connection.began = number, began
        connection.late_s = max(time.perf_counter() - began, 0.0)
        self.busy.add(connection)
        try:
            connection.socket.sendall(request)
        except OSError:  # the server has closed the connection since its last answer
            self._lost.append(self._answered(connection, 0, b""))
            self._drop(connection)

    def receive(self, timeout_s: float) -> list[Answered]:
        """The requests that were answered since the last call; waits at most `timeout_s` for one."""
        if timeout_s > 0 and not self._lost:
            # epoll waits whole milliseconds, which would delay an open loop. select on its descriptor waits microseconds.
            select.select((self._selector.fileno(),), (), (), timeout_s)
        answered, self._lost = self._lost, []
        for key, _ in self._selector.select(0):
            connection: _Connection = key.data
            try:
                received = connection.socket.recv(1 << 18)
            except OSError:
                received = b""
            connection.answer += received
            answer = _parse(connection.answer)
            if answer is None and received:
                continue
            if connection in self.busy:
                status, body = answer or (0, b"")
                answered.append(self._answered(connection, status, self._keep(body) if status == 200 else body))
            connection.answer.clear()
            if received:
                self.busy.discard(connection)
                self.free.append(connection)
            else:
                self._drop(connection)
        return answered

    def give_up(self, began: float) -> list[Answered]:
        """The unanswered requests that were sent before a time, as if the server had closed their connections."""
        stalled = [connection for connection in self.busy if connection.began < began]
        answered = [self._answered(connection, 0, b"") for connection in stalled]
        for connection in stalled:
            self._drop(connection)
        return answered

    def unanswered(self) -> list[Answered]:
        """The requests that are still in flight, as if the server had closed their connections."""
        return [*self._lost, *(self._answered(connection, 0, b"") for connection in self.busy)]

    def _answered(self, connection: _Connection, status: int, body: bytes) -> Answered:
        return Answered(connection.number, connection.began, connection.late_s, time.perf_counter() - connection.began, status, body)

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self.busy.discard(connection)
        if connection in self.free:
            self.free.remove(connection)

    def close(self) -> None:
        for connection in (*self.free, *self.busy):
            connection.socket.close()
        self._selector.close()


_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


def _parse(answer: bytearray) -> tuple[int, bytes] | None:
    """Status and body of a complete answer; None if it is incomplete. Raises ServiceRefused for an answer that cannot be read."""
    end = answer.find(b"\r\n\r\n")
    if end < 0:
        return None
    status, length = _STATUS.match(answer), _LENGTH.search(answer, 0, end + 2)
    if status is None or length is None:
        first_line = bytes(answer[:end]).decode("latin-1").split("\r\n")[0]
        raise ServiceRefused(f"{first_line}, without a Content-Length; is there a proxy between? Give the address of the service itself")
    if len(answer) < end + 4 + int(length[1]):
        return None
    return int(status[1]), bytes(answer[end + 4 :])
