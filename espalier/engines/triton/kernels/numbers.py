"""Which numbers are finite. For use in the kernels that score."""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)
"""The largest finite float32."""


@triton.jit
def is_finite(x):
    return tl.abs(x) <= LARGEST  # not true of NaN
