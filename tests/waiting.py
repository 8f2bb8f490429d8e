"""Waiting for a condition, in place of sleeping."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def until(condition: Callable[[], object], wanted: str | Callable[[], object] = "the condition", within_s: float = 20) -> None:
    """Poll until it holds. `wanted`, or what it returns, says what did not come."""
    deadline, pause = time.monotonic() + within_s, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {wanted() if callable(wanted) else wanted}"
        pause.wait(0.01)
