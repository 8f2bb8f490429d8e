"""The rate limits of keys: requests and engine seconds, counted by all workers of a host together; and how refusals are held back.

This is the generic cell rate algorithm (GCRA). Each limit has a theoretical arrival time: the time at which all that the key has taken
would be spread at the allowed rate. They are in one mapped file, with a slot for each key and its limits; a key whose limits change gets a
new slot. A slot whose arrival times are past limits nothing, so another key may take it; its former key then gets another one. A slot is
written under a lock, so that a worker interrupted between reading and writing does not undo the counts of others. A worker waits for the
lock for at most LOCK_S, because the holder may be suspended; then one request too many may pass.

Refusals of keys over their limits are held back, so that each key gets at most REFUSALS_PER_S of them a second: this slows a flood down.
The connection of a held refusal does not count towards the limit of connections.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import mmap
import os
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from starlette.types import Scope

from ..errors import KeyLimit
from ..http.connection import CONNECTION
from ..keys_file import MOST_KEYS, Key

log = logging.getLogger(__name__)

COST_BURST_S = 1.0
"""A key may use this many seconds of its cost limit at once."""
DEBT_S = 60.0
"""Longest time for which a key is refused because of engine seconds that it used beyond its limit."""
LOCK_S = 0.001
"""Longest time for which the event loop waits for another worker's lock on a slot."""
ARRIVAL_TIMES = struct.Struct("=dd")
"""The theoretical arrival times of requests and of engine seconds."""
IDENTITY_BYTES = 16
SLOT_BYTES, SLOTS = IDENTITY_BYTES + ARRIVAL_TIMES.size, 8 * MOST_KEYS
"""Bytes of a slot, which begins with its key's identity, and number of slots. If none is free, each worker counts a key by itself."""
FREE_AFTER_S = 60.0
"""A slot is free if its arrival times have been past for so long. A key in use keeps its slot."""
MIN_HELD_S, REFUSALS_PER_S = 1.0, 128
"""Shortest time for which a refusal is held back, and the rate of refusals for each key."""
MAX_HELD_S = 10.0
"""Longest time for which a refusal is held back, however many refusals of its key are held."""


class KeyLimits:
    """The limits of keys. One event loop uses it.

    file   shared by the workers of a host; None: there is only this process
    clock  seconds, the same clock in all processes of a host
    """

    def __init__(self, file: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._file: int | None = None
        self._slots: bytearray | mmap.mmap = bytearray(SLOT_BYTES * SLOTS)
        if file is not None:
            self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(self._file, 0, SLOT_BYTES * SLOTS)  # without space for a page, its first use would kill the process
                self._slots = mmap.mmap(self._file, SLOT_BYTES * SLOTS)
            except OSError as error:
                log.error("%s: %s: until a restart each worker counts requests of keys by itself", file, error.strerror)
                os.close(self._file)
                self._file = None
        self._clock = clock
        self._key_slots: dict[Key, _Slot] = {}

    def take(self, key: Key) -> None:
        """Count one request. Raises KeyLimit, and counts nothing, if it exceeds a limit."""
        if key.rate is None and key.cost is None:
            return
        with self._slot_lock(key):
            (requests, seconds), now = self._arrival_times(key), self._clock()
            if key.rate is not None and (retry_after_s := requests - now - (key.burst - 1) / key.rate) > 0:
                raise KeyLimit(f"The key {key.name} may send {key.rate:g} requests a second, {key.burst:g} at once.", retry_after_s)
            if key.cost is not None and (retry_after_s := seconds - now - COST_BURST_S) > 0:
                raise KeyLimit(f"The key {key.name} may use {key.cost:g} engine seconds a second.", retry_after_s)
            if key.rate is not None:
                self._write(key, max(requests, now) + 1 / key.rate, seconds)

    def spend(self, key: Key, expected_s: float) -> None:
        """Count the expected engine seconds of a request. `settle` has to follow."""
        if key.cost is not None:
            with self._slot_lock(key):
                requests, seconds = self._arrival_times(key)
                self._write(key, requests, max(seconds, self._clock()) + expected_s / key.cost)

    def settle(self, key: Key, expected_s: float, taken_s: float) -> None:
        """Replace the expected engine seconds of a request by the actual ones."""
        if key.cost is not None:
            with self._slot_lock(key):
                requests, seconds = self._arrival_times(key)
                self._write(key, requests, min(seconds + (taken_s - expected_s) / key.cost, self._clock() + COST_BURST_S + DEBT_S))

    @contextmanager
    def _slot_lock(self, key: Key) -> Iterator[None]:
        """Lock the slot of a key against other workers; goes on without the lock after LOCK_S."""
        if self._file is None:
            yield
            return
        _, buffer, offset = self._slot(key)
        lock_offset = offset if buffer is self._slots else 0
        give_up_at = time.monotonic() + LOCK_S
        while not (is_locked := _locked(self._file, lock_offset)) and time.monotonic() < give_up_at:
            time.sleep(0)
        try:
            yield
        finally:
            if is_locked:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, lock_offset)

    def _arrival_times(self, key: Key) -> tuple[float, float]:
        _, buffer, offset = self._slot(key)
        requests, seconds = ARRIVAL_TIMES.unpack_from(buffer, offset)
        return requests, seconds

    def _write(self, key: Key, requests: float, seconds: float) -> None:
        _, buffer, offset = self._slot(key)
        ARRIVAL_TIMES.pack_into(buffer, offset, requests, seconds)

    def _slot(self, key: Key) -> _Slot:
        slot = self._key_slots.get(key)
        if slot is None or slot.buffer[slot.offset - IDENTITY_BYTES : slot.offset] != slot.identity:
            if len(self._key_slots) >= SLOTS:
                self._key_slots.clear()  # most of these keys no longer exist
            slot = self._key_slots[key] = self._claim_slot(key)
        return slot

    def _claim_slot(self, key: Key) -> _Slot:
        """The slot of a key; a key without a slot gets the next free one."""
        description = repr((key.name, key.digest, key.rate, key.burst, key.cost))
        identity = hashlib.blake2b(description.encode(), digest_size=IDENTITY_BYTES).digest()
        if (begin := self._slots.find(identity)) >= 0:
            return _Slot(identity, self._slots, begin + IDENTITY_BYTES)
        first, past = int.from_bytes(identity[:4]), self._clock() - FREE_AFTER_S
        for step in range(SLOTS):
            begin = (first + step) % SLOTS * SLOT_BYTES
            offset = begin + IDENTITY_BYTES
            holder = self._slots[begin:offset]  # this key's, if another worker has just claimed it
            if holder == identity or not any(holder) or max(ARRIVAL_TIMES.unpack_from(self._slots, offset)) < past:
                self._slots[begin:offset] = identity
                return _Slot(identity, self._slots, offset)
        log.warning("all %d slots of limits are in use: each worker counts the key %s by itself", SLOTS, key.name)
        return _Slot(identity, bytearray(identity + bytes(ARRIVAL_TIMES.size)), IDENTITY_BYTES)


class _Slot(NamedTuple):
    """A slot of a key. offset: of its arrival times in the buffer, after the identity of the key that has the slot."""

    identity: bytes
    buffer: bytearray | mmap.mmap
    offset: int


def _locked(file: int, offset: int) -> bool:
    """Try to lock one byte of a file. Returns whether this process now has the lock."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
    except OSError:  # another process has the lock
        return False
    return True


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
