"""The ASGI application."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.telemetry import TelemetryConfig

from . import problems
from .batching.priority import HEADER
from .http import documentation
from .http.bulk_route import BulkRoute
from .http.console import add_console
from .http.dependencies import Service
from .http.frontier_route import FrontierRoute
from .http.live_routes import ItemRoute
from .http.middleware import FRONTIER, ITEM, ITEMS, RETRIEVE, SEARCH, STREAM, Direct, Edge, write_left_out
from .http.retrieve_route import RetrieveRoute
from .http.routes import add_routes, documented_classes, for_customers, match_whole_paths
from .http.shard_routes import SearchRoute
from .http.stream_route import StreamRoute
from .lifecycle import lifespan
from .models.loading import EngineSource
from .retrieval.trial import GROUP, USER
from .settings import Settings
from .watch.logs import Ration
from .watch.metrics import Metrics

DESCRIPTION = """Candidate retrieval from trained trees: `POST /retrieve` answers with the top m items of each query and the
milliseconds it took. `GET /models` lists the models, their query kinds and their limits."""

_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
"""The service has metrics of its own. Those of the framework take time in every request and read the environment."""


def create_app(settings: Settings, engines: EngineSource | None = None, metrics: Metrics | None = None) -> FastAPI:
    """The service for a models folder. Raises BundleNotFound if the folder has no model.

    engines  None: the engines that settings and hardware choose
    metrics  None: new ones
    """
    app = FastAPI(
        openapi_url=None,  # documentation.py has these two
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would lead to the host that the client's Host header names
        title=documentation.TITLE,
        version="0.1.0",
        description=DESCRIPTION,
        lifespan=lifespan,
        telemetry=_NO_TELEMETRY,
    )
    describe = app.openapi
    app.state.service = service = Service(settings, engines, metrics or Metrics())
    single, stream, item, bulk = RetrieveRoute(service), StreamRoute(service), ItemRoute(service), BulkRoute(service)
    frontier, search = FrontierRoute(service), SearchRoute(service)
    app.state.bodies = {"item": item.bodies, "bulk": bulk.bodies}
    body_budgets = [holder.bodies for holder in (service, single, stream, item, bulk, frontier, search)]
    app.state.budgets = (*body_budgets, single.answers, single.background_answers, stream.answers, search.answers)
    direct = {("POST", RETRIEVE): Direct(single, RETRIEVE), ("POST", STREAM): Direct(stream, STREAM, streams=True)}
    direct |= {(method, ITEM): Direct(item, ITEM) for method in ("DELETE", "GET", "PUT")}
    direct[("POST", ITEMS)] = Direct(bulk, ITEMS, streams=True)
    direct[("POST", FRONTIER)] = Direct(frontier, FRONTIER)
    direct[("POST", SEARCH)] = Direct(search, SEARCH, max_body_bytes=settings.max_search_bytes)
    app.state.error_lines = Ration(write_left_out)
    edge_arguments = service.audit, service.metrics, settings, app.state.error_lines, for_customers(), service.tracer
    app.add_middleware(Edge, direct, *edge_arguments)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["DELETE", "GET", "HEAD", "POST", "PUT"],
            allow_headers=[
                "Authorization",
                "Content-Type",
                HEADER,
                USER,
                GROUP,
                "If-Match",
                "If-None-Match",
                "X-Request-Id",
                "traceparent",
            ],
            expose_headers=["ETag", "Server-Timing", "X-Request-Id", "Retry-After"],
        )
    problems.install(app)
    add_routes(app)
    documentation.add_pages(app)
    if settings.console:
        add_console(app)
    # FastAPI documents this way of changing the document.
    app.openapi = lambda: documentation.completed(describe(), documented_classes(), service.keys)  # type: ignore[method-assign]
    match_whole_paths(app)
    return app
