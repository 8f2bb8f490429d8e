"""Whether files have changed: those of keys and of certificates are read again when they have. Knows files, not what is in them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

LOOK_S = 1.0
"""Seconds between two looks."""


class WatchedFiles:
    """Files, or what links point to, that are looked at once in LOOK_S. Of one thread. clock: seconds."""

    def __init__(self, files: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        self._files, self._clock = files, clock
        self._seen, self._next_look = self._signatures(), clock() + LOOK_S

    def have_changed(self) -> bool:
        """Whether they have since the last look, or since this object was made."""
        if self._clock() < self._next_look:
            return False
        self._next_look = self._clock() + LOOK_S
        before, self._seen = self._seen, self._signatures()
        return self._seen != before

    def _signatures(self) -> list[tuple[int, ...] | None]:
        return [_signature(file) for file in self._files]


def _signature(file: Path) -> tuple[int, ...] | None:
    """None where there is no file."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
