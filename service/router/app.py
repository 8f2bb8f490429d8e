"""The router as an ASGI application: that of the ordinary service, with engines that ask shards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from service.app import create_app
from service.models.loading import EngineSource
from service.router.config import RouterConfig, with_key_of
from service.router.fleet import Fleet
from service.router.http_transport import HttpTransport
from service.router.metrics import RouterMetrics
from service.router.opening import ShardedEngines
from service.router.transport import Transport
from service.settings import Settings
from service.watch.metrics import Metrics

FIRST_LOOK_S = 2.0
"""How long loading waits for the first look at the replicas."""


def create_router(settings: Settings, config: RouterConfig, transport: Transport | None = None) -> FastAPI:
    """The service over the bundles of a models folder, whose items are on the shards at `config.shards`.

    transport  how these are reached; None: by HTTP
    Raises BundleNotFound when the folder holds no model.
    """
    metrics = Metrics()
    if transport is None:
        transport = HttpTransport(with_key_of(config, settings))
    fleet = Fleet(transport, config.shards, config, RouterMetrics(metrics))
    engines = ShardedEngines(fleet)
    source = EngineSource(engines.open, config.calls, engines.awaits, engines.layout, engines.layout_of)
    app = create_app(settings, source, metrics=metrics)
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        fleet.start()
        fleet.wait_until_looked(FIRST_LOOK_S)
        try:
            async with inner(app):
                yield
        finally:
            fleet.close()

    app.router.lifespan_context = lifespan
    return app
