"""Programmatic dependent launch (Hopper and later): a kernel starts while the one before it ends, and waits for its results."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin_after(DEPENDENT: tl.constexpr):
    """Let the next kernel start, which waits at this point too; then wait for all earlier kernels.

    DEPENDENT  the launch has the attribute that lets it start early; without it this function does nothing
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
