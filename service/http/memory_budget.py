"""Memory that requests share: so many units for all of them together, and a little for each that nobody has to ask for.

Knows units: bytes of bodies, values of answers. Touched by the event loop alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_S = 1.0
"""How often one who waits looks whether he still has a reason to."""


class Budget:
    """`units` for all holders together.

    free          units of each holder that are not counted, so that small requests never wait for large ones
    most_waiting  holders that may wait at a time
    """

    def __init__(self, units: int, free: int, most_waiting: int = 64) -> None:
        self.units, self.free, self.left, self.most_waiting = units, free, units, most_waiting
        self.waiting: set[asyncio.Future[None]] = set()

    def holding(self) -> Held:
        """What one request holds; a context manager that gives all of it back."""
        return Held(self)

    def tell(self) -> None:
        """Let all who wait look again."""
        if self.waiting:
            waiting, self.waiting = self.waiting, set()
            for one in waiting:
                if not one.done():
                    one.set_result(None)


class Held:
    """The units of one request, or of one stream."""

    __slots__ = ("_budget", "_counted", "units")

    def __init__(self, budget: Budget) -> None:
        self._budget, self.units, self._counted = budget, 0, 0

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        if self.units:
            self.give(self.units)

    def take(self, units: int) -> bool:
        """Hold so many units more. False, and nothing is held, where there are not so many left."""
        counted = max(self.units + units - self._budget.free, 0)
        if counted - self._counted > self._budget.left:
            return False
        self._count(self.units + units, counted)
        return True

    async def wait(self, units: int, most: int, gone: Callable[[], bool]) -> bool:
        """The same, as soon as there are so many, and this holder has no more than `most` with them.

        False where so many wait already that nobody else may, or where `gone` says so, which is asked every LOOK_S.
        """
        while (self.units and self.units + units > most) or not self.take(units):
            if len(self._budget.waiting) >= self._budget.most_waiting or gone():
                return False
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._budget.waiting.add(waiting)
            try:
                await asyncio.wait((waiting,), timeout=LOOK_S)
            finally:
                self._budget.waiting.discard(waiting)
        return True

    def give(self, units: int) -> None:
        """Give so many back."""
        self._count(self.units - units, max(self.units - units - self._budget.free, 0))
        self._budget.tell()

    def _count(self, units: int, counted: int) -> None:
        self._budget.left -= counted - self._counted
        self.units, self._counted = units, counted
