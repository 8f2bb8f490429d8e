"""A replica of the ingress: the router's ASGI application, whose shards are other deployments.

Ray's proxies bring it requests, or Ray's HAProxy its connections; the service's own HTTP server is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from espalier.compile import make_ready
from service.router.app import create_router
from service.router.config import RouterConfig
from service.settings import warn_of_unknown_settings
from service.watch import logs

from ..ray.arguments import settings_of
from ..ray.handles import HandleTransport


class Ingress:
    """See the module. /readyz says when it can answer: before its shards are there it answers 503, as the router does."""

    def __init__(self, shards: Mapping[str, Any], settings: Mapping[str, Any], router: Mapping[str, Any]) -> None:
        """shards: handles by the names of their deployments; settings, router: what app.yaml says of them."""
        self._shards, self._settings, self._router = shards, settings, router

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray once, in the replica."""
        settings = settings_of(self._settings)
        logs.configure(settings.log_level, settings.log_format)
        warn_of_unknown_settings(settings)
        config = RouterConfig(**self._router).model_copy(update={"shards": tuple(self._shards)})  # which are no URLs
        make_ready()
        self._app = create_router(settings, config, HandleTransport(self._shards))
        return self._app

    def check_health(self) -> None:
        """Answering is healthy: a router that waits for shards, or that misses some, would not find them by being replaced."""
