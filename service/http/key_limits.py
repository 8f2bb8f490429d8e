"""How much of the service a key has had: requests and engine seconds, counted together by all workers of a host.

The generic cell rate algorithm: a moment for each limit, up to which what was taken is spread at the allowed rate. All moments lie in one
mapped file, a slot for each key with its limits: one whose limits change begins anew. A moment is written under a lock of its slot: a
worker that is interrupted between reading and writing would undo what others have counted. None waits for the lock for longer than
LOCK_S, because its holder may stand still; then a request too many may pass.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import KeyLimit
from ..keys_file import MOST_KEYS, Key

COST_BURST_S = 1.0
"""Seconds' worth of engine time that a key may take at once."""
DEBT_S = 60.0
"""How long what a key has taken too much keeps it out, at most."""
LOCK_S = 0.001
"""How long the event loop waits for another worker that counts for the same key."""
MOMENTS = struct.Struct("=dd")
"""Of requests, and of engine seconds."""
IDENTITY = 16
SLOT, SLOTS = IDENTITY + MOMENTS.size, 8 * MOST_KEYS
"""Bytes of a slot, which begins with whose it is, and how many there are: keys come and go. A key without one is counted by each worker."""


class KeyLimits:
    """The limits of keys. From one event loop.

    file   where the workers of a host share what they count; None: this process is alone
    clock  the same in all processes of a host
    """

    def __init__(self, file: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._file: int | None = None
        self._slots: bytearray | mmap.mmap = bytearray(SLOT * SLOTS)
        if file is not None:
            self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.truncate(self._file, SLOT * SLOTS)
            self._slots = mmap.mmap(self._file, SLOT * SLOTS)
        self._clock = clock
        self._places: dict[Key, tuple[bytearray | mmap.mmap, int]] = {}

    def refusal(self, key: Key) -> KeyLimit | None:
        """Why the next request of a key would be one too many; None where it would not."""
        if key.rate is None and key.cost is None:
            return None
        (requests, seconds), now = self._moments(key), self._clock()
        if key.rate is not None and (early_s := requests - now - (key.burst - 1) / key.rate) > 0:
            return KeyLimit(f"The key {key.name} may send {key.rate:g} requests a second, {key.burst:g} at once.", early_s)
        if key.cost is not None and (early_s := seconds - now - COST_BURST_S) > 0:
            return KeyLimit(f"The key {key.name} may use {key.cost:g} engine seconds a second.", early_s)
        return None

    def take(self, key: Key) -> None:
        """Count one request. Raises KeyLimit where it is one too many, counting nothing."""
        with self._alone(key):
            if (refusal := self.refusal(key)) is not None:
                raise refusal
            if key.rate is not None:
                requests, seconds = self._moments(key)
                self._write(key, max(requests, self._clock()) + 1 / key.rate, seconds)

    def spend(self, key: Key, expected_s: float) -> None:
        """Count engine seconds that a request is expected to take; `settle` has to follow."""
        if key.cost is not None:
            with self._alone(key):
                requests, seconds = self._moments(key)
                self._write(key, requests, max(seconds, self._clock()) + expected_s / key.cost)

    def settle(self, key: Key, expected_s: float, taken_s: float) -> None:
        """Count what a request has taken instead of what it was expected to."""
        if key.cost is not None:
            with self._alone(key):
                requests, seconds = self._moments(key)
                self._write(key, requests, min(seconds + (taken_s - expected_s) / key.cost, self._clock() + COST_BURST_S + DEBT_S))

    @contextmanager
    def _alone(self, key: Key) -> Iterator[None]:
        """Let no other worker count for a key meanwhile, unless one stands still."""
        if self._file is None or (key.rate is None and key.cost is None):
            yield
            return
        slots, place = self._place(key)
        at = place if slots is self._slots else 0
        until = time.monotonic() + LOCK_S
        while not (held := _locked(self._file, at)) and time.monotonic() < until:
            time.sleep(0)
        try:
            yield
        finally:
            if held:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, at)

    def _moments(self, key: Key) -> tuple[float, float]:
        slots, place = self._place(key)
        requests, seconds = MOMENTS.unpack_from(slots, place)
        return requests, seconds

    def _write(self, key: Key, requests: float, seconds: float) -> None:
        slots, place = self._place(key)
        MOMENTS.pack_into(slots, place, requests, seconds)

    def _place(self, key: Key) -> tuple[bytearray | mmap.mmap, int]:
        found = self._places.get(key)
        if found is None:
            if len(self._places) >= SLOTS:
                self._places.clear()  # most of them are of keys that are gone
            found = self._places[key] = self._found(key)
        return found

    def _found(self, key: Key) -> tuple[bytearray | mmap.mmap, int]:
        """The slot of a key, or the next free one, which is then its own."""
        about = repr((key.name, key.digest, key.rate, key.burst, key.cost))
        identity = hashlib.blake2b(about.encode(), digest_size=IDENTITY).digest()
        first = int.from_bytes(identity[:4])
        for step in range(SLOTS):
            place = (first + step) % SLOTS * SLOT
            owner = self._slots[place : place + IDENTITY]
            if not any(owner):
                self._slots[place : place + IDENTITY] = owner = identity
            if owner == identity:
                return self._slots, place + IDENTITY
        return bytearray(MOMENTS.size), 0


def _locked(file: int, at: int) -> bool:
    """Whether a byte of a file is locked now, by this process."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
    except OSError:  # another has it
        return False
    return True
