"""The objects that routes share, and functions that several routes use: JSON answers, the description of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import Depends, Path, Request
from starlette.responses import Response

from ..http.api_keys import Keys
from ..http.memory_budget import Budget, Reservation
from ..http.middleware import RequestInfo
from ..http.request_bodies import JSON_TYPES, Body, check_head, parse_body, read_body, validate
from ..http.single_flight import SingleFlight
from ..models.loading import EngineSource
from ..models.registry import Registry
from ..models.registry_entry import Entry
from ..retrieval.scans import Scans
from ..retrieval.typical_values import TypicalValues
from ..settings import Settings
from ..watch.audit import Audit
from ..watch.metrics import Metrics
from ..watch.query_samples import QuerySamples
from ..watch.recorder import Recorder
from ..watch.tracing import Tracer
from ..watch.unknown_ids import UnknownIds

FEEDS = 4
"""Most answers of the feed of changes at a time. Each may have megabytes."""
Name = Annotated[str, Path(description="Name of a model.")]


class Service:
    """The objects that routes share; `app.state.service`. Raises BundleNotFound if the models folder has no model.

    bodies  memory budget of admin requests, which share that of one largest body
    """

    def __init__(self, settings: Settings, engines: EngineSource | None, metrics: Metrics) -> None:
        self.settings, self.metrics = settings, metrics
        self.keys, self.registry, self.audit = Keys(settings), Registry(settings, metrics, engines), Audit(metrics)
        self.tracer = Tracer(settings.otlp_endpoint) if settings.otlp_endpoint else None
        timeout_s = settings.timeout_ms / 1e3
        self.completions, self.scans, self.feeds = Scans("completions", timeout_s), Scans("scans", timeout_s), Budget(FEEDS, 0)
        self.bodies = Budget(settings.max_body_bytes, 0)
        self.typical_values, self.exposition = TypicalValues(), SingleFlight(metrics.render)
        self.unknown_ids, self.samples = UnknownIds(), QuerySamples(settings.sample_queries)
        self.registry.catalogues.on_erasure = self.samples.forget  # a query does not say whose it is
        self.recorder = Recorder(metrics.samples, lambda: [*self.registry.entries], self.unknown_ids, settings.run_folder)


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def info_of(request: Request) -> RequestInfo:
    info: RequestInfo = request.scope[RequestInfo.KEY]
    return info


def body_of(kind: type[Body]) -> Any:
    """The dependency of an admin route that reads and checks its body, after the route's other dependencies."""

    async def read(request: Request) -> Body:
        service = service_of(request)
        check_head(request.scope, info_of(request).content_type, JSON_TYPES)
        with Reservation(service.bodies) as memory:
            content = await read_body(request.receive, service.settings.body_timeout_s, memory)
            return await parse_body(content, partial(validate, kind))

    return Depends(read)


def as_json(document: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(document), status, headers, media_type="application/json")


def candidate_of(entry: Entry) -> dict[str, Any] | None:
    """The JSON of a model's candidate; None without a trial."""
    candidate = None if entry.serving is None else entry.serving.candidate
    return None if candidate is None else candidate.model_dump(mode="json")


def describe(entry: Entry, service: Service) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": entry.name,
        "state": entry.state,
        "reason": entry.reason,
        "version": entry.version,
        "versions": [asdict(info) for info in entry.states()],
        "candidate": candidate_of(entry),
        "max_queries": service.settings.max_queries,
    }
    if entry.loaded is not None:
        manifest = entry.loaded.bundle.manifest
        document |= {
            "engine": entry.loaded.engine.name,
            "algorithm": manifest.algorithm,
            **manifest.model_dump(mode="json", include={"query", "search", "tree", "ranker", "metrics"}),
            "trees": 1 + len(manifest.trees),
            "tail": None if manifest.tail is None else manifest.tail.model_dump(mode="json"),
            "stacking": None if manifest.stacking is None else manifest.stacking.model_dump(mode="json"),
            "fields": entry.loaded.live.items.fields,
        }
    store_wait = service.registry.waits_for(entry.name)
    document["store"] = None if store_wait is None else asdict(store_wait)
    document["live"] = asdict(service.registry.catalogue(entry.name).status())
    return document
