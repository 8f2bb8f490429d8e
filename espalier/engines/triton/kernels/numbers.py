"""Which numbers are finite, and the log of the sigmoid. For use in scoring kernels."""

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
