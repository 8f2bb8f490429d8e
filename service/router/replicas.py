"""The replicas of shards: which shards each serves, how busy it is, and whether it is trusted with first tries.

A replica that fails or answers late is suspect: it gets no first tries until it answers a poll. After each failure in a row, it is trusted
again only after a longer time. After the shard's 95th percentile a request is sent to a second replica, too, at most 5 % of them: one slow
replica then delays no answer for longer (Dean and Barroso, "The Tail at Scale", 2013). Knows replicas, not messages. Everything here
belongs to the event loop of the fleet.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from espalier.shards.messages import Pin

from ..watch.logs import Ration

log = logging.getLogger(__name__)

REST_S, LONGEST_REST_S = 0.05, 5.0
"""How long a replica is suspect after its first failure, and at most. Each failure in a row doubles the time."""

LINES, LINES_PER_S = 5, 0.1
"""Most log lines of one kind about one replica: at once, and then per second."""

SHARE = 0.05
"""Second tries, as a share of first tries."""
MAX_BURST = 10.0
"""Most second tries in a row, after a time without any."""
WINDOW = 256
"""The percentile is of so many last answers of a shard."""
MIN_ANSWERS = 20
"""Answers before the percentile is measured."""
UPDATE_EVERY = 16
"""Answers from one measurement of the percentile to the next."""
UNKNOWN_S = 0.05
"""The percentile before it is measured."""

Trust = Literal["trusted", "failed", "late"]
"""failed: it fails at once. late: it answers late, and is tried only if there is no other replica."""


@dataclass(frozen=True)
class Whole:
    """The whole bundle that shards were cut from. digest: SHA-256 of its manifest.json, in hex."""

    of: str
    version: int
    digest: str

    def pin(self, index: int, count: int) -> Pin:
        return Pin(self.of, self.version, self.digest, index, count)


class Replica:
    """One address.

    shards     that it serves, by the last poll that was answered
    layouts    the same by the bundle that they were cut from; replaced as a whole, so that any thread may read it
    poll_error why the last poll failed; empty if it did not
    gone       whether the last poll failed: only patient calls try it then, and calls that wait for it try another replica
    poll_log_lines, failure_log_lines  ration the log lines about its polls and its failures
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.poll_error = ""
        self.shards: frozenset[Pin] = frozenset()
        self.layouts: Mapping[Whole, Sequence[Pin]] = {}
        self.in_flight = 0
        self.trust: Trust = "trusted"
        self.gone = self.polled = False
        self.on_gone: set[Callable[[Replica], None]] = set()  # called when it becomes gone
        self.poll_now = asyncio.Event()  # set to have it polled at once
        self.suspect_until = 0.0
        self._failures = 0
        self.poll_log_lines = Ration(partial(_log_omitted, address, "looks"), LINES, LINES_PER_S)
        self.failure_log_lines = Ration(partial(_log_omitted, address, "failures"), LINES, LINES_PER_S)

    def answered(self) -> None:
        self._failures = 0
        self.trust = "trusted"
        if self.gone:
            self.poll_now.set()

    def suspect(self, trust: Literal["failed", "late"], now: float) -> None:
        if self.trust == "trusted":
            self._failures += 1
            self.suspect_until = now + min(REST_S * 2.0 ** min(self._failures - 1, 10), LONGEST_REST_S)
            self.poll_now.set()
        self.trust = trust if self.trust != "late" else "late"

    def poll_answered(self, shards: frozenset[Pin], now: float) -> None:
        self._set_shards(shards)
        self.gone = False
        if now >= self.suspect_until:
            self.trust = "trusted"

    def poll_failed(self, late: bool) -> None:
        self.trust, self.gone = "late" if late else "failed", True
        for call in tuple(self.on_gone):
            call(self)

    def lacks(self, pin: Pin) -> None:
        """It refused a search of a shard that it served at the last poll."""
        self._set_shards(self.shards - {pin})
        self.poll_now.set()

    def _set_shards(self, shards: frozenset[Pin]) -> None:
        layouts: dict[Whole, list[Pin]] = {}
        for pin in shards:
            layouts.setdefault(Whole(pin.of, pin.version, pin.digest), []).append(pin)
        self.shards, self.layouts = shards, layouts


def _log_omitted(address: str, topic: str, count: int) -> None:
    log.warning("%s: lines on its %s that were left out: %d", address, topic, count)


def omitted_text(count: int) -> str:
    """The end of a log line before which lines were omitted."""
    return f" ({count} lines before this one were left out)" if count else ""


def choose(holders: Sequence[Replica], tried: Sequence[Replica]) -> Replica | None:
    """The less busy of two random replicas (Mitzenmacher, 2001) among the most trusted. None if all were tried.

    tried  replicas that are not chosen
    """
    untried = [replica for replica in holders if replica not in tried]
    for trust in ("trusted", "failed", "late"):
        most_trusted = [replica for replica in untried if replica.trust == trust]
        if most_trusted:
            break
    if len(most_trusted) <= 1:
        return most_trusted[0] if most_trusted else None
    first, second = random.sample(most_trusted, 2)
    return second if second.in_flight < first.in_flight else first


class Budget:
    """A token bucket: each first try adds `share` of a second try."""

    def __init__(self, share: float = SHARE) -> None:
        self._share, self._tokens = share, MAX_BURST if share else 0.0

    def first_try(self) -> None:
        self._tokens = min(self._tokens + self._share, MAX_BURST)

    def take(self) -> bool:
        """Whether a second try may be made. If so, it is paid for."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Latencies:
    """The running 95th percentile of a shard's seconds."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._count = 0
        self.p95_s = UNKNOWN_S

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self._count += 1
        if self._count == MIN_ANSWERS or (self._count > MIN_ANSWERS and self._count % UPDATE_EVERY == 0):
            ordered = sorted(self._seconds)
            self.p95_s = ordered[int(0.95 * len(ordered))]
