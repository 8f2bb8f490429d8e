"""Gives memory back that a burst of large requests has left behind.

Two things keep it otherwise: objects in reference cycles, which the collector visits only after many small allocations, and pages that
the C library keeps for itself. Knows the process's memory, nothing of who used it.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
from collections.abc import Sequence
from pathlib import Path

from service.http.memory_budget import Budget

LOOK_S = 2.0
"""Between two looks at the memory."""
GROWN_BYTES = 16 << 20
"""Growth that is worth a collection."""
LOOKS = 5
"""Collections, one a look, after which growth that has stayed although no large request was under way is taken for needed: by another
version, say."""

_STATM = Path("/proc/self/statm")


async def give_back(budgets: Sequence[Budget]) -> None:
    """Until cancelled. Does nothing as long as the memory does not grow. `budgets` tell whether large requests are under way."""
    if not _STATM.exists():  # not Linux
        return
    usual, grown = resident_bytes(), 0
    while True:
        await asyncio.sleep(LOOK_S)
        found = resident_bytes()
        if found <= usual + GROWN_BYTES:
            usual, grown = min(usual, found), 0
            continue
        await asyncio.to_thread(collect)
        grown = 0 if any(budget.left < budget.units for budget in budgets) else grown + 1
        if grown >= LOOKS:
            usual, grown = resident_bytes(), 0


def resident_bytes() -> int:
    """Of this process."""
    return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def collect() -> None:
    """Free what nobody can reach, and hand free pages back to the system."""
    gc.collect()
    if _trim is not None:
        _trim(0)


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others have none
