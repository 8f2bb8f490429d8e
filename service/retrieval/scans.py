"""Scans of a catalogue, in threads: only a few run at once, a few wait, and none runs past its deadline.

A scan of a large catalogue keeps a core busy for a while, and every client that may retrieve may request one. Knows threads and deadlines.
Does not know the scanned data.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ..batching.priority import Turns
from ..errors import DeadlinePassed

MAX_SCANS = 2
MAX_WAITING = 8

T = TypeVar("T")
Check = Callable[[], None]
"""A scan calls it regularly. It raises DeadlinePassed after the deadline."""


class Scans:
    """The scans of one kind in one process.

    noun       plural noun of the scans, for messages
    timeout_s  longest time from request to answer, including the wait for a turn
    clock      seconds; tests pass their own
    """

    def __init__(self, noun: str, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._turns, self._timeout_s = Turns(noun, MAX_SCANS, MAX_WAITING, clock), timeout_s

    async def run(self, scan: Callable[[Check], T]) -> T:
        """The result of a scan, which runs in a thread. Raises QueueFull, DeadlinePassed and the errors of the scan."""
        deadline = self._turns.clock() + self._timeout_s

        def check() -> None:
            if self._turns.clock() >= deadline:
                raise DeadlinePassed("The catalogue was not scanned to its end in time.")

        await self._turns.enter(deadline)
        running = asyncio.ensure_future(asyncio.to_thread(scan, check))
        running.add_done_callback(self._leave)  # the turn ends with the thread, even if the client hangs up earlier
        try:
            return await asyncio.shield(running)
        finally:
            del running  # its error holds this frame

    def _leave(self, scan: asyncio.Future[Any]) -> None:
        self._turns.leave()
        if not scan.cancelled():
            scan.exception()  # read it, so that asyncio does not log it if the client has gone
