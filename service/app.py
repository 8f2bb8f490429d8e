"""The ASGI application."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.telemetry import TelemetryConfig
from fastapi_offline import FastAPIOffline
from starlette.types import ASGIApp

from espalier.search import open_engine
from service import errors
from service.direct import Retrieve, Stream
from service.lifecycle import lifespan
from service.middleware import RETRIEVE, STREAM, Edge
from service.monitoring import Metrics
from service.registry import OpenEngine, Registry
from service.routes import Service, add_routes
from service.security import Keys
from service.settings import Settings
from service.tracing import Tracer

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
    describe = app.openapi
    metrics, keys = Metrics(), Keys(settings.retrieve_keys, settings.admin_keys)
    registry = Registry(settings, metrics, open_engine)
    tracer = Tracer(settings.otlp_endpoint) if settings.otlp_endpoint else None
    app.state.service = Service(settings, metrics, registry, keys, tracer)
    single, stream = Retrieve(settings, registry, keys, metrics), Stream(settings, registry, keys, metrics)
    app.state.budgets = (single.bodies, single.answers, stream.answers)
    direct: dict[str, ASGIApp] = {RETRIEVE: single, STREAM: stream}
    limits = settings.max_body_bytes, settings.body_timeout_s
    app.add_middleware(Edge, direct, keys, *limits, metrics, settings.log_requests, tracer)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "PUT"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["Server-Timing", "X-Request-Id", "Retry-After"],
        )
    errors.install(app)
    add_routes(app)
    app.openapi = lambda: _with_problems(describe())  # type: ignore[method-assign]  # the framework's documented way
    return app


def _with_problems(document: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI document with errors as they are: problem documents of their own content type, and no other form of 422."""
    for methods in document["paths"].values():
        for operation in methods.values():
            if "HTTPValidationError" in str(operation["responses"].get("422")):
                del operation["responses"]["422"]
            for answer in operation["responses"].values():
                if "/Problem" in str(answer):
                    answer["content"] = {"application/problem+json": answer["content"].popitem()[1]}
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    return document
