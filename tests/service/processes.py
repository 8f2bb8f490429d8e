"""`espalier serve` in a process of its own, with any number of workers."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.process_trees import workers_of
from tests.waiting import until

KEY = "an-admin-key-of-a-test"
ANSWERED = 'espalier_requests_total{model="books",status="200"}'
COMPILING_S = 120.0
"""The first start after a change of compiled code makes it anew, on a machine that may be busy."""
LONG_MS = "60000"
"""On a busy machine a burst of requests waits longer than customers' may, and would be refused."""
BODY = json.dumps({"queries": [{"history": ["item-3"]}], "m": 32, "beam_size": 32}).encode()


@dataclass
class Service:
    """`espalier serve` in a process of its own; `log` grows while it runs. tls: what a test trusts and shows."""

    process: subprocess.Popen[str]
    port: int
    log: list[str]
    tls: ssl.SSLContext | None = None
    admin_port: int = 0

    def request(self, method: str, path: str, body: Any = None, **more: str) -> tuple[int, Any]:
        """Status and JSON of a request on a connection of its own. more: headers."""
        return self.asked(self.port, method, path, body, **more)

    def asked(self, port: int, method: str, path: str, body: Any = None, **more: str) -> tuple[int, Any]:
        """The same of another address of the service."""
        if self.tls is None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        else:
            connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=self.tls)
        try:
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"} | more
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            content = answer.read()
            return answer.status, json.loads(content) if "json" in str(answer.headers["content-type"]) else content.decode()
        finally:
            connection.close()

    def served(self, requests: int = 40) -> tuple[set[int], set[str]]:
        """Versions and item ids in the answers to many requests, eight at a time."""
        answers: list[tuple[int, Any]] = []
        counted = self.metric(ANSWERED)

        def ask() -> None:
            for _ in range(requests // 8):
                answers.append(self.request("POST", "/retrieve", json.loads(BODY)))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        refused = [answer for answer in answers if answer[0] != 200]
        assert not refused, refused
        assert len(answers) == requests
        until(lambda: self.metric(ANSWERED) == counted + requests, "the answers have been counted, which is after they were sent")
        items = {item["id"] for _, answer in answers for item in answer["results"][0]["items"]}
        return {answer["version"] for _, answer in answers}, items

    def metric(self, line: str) -> float:
        """One sample of /metrics, as `name{labels}`; 0 where it is not there."""
        _, text = self.request("GET", "/metrics")
        found = [row for row in text.splitlines() if row.startswith(line + " ")]
        return float(found[0].rpartition(" ")[2]) if found else 0.0

    def workers(self) -> list[int]:
        return workers_of(self.process.pid)

    def replace_workers(self) -> None:
        """Kill each worker in turn, and wait until another one has taken its place."""

        for place, pid in enumerate(self.workers(), self._started() + 1):
            os.kill(pid, signal.SIGKILL)
            until(partial(self._has_started, place), "another one takes its place")

    def _started(self) -> int:
        """How many workers became ready so far."""
        return "".join(self.log).count("is ready on")

    def _has_started(self, times: int) -> bool:
        return self._started() == times


@contextmanager
def service(models: Path, workers: int, program: Sequence[str] = ("service",), **settings: str) -> Iterator[Service]:
    """A service that is ready, on a free port unless ESPALIER_PORT is among the settings. Its run folder is beside the models.

    program  its module and more arguments
    """
    environment = os.environ | {"ESPALIER_MODELS": str(models), "ESPALIER_DEVICE": "cpu", "ESPALIER_ADMIN_KEYS": KEY}
    environment |= {"TMPDIR": str(models.parent), "ESPALIER_MAX_QUEUE_MS": LONG_MS, "ESPALIER_TIMEOUT_MS": LONG_MS} | settings
    environment |= {"ESPALIER_WORKERS": str(workers)}
    command = [sys.executable, "-m", *program, "--port", settings.get("ESPALIER_PORT", "0")]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    log: list[str] = []
    assert process.stderr is not None
    stream = process.stderr
    reader = threading.Thread(target=lambda: log.extend(stream), daemon=True)
    reader.start()
    try:
        until(lambda: any("listening on" in line for line in log) or process.poll() is not None, "the service listens")
        found = re.search(r"listening on https?://127.0.0.1:(\d+)(?: and for operators on https?://127.0.0.1:(\d+))?", "".join(log))
        assert found, "".join(log)
        running = Service(process, int(found[1]), log, admin_port=int(found[2] or 0))
        until(lambda: "".join(log).count("is ready on") >= workers, "every worker is ready", COMPILING_S)
        yield running
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join(20)
        stream.close()


def exit_code(running: Service) -> int:
    try:
        return running.process.wait(20)
    except subprocess.TimeoutExpired:
        pytest.fail("still running:\n" + "".join(running.log))


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """The process does nothing meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: process_state(pid) == "T", "it has stopped")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
        until(lambda: process_state(pid) != "T", "it goes on")


def process_state(pid: int) -> str:
    """One letter: T is stopped, Z has ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
