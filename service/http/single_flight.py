"""One computation for all requests that need its result at the same time. Knows threads and the event loop, not the result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Requests that arrive during a computation wait for its result.

    compute  called in a thread
    keep     whether the result serves all later requests as well
    """

    def __init__(self, compute: Callable[[], T], keep: bool = False) -> None:
        self._compute, self._keep = compute, keep
        self._running: asyncio.Future[T] | None = None

    async def get(self) -> T:
        """The result. Raises what `compute` raised; the next request then tries again."""
        if self._running is None:
            self._running = asyncio.ensure_future(asyncio.to_thread(self._compute))
            self._running.add_done_callback(self._done)
        return await asyncio.shield(self._running)  # a client that hangs up does not end it for the others

    def _done(self, made: asyncio.Future[T]) -> None:
        failed = made.cancelled() or made.exception() is not None
        if failed or not self._keep:
            self._running = None
