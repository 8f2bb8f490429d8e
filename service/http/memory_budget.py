"""Memory that requests share: a budget for all of them together, and a small free share for each.

Knows units: bytes of bodies, values of answers. Used by the event loop alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

RECHECK_S = 1.0
"""How often a waiting holder checks whether its client is still there."""


class Budget:
    """`units` for all holders together.

    free          units of each holder that are not counted, so that small requests never wait for large ones
    most_waiting  holders that may wait at a time
    """

    def __init__(self, units: int, free: int, most_waiting: int = 64) -> None:
        self.units, self.free, self.left, self.most_waiting = units, free, units, most_waiting
        self.waiting: set[asyncio.Future[None]] = set()

    def wake(self) -> None:
        """Let all waiting holders try again."""
        waiting, self.waiting = self.waiting, set()
        for one in waiting:
            if not one.done():
                one.set_result(None)


class Held:
    """The units of one request or stream; a context manager that gives all of them back."""

    __slots__ = ("_budget", "_counted", "units")

    def __init__(self, budget: Budget) -> None:
        self._budget, self.units, self._counted = budget, 0, 0

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        if self.units:
            self.give(self.units)

    def take(self, units: int) -> bool:
        """Hold this many more units. False, and nothing changes, where the budget has not enough left."""
        units += self.units
        counted = max(units - self._budget.free, 0)
        if counted - self._counted > self._budget.left:
            return False
        self._budget.left -= counted - self._counted
        self.units, self._counted = units, counted
        return True

    async def wait(self, units: int, most: int, gone: Callable[[], bool]) -> bool:
        """Take `units` as soon as the budget has them and this holder has at most `most` with them.

        False where too many holders wait already, or once `gone()` says that the client has left, which is checked every RECHECK_S.
        """
        while (self.units and self.units + units > most) or not self.take(units):
            if len(self._budget.waiting) >= self._budget.most_waiting or gone():
                return False
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._budget.waiting.add(waiting)
            try:
                await asyncio.wait((waiting,), timeout=RECHECK_S)
            finally:
                self._budget.waiting.discard(waiting)
        return True

    def give(self, units: int) -> None:
        budget = self._budget
        self.units -= units
        counted = max(self.units - budget.free, 0)
        budget.left += self._counted - counted
        self._counted = counted
        if budget.waiting:
            budget.wake()
