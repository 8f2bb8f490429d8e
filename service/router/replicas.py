"""The replicas of shards: what each holds, how busy it is, and whether it is trusted with first tries.

A replica that fails or lets a query wait is a suspect: it gets no first tries until it answers when it is asked what it holds. After each
failure in a row it must wait longer for that. Knows replicas, not messages. Everything here belongs to the event loop of the fleet.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Literal

from espalier.shards.messages import Pin
from service.router.transport import Held

REST_S, LONGEST_REST_S = 0.05, 5.0
"""How long a suspect is left alone after its first failure; twice as long after each other one in a row."""

Trust = Literal["trusted", "failed", "late"]
"""failed: it fails at once. late: it lets one wait, and is asked only where nobody else is left."""


class Replica:
    """One address.

    engines    the shards that it serves, with their engines, as of the last look that was answered
    under_way  queries that it has not answered yet
    looked     whether it was looked at once
    why        the last look failed; empty: it did not
    gone       set while it does not answer a look either: nobody asks it, and who waits for it asks another
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.process = self.why = ""
        self.engines: dict[Pin, str] = {}
        self.under_way = 0
        self.trust: Trust = "trusted"
        self.gone = self.looked = False
        self.waiting: set[Callable[[Replica], None]] = set()  # called when it is gone
        self.look = asyncio.Event()  # somebody wants to know how it is, now
        self.rests_until = 0.0
        self._failures = 0

    def answered(self) -> None:
        """It has answered a query."""
        self._failures = 0
        self.trust = "trusted"
        if self.gone:
            self.look.set()

    def suspect(self, trust: Literal["failed", "late"], now: float) -> None:
        """It has failed a query, or let it wait."""
        if self.trust == "trusted":
            self._failures += 1
            self.rests_until = now + min(REST_S * 2.0 ** min(self._failures - 1, 10), LONGEST_REST_S)
            self.look.set()
        self.trust = trust if self.trust != "late" else "late"

    def says(self, held: Held, now: float) -> None:
        """It has answered a look."""
        self.process, self.engines = held.process, dict(held.engines)
        self.gone = False
        if now >= self.rests_until:
            self.trust = "trusted"

    def silent(self, late: bool) -> None:
        """It has not answered a look."""
        self.trust, self.gone = "late" if late else "failed", True
        for lost in tuple(self.waiting):
            lost(self)

    def lacks(self, pin: Pin) -> None:
        """It said that it does not serve a shard which it did at the last look."""
        self.engines.pop(pin, None)
        self.look.set()


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
