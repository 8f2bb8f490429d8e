"""When a request is sent again, and how long to wait before.

Own code, because neither tenacity nor httpx-retries can bound a call and its pauses by one deadline, or retry single lines of a stream.

Two kinds of requests are sent again: requests that never reached the service; and repeatable requests (all but admin changes and writes
with a condition) after 429, 503 or a broken connection. (An idle connection breaks if the service closes it at that moment.) A request
whose answer timed out is not sent again: the service is overloaded already.

    pause = Retry-After + uniform(0, min(max_backoff_s, backoff_s · 2^n))        n = 0, 1, … failures so far

The random part spreads clients that were refused at the same time; it is added to Retry-After, so that no client comes back too early.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from espalier_client.calls import Call
from espalier_client.errors import ClientError, ConnectionFailed, Overloaded, RequestFailed, TimedOut, Unavailable

logger = logging.getLogger("espalier_client")


@dataclass(frozen=True, slots=True)
class Retry:
    """How often a request is sent again, and how long to wait. `Retry(retries=0)` never sends it again.

    `deadline_s` bounds a call as a whole: its attempts and the pauses between them. It is checked before each attempt and between the
    pieces of an answer; the wait for a piece is at most the client's `timeout_s`. A call with a longer time-out of its own, such as
    loading, is bounded by that. `clock` and `draw` are for tests.
    """

    retries: int = 3
    backoff_s: float = 0.1
    max_backoff_s: float = 5.0
    deadline_s: float = 30.0
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    draw: Callable[[float, float], float] = field(default=random.uniform, repr=False)

    def __post_init__(self) -> None:
        for name in ("retries", "backoff_s", "max_backoff_s", "deadline_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: got {value!r}, expected a finite number of at least 0")
        if self.deadline_s == 0:
            raise ValueError("deadline_s: got 0, expected a finite number above 0")


class Attempts:
    def __init__(self, call: Call[Any], retry: Retry, timeout_s: float) -> None:
        self._call = call
        self._retry = retry
        self._timeout_s = timeout_s
        self._deadline_s = max(retry.deadline_s, call.patience_s or 0.0)
        self.restart()

    def restart(self) -> None:
        """Reset the count of failures and the clock, after progress."""
        self._failures = 0
        self._began_s = self._retry.clock()

    def arguments(self) -> dict[str, Any]:
        """Arguments of httpx's `stream` for the next attempt. Raises TimedOut if no time is left."""
        return self._call.arguments(self._timeout_s, self.check())

    def left_s(self) -> float:
        return self._began_s + self._deadline_s - self._retry.clock()

    def check(self) -> float:
        """Seconds left for the whole call. Raises TimedOut if there are none."""
        left_s = self.left_s()
        if left_s <= 0:
            raise TimedOut(f"{self._call}: no whole answer within {self._deadline_s:g} s (deadline_s)", True, self._call.request_id)
        return left_s

    def pause_s(self, failure: ClientError) -> float | None:
        """Seconds to wait before the next attempt; None: there is no further attempt."""
        if self._failures >= self._retry.retries or not self._may_retry(failure):
            return None
        ceiling_s = min(self._retry.max_backoff_s, self._retry.backoff_s * 2.0 ** min(self._failures, 64))
        retry_after_s = (failure.retry_after_s or 0.0) if isinstance(failure, RequestFailed) else 0.0
        pause_s = retry_after_s + self._retry.draw(0.0, ceiling_s)
        if pause_s >= self.left_s():
            return None
        self._failures += 1
        logger.info("%s; trying again in %.3f s", failure, pause_s)
        return pause_s

    def failed(self, error: httpx.RequestError | ClientError) -> float:
        """Seconds to wait before the next attempt. Raises the failure if there is none."""
        failure = self._call.failure(error)
        pause_s = self.pause_s(failure)
        if pause_s is not None:
            return pause_s
        if failure is error:
            raise failure
        raise failure from error

    def _may_retry(self, failure: ClientError) -> bool:
        match failure:
            case ConnectionFailed(sent=False):
                return True
            case TimedOut():
                return False
            case ConnectionFailed() | Overloaded() | Unavailable():
                return self._call.repeatable
        return False
