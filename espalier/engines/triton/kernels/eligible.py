"""The nodes that a query may visit, by its mask and its excluded nodes. For use in scoring kernels.

Legend: X excluded nodes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_eligible(node, exists, mask_address, excluded_X, excluded_count, excluded_steps):
    """Which existing nodes a query may visit: bit n of its mask is 1 (address 0: no mask), and n is not in its ascending excluded nodes."""
    if mask_address != 0:
        mask = mask_address.to(tl.pointer_type(tl.uint8))
        byte = tl.load(mask + (node >> 3), mask=exists, other=0).to(tl.int32)
        exists = exists & (((byte >> (node & 7)) & 1) == 1)
    if excluded_count > 0:
        low = tl.zeros_like(node)
        high = low + excluded_count
        for _ in range(0, excluded_steps):
            middle = (low + high) // 2
            searching = low < high
            below = tl.load(excluded_X + middle, mask=searching, other=0) < node
            low = tl.where(searching & below, middle + 1, low)
            high = tl.where(searching & (below == 0), middle, high)
        exists = exists & (tl.load(excluded_X + low, mask=low < excluded_count, other=-1) != node)
    return exists
