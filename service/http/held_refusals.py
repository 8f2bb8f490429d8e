"""Refusals of keys over their limits are held back, so that each key gets at most REFUSALS_PER_S of them a second: this slows a flood down.

If too many are held, a refusal is sent at once. The connection of a held refusal does not count towards the limit of connections.
Knows times. Does not know why a request is refused.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from starlette.types import Scope

from ..http.connection import CONNECTION

MIN_HELD_S, REFUSALS_PER_S = 1.0, 128
"""Shortest time for which a refusal is held back, and the rate of refusals for each key."""
MAX_HELD_S = 10.0
"""Longest time for which a refusal is held back, however many refusals of its key are held."""


class HeldRefusals:
    """The held refusals of one event loop."""

    def __init__(self) -> None:
        self._next = defaultdict[str, float](float)  # time of each key's last refusal

    async def wait(self, key: str, scope: Scope) -> bool:
        """Hold a refusal back until its turn, the client leaves or the service stops. Returns False at once if too many are held."""
        loop, connection = asyncio.get_running_loop(), scope.get(CONNECTION)
        client_gone: asyncio.Future[None] = loop.create_future()
        if connection is not None and not connection.hold(client_gone):
            return False
        now = loop.time()
        self._next[key] = answer_at = min(max(self._next[key] + 1 / REFUSALS_PER_S, now + MIN_HELD_S), now + MAX_HELD_S)
        try:
            await _passed(client_gone, answer_at - now)
        finally:
            if connection is not None:
                connection.take_back()
        return True


async def _passed(client_gone: asyncio.Future[None], seconds: float) -> None:
    await asyncio.wait([client_gone], timeout=seconds)
