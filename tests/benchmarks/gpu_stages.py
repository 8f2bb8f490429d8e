"""Stages for tests of `benchmarks.gpu_all`: some that end well, and one for every way not to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def card(name: str) -> Iterator[Row]:
    yield {"case": "device", "gpu": True, "card": name, "versions": {"torch": "2"}, "host": "a host"}


def two(ran: str) -> Iterator[Row]:
    """Two rows, and a line in the file `ran` for every time it runs."""
    with Path(ran).open("a") as file:
        file.write("ran\n")
    yield {"case": "first", "ok": True, "ms": 1.5, "queries_per_s": 667}
    yield {"case": "second", "ok": True, "engine": "triton", "form": "mlp", "precision": "float32", "check": "alone"}


def wrong() -> Iterator[Row]:
    yield {"case": "it", "ok": False, "note": "differs"}


def crash() -> Iterator[Row]:
    yield {"case": "before", "ok": True}
    raise ValueError("of no use")


class OutOfMemoryError(RuntimeError):
    """Named as torch names its own."""


def no_memory(kind: str) -> Iterator[Row]:
    yield {"case": "before", "ok": True}
    raise {"host": MemoryError, "card": OutOfMemoryError}[kind]("no room for 1 GB")


def killed() -> Iterator[Row]:
    yield {"case": "before", "ok": True}
    os.kill(os.getpid(), signal.SIGKILL)


def hang(started: str) -> Iterator[Row]:
    """Waits for ever, and so does a process that it started; both numbers are in the file `started`."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    Path(started).write_text(f"{os.getpid()} {child.pid}\n")
    yield {"case": "before", "ok": True}
    signal.pause()
