"""How many lines the log gets of what anybody can cause: a burst at once, then so many a second. The rest is counted.

The next line, or one after SUMMARY_S, says how many were left out. Knows counts and seconds, not lines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

BURST, PER_S = 20, 1.0
SUMMARY_S = 10.0


class Ration:
    """The lines of one kind; used from one event loop alone. `clock` is in seconds.

    summary  writes a line of how many were left out
    """

    def __init__(
        self, summary: Callable[[int], None], burst: int = BURST, per_s: float = PER_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._summary, self._burst, self._per_s, self._clock = summary, float(burst), per_s, clock
        self._lines_left, self._filled_at = float(burst), clock()
        self._left_out = 0
        self._timer: asyncio.TimerHandle | None = None

    def take(self) -> int | None:
        """How many lines were left out since the last one; None: this one is left out too."""
        now = self._clock()
        self._lines_left = min(self._burst, self._lines_left + (now - self._filled_at) * self._per_s)
        self._filled_at = now
        if self._lines_left < 1:
            self._left_out += 1
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(SUMMARY_S, self.write_left_out)
            return None
        self._lines_left -= 1
        return self._take_left_out()

    def write_left_out(self) -> None:
        """Write how many had no line since the last line."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if left_out := self._take_left_out():
            self._summary(left_out)

    def _take_left_out(self) -> int:
        left_out, self._left_out = self._left_out, 0
        return left_out
