"""The start and stop of the service, and the return of memory to the system after a burst of large requests.

Two things would otherwise keep that memory: objects in reference cycles, which the garbage collector visits only after many small
allocations, and free pages that the C library keeps.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from fastapi import FastAPI

from .http.memory_budget import Budget
from .models.probe import Probe

CHECK_S = 2.0
"""Seconds between two measurements."""
GROWN_BYTES = 16 << 20
"""Growth that causes a collection."""
MAX_COLLECTIONS = 5
"""Growth that remains after this many collections without large requests is accepted: another version needs it, say."""
_STATM = Path("/proc/self/statm")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Load models in the background, so that /livez answers at once. At the end, finish the accepted requests.

    A worker that replaces another one accepts no connection before it can answer requests; meanwhile the other workers accept them.
    """
    service = app.state.service
    await anyio.sleep(0)  # anyio imports its backend now; later no descriptor may be free
    service.registry.start_loading()
    await service.registry.take_over()
    per_s = service.settings.probe_per_s
    background = [asyncio.create_task(give_memory_back(app.state.budgets)), asyncio.create_task(service.recorder.run())]
    if per_s:
        background.append(asyncio.create_task(Probe(service.registry, service.metrics, per_s).run()))
    yield
    for task in background:
        task.cancel()
    service.recorder.close()
    await service.registry.drain(service.settings.drain_s)
    service.audit.write_left_out()
    app.state.error_lines.write_left_out()
    if service.tracer is not None:
        await asyncio.to_thread(service.tracer.close)


async def give_memory_back(budgets: Sequence[Budget]) -> None:
    """Return memory to the system when it has grown, until cancelled. budgets: show whether large requests are being answered."""
    if not _STATM.exists():  # not Linux
        return
    usual_bytes, collections = resident_bytes(), 0
    while True:
        await asyncio.sleep(CHECK_S)
        resident = resident_bytes()
        if resident <= usual_bytes + GROWN_BYTES:
            usual_bytes, collections = min(usual_bytes, resident), 0
            continue
        await asyncio.to_thread(collect)
        collections = 0 if any(budget.available < budget.units for budget in budgets) else collections + 1
        if collections >= MAX_COLLECTIONS:
            usual_bytes, collections = resident_bytes(), 0


def resident_bytes() -> int:
    """Memory of this process in RAM."""
    return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def collect() -> None:
    """Free unreachable objects, and return free pages to the system."""
    gc.collect()
    if _trim is not None:
        _trim(0)


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
