"""Servers under test in processes of their own, which can be killed, stopped and started again.

Knows processes and ports. Does not know loads.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

READY_S = 300.0


class Process:
    """A server on a port of its own.

    command      a module and its arguments; `--port` tells it the port
    environment  beside that of this process
    log          where standard error goes; None: to that of this process
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path | None = None) -> None:
        self.port = free_port()
        self._command, self._environment, self._log = command, environment, log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """None before the first start."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        command = [sys.executable, "-m", *self._command, "--port", str(self.port)]
        with ExitStack() as opened:
            log = None if self._log is None else opened.enter_context(self._log.open("ab"))
            self._process = subprocess.Popen(command, env=os.environ | self._environment, stderr=log, start_new_session=True)

    def wait_until_ready(self, within_s: float = READY_S) -> None:
        """Until /readyz says so. Raises RuntimeError with the end of the log."""
        give_up = time.monotonic() + within_s
        while get(self.port, "/readyz")[0] != 200:
            if not self.is_alive() or time.monotonic() > give_up:
                said = "" if self._log is None else f":\n{self._log.read_text()[-3000:]}"
                raise RuntimeError(f"{' '.join(self._command)} did not become ready{said}")
            time.sleep(0.05)

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End it with all its workers."""
        self._signal(how)
        if self._process is not None:
            self._process.wait(READY_S)

    def stop(self) -> None:
        """Hold it still; it keeps its connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """Let it end by itself, or kill it."""
        if self._process is not None and self.is_alive():
            self.go_on()
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of a metric that have these labels."""
        total = 0.0
        for line in get(self.port, "/metrics")[1].decode().splitlines():
            left, _, value = line.rpartition(" ")
            if left.partition("{")[0] == name and all(f'{key}="{wanted}"' in left for key, wanted in labels.items()):
                total += float(value)
        return total

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


@contextmanager
def serving(command: Sequence[str], environment: Mapping[str, str], core: int | None = None, timeout_s: float = READY_S) -> Iterator[int]:
    """The port of a server process that is ready, on one core if so told."""
    process = Process(command, environment)
    cores = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})  # the child inherits it
    process.start()
    os.sched_setaffinity(0, cores)
    try:
        process.wait_until_ready(timeout_s)
        yield process.port
    finally:
        process.end()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def get(port: int, path: str) -> tuple[int, bytes]:
    """Status and body; status 0 where nobody listens, or the answer breaks off."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()
