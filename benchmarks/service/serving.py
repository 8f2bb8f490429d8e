"""Servers under test in processes of their own, which can be killed, stopped and started again; their settings, and requests to them.

Knows processes, ports, connections and folders of bundles. Does not know loads.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from espalier.bundle import Bundle
from loadtest.loops import request_bytes
from loadtest.queries import Query

READY_S = 300.0
UNREFUSED = 4
"""Clients of a closed loop that measures capacity: so few that a worker refuses nothing."""
JSON = {"Content-Type": "application/json"}
PROCESS_DIGITS = 12
"""First digits of an X-Request-Id, which name the process."""
ATTEMPTS, EACH_TURN, TURN_S = 500, 10, 0.1
"""Most connections that are opened to reach every worker, and a pause after each ten of them."""


class Process:
    """A server on a port of its own.

    command      a module and its arguments; `--port` tells it the port
    environment  added to that of this process
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
    def pid(self) -> int:
        """Of the last start."""
        assert self._process is not None, "it has not been started"
        return self._process.pid

    def start(self) -> None:
        command = [sys.executable, "-m", *self._command, "--port", str(self.port)]
        with ExitStack() as opened:
            log = None if self._log is None else opened.enter_context(self._log.open("ab"))
            self._process = subprocess.Popen(command, env=os.environ | self._environment, stderr=log, start_new_session=True)

    def wait_until_ready(self, within_s: float = READY_S) -> None:
        """Until /readyz says so. Raises RuntimeError with the end of the log."""
        deadline = time.monotonic() + within_s
        while request(self.port, "GET", "/readyz", timeout_s=10)[0] != 200:
            if not self.is_alive() or time.monotonic() > deadline:
                log_end = f":\n{self._log.read_text()[-3000:]}" if self._log is not None and self._log.is_file() else ""
                raise RuntimeError(f"{' '.join(self._command)} did not become ready{log_end}")
            time.sleep(0.05)

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Kill the process and all its workers."""
        self._signal(how)
        if self._process is not None:
            self._process.wait(READY_S)

    def stop(self) -> None:
        """Stop the process: it keeps its connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self, within_s: float = 30) -> None:
        """Ask the process to end, and kill it after `within_s`."""
        if self._process is not None and self.is_alive():
            self.go_on()
            self._process.terminate()
            try:
                self._process.wait(within_s)
            except subprocess.TimeoutExpired:
                self.kill()

    def workers(self) -> list[int]:
        """Process ids of the workers."""
        with suppress(OSError):
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
        return []

    def kill_worker(self, rng: random.Random) -> bool:
        """Kill a random worker; False if there is none."""
        workers = self.workers()
        if workers:
            with suppress(ProcessLookupError):
                os.kill(rng.choice(workers), signal.SIGKILL)
        return bool(workers)

    def stop_worker(self, rng: random.Random, stopped_s: float) -> None:
        worker = rng.choice(self.workers())
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGSTOP)
            try:
                time.sleep(stopped_s)
            finally:
                os.kill(worker, signal.SIGCONT)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of a metric that have these labels."""
        return sum(value for sample_labels, value in samples(self.port, name) if labels.items() <= sample_labels.items())

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


@contextmanager
def serving(command: Sequence[str], environment: Mapping[str, str], core: int | None = None, timeout_s: float = READY_S) -> Iterator[int]:
    """The port of a ready server process. core: the core that it runs on."""
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def copied(model: Path) -> Iterator[tuple[Path, str]]:
    """A models folder with a copy of a bundle, since its journal lies beside it, and the model's name."""
    name = Bundle.open(model, verify=False).manifest.name
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(model, Path(folder) / name / model.name)
        yield Path(folder), name


def settings(models: Path, **more: object) -> dict[str, str]:
    """The environment of a service on a CPU. more: other settings, or other values of these."""
    values = {"models": models, "device": "cpu", "log_level": "WARNING"} | more
    return {f"ESPALIER_{name.upper()}": str(value) for name, value in values.items()}


def retrievals(queries: Sequence[Query], body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> list[bytes]:
    """A POST /retrieve of each query. body: what all have besides."""
    return [request_bytes("/retrieve", {"queries": [query.body()]} | dict(body), headers) for query in queries]


def samples(port: int, name: str) -> list[tuple[dict[str, str], float]]:
    """Labels and value of each sample of a metric."""
    families = text_string_to_metric_families(request(port, "GET", "/metrics", timeout_s=10)[1] or "")
    return [(sample.labels, sample.value) for family in families for sample in family.samples if sample.name == name]


def request(
    port: int, method: str, path: str, body: Any = None, headers: Mapping[str, str] = JSON, timeout_s: float = READY_S
) -> tuple[int, Any]:
    """As `exchange`, over a new connection; status 0 without a complete answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    with closing(connection), suppress(OSError, http.client.HTTPException, ValueError):
        return exchange(connection, method, path, body, headers)
    return 0, None


def exchange(
    connection: http.client.HTTPConnection, method: str, path: str, body: Any = None, headers: Mapping[str, str] = JSON
) -> tuple[int, Any]:
    """Status and document of one request; JSON lines are a list. body: JSON or bytes."""
    connection.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body), dict(headers))
    answer = connection.getresponse()
    content, kind = answer.read(), str(answer.headers["content-type"])
    if "ndjson" in kind:
        return answer.status, [json.loads(line) for line in content.splitlines()]
    return answer.status, json.loads(content) if "json" in kind else content.decode()


def connections_to(address: tuple[str, int], workers: int, each: int) -> list[list[http.client.HTTPConnection]]:
    """`each` lists with a connection to every worker. Raises RuntimeError if a worker is not reached.

    Request ids tell workers apart: all ids of a process begin with the same digits.
    """
    by_process: dict[str, list[http.client.HTTPConnection]] = {}
    for number in range(ATTEMPTS):
        if number % EACH_TURN == EACH_TURN - 1:
            time.sleep(TURN_S)  # a worker that has just begun may leave all connections to the others
        connection = http.client.HTTPConnection(*address, timeout=30)
        connection.request("GET", "/livez")
        answer = connection.getresponse()
        answer.read()
        connections = by_process.setdefault(answer.headers["X-Request-Id"][:PROCESS_DIGITS], [])
        if len(connections) < each:
            connections.append(connection)
        else:
            connection.close()
        if len(by_process) == workers and all(len(connections) == each for connections in by_process.values()):
            return [list(turn) for turn in zip(*by_process.values(), strict=True)]
    for connections in by_process.values():
        for connection in connections:
            connection.close()
    raise RuntimeError(f"after {ATTEMPTS} connections: {[*map(len, by_process.values())]} of {workers} workers, {each} each")


def wait_for(condition: Callable[[], object], complaint: str, within_s: float = READY_S) -> None:
    """Poll until it holds. Raises RuntimeError."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"after {within_s:g} s: {complaint}")
        time.sleep(0.05)
