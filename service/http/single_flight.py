"""Shares one computation between all requests that need its result at the same time. Knows threads and the event loop, not the result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Requests that arrive during a computation wait for its result.

    compute  called in a thread
    keep     whether later requests get the same result
    """

    def __init__(self, compute: Callable[[], T], keep: bool = False) -> None:
        self._compute, self._keep = compute, keep
        self._running: asyncio.Future[T] | None = None

    async def get(self) -> T:
        """The result. Raises the error of `compute`; the next request then computes again."""
        if self._running is None:
            self._running = asyncio.ensure_future(asyncio.to_thread(self._compute))
            self._running.add_done_callback(self._done)
        return await asyncio.shield(self._running)  # so that a client that hangs up does not cancel it for others

    def _done(self, made: asyncio.Future[T]) -> None:
        failed = made.cancelled() or made.exception() is not None
        if failed or not self._keep:
            self._running = None
