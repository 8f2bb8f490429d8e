"""What happens when the service starts and stops."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Load in the background, so that /livez answers at once; at the end finish what was accepted."""
    service = app.state.service
    service.registry.start_loading()
    yield
    await service.registry.drain(service.settings.drain_s)
