"""How a model fared in the last 24 hours, and what customers asked last. Knows requests and answers, not what the numbers mean."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request
from starlette.responses import Response

from service.http.console_routes import Version
from service.http.dependencies import Name, Service, service_of
from service.settings import MAX_SAMPLES
from service.watch import query_samples
from service.watch.health import as_json


async def health(request: Request, name: Name) -> Response:
    """The last 24 hours of a model, all workers together: a number a minute of each series, alerts, events, and unknown ids.

    The last number of each series is of now. Null is what is not known. `p50_ms` and `p99_ms` are those of the last five minutes.
    """
    service = service_of(request)
    version = _default_version(service, name)
    counts = service.asked.unknown.counts()

    def made() -> bytes:
        return as_json(name, version, service.recorder.history(name), service.recorder.unknown(name, counts))

    return Response(await service.scans.run(lambda _: made()), media_type="application/json")


async def samples(
    request: Request,
    name: Name,
    version: Version = None,
    limit: Annotated[int, Query(ge=1, le=MAX_SAMPLES, description="Most queries to return.")] = 100,
) -> Response:
    """Customers' most recent queries, newest first, of the worker that answers. None unless `ESPALIER_SAMPLE_QUERIES` says how many."""
    service = service_of(request)
    service.registry.entry(name)
    kept = service.asked.samples
    return Response(query_samples.as_json(kept.of(name, limit, version), kept.most), media_type="application/json")


def _default_version(service: Service, name: str) -> int | None:
    """None where none is ready. Raises ModelNotFound. (The version is not kept.)"""
    loaded = service.registry.entry(name).loaded
    return None if loaded is None else loaded.version
