"""A server under test in a process of its own."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager


@contextmanager
def serving(command: Sequence[str], environment: Mapping[str, str], core: int | None = None, timeout_s: float = 300) -> Iterator[int]:
    """A server process, on one core if so told; gives its port once /readyz says so. `command` is told the port by `--port`."""
    port = free_port()
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


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


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
