"""For use in scoring kernels: which nodes a query may visit, which numbers are finite, and the log of the sigmoid.

Legend: X excluded nodes.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)
"""The largest finite float32."""


@triton.jit
def is_finite(x):
    return tl.abs(x) <= LARGEST  # not true of NaN


@triton.jit
def log_sigmoid(x):
    """log σ(x) = min(x, 0) − log1p(e^−|x|), to float32's precision at any x.

    log1p(e) = 2 · artanh(e / (2 + e)) by its series, because Triton has no log1p, and log(1 + e) rounds e away: from |x| = 16.7 on, all of
    it. The series' argument is at most 1/3, so the first term that is left out is 1.4e-8 of the first term.
    """
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    z = s * s
    series = 1 + z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11 + z * (1 / 13))))))
    return tl.minimum(x, 0.0) - 2.0 * s * series


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
