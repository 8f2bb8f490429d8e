"""The connections of one process: their limits in number and time, and which of them are closed to make room for others.

Knows connections and times. Does not know bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

RESERVE = 32
"""Connections above the limit that are reserved for probes (connection.py); fewer if the limit is below four times as many."""
MAX_HELD = 1024
"""Most connections whose answers are held back. They do not count towards the limit."""
GRACE_S = 0.25
"""A connection that has been silent or idle for this long may be closed to make room for another."""


class LimitedConnection(Protocol):
    """One connection. since: when it became silent or idle; unsent: bytes of answers that the operating system has not accepted."""

    since: float

    @property
    def unsent(self) -> int: ...

    def check(self, now: float) -> None: ...

    def abort(self) -> None: ...


@dataclass
class Connections:
    """The connections of one process, and their limits.

    limit            most connections at a time; RESERVE more may only ask for probes
    held_limit       most connections, besides these, whose answers are held back
    head_timeout_s   longest time from the opening of a connection, or the first byte of a request, to the end of the head
    keep_alive_s     longest time that a connection may be idle between two requests
    write_timeout_s  longest time for which a client may read nothing of an answer
    refused          called with one of metrics.REFUSALS for every connection that is refused or cut off
    """

    limit: int
    head_timeout_s: float
    keep_alive_s: float
    write_timeout_s: float
    refused: Callable[[str], None] = lambda reason: None
    held_limit: int = MAX_HELD
    open: set[LimitedConnection] = field(default_factory=set)
    silent: dict[LimitedConnection, None] = field(default_factory=dict)
    """Connections that have not sent a whole head yet, oldest first."""
    idle: dict[LimitedConnection, None] = field(default_factory=dict)
    """Connections that wait for another request, longest wait first."""
    held: set[LimitedConnection] = field(default_factory=set)
    """Connections whose clients wait for a refusal that is held back. They do not count, so they take no other client's place."""

    @property
    def reserve(self) -> int:
        """Number of connections above the limit that are reserved for probes."""
        return min(RESERVE, max(self.limit // 4, 1))

    def check(self, now: float) -> None:
        """End the connections that exceed a time limit. Call it about once a second. now: the event loop's time."""
        for connection in list(self.open):
            connection.check(now)

    def admit(self, connection: LimitedConnection, now: float) -> bool:
        """Count a new connection. Returns False if there are too many; then it may only ask for probes.

        Connections that have waited for longer than GRACE_S are closed to make room: first those that never sent a request, oldest first.
        """
        is_full = self._admit(connection, now)
        self.silent[connection] = None
        return not is_full

    def hold(self, connection: LimitedConnection) -> bool:
        """Do not count a connection until `take_back`. Returns False if too many are held, or if it has ended."""
        if connection not in self.open or len(self.held) >= self.held_limit:
            return False
        self.open.discard(connection)
        self.held.add(connection)
        return True

    def take_back(self, connection: LimitedConnection, now: float) -> None:
        """Count a connection again, unless it has ended."""
        if connection in self.held:
            self.held.discard(connection)
            self._admit(connection, now)

    def forget(self, connection: LimitedConnection) -> None:
        self.open.discard(connection)
        self.held.discard(connection)
        self.silent.pop(connection, None)
        self.idle.pop(connection, None)

    def _admit(self, connection: LimitedConnection, now: float) -> bool:
        """Count a connection, after closing others to make room. Returns whether the limit was reached nevertheless."""
        while len(self.open) >= self.limit and (evicted := self._longest_waiting(now)) is not None:
            self.forget(evicted)
            self.refused("crowded_out")
            evicted.abort()
        is_full = len(self.open) >= self.limit
        self.open.add(connection)
        return is_full

    def _longest_waiting(self, now: float) -> LimitedConnection | None:
        for connections in (self.silent, self.idle):
            for connection in connections:
                if now - connection.since < GRACE_S:
                    break
                if not connection.unsent:  # else it still sends an answer; a time limit ends it if its client reads nothing
                    return connection
        return None
