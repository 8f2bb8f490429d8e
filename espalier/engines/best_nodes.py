"""Compiled: selects the best of a level's candidates, and sorts results."""

from __future__ import annotations

import numpy as np

from espalier.arrays import Array
from espalier.compiled_code import compiled


@compiled()
def best_positions(keys: Array, total: int, count: int, ordered: Array, positions: Array) -> int:
    """Write the positions of the best `count` of `total` keys, ascending; of equal keys the first. Returns how many were written.

    keys       float32
    ordered    int32, room for `total` numbers
    positions  int64, room for `count` numbers

    The smallest selected key is found bit by bit. Each pass counts the keys that reach a bound, without branches, so processors can compare
    16 keys in one instruction. A heap takes 4 to 30 times as long.
    """
    if total <= count:
        for c in range(total):
            positions[c] = c
        return total
    for c in range(total):  # integers in the order of the keys; −0, which equals 0, would be −1
        bits = np.float32(keys[c]).view(np.int32)
        bits ^= (bits >> 31) & 0x7FFFFFFF
        ordered[c] = bits + (bits == -1)
    reached = 0
    for c in range(total):
        reached += ordered[c] >= 0
    cut = np.int32(0) if reached >= count else np.int32(-(2**31))
    bit = np.int32(2**30)
    while bit > 0 and reached != count:
        bound = np.int32(cut | bit)
        reached = 0
        for c in range(total):
            reached += ordered[c] >= bound
        if reached >= count:
            cut = bound
        bit >>= 1
    above = 0
    for c in range(total):
        above += ordered[c] > cut
    ties = count - above
    written = 0
    for c in range(total):
        if ordered[c] > cut or (ordered[c] == cut and ties > 0):
            ties -= ordered[c] == cut
            positions[written] = c
            written += 1
    return written


@compiled()
def best_first(keys: Array, count: int) -> Array:
    """int64[count]: the positions of the first `count` keys, best first, ties by position.

    This is a merge sort because numba needs a second to compile NumPy's sort.
    """
    order, merged = np.empty(count, np.int64), np.empty(count, np.int64)
    for k in range(count):
        order[k] = k
    width = 1
    while width < count:
        for begin in range(0, count, 2 * width):
            middle, end = min(begin + width, count), min(begin + 2 * width, count)
            i, j = begin, middle
            for k in range(begin, end):
                if j == end or (i < middle and keys[order[i]] >= keys[order[j]]):
                    merged[k] = order[i]
                    i += 1
                else:
                    merged[k] = order[j]
                    j += 1
        order, merged = merged, order
        width *= 2
    return order
