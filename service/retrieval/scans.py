"""Scans of a catalogue, in threads: few run at once, few wait, and none runs past its deadline.

A scan of a large catalogue takes a core for a while, and every client that may retrieve may request one. Knows threads and deadlines. Does
not know what is scanned.
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
"""Raises DeadlinePassed. A scan calls it now and then."""


class Scans:
    """The scans of one kind in one process.

    noun       of several of them, for messages
    timeout_s  from the request to its answer, the wait included
    clock      in seconds; tests bring their own
    """

    def __init__(self, noun: str, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._turns, self._timeout_s = Turns(noun, MAX_SCANS, MAX_WAITING, clock), timeout_s

    async def run(self, scan: Callable[[Check], T]) -> T:
        """The result of a scan, which is called in a thread. Raises what it raises, QueueFull and DeadlinePassed."""
        deadline = self._turns.clock() + self._timeout_s

        def check() -> None:
            if self._turns.clock() >= deadline:
                raise DeadlinePassed("The catalogue was not scanned to its end in time.")

        await self._turns.enter(deadline)
        running = asyncio.ensure_future(asyncio.to_thread(scan, check))
        running.add_done_callback(self._leave)  # with the thread, not with a client that hangs up
        return await asyncio.shield(running)

    def _leave(self, scan: asyncio.Future[Any]) -> None:
        self._turns.leave()
        if not scan.cancelled():
            scan.exception()  # read, so that asyncio does not log it where the client has gone
