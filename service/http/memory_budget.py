"""Memory that requests share: one budget for all of them, and a small free share for each.

Knows units: bytes of bodies, values of answers. Only the event loop uses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

RECHECK_S = 1.0
"""Interval at which a waiting holder checks whether its client is still connected."""


class Budget:
    """`units` that all holders share.

    free          units of each holder that are not counted, so that small requests never wait for large ones
    available     units that no holder has
    waiting       holders that wait; most_waiting: most of them at a time
    """

    def __init__(self, units: int, free: int, most_waiting: int = 64) -> None:
        self.units, self.free, self.available, self.most_waiting = units, free, units, most_waiting
        self.waiting, self.given = 0, asyncio.Event()


class Reservation:
    """The units of one request or stream. As a context manager, it gives all of them back at the end."""

    __slots__ = ("_budget", "_counted", "units")

    def __init__(self, budget: Budget) -> None:
        self._budget, self.units, self._counted = budget, 0, 0

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        if self.units:
            self.give(self.units)

    def take(self, units: int) -> bool:
        """Take this many more units. Returns False, and takes none, if the budget does not have enough."""
        units += self.units
        counted = max(units - self._budget.free, 0)
        if counted - self._counted > self._budget.available:
            return False
        self._budget.available -= counted - self._counted
        self.units, self._counted = units, counted
        return True

    async def wait(self, units: int, most: int, has_gone: Callable[[], bool]) -> bool:
        """Take `units` as soon as the budget has them and this holder then has at most `most`.

        Returns False if too many holders wait already, or once `has_gone()` is true, which is checked every RECHECK_S.
        """
        while (self.units and self.units + units > most) or not self.take(units):
            if self._budget.waiting >= self._budget.most_waiting or has_gone():
                return False
            self._budget.waiting += 1
            self._budget.given.clear()  # those that wait already have seen what was given
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(RECHECK_S):
                        await self._budget.given.wait()
            finally:
                self._budget.waiting -= 1
        return True

    def give(self, units: int) -> None:
        budget = self._budget
        self.units -= units
        counted = max(self.units - budget.free, 0)
        budget.available += self._counted - counted
        self._counted = counted
        budget.given.set()
