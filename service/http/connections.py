"""The connections of one process: how many there may be, how long they may take, and which of them make room for others.

Knows connections and times. Does not know bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

RESERVE = 32
"""Connections above the limit, for probes (connection.py) alone, where the limit is at least four times as high."""
MOST_HELD = 1024
"""Connections whose answers are held back, of all at most: they do not count."""
GRACE_S = 0.25
"""A connection that has been silent or idle for this long may be closed to make room for another."""


class LimitedConnection(Protocol):
    """One connection. since: when it became silent or idle; unsent: bytes of answers that the system has not taken."""

    since: float

    @property
    def unsent(self) -> int: ...

    def check(self, now: float) -> None: ...

    def abort(self) -> None: ...


@dataclass
class Connections:
    """The connections of one process, and their limits.

    most             connections at a time; RESERVE more may ask for probes
    most_held        connections beside these whose answers are held back
    head_timeout_s   from the opening of a connection, or the first byte of a request, to the end of the head
    keep_alive_s     that a connection may be idle between two requests
    write_timeout_s  that a client may take nothing of an answer
    refused          called with one of metrics.REFUSALS for every connection that is refused or cut off
    """

    most: int
    head_timeout_s: float
    keep_alive_s: float
    write_timeout_s: float
    refused: Callable[[str], None] = lambda reason: None
    most_held: int = MOST_HELD
    open: set[LimitedConnection] = field(default_factory=set)
    silent: dict[LimitedConnection, None] = field(default_factory=dict)
    """Connections that have not sent a whole head yet, oldest first."""
    idle: dict[LimitedConnection, None] = field(default_factory=dict)
    """Connections that wait for another request, longest first."""
    held: set[LimitedConnection] = field(default_factory=set)
    """Connections whose clients wait for a refusal that is held back: they do not count, and so they keep nobody out."""

    @property
    def reserve(self) -> int:
        """Connections above the limit, for probes alone."""
        return min(RESERVE, max(self.most // 4, 1))

    def check(self, now: float) -> None:
        """End the connections that are over a time limit. To be called about once a second; `now` is the event loop's time."""
        for connection in list(self.open):
            connection.check(now)

    def admit(self, connection: LimitedConnection, now: float) -> bool:
        """Count a connection in. False where there are too many, so that it may only ask for probes.

        Connections that have waited for longer than GRACE_S make room: first those that never sent a request, oldest first.
        """
        full = self._count(connection, now)
        self.silent[connection] = None
        return not full

    def hold(self, connection: LimitedConnection) -> bool:
        """Do not count a connection until `take_back`. False where too many are held, or it has ended."""
        if connection not in self.open or len(self.held) >= self.most_held:
            return False
        self.open.discard(connection)
        self.held.add(connection)
        return True

    def take_back(self, connection: LimitedConnection, now: float) -> None:
        """Count a connection again, unless it has ended."""
        if connection in self.held:
            self.held.discard(connection)
            self._count(connection, now)

    def forget(self, connection: LimitedConnection) -> None:
        self.open.discard(connection)
        self.held.discard(connection)
        self.silent.pop(connection, None)
        self.idle.pop(connection, None)

    def _count(self, connection: LimitedConnection, now: float) -> bool:
        """Make room for a connection where others wait, and count it. Whether there was none."""
        while len(self.open) >= self.most and (crowded_out := self._longest_waiting(now)) is not None:
            self.forget(crowded_out)
            self.refused("crowded_out")
            crowded_out.abort()
        full = len(self.open) >= self.most
        self.open.add(connection)
        return full

    def _longest_waiting(self, now: float) -> LimitedConnection | None:
        for waiting in (self.silent, self.idle):
            for connection in waiting:
                if now - connection.since < GRACE_S:
                    break
                if not connection.unsent:  # else it is sending, and ends when its client takes nothing
                    return connection
        return None
