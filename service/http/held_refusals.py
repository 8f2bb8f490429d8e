"""Refusals of keys that have had enough: while there is room to hold them, each key gets so many a second, so that who floods makes no more
requests than that.

A connection whose refusal is held back does not count among those that there may be. Knows times. Does not know why a request is refused.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from starlette.types import Scope

from ..http.connection import CONNECTION

HELD_S, REFUSALS_PER_S = 1.0, 128
"""How long a refusal is held back at least, and how many each key gets a second."""
LONGEST_S = 10.0
"""No refusal is held back for longer, however many of its key came before it."""


class HeldRefusals:
    """Used by one event loop."""

    def __init__(self) -> None:
        self._next = defaultdict[str, float](float)  # by key, when it may get its next one

    async def wait(self, key: str, scope: Scope) -> bool:
        """Hold a refusal back until it is its turn, the client has gone or the service stops. False, at once, where too many are held."""
        loop, connection = asyncio.get_running_loop(), scope.get(CONNECTION)
        gone: asyncio.Future[None] = loop.create_future()
        if connection is not None and not connection.hold(gone):
            return False
        now = loop.time()
        self._next[key] = at = min(max(self._next[key] + 1 / REFUSALS_PER_S, now + HELD_S), now + LONGEST_S)
        try:
            await _passed(gone, at - now)
        finally:
            if connection is not None:
                connection.take_back()
        return True


async def _passed(gone: asyncio.Future[None], seconds: float) -> None:
    await asyncio.wait([gone], timeout=seconds)
