"""Work that is done once for all requests that want it at the same time. Knows threads and the event loop, not what is made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """What takes a while to make. Requests that come while it is being made wait for that one making.

    make  called in a thread
    keep  whether what was made serves all later requests as well
    """

    def __init__(self, make: Callable[[], T], keep: bool = False) -> None:
        self._make, self._keep = make, keep
        self._making: asyncio.Future[T] | None = None

    async def get(self) -> T:
        """What was made. Raises what `make` raised; the next request then tries again."""
        if self._making is None:
            self._making = asyncio.ensure_future(asyncio.to_thread(self._make))
            self._making.add_done_callback(self._made)
        return await asyncio.shield(self._making)  # who hangs up ends it for nobody else

    def _made(self, made: asyncio.Future[T]) -> None:
        failed = made.cancelled() or made.exception() is not None
        if failed or not self._keep:
            self._making = None
