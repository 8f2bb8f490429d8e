"""Load for a service under test: raw HTTP/1.1 over keep-alive sockets, closed loop (as many clients as connections) and open loop (requests
come when they come, whether the service keeps up or not). Client libraries would cost more than the service.
"""

from __future__ import annotations

import http.client
import os
import platform
import re
import selectors
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson


@dataclass(frozen=True)
class Answered:
    """One request. began is when it was due (open loop) or sent (closed loop), in seconds of time.perf_counter()."""

    began: float
    seconds: float
    status: int
    body: bytes


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    answer: bytearray = field(default_factory=bytearray)
    began: float = 0.0


def request_bytes(path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> bytes:
    """A whole POST request."""
    content = orjson.dumps(body)
    lines = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(content)), **(headers or {})}
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"
    return head.encode() + content


def closed_loop(port: int, requests: Sequence[bytes], concurrency: int, seconds: float) -> list[Answered]:
    """`concurrency` clients, each of which sends its next request when it has its answer; what was sent in time is waited for."""
    load = _Load(port)
    for _ in range(concurrency):
        load.connect()
    answered: list[Answered] = []
    end = time.perf_counter() + seconds
    sent = 0
    while (now := time.perf_counter()) < end:
        while load.free:
            load.send(requests[sent % len(requests)], now)
            sent += 1
        answered += load.receive(end - now)
    while load.busy and time.perf_counter() < end + 10:
        answered += load.receive(0.1)
    load.close()
    return answered


def open_loop(port: int, requests: Sequence[bytes], per_s: float, seconds: float, seed: int = 0, connections: int = 512) -> list[Answered]:
    """Requests at random times (Poisson, `per_s` in the mean), each on a free connection; a time is counted from when it was due.

    Those that found no free connection of `connections` wait for one. What is unanswered 10 s after the end has the status 0.
    """
    due = deque(np.cumsum(np.random.default_rng(seed).exponential(1 / per_s, int(per_s * seconds))).tolist())
    load = _Load(port)
    answered: list[Answered] = []
    began = time.perf_counter()
    sent = 0
    while due or load.busy:
        now = time.perf_counter() - began
        while due and due[0] <= now and (load.free or len(load.busy) < connections):
            if not load.free:
                load.connect()
            load.send(requests[sent % len(requests)], began + due.popleft())
            sent += 1
        if now > seconds + 10:
            break
        wait = max(due[0] - now, 0.0) if due and (load.free or len(load.busy) < connections) else 0.01
        answered += load.receive(wait)  # late by up to a millisecond; spinning it away would take a core from the service
    now = time.perf_counter()
    answered += [Answered(connection.began, now - connection.began, 0, b"") for connection in load.busy]
    load.close()
    return answered


def percentiles_ms(answered: Sequence[Answered]) -> tuple[float, float]:
    """p50 and p99."""
    if not answered:
        return float("nan"), float("nan")
    p50, p99 = np.percentile([answer.seconds for answer in answered], [50, 99]) * 1e3
    return float(p50), float(p99)


def statuses(answered: Sequence[Answered]) -> dict[str, int]:
    return {str(status): count for status, count in sorted(Counter(answer.status for answer in answered).items())}


@contextmanager
def serving(command: Sequence[str], environment: Mapping[str, str], core: int | None = None, timeout_s: float = 300) -> Iterator[int]:
    """A server process, on one core if so told; gives its port once /readyz says so. `command` is told the port by `--port`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    cores = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})  # the child inherits it
    process = subprocess.Popen([sys.executable, "-m", *command, "--port", str(port)], env=os.environ | environment)
    os.sched_setaffinity(0, cores)
    try:
        give_up = time.monotonic() + timeout_s
        while get(port, "/readyz")[0] != 200:
            if process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"{' '.join(command)} did not become ready")
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait()


def get(port: int, path: str) -> tuple[int, bytes]:
    """Status and body; status 0 where nobody listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except OSError:
        return 0, b""
    finally:
        connection.close()


def hardware() -> str:
    """The processor's name and how many cores this process may use."""
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.is_file() else []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores"


class _Load:
    """Connections to one port, each with at most one request under way."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._selector = selectors.DefaultSelector()
        self.free: list[_Connection] = []
        self.busy: set[_Connection] = set()

    def connect(self) -> None:
        connection = _Connection(socket.create_connection(("127.0.0.1", self._port)))
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)
        self.free.append(connection)

    def send(self, request: bytes, began: float) -> None:
        connection = self.free.pop()
        connection.began = began
        connection.socket.sendall(request)
        self.busy.add(connection)

    def receive(self, timeout_s: float) -> list[Answered]:
        """What has been answered, after at most `timeout_s`."""
        answered = []
        for key, _ in self._selector.select(timeout_s):
            connection: _Connection = key.data
            received = connection.socket.recv(1 << 16)
            connection.answer += received
            answer = _parse(connection.answer)
            if answer is None and received:
                continue
            if connection in self.busy:
                status, body = answer or (0, b"")  # status 0: the server closed the connection instead
                answered.append(Answered(connection.began, time.perf_counter() - connection.began, status, body))
                self.busy.discard(connection)
            connection.answer.clear()
            if received:
                self.free.append(connection)
            else:
                self._selector.unregister(connection.socket)
                connection.socket.close()
                if connection in self.free:
                    self.free.remove(connection)
        return answered

    def close(self) -> None:
        for connection in (*self.free, *self.busy):
            connection.socket.close()


_HEAD = re.compile(rb"HTTP/1.1 (\d+).*?\r\ncontent-length: (\d+)\r\n", re.IGNORECASE | re.DOTALL)


def _parse(answer: bytearray) -> tuple[int, bytes] | None:
    """Status and body of a complete answer, None while some is missing."""
    end = answer.find(b"\r\n\r\n")
    head = _HEAD.match(answer, 0, end + 2) if end >= 0 else None
    if head is None or len(answer) < end + 4 + int(head[2]):
        return None
    return int(head[1]), bytes(answer[end + 4 :])
