"""What happens when the service starts and stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from fastapi import FastAPI

from service.http import memory_release
from service.models.probe import Probe


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Load in the background, so that /livez answers at once; at the end finish what was accepted.

    A worker that comes in for one that died accepts no connection before it can answer: the other workers do.
    """
    service = app.state.service
    await anyio.sleep(0)  # it imports what it works with now, and not when there may be no descriptor left to do so
    service.registry.start_loading()
    await service.registry.take_over()
    per_s = service.settings.probe_per_s
    beside = [asyncio.create_task(memory_release.give_back(app.state.budgets))]
    if per_s:
        beside.append(asyncio.create_task(Probe(service.registry, service.metrics, per_s).run()))
    yield
    for task in beside:
        task.cancel()
    await service.registry.drain(service.settings.drain_s)
    service.audit.tell_left_out()
    if service.tracer is not None:
        await asyncio.to_thread(service.tracer.close)
