"""How much of the service a key has had: requests and engine seconds, counted together by all workers of a host.

The generic cell rate algorithm: a moment for each limit, up to which what was taken is spread at the allowed rate. A moment is a number of
eight bytes in a mapped file, which a processor writes whole; where two workers write it at once, one request too many may pass.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

from ..errors import KeyLimit
from ..keys_file import Key

COST_BURST_S = 1.0
"""Seconds' worth of engine time that a key may take at once."""
MOMENTS = struct.Struct("=dd")
"""Of requests, and of engine seconds."""


class KeyLimits:
    """The limits of keys by name. From one event loop.

    folder  where the workers of a host share what they count; None: this process is alone
    clock   the same in all processes of a host
    """

    def __init__(self, folder: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._taken: dict[str, bytearray | mmap.mmap] = {}

    def refusal(self, key: Key) -> KeyLimit | None:
        """Why the next request of a key would be one too many; None where it would not."""
        if key.rate is None and key.cost is None:
            return None
        (requests, seconds), now = MOMENTS.unpack_from(self._of(key)), self._clock()
        if key.rate is not None and (early_s := requests - now - (key.burst - 1) / key.rate) > 0:
            return KeyLimit(f"The key {key.name} may send {key.rate:g} requests a second, {key.burst:g} at once.", early_s)
        if key.cost is not None and (early_s := seconds - now - COST_BURST_S) > 0:
            return KeyLimit(f"The key {key.name} may use {key.cost:g} engine seconds a second.", early_s)
        return None

    def take(self, key: Key, cost_s: float = 0.0) -> None:
        """Count one request that is expected to take so many engine seconds. Raises KeyLimit where it is one too many, counting nothing."""
        if key.rate is None and key.cost is None:
            return
        if (refusal := self.refusal(key)) is not None:
            raise refusal
        taken, now = self._of(key), self._clock()
        requests, seconds = MOMENTS.unpack_from(taken)
        if key.rate is not None:
            requests = max(requests, now) + 1 / key.rate
        if key.cost is not None:
            seconds = max(seconds, now) + cost_s / key.cost
        MOMENTS.pack_into(taken, 0, requests, seconds)

    def settle(self, key: Key, expected_s: float, cost_s: float) -> None:
        """What a request that was counted has taken."""
        if key.cost is not None:
            taken = self._of(key)
            requests, seconds = MOMENTS.unpack_from(taken)
            MOMENTS.pack_into(taken, 0, requests, seconds + (cost_s - expected_s) / key.cost)

    def _of(self, key: Key) -> bytearray | mmap.mmap:
        found = self._taken.get(key.name)
        if found is None:
            found = self._taken[key.name] = bytearray(MOMENTS.size) if self._folder is None else self._mapped(self._folder, key.name)
        return found

    def _mapped(self, folder: Path, name: str) -> mmap.mmap:
        folder.mkdir(exist_ok=True)
        place = os.open(folder / hashlib.sha256(name.encode()).hexdigest()[:32], os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.truncate(place, MOMENTS.size)
            return mmap.mmap(place, MOMENTS.size)
        finally:
            os.close(place)
