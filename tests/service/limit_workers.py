"""What processes do with the limits of keys, in a module that imports little: each starts with importing it."""

from __future__ import annotations

import os
from pathlib import Path

from service.errors import KeyLimit
from service.http import key_limits
from service.http.key_limits import KeyLimits, _locked
from service.keys_file import Key


def patiently_taken(file: Path, key: Key) -> None:
    key_limits.LOCK_S = 20.0
    KeyLimits(file).take(key)


def lock_for_ever(file: Path, place: int) -> None:
    assert _locked(os.open(file, os.O_RDWR), place)


def taken(file: Path, key: Key, tries: int) -> int:
    """How many of them pass, if each waits as long as it must for others that count."""
    key_limits.LOCK_S = 20.0
    limits, count = KeyLimits(file), 0
    for _ in range(tries):
        try:
            limits.take(key)
        except KeyLimit:
            continue
        count += 1
    return count
