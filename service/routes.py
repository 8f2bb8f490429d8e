"""The routes: what is asked for, by which path, and how it is documented. The work is done elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Annotated, Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from fastapi import FastAPI, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.responses import Response
from starlette.types import Message

from espalier.items import ItemTable
from service.errors import ClientGone, NotJson
from service.middleware import MODEL, RETRIEVE
from service.monitoring import CONTENT_TYPE, Metrics
from service.registry import Entry, Registry
from service.retrieve import retrieve
from service.schemas import Completions, Model, Models, Problem, Readiness, RetrieveRequest, RetrieveResponse
from service.settings import Settings

SCANNED_ROWS = 1 << 16
"""Rows that completion looks at before it checks whether it has enough."""

Name = Annotated[str, Path(description="Name of a model.")]


@dataclass(frozen=True)
class Service:
    """What the routes work with; `app.state.service`."""

    settings: Settings
    metrics: Metrics
    registry: Registry


class JsonBodyRoute(APIRoute):
    """A route whose endpoint takes (request, body, began): the body is parsed and validated straight from its bytes.

    That refuses what JSON refuses, names the field of a NaN, and costs a third of the framework's own way, which parses, then validates.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[..., Coroutine[Any, Any, Response]] = self.endpoint

        async def handle(request: Request) -> Response:
            media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if media_type != "application/json":
                raise NotJson(f"Expected the content type application/json, got {media_type or 'none'}.")
            content = await request.body()
            began = time.perf_counter()
            try:
                body = RetrieveRequest.model_validate_json(content)
            except ValidationError as error:
                found = error.errors(include_url=False)
                raise RequestValidationError([{**item, "loc": ("body", *item["loc"])} for item in found]) from error
            return await endpoint(request, body, began)

        return handle


def add_routes(app: FastAPI) -> None:
    """Put every route on the application."""
    wrong: dict[int | str, dict[str, Any]] = {status: {"model": Problem, "description": text} for status, text in _PROBLEMS.items()}
    app.router.add_api_route(
        RETRIEVE,
        retrieve_items,
        methods=["POST"],
        route_class_override=JsonBodyRoute,
        responses={200: {"model": RetrieveResponse}, **wrong},
        tags=["retrieval"],
    )
    get: list[tuple[str, Callable[..., Any], str, dict[int | str, dict[str, Any]]]] = [
        ("/models", models, "models", {200: {"model": Models}}),
        ("/models/{name}", model, "models", {200: {"model": Model}, 404: wrong[404]}),
        ("/models/{name}/items", complete_items, "models", {200: {"model": Completions}, **{s: wrong[s] for s in (404, 422, 503)}}),
        ("/livez", livez, "operation", {}),
        ("/readyz", readyz, "operation", {200: {"model": Readiness}, 503: {"model": Readiness}}),
        ("/metrics", metrics, "operation", {200: {"content": {"text/plain": {}}}}),
    ]
    for path, endpoint, tag, responses in get:
        app.router.add_api_route(path, endpoint, methods=["GET"], responses=responses, tags=[tag])


async def retrieve_items(request: Request, body: RetrieveRequest, began: float) -> Response:
    """The top m items of each query, best first, and where the milliseconds went.

    Queries of concurrent requests share engine calls; `timing.batch` says how many did, `timing.ms_per_query` what each cost.
    """
    service = _service(request)
    chosen = service.registry.choose(body.model, body.version)
    request.scope[MODEL] = chosen.name
    async with _WhileConnected(request):
        retrieved = await retrieve(body, chosen, service.settings, began)
    timing = ", ".join(f"{stage};dur={ms}" for stage, ms in retrieved.stages_ms.items())
    return Response(retrieved.body, headers={"Server-Timing": timing}, media_type="application/json")


async def models(request: Request) -> Response:
    """Every model of the models folder, ready or not."""
    service = _service(request)
    return _json({"models": [_describe(entry, service.settings) for entry in service.registry.entries.values()]})


async def model(request: Request, name: Name) -> Response:
    """One model: state, version, engine, query kind, search defaults and limits, tree size, metrics at training."""
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


async def livez() -> Response:
    """The process runs."""
    return _json({"alive": True})


async def readyz(request: Request) -> Response:
    """200 once every model is loaded, verified and warm; 503 with the reasons before, after a failure, and while shutting down."""
    reasons = _service(request).registry.not_ready()
    return _json({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    return Response(_service(request).metrics.render(), media_type=CONTENT_TYPE)


class _WhileConnected:
    """Cancels what runs inside when the client hangs up, and raises ClientGone instead."""

    def __init__(self, request: Request) -> None:
        self._receive = request.receive

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        self._cancelled = False
        self._hung_up = asyncio.ensure_future(self._receive())
        self._hung_up.add_done_callback(self._cancel)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        task, self._task = self._task, None
        self._hung_up.cancel()
        if self._cancelled and task is not None and task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ClientGone("The client hung up before the answer.") from error

    def _cancel(self, hung_up: asyncio.Future[Message]) -> None:
        if self._task is not None and not hung_up.cancelled():
            self._cancelled = self._task.cancel()


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
        "versions": entry.versions,
        "max_queries": settings.max_queries,
    }
    if entry.loaded is not None:
        manifest = entry.loaded.bundle.manifest
        described |= {
            "engine": entry.loaded.engine.name,
            "algorithm": manifest.algorithm,
            **manifest.model_dump(mode="json", include={"query", "search", "tree", "metrics"}),
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
    404: "No such model, or the version is not loaded.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    422: "A value is wrong; `errors` lists the fields, the values and what was expected.",
    500: "Something unexpected; the log says what.",
    503: "The model is not ready, or the service is shutting down.",
}
