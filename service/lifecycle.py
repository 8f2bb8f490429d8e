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
    """Load in the background, so that /livez answers at once; at the end finish the accepted requests.

    A worker that replaces another one accepts no connection before it can answer; the other workers do.
    """
    service = app.state.service
    await anyio.sleep(0)  # anyio imports its backend here, and not later, when no descriptor may be free
    service.registry.start_loading()
    await service.registry.take_over()
    per_s = service.settings.probe_per_s
    background = [asyncio.create_task(memory_release.give_back(app.state.budgets)), asyncio.create_task(service.recorder.run())]
    if per_s:
        background.append(asyncio.create_task(Probe(service.registry, service.metrics, per_s).run()))
    yield
    for task in background:
        task.cancel()
    service.recorder.close()
    await service.registry.drain(service.settings.drain_s)
    service.audit.write_left_out()
    app.state.lines.write_left_out()
    if service.tracer is not None:
        await asyncio.to_thread(service.tracer.close)
