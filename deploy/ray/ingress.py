"""A replica of the ingress: the router's ASGI application, whose shards are other deployments.

Ray's proxies forward requests to it, or Ray's HAProxy connections. The service's own HTTP server is not used.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI

from espalier.compile import make_ready
from service.router.app import create_router
from service.router.config import RouterConfig
from service.settings import warn_of_unknown_settings
from service.watch import logs

from ..ray.arguments import settings_of
from ..ray.handles import HandleTransport

LOOK_S = 0.05
"""Seconds between two checks whether the models are ready."""
PATIENCE_S = 60.0
"""How long Ray sends a new replica no requests while models are not ready. Then it serves those that are; /readyz says what is not."""


class Ingress:
    """See the module. Until its shards are served, /readyz answers 503, as the router's does."""

    def __init__(self, shards: Mapping[str, Any], settings: Mapping[str, Any], router: Mapping[str, Any]) -> None:
        """shards: handles by the names of their deployments; settings, router: from app.yaml."""
        self._shards, self._settings, self._router = shards, settings, router

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray once, in the replica."""
        settings = settings_of(self._settings)
        logs.configure(settings.log_level, settings.log_format)
        warn_of_unknown_settings(settings)
        config = RouterConfig(**self._router).model_copy(update={"shards": tuple(self._shards)})  # names, not URLs
        make_ready()
        app = create_router(settings, config, HandleTransport(self._shards))
        router_lifespan = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            async with router_lifespan(app):
                with suppress(TimeoutError):
                    async with asyncio.timeout(PATIENCE_S):
                        while app.state.service.registry.not_ready():
                            await asyncio.sleep(LOOK_S)
                yield

        app.router.lifespan_context = lifespan
        self._app = app
        return self._app

    def check_health(self) -> None:
        """Always healthy if it answers: replacing a router that waits for shards would not help."""
