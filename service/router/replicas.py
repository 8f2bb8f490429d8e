"""The replicas of shards: what each holds, how busy it is, and whether it is trusted with first tries.

A replica that fails or lets a query wait is a suspect: it gets no first tries until it answers when it is asked what it holds. After each
failure in a row it must wait longer for that. Knows replicas, not messages. Everything here belongs to the event loop of the fleet.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from espalier.shards.messages import Pin

from ..watch.logs import Ration

log = logging.getLogger(__name__)

REST_S, LONGEST_REST_S = 0.05, 5.0
"""How long a suspect is left alone after its first failure; twice as long after each other one in a row."""

LINES, LINES_PER_S = 5, 0.1
"""Lines of one kind that the log gets of one replica: at once, and then a second."""

Trust = Literal["trusted", "failed", "late"]
"""failed: it fails at once. late: it lets one wait, and is asked only where nobody else is left."""


@dataclass(frozen=True)
class Whole:
    """The bundle that shards were cut from. digest: SHA-256 of its manifest.json, in hex."""

    of: str
    version: int
    digest: str

    def pin(self, index: int, count: int) -> Pin:
        return Pin(self.of, self.version, self.digest, index, count)


class Replica:
    """One address.

    shards     that it serves, as of the last look that was answered
    layouts    the same by the bundle that they were cut from; replaced as a whole, so that any thread may read it
    why        the last look failed; empty: it did not
    gone       set while it does not answer a look either: nobody asks it, and who waits for it asks another
    looks_told, failures_told  lines of the log on its looks and on its failures
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.why = ""
        self.shards: frozenset[Pin] = frozenset()
        self.layouts: Mapping[Whole, Sequence[Pin]] = {}
        self.under_way = 0
        self.trust: Trust = "trusted"
        self.gone = self.looked = False
        self.waiting: set[Callable[[Replica], None]] = set()  # called when it is gone
        self.look = asyncio.Event()  # somebody wants to know how it is, now
        self.rests_until = 0.0
        self._failures = 0
        self.looks_told = Ration(partial(_write_left_out, address, "looks"), LINES, LINES_PER_S)
        self.failures_told = Ration(partial(_write_left_out, address, "failures"), LINES, LINES_PER_S)

    def answered(self) -> None:
        self._failures = 0
        self.trust = "trusted"
        if self.gone:
            self.look.set()

    def suspect(self, trust: Literal["failed", "late"], now: float) -> None:
        if self.trust == "trusted":
            self._failures += 1
            self.rests_until = now + min(REST_S * 2.0 ** min(self._failures - 1, 10), LONGEST_REST_S)
            self.look.set()
        self.trust = trust if self.trust != "late" else "late"

    def says(self, held: frozenset[Pin], now: float) -> None:
        self._holds(held)
        self.gone = False
        if now >= self.rests_until:
            self.trust = "trusted"

    def silent(self, late: bool) -> None:
        self.trust, self.gone = "late" if late else "failed", True
        for lost in tuple(self.waiting):
            lost(self)

    def lacks(self, pin: Pin) -> None:
        """It said that it does not serve a shard which it did at the last look."""
        self._holds(self.shards - {pin})
        self.look.set()

    def _holds(self, shards: frozenset[Pin]) -> None:
        layouts: dict[Whole, list[Pin]] = {}
        for pin in shards:
            layouts.setdefault(Whole(pin.of, pin.version, pin.digest), []).append(pin)
        self.shards, self.layouts = shards, layouts


def _write_left_out(address: str, what: str, left_out: int) -> None:
    log.warning("%s: lines on its %s that were left out: %d", address, what, left_out)


def after(left_out: int) -> str:
    """What the next line says of those that were left out before it."""
    return f" ({left_out} lines before this one were left out)" if left_out else ""


def choose(holders: Sequence[Replica], tried: Sequence[Replica]) -> Replica | None:
    """The less busy of two replicas taken at random (Mitzenmacher, 2001) among the most trusted; None: nobody is left.

    tried  not these
    """
    left = [replica for replica in holders if replica not in tried]
    for trust in ("trusted", "failed", "late"):
        found = [replica for replica in left if replica.trust == trust]
        if found:
            break
    if len(found) <= 1:
        return found[0] if found else None
    first, second = random.sample(found, 2)
    return second if second.under_way < first.under_way else first
