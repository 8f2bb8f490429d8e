"""Refusals of keys that have had enough: each key gets so many a second, so that who floods makes no more requests than that.

A connection whose refusal is held back does not count among those that there may be. Knows times. Does not know why a request is refused.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from starlette.types import Scope

from ..http.connection import CONNECTION

HELD_S, REFUSALS_PER_S = 1.0, 128
"""How long a refusal is held back at least, and how many each key gets a second."""
MOST_HELD = 1024
"""Refusals that are held back at a time. Beyond that the connection ends with the refusal."""


class HeldRefusals:
    """Used by one event loop."""

    def __init__(self) -> None:
        self._next = defaultdict[str, float](float)  # by key, when it may get its next one
        self._held = 0

    async def wait(self, key: str, scope: Scope) -> bool:
        """Hold a refusal back until it is its turn. False, at once, where too many are held."""
        if self._held >= MOST_HELD:
            return False
        now = asyncio.get_running_loop().time()
        self._next[key] = at = max(self._next[key] + 1 / REFUSALS_PER_S, now + HELD_S)
        connection = scope.get(CONNECTION)
        if connection is not None:
            connection.hold()
        self._held += 1
        try:
            await asyncio.sleep(at - now)
        finally:
            self._held -= 1
            if connection is not None:
                connection.take_back()
        return True
