"""Scans of a catalogue, in threads: few run at once, few wait, and none runs past its deadline.

A scan of a large catalogue takes a core for a while, and every client that may retrieve may request one. Knows threads and deadlines. Does
not know what is scanned.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import DeadlinePassed, QueueFull

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
        self._noun, self._timeout_s, self._clock = noun, timeout_s, clock
        self._free = asyncio.Semaphore(MAX_SCANS)
        self._waiting = 0

    async def run(self, scan: Callable[[Check], T]) -> T:
        """The result of a scan, which is called in a thread. Raises what it raises, QueueFull and DeadlinePassed."""
        deadline = self._clock() + self._timeout_s

        def check() -> None:
            if self._clock() >= deadline:
                raise _too_late()

        await self._enter()
        running = asyncio.ensure_future(asyncio.to_thread(scan, check))
        running.add_done_callback(self._leave)  # with the thread, not with a client that hangs up
        return await asyncio.shield(running)

    async def _enter(self) -> None:
        if self._free.locked() and self._waiting >= MAX_WAITING:
            raise QueueFull(f"{MAX_SCANS} {self._noun} run and {MAX_WAITING} wait already.", retry_after_s=1)
        self._waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._free.acquire()
        except TimeoutError:
            raise _too_late() from None
        finally:
            self._waiting -= 1

    def _leave(self, scan: asyncio.Future[Any]) -> None:
        self._free.release()
        if not scan.cancelled():
            scan.exception()  # read, so that asyncio does not log it where the client has gone


def _too_late() -> DeadlinePassed:
    return DeadlinePassed("The catalogue was not scanned to its end in time.")
