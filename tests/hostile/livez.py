"""How long GET /livez takes while something else happens to a service: a process of its own asks fifty times a second, on new connections
and on one that it keeps, in turn.

    python -m tests.hostile.livez --port PORT

Writes a line once the first answers are there, and the figures as JSON when its standard input ends. Knows nothing of attacks.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

TIMEOUT_S = 5.0
"""An answer that takes longer counts as none, and as so long."""
EVERY_S = 0.04


class Answered(NamedTuple):
    """One request. refused: a new connection was answered 503 and closed."""

    ms: float
    failed: bool = False
    refused: bool = False


@dataclass(frozen=True)
class Liveness:
    """max_ms over all requests; a failed one counts with the time-out."""

    max_ms: float
    p99_ms: float
    requests: int
    failed: int
    refused: int


def ask(port: int, keep: bool, answers: list[Answered], end: threading.Event) -> None:
    """Ask until the end."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    while not end.is_set():
        began = time.perf_counter()
        try:
            connection.request("GET", "/livez")
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException):
            answers.append(Answered(TIMEOUT_S * 1e3, failed=True))
            connection.close()
        else:
            closes = answer.headers["connection"] == "close"
            refused = answer.status == 503 and closes
            answers.append(Answered((time.perf_counter() - began) * 1e3, answer.status != 200 and not refused, refused))
            if not keep or closes:
                connection.close()
        end.wait(max(0.0, EVERY_S - (time.perf_counter() - began)))
    connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.livez", description=__doc__.split("\n")[0])
    parser.add_argument("--port", type=int, required=True, help="port of the service on this machine")
    port = parser.parse_args().port
    gc.disable()
    with contextlib.suppress(OSError):
        os.nice(-10)  # what is measured is the service, not this process's place in the queue for a core
    kept, fresh, end = list[Answered](), list[Answered](), threading.Event()
    threads = [threading.Thread(target=ask, args=(port, keep, answers, end)) for keep, answers in ((True, kept), (False, fresh))]
    for thread in threads:
        thread.start()
    while not (kept and fresh):
        time.sleep(0.01)
    print("asking", flush=True)
    sys.stdin.read()
    end.set()
    for thread in threads:
        thread.join()
    print(json.dumps(vars(liveness([*kept, *fresh]))))


def liveness(answers: Sequence[Answered]) -> Liveness:
    ms = sorted(answer.ms for answer in answers)
    failed, refused = sum(answer.failed for answer in answers), sum(answer.refused for answer in answers)
    return Liveness(ms[-1], ms[int(0.99 * (len(ms) - 1))], len(ms), failed, refused)


@contextmanager
def watched(port: int) -> Iterator[list[Liveness]]:
    """Ask while the block runs; afterwards the list holds what was found, or nothing where the asking process broke."""
    found: list[Liveness] = []
    command = [sys.executable, "-m", "tests.hostile.livez", "--port", str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield found
        finally:
            process.stdin.close()
            with contextlib.suppress(ValueError):
                found.append(Liveness(**json.loads(process.stdout.read())))


if __name__ == "__main__":
    main()
