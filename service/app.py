"""The ASGI application."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from fastapi_offline import FastAPIOffline

from espalier.search import open_engine
from service import errors
from service.lifecycle import lifespan
from service.middleware import Edge
from service.monitoring import Metrics
from service.registry import OpenEngine, Registry
from service.routes import Service, add_routes
from service.settings import Settings

DESCRIPTION = """Candidate retrieval from trained trees: `POST /retrieve` answers with the top m items of each query and the
milliseconds it took. `GET /models` says which models there are and what they take."""

_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
"""The service has metrics of its own; the framework's cost time in every request and would read the environment."""


def create_app(settings: Settings, open_engine: OpenEngine = open_engine) -> FastAPI:
    """The service over a models folder. Raises BundleNotFound when the folder holds no model."""
    app = FastAPIOffline(  # /docs without a CDN, for machines that cannot reach one
        docs_url="/docs",
        redoc_url=None,
        title="Espalier",
        version="0.1.0",
        description=DESCRIPTION,
        lifespan=lifespan,
        telemetry=_NO_TELEMETRY,
    )
    metrics = Metrics()
    app.state.service = Service(settings, metrics, Registry(settings, metrics, open_engine))
    app.add_middleware(Edge, max_body_bytes=settings.max_body_bytes, metrics=metrics)
    errors.install(app)
    add_routes(app)
    return app
