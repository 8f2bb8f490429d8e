"""Programmatic dependent launch (Hopper and later): a kernel starts while the one before it ends, and waits for what that writes."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin_after(DEPENDENT: tl.constexpr):
    """Wait for all that was launched before, and let the next kernel start: it waits here too.

    DEPENDENT  the launch has the attribute that lets it start early; without it nothing is done
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
