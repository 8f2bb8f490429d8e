"""Draws users, queries and items to hold out by their ids, so that who is held out hardly changes as a log grows.

An item that is drawn by position is another one as soon as the log has a new user: the next version of a model would be measured on users
that the last one learned from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from espalier.arrays import Array, Int64

SIZE = 8
"""Bytes of a number."""


def numbers_of(ids: Iterable[str], seed: int, purpose: str) -> Array:
    """uint64: a random number of each id, which depends on nothing but the id, the seed and the purpose."""
    start = hashlib.blake2b(f"{seed} {purpose} ".encode(), digest_size=SIZE)
    numbers = bytearray()
    for name in ids:
        digest = start.copy()
        digest.update(name.encode())
        numbers += digest.digest()
    return np.frombuffer(bytes(numbers), "<u8").astype(np.uint64)


def drawing_order(ids: Iterable[str], seed: int, purpose: str) -> Int64:
    """int64: the positions of distinct ids in random order. Of two ids the same one comes first in any other list of ids."""
    return np.argsort(numbers_of(ids, seed, purpose), kind="stable").astype(np.int64)
