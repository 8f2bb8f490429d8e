"""The parts of the service, as routes find them, and what routes share: documents as answers, a model described."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import orjson
from fastapi import Path, Request
from starlette.responses import Response

from ..http.api_keys import Keys
from ..http.memory_budget import Budget
from ..http.middleware import RequestInfo
from ..http.single_flight import SingleFlight
from ..models.registry import Registry
from ..models.registry_entry import Entry
from ..retrieval.scans import Scans
from ..retrieval.typical_values import TypicalValues
from ..settings import Settings
from ..watch.audit import Audit
from ..watch.metrics import Metrics
from ..watch.query_samples import Asked
from ..watch.recorder import Recorder
from ..watch.tracing import Tracer

FEEDS = 4
"""Answers of feeds of changes that are made or sent at a time: each may have megabytes."""
Name = Annotated[str, Path(description="Name of a model.")]


@dataclass(frozen=True)
class Service:
    """What the routes work with; `app.state.service`."""

    settings: Settings
    metrics: Metrics
    registry: Registry
    keys: Keys
    audit: Audit
    completions: Scans
    scans: Scans
    exposition: SingleFlight[bytes]
    asked: Asked
    recorder: Recorder
    tracer: Tracer | None = None
    typical_values: TypicalValues = field(default_factory=TypicalValues)
    feeds: Budget = field(default_factory=lambda: Budget(FEEDS, 0))


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def info_of(request: Request) -> RequestInfo:
    info: RequestInfo = request.scope[RequestInfo.KEY]
    return info


def as_json(document: object, status: int = 200) -> Response:
    return Response(orjson.dumps(document), status, media_type="application/json")


def candidate_of(entry: Entry) -> dict[str, Any] | None:
    """The version of a model that is tried on some requests."""
    candidate = None if entry.serving is None else entry.serving.candidate
    return None if candidate is None else candidate.model_dump(mode="json")


def describe(entry: Entry, service: Service) -> dict[str, Any]:
    described: dict[str, Any] = {
        "name": entry.name,
        "state": entry.state,
        "reason": entry.reason,
        "version": entry.version,
        "versions": [info._asdict() for info in entry.states()],
        "candidate": candidate_of(entry),
        "max_queries": service.settings.max_queries,
    }
    if entry.loaded is not None:
        manifest = entry.loaded.bundle.manifest
        described |= {
            "engine": entry.loaded.engine.name,
            "algorithm": manifest.algorithm,
            **manifest.model_dump(mode="json", include={"query", "search", "tree", "ranker", "metrics"}),
            "trees": 1 + len(manifest.trees),
            "tail": None if manifest.tail is None else manifest.tail.model_dump(mode="json"),
            "stacking": None if manifest.stacking is None else manifest.stacking.model_dump(mode="json"),
            "fields": entry.loaded.live.items.fields,
        }
    waits = service.registry.waits_for(entry.name)
    described["store"] = None if waits is None else asdict(waits)
    described["live"] = asdict(service.registry.catalogues.of(entry.name).status())
    return described
