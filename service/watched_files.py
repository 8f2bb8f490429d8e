"""Whether files have changed, so that keys and certificates are read again. Knows files, not their content."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

LOOK_S = 1.0
"""Seconds between two looks."""


class WatchedFiles:
    """Files that are looked at once in LOOK_S; links are followed. For one thread. clock: seconds."""

    def __init__(self, files: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        self._files, self._clock = files, clock
        self._last_signatures, self._next_look = self._signatures(), clock() + LOOK_S

    def have_changed(self) -> bool:
        """Whether a file has changed since the last look, or since this object was made."""
        if self._clock() < self._next_look:
            return False
        self._next_look = self._clock() + LOOK_S
        before, self._last_signatures = self._last_signatures, self._signatures()
        return self._last_signatures != before

    def _signatures(self) -> list[tuple[int, ...] | None]:
        return [_signature(file) for file in self._files]


def _signature(file: Path) -> tuple[int, ...] | None:
    """Modification time, size and inode of a file; None if it is missing."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
