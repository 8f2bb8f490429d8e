"""Numbers ids by first appearance, for logs of any size. The bytes of all ids are in one array, and a hash table finds them.

A Python dictionary takes some 200 bytes an id and most of the time of reading a log; this takes the id's bytes and 28 more. Compiled by
numba. Written by hand, since pyarrow's and polars' dictionaries cannot grow block by block.

Legend: R rows of a block, V ids.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from espalier.arrays import Array, Int32, Int64
from espalier.compiled_code import compiled

EMPTY = -1
"""An empty slot of the table; the code of a null row."""


class Vocabulary:
    """The ids seen so far."""

    def __init__(self) -> None:
        self._count = 0
        self._bytes = np.zeros(1 << 16, np.uint8)
        self._end_V1 = np.zeros(1 << 12, np.int64)  # id v is the bytes end[v] … end[v + 1] − 1
        self._hash_V = np.zeros(1 << 12, np.uint64)
        self._slots = np.full(1 << 13, EMPTY, np.int32)

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> pa.Array:
        """large_string[V], in the order of the codes."""
        end_V1 = self._end_V1[: self._count + 1]
        buffers = [None, pa.py_buffer(end_V1), pa.py_buffer(self._bytes[: end_V1[-1]])]
        return pa.Array.from_buffers(pa.large_string(), self._count, buffers)

    def encode(self, column: pa.Array) -> Int32:
        """int32[R]: the codes of strings, −1 for null; new ids are added."""
        column = column.cast(pa.large_string())
        _, ends, data = column.buffers()
        end_R1 = np.frombuffer(ends, np.int64)[column.offset : column.offset + len(column) + 1] if len(column) else np.zeros(1, np.int64)
        text = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
        null_R = column.is_null().to_numpy(zero_copy_only=False)
        self._make_room(len(column), int(end_R1[-1] - end_R1[0]))
        codes_R = np.empty(len(column), np.int32)
        self._count = _encode(text, end_R1, null_R, self._count, self._bytes, self._end_V1, self._hash_V, self._slots, codes_R)
        return codes_R

    def sorted_codes(self) -> Int64:
        """int64[V]: the codes, sorted by their ids' UTF-8 bytes."""
        return np.asarray(pc.sort_indices(self.ids), np.int64)

    def _make_room(self, ids: int, text: int) -> None:
        """Make room for `ids` more ids with `text` bytes. Arrays at least double when they grow, so that growing costs little."""
        used_bytes = int(self._end_V1[self._count])
        self._bytes = _grown(self._bytes, used_bytes + text)
        self._end_V1 = _grown(self._end_V1, self._count + ids + 1)
        self._hash_V = _grown(self._hash_V, self._count + ids)
        if 2 * (self._count + ids) > len(self._slots):
            self._slots = np.full(1 << (4 * (self._count + ids) - 1).bit_length(), EMPTY, np.int32)
            _fill(self._hash_V[: self._count], self._slots)


def _grown(array: Array, size: int) -> Array:
    if size <= len(array):
        return array
    grown = np.zeros(max(size, 2 * len(array)), array.dtype)
    grown[: len(array)] = array
    return grown


@compiled()
def _fill(hash_V: Array, slots: Array) -> None:
    for code in range(len(hash_V)):
        slot = np.int64(hash_V[code] & np.uint64(len(slots) - 1))
        while slots[slot] >= 0:
            slot = (slot + 1) & (len(slots) - 1)
        slots[slot] = code


@compiled()
def _encode(
    text: Array, end_R1: Array, null_R: Array, count: int, known: Array, end_V1: Array, hash_V: Array, slots: Array, codes_R: Array
) -> int:
    """Fills codes_R, adds new ids to the other arrays, and returns how many ids there are then."""
    for row in range(len(codes_R)):
        codes_R[row] = EMPTY
        if null_R[row]:
            continue
        begin, end = end_R1[row], end_R1[row + 1]
        hashed = np.uint64(14695981039346656037)  # FNV-1a, and a last mixing, since the table takes the low bits
        for place in range(begin, end):
            hashed = (hashed ^ np.uint64(text[place])) * np.uint64(1099511628211)
        hashed = (hashed ^ (hashed >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
        hashed ^= hashed >> np.uint64(29)
        slot = np.int64(hashed & np.uint64(len(slots) - 1))
        while slots[slot] >= 0:
            code = slots[slot]
            if hash_V[code] == hashed and end_V1[code + 1] - end_V1[code] == end - begin:
                same, first = True, end_V1[code]
                for place in range(end - begin):
                    if known[first + place] != text[begin + place]:
                        same = False
                        break
                if same:
                    codes_R[row] = code
                    break
            slot = (slot + 1) & (len(slots) - 1)
        if codes_R[row] < 0:
            first = end_V1[count]
            for place in range(end - begin):
                known[first + place] = text[begin + place]
            end_V1[count + 1] = first + end - begin
            hash_V[count], slots[slot], codes_R[row] = hashed, count, count
            count += 1
    return count
