"""Memory that requests share: so many units for all of them together, and a little for each that nobody has to ask for.

Knows units: bytes of bodies, values of answers. Touched by the event loop alone.
"""

from __future__ import annotations

import asyncio


class Budget:
    """`units` for all holders together.

    free  units of each holder that are not counted, so that small requests never wait for large ones
    """

    def __init__(self, units: int, free: int) -> None:
        self.units, self.free, self.left = units, free, units
        self.waiting: list[asyncio.Future[None]] = []

    def holding(self) -> Held:
        """What one request holds; a context manager that gives all of it back."""
        return Held(self)

    def tell(self) -> None:
        """Let all who wait look again."""
        if self.waiting:
            waiting, self.waiting = self.waiting, []
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
        self.give(self.units)

    def take(self, units: int) -> bool:
        """Hold so many units more. False, and nothing is held, where there are not so many left."""
        counted = max(self.units + units - self._budget.free, 0)
        if counted - self._counted > self._budget.left:
            return False
        self._count(self.units + units, counted)
        return True

    async def wait(self, units: int) -> None:
        """The same, as soon as there are so many. (More than there are at all would be waited for for ever: limit them before.)"""
        while not self.take(units):
            await self.changed()

    async def changed(self) -> None:
        """Wait until somebody has given something back."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._budget.waiting.append(waiting)
        await waiting

    def give(self, units: int) -> None:
        """Give so many back."""
        self._count(self.units - units, max(self.units - units - self._budget.free, 0))
        self._budget.tell()

    def _count(self, units: int, counted: int) -> None:
        self._budget.left -= counted - self._counted
        self.units, self._counted = units, counted
