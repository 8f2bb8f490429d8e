"""Returns memory to the system after a burst of large requests.

Otherwise two things would keep it: objects in reference cycles, which the garbage collector visits only after many small allocations, and
pages that the C library keeps. Knows the memory of the process, not its users.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
from collections.abc import Sequence
from pathlib import Path

from service.http.memory_budget import Budget

CHECK_S = 2.0
"""Between two measurements."""
GROWN_BYTES = 16 << 20
"""Growth that is worth a collection."""
COLLECTIONS = 5
"""Growth that stays over this number of collections without a large request is needed (by another version, say) and is accepted."""

_STATM = Path("/proc/self/statm")


async def give_back(budgets: Sequence[Budget]) -> None:
    """Run until cancelled. Does nothing while the memory does not grow. budgets: show whether large requests are under way."""
    if not _STATM.exists():  # not Linux
        return
    usual, grown = resident_bytes(), 0
    while True:
        await asyncio.sleep(CHECK_S)
        found = resident_bytes()
        if found <= usual + GROWN_BYTES:
            usual, grown = min(usual, found), 0
            continue
        await asyncio.to_thread(collect)
        grown = 0 if any(budget.left < budget.units for budget in budgets) else grown + 1
        if grown >= COLLECTIONS:
            usual, grown = resident_bytes(), 0


def resident_bytes() -> int:
    """Memory of this process in RAM."""
    return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def collect() -> None:
    """Free unreachable objects, and return free pages to the system."""
    gc.collect()
    if _trim is not None:
        _trim(0)


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others have none
