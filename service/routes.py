"""The routes: what is asked for, by which path, who may, and how it is documented. The work is done elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from fastapi import Depends, FastAPI, Path, Query, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.responses import Response

from espalier.items import ItemTable
from service.direct import LINES_TYPES
from service.middleware import RETRIEVE, STREAM
from service.monitoring import CONTENT_TYPE, Metrics
from service.registry import Entry, Registry
from service.schemas import (
    Completions,
    LoadRequest,
    Model,
    Models,
    Problem,
    Readiness,
    Removed,
    RemovedIds,
    RemovedRequest,
    RetrieveRequest,
    RetrieveResponse,
    VersionRequest,
)
from service.security import Keys, Role
from service.settings import Settings
from service.tracing import Tracer

SCANNED_ROWS = 1 << 16
"""Rows that completion looks at before it checks whether it has enough."""

Bearer = Annotated[
    HTTPAuthorizationCredentials | None,
    Security(HTTPBearer(auto_error=False, description="An API key; needed where the service has some.")),
]
Name = Annotated[str, Path(description="Name of a model.")]


@dataclass(frozen=True)
class Service:
    """What the routes work with; `app.state.service`."""

    settings: Settings
    metrics: Metrics
    registry: Registry
    keys: Keys
    tracer: Tracer | None = None


def add_routes(app: FastAPI) -> None:
    """Put every route on the application. The two that direct.py answers are here for their documentation and for other methods."""

    content: dict[str, Any] = {LINES_TYPES[0]: {"schema": {"type": "string"}}}

    def needs(role: Role) -> Sequence[Any]:
        def check(request: Request, _: Bearer) -> None:
            authorization = request.headers.get("authorization")
            _service(request).keys.check(role, None if authorization is None else authorization.encode("latin-1"))

        return [Depends(check)]

    def add(
        method: str, path: str, endpoint: Callable[..., Any], tag: str, answer: Any, statuses: Sequence[int], role: Role | None
    ) -> None:
        responses: dict[int | str, dict[str, Any]] = {200: answer if isinstance(answer, dict) else {"model": answer}}
        for status in (*((401, 403) if role else ()), *statuses):
            responses[status] = {"model": Problem, "description": _PROBLEMS[status]}
        if endpoint is readyz:
            responses[503] = {"model": Readiness, "description": "Not ready; `reasons` says why."}
        dependencies = needs(role) if role else None
        extra = {"requestBody": {"content": content, "required": True}} if path == STREAM else None
        app.router.add_api_route(
            path, endpoint, methods=[method], responses=responses, tags=[tag], dependencies=dependencies, openapi_extra=extra
        )

    lines: dict[str, Any] = {
        "content": {LINES_TYPES[0]: {"schema": {"type": "string"}}},
        "description": "One answer or problem document a line.",
    }
    add("POST", RETRIEVE, retrieve_items, "retrieval", RetrieveResponse, (404, 408, 413, 415, 422, 429, 500, 503, 504), "retrieve")
    add("POST", STREAM, retrieve_stream, "retrieval", lines, (408, 415), "retrieve")
    add("GET", "/models", models, "models", Models, (), "retrieve")
    add("GET", "/models/{name}", model, "models", Model, (404,), "retrieve")
    add("GET", "/models/{name}/items", complete_items, "models", Completions, (404, 422, 503), "retrieve")
    add("POST", "/models/{name}/load", load, "admin", Model, (404, 409, 422, 503), "admin")
    add("POST", "/models/{name}/unload", unload, "admin", Model, (404, 409, 422, 503), "admin")
    add("POST", "/models/{name}/default", set_default, "admin", Model, (404, 409, 422, 503), "admin")
    add("PUT", "/models/{name}/removed", set_removed, "admin", Removed, (404, 409, 422, 503), "admin")
    add("GET", "/models/{name}/removed", removed, "admin", RemovedIds, (404, 503), "admin")
    add("GET", "/livez", livez, "operation", {}, (), None)
    add("GET", "/readyz", readyz, "operation", Readiness, (), None)
    add("GET", "/metrics", metrics, "operation", {"content": {"text/plain": {}}}, (), None)


def retrieve_items(body: RetrieveRequest) -> None:
    """The top m items of each query, best first, and where the milliseconds went.

    Queries of concurrent requests share engine calls; `timing.batch` says how many did, `timing.ms_per_query` what each cost.
    """


def retrieve_stream() -> None:
    """Many requests in one: each line in is a body of `POST /retrieve`, each line out its answer or its problem document, in order.

    Lines are read only as fast as they are answered and the answers are taken; a wrong line costs one line.
    """


async def models(request: Request) -> Response:
    """Every model of the models folder, ready or not."""
    service = _service(request)
    return _json({"models": [_describe(entry, service.settings) for entry in service.registry.entries.values()]})


async def model(request: Request, name: Name) -> Response:
    """One model: state, versions, engine, query kind, search defaults and limits, tree size, metrics at training."""
    service = _service(request)
    return _json(_describe(service.registry.entry(name), service.settings))


async def complete_items(
    request: Request,
    name: Name,
    prefix: Annotated[str, Query(max_length=200, description="Start of an id or a title, in any case.")] = "",
    limit: Annotated[int, Query(ge=1, le=100, description="Most items to return.")] = 10,
) -> Response:
    """Items whose id or title starts with `prefix`, in catalogue order."""
    items = _service(request).registry.choose(name, None).bundle.items
    return _json({"items": await asyncio.to_thread(_complete, items, prefix, limit)})


async def load(request: Request, name: Name, body: LoadRequest) -> Response:
    """Open a version, verify and warm it beside what serves, and, unless told otherwise, make it the default in one step.

    A version that fails to load changes nothing.
    """
    service = _service(request)
    await service.registry.load(name, body.version, body.default)
    return _json(_describe(service.registry.entry(name), service.settings))


async def unload(request: Request, name: Name, body: VersionRequest) -> Response:
    """Drop a version that is not the default, once the requests that it has accepted are answered."""
    service = _service(request)
    await service.registry.unload(name, body.version)
    return _json(_describe(service.registry.entry(name), service.settings))


async def set_default(request: Request, name: Name, body: VersionRequest) -> Response:
    """Send requests without a version to this one, which is loaded first where it is not: pin a version, or roll back."""
    service = _service(request)
    await service.registry.set_default(name, body.version)
    return _json(_describe(service.registry.entry(name), service.settings))


async def set_removed(request: Request, name: Name, body: RemovedRequest) -> Response:
    """Items that no answer of this model may hold, in place of the former ones. Takes effect without a reload."""
    unknown = await _service(request).registry.set_removed(name, body.ids)
    return _json({"removed": len(set(body.ids)) - len(set(unknown)), "unknown": unknown})


async def removed(request: Request, name: Name) -> Response:
    """The standing exclusions."""
    return _json({"ids": _service(request).registry.removed(name)})


async def livez() -> Response:
    """The process runs."""
    return _json({"alive": True})


async def readyz(request: Request) -> Response:
    """200 once every model is loaded, verified and warm; 503 with the reasons before, after a failure, and while shutting down."""
    reasons = _service(request).registry.not_ready()
    return _json({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    return Response(await asyncio.to_thread(_service(request).metrics.render), media_type=CONTENT_TYPE)


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _json(document: object, status: int = 200) -> Response:
    return Response(orjson.dumps(document), status, media_type="application/json")


def _describe(entry: Entry, settings: Settings) -> dict[str, Any]:
    described: dict[str, Any] = {
        "name": entry.name,
        "state": entry.state,
        "reason": entry.reason,
        "version": entry.version,
        "versions": [info._asdict() for info in entry.states()],
        "max_queries": settings.max_queries,
    }
    if entry.loaded is not None:
        manifest = entry.loaded.bundle.manifest
        described |= {
            "engine": entry.loaded.engine.name,
            "algorithm": manifest.algorithm,
            **manifest.model_dump(mode="json", include={"query", "search", "tree", "ranker", "metrics"}),
            "fields": entry.loaded.bundle.items.fields,
        }
    return described


def _complete(items: ItemTable, prefix: str, limit: int) -> list[dict[str, str | None]]:
    found: list[dict[str, str | None]] = []
    for id_name, title in _slices(items):
        matches = pc.starts_with(id_name, prefix, ignore_case=True)
        if title is not None:
            matches = pc.or_(matches, pc.fill_null(pc.starts_with(title, prefix, ignore_case=True), False))
        at = pc.indices_nonzero(matches)[: limit - len(found)]
        titles = [None] * len(at) if title is None else title.take(at).to_pylist()
        found += [{"id": i, "title": t} for i, t in zip(id_name.take(at).to_pylist(), titles, strict=True)]
        if len(found) == limit:
            break
    return found


def _slices(items: ItemTable) -> Iterator[tuple[pa.ChunkedArray, pa.ChunkedArray | None]]:
    ids, titles = items.column("id"), None
    if "title" in items.fields and items.column("title").type in (pa.string(), pa.large_string()):
        titles = items.column("title")
    for begin in range(0, len(items), SCANNED_ROWS):
        yield ids.slice(begin, SCANNED_ROWS), None if titles is None else titles.slice(begin, SCANNED_ROWS)


_PROBLEMS = {
    401: "No API key, or one that is not known.",
    403: "The key's role does not reach here, or the admin routes are off.",
    404: "No such model, or the version is not loaded.",
    408: "The body did not arrive in time.",
    409: "The models' state does not allow it; `detail` says why.",
    413: "The body is too large.",
    415: "The content type is another than the route takes.",
    422: "A value is wrong; `errors` lists the fields, the values and what was expected.",
    429: "Too many queries wait already; Retry-After says when to try again.",
    500: "Something unexpected; the log says what.",
    503: "The model is not ready, or the service is shutting down.",
    504: "The deadline passed before the answer was there.",
}
