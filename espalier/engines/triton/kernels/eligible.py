"""Which nodes a query may visit: its mask and its closed nodes. For use in the kernels that score.

Legend: X closed nodes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_open(node, there, mask_address, closed_X, closed_count, closed_steps):
    """Which nodes a query may visit: bit n of its mask is 1 (address 0: none), and they are not in its ascending list of closed nodes."""
    if mask_address != 0:
        mask = mask_address.to(tl.pointer_type(tl.uint8))
        byte = tl.load(mask + (node >> 3), mask=there, other=0).to(tl.int32)
        there = there & (((byte >> (node & 7)) & 1) == 1)
    if closed_count > 0:
        low = tl.zeros_like(node)
        high = low + closed_count
        for _ in range(0, closed_steps):
            middle = (low + high) // 2
            searching = low < high
            below = tl.load(closed_X + middle, mask=searching, other=0) < node
            low = tl.where(searching & below, middle + 1, low)
            high = tl.where(searching & (below == 0), middle, high)
        there = there & (tl.load(closed_X + low, mask=low < closed_count, other=-1) != node)
    return there
