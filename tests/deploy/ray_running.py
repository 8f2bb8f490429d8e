"""Ray Serve with an application of this repository, in processes of its own, as `serve run` starts it."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.service.serving import free_port
from loadtest.loops import closed_loop, request_bytes
from tests.process_trees import command_line, descendants

ROOT = Path(__file__).parents[2]
LOCAL = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",  # it listens on this machine alone; a token would be written into the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
}


TURN_S, PATIENCE_S = 0.5, 60.0
"""A load counts its answers so often, and waits so long for one: three times the deadline of the service (`timeout_ms`)."""


@dataclass
class RayServing:
    """port: where the ingress listens; log: what Ray writes."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def ask(self, body: Mapping[str, Any], timeout_s: float = 30) -> tuple[int, Any]:
        """Status and document of a POST /retrieve; status 0 where there is no answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("POST", "/retrieve", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
            return answer.status, json.loads(content) if "json" in str(answer.headers["content-type"]) else content.decode()
        except (OSError, http.client.HTTPException):
            return 0, None
        finally:
            connection.close()

    def wait_for(self, body: Mapping[str, Any], within_s: float) -> Any:
        """The first answer to this request for which all shards answered. Raises RuntimeError."""
        give_up = time.monotonic() + within_s
        while time.monotonic() < give_up and self.process.poll() is None:
            status, document = self.ask(body)
            if status == 200 and document["coverage"]["items"] == 1:
                return document
            time.sleep(0.1)
        raise RuntimeError(f"no whole answer within {within_s:g} s; the end of Ray's log:\n{self.tail()}")

    def replicas(self, deployment: str) -> list[int]:
        """Process ids of a deployment's replicas that live and have started, ascending: Ray's controller writes it into its log."""
        started = re.compile(rf"deployment='{re.escape(deployment)}', .*started successfully.*\(PID: (\d+)\)")
        logs = self.log.parent.glob("ray/session_[0-9]*/logs/serve/controller_*.log")
        found = {int(pid) for log in logs for pid in started.findall(log.read_text(errors="replace"))}
        return sorted(pid for pid in found.intersection(descendants(self.process.pid)) if b"ServeReplica" in command_line(pid))

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Load:
    """Clients in a closed loop, in a thread. They count what they are told.

    answered  answers of status 200; lacking: those without a shard; other: statuses of all others and their seconds, 0 where the
              connection was closed or nothing came for longer than the service's own deadline
    versions  of the model, in the answers
    """

    def __init__(self, serving: RayServing, body: Mapping[str, Any], clients: int) -> None:
        self.answered = self.lacking = 0
        self.other: list[tuple[int, float]] = []
        self.versions: set[int] = set()
        self._address, self._clients = ("127.0.0.1", serving.port), clients
        self._requests = [request_bytes("/retrieve", body)]
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            for found in closed_loop(self._address, self._requests, self._clients, TURN_S, grace_s=PATIENCE_S):
                if found.status != 200:
                    self.other.append((found.status, round(found.seconds, 1)))
                    continue
                answer = json.loads(found.body)
                self.lacking += answer["coverage"]["items"] < 1
                self.versions.add(answer["version"])
                self.answered += 1


@contextmanager
def ray_serving(command: Sequence[str], arguments: Mapping[str, Any]) -> Iterator[RayServing]:
    """`command` with deploy/ray/app.yaml, but for other arguments and a free port, from the root of the repository.

    Ray has a temporary folder of its own.
    """
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # a short path: sockets lie in it
    port = free_port()
    file, log = folder / "app.yaml", folder / "log"
    document: dict[str, Any] = yaml.safe_load((ROOT / "deploy/ray/app.yaml").read_text())
    document["http_options"]["port"] = port
    document["applications"][0]["args"] = dict(arguments)
    file.write_text(yaml.safe_dump(document))
    own = {
        "PYTHONPATH": str(ROOT),
        "RAY_TMPDIR": str(folder),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy/haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "haproxy/admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder / "haproxy"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "haproxy/server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "haproxy/metrics.sock"),
    }
    with log.open("wb") as output:
        environment = os.environ | LOCAL | own
        process = subprocess.Popen([*command, str(file)], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield RayServing(process, port, log)
    finally:
        _end(process)
        shutil.rmtree(folder, ignore_errors=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End Ray, and what it may leave."""
    started = descendants(process.pid)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(20)
    for pid in started:
        if b"ray" in command_line(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()
