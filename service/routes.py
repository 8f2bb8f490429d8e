"""The routes: what is asked for, by which path, who may, and how it is documented. The work is done elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar
from urllib.parse import unquote_to_bytes

import orjson
from fastapi import Depends, FastAPI, Header, Path, Query, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.convertors import Convertor, register_url_convertor
from starlette.responses import Response

from espalier.errors import InvalidInput
from service.audit import Audit, Change, origin
from service.completion import Completer
from service.direct import LINES_TYPES
from service.errors import Denied
from service.middleware import RETRIEVE, STREAM, Seen
from service.monitoring import CONTENT_TYPE, Metrics
from service.registry import Edited, Entry, Registry, Served
from service.removals import Condition, Ids, check_id, check_list, etag, matches, summary, with_id, without_id
from service.schemas import (
    Completions,
    LoadRequest,
    Model,
    Models,
    Problem,
    Readiness,
    Removed,
    RemovedId,
    RemovedIds,
    RemovedRequest,
    RetrieveRequest,
    RetrieveResponse,
    VersionRequest,
)
from service.security import Keys, Role
from service.settings import Settings
from service.sharing import Shared
from service.tracing import Tracer

T = TypeVar("T")

Bearer = Annotated[
    HTTPAuthorizationCredentials | None,
    Security(HTTPBearer(auto_error=False, description="An API key; needed where the service has some.")),
]
Name = Annotated[str, Path(description="Name of a model.")]
ItemId = Annotated[str, Path(alias="id", description="Id of an item, percent-encoded; it may hold `/`.")]
IfMatch = Annotated[
    str | None, Header(description="Entity tags: the change is made if the list is one that has one of them, or for `*`; else 412.")
]
IfNoneMatch = Annotated[
    str | None, Header(description="Entity tags: the change is made unless the list has one of them; never for `*`. Else 412.")
]
IfChanged = Annotated[
    str | None, Header(alias="If-None-Match", description="Entity tags: the answer is 304 where the list has one of them.")
]


class _ItemIds(Convertor[str]):
    """The rest of a path, whatever is in it; the framework's own stops at a line break."""

    regex = "(?s:.+)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("item_id", _ItemIds())


@dataclass(frozen=True)
class Service:
    """What the routes work with; `app.state.service`."""

    settings: Settings
    metrics: Metrics
    registry: Registry
    keys: Keys
    audit: Audit
    completer: Completer
    exposition: Shared[bytes]
    tracer: Tracer | None = None


def add_routes(app: FastAPI) -> None:
    """Put every route on the application. The two that direct.py answers are here for their documentation and for other methods."""

    content: dict[str, Any] = {LINES_TYPES[0]: {"schema": {"type": "string"}}}

    def needs(role: Role) -> Sequence[Any]:
        async def check(request: Request, _: Bearer) -> None:
            service, seen = _service(request), _seen(request)
            try:
                seen.key = service.keys.check(role, seen.authorization)
            except Denied as error:
                service.audit.denied(request.scope, seen.request_id.decode(), error)
                raise

        return [Depends(check)]

    def add(
        method: str, path: str, endpoint: Callable[..., Any], tag: str, answer: Any, statuses: Sequence[int], role: Role | None
    ) -> None:
        responses: dict[int | str, dict[str, Any]] = {200: answer if isinstance(answer, dict) else {"model": answer}}
        if answer in (Removed, RemovedId, RemovedIds):
            responses[200]["headers"] = _ETAG
        for status in (*_DENIED[role], *statuses):
            responses[status] = {"model": Problem, "description": _PROBLEMS[status]}
        if endpoint is removed:
            responses[304] = {"description": "The list is the one that If-None-Match names.", "headers": _ETAG}
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
    add("GET", "/models/{name}/items", complete_items, "models", Completions, (404, 422, 429, 503, 504), "retrieve")
    changed = 404, 408, 409, 413, 415, 422, 503
    add("POST", "/models/{name}/load", load, "admin", Model, changed, "admin")
    add("POST", "/models/{name}/unload", unload, "admin", Model, changed, "admin")
    add("POST", "/models/{name}/default", set_default, "admin", Model, changed, "admin")
    add("PUT", "/models/{name}/removed", set_removed, "admin", Removed, (*changed, 412), "admin")
    add("GET", "/models/{name}/removed", removed, "admin", RemovedIds, (404,), "admin")
    add("PUT", "/models/{name}/removed/{id:item_id}", remove_item, "admin", RemovedId, (404, 409, 412, 422, 503), "admin")
    add("DELETE", "/models/{name}/removed/{id:item_id}", restore_item, "admin", RemovedId, (404, 409, 412, 422, 503), "admin")
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
    service = _service(request)
    items = service.registry.choose(name, None).bundle.items
    return _json({"items": await service.completer.complete(items, prefix, limit)})


async def load(request: Request, name: Name, body: LoadRequest) -> Response:
    """Open a version, verify and warm it beside what serves, and, unless told otherwise, make it the default in one step.

    A version that fails to load changes nothing.
    """
    service = _service(request)
    change = service.registry.load(name, body.version, body.default)
    await _audited(request, "load", name, change, _versions, version=body.version)
    return _json(_describe(service.registry.entry(name), service.settings))


async def unload(request: Request, name: Name, body: VersionRequest) -> Response:
    """Drop a version that is not the default, once the requests that it has accepted are answered."""
    service = _service(request)
    await _audited(request, "unload", name, service.registry.unload(name, body.version), _versions, version=body.version)
    return _json(_describe(service.registry.entry(name), service.settings))


async def set_default(request: Request, name: Name, body: VersionRequest) -> Response:
    """Send requests without a version to this one, which is loaded first where it is not: pin a version, or roll back."""
    service = _service(request)
    await _audited(request, "default", name, service.registry.set_default(name, body.version), _versions, version=body.version)
    return _json(_describe(service.registry.entry(name), service.settings))


async def set_removed(
    request: Request, name: Name, body: RemovedRequest, if_match: IfMatch = None, if_none_match: IfNoneMatch = None
) -> Response:
    """Items that no answer of this model may hold, in place of the former ones. Takes effect without a reload.

    With the ETag of what was read in `If-Match`, nobody else's change can be lost: 412 says that there was one.
    """
    service = _service(request)
    listed = check_list(body.ids, service.settings.max_removed)
    condition = Condition(if_match, if_none_match)

    def replace(before: Ids) -> Ids:
        condition.check(before)
        return listed

    change = service.registry.edit_removed(name, replace, whole=not condition.given)
    await _audited(request, "set_removed", name, change, _lists)
    unknown = await service.registry.unknown(name, listed)
    return await _tagged({"removed": len(listed) - len(unknown), "unknown": unknown}, listed)


async def removed(request: Request, name: Name, if_none_match: IfChanged = None) -> Response:
    """The standing exclusions."""
    ids = _service(request).registry.removed(name)
    tag = await asyncio.to_thread(etag, ids)
    if if_none_match is not None and matches(if_none_match, tag):
        return Response(None, 304, {"ETag": tag})
    return await _tagged({"ids": ids}, ids)


async def remove_item(
    request: Request, name: Name, item_id: ItemId, if_match: IfMatch = None, if_none_match: IfNoneMatch = None
) -> Response:
    """One more item that no answer of this model may hold; nothing changes where it is one already. There is no body."""
    most = _service(request).settings.max_removed
    condition = Condition(if_match, if_none_match)
    return await _edit_item(request, "remove_item", name, item_id, lambda ids: with_id(ids, item_id, most), condition)


async def restore_item(
    request: Request, name: Name, item_id: ItemId, if_match: IfMatch = None, if_none_match: IfNoneMatch = None
) -> Response:
    """Let answers hold an item again; nothing changes where they may."""
    condition = Condition(if_match, if_none_match)
    return await _edit_item(request, "restore_item", name, item_id, lambda ids: without_id(ids, item_id), condition)


async def livez() -> Response:
    """The process runs."""
    return _json({"alive": True})


async def readyz(request: Request) -> Response:
    """200 once every model is loaded, verified and warm; 503 with the reasons before, after a failure, and while shutting down."""
    reasons = _service(request).registry.not_ready()
    return _json({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


async def metrics(request: Request) -> Response:
    """Prometheus metrics. Those who ask at the same time get the same answer."""
    return Response(await _service(request).exposition.get(), media_type=CONTENT_TYPE)


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _seen(request: Request) -> Seen:
    seen: Seen = request.scope[Seen.KEY]
    return seen


async def _edit_item(
    request: Request, action: str, name: str, item_id: str, edit: Callable[[Ids], Ids | None], condition: Condition
) -> Response:
    """Change the standing exclusions by the item that the path names."""
    registry = _service(request).registry
    _check_item(request, item_id)

    def edit_item(before: Ids) -> Ids | None:
        condition.check(before)
        return edit(before)

    edited = await _audited(request, action, name, registry.edit_removed(name, edit_item), _lists, id=item_id)
    unknown = await registry.unknown(name, (item_id,))
    answer = {
        "id": item_id,
        "removed": action == "remove_item",
        "changed": edited.before != edited.after,
        "known": not unknown,
        "total": len(edited.after),
    }
    return await _tagged(answer, edited.after)


def _check_item(request: Request, item_id: str) -> None:
    """Raise InvalidInput for an id that no item can have, or that was not sent in UTF-8: the server has replaced what was none."""
    try:
        unquote_to_bytes(request.scope.get("raw_path") or b"").decode()
    except UnicodeDecodeError:
        raise InvalidInput("id", item_id, "an item id in UTF-8, percent-encoded") from None
    check_id(item_id, "id")


async def _audited(
    request: Request, action: str, name: str, change: Coroutine[Any, Any, T], described: Callable[[T], Change], **what: Any
) -> T:
    seen = _seen(request)
    by = origin(request.scope, seen.request_id.decode(), seen.key)
    return await _service(request).audit.change(action, name, by, change, described, **what)


def _versions(change: tuple[Served, Served]) -> Change:
    before, after = change
    return Change(before._asdict(), after._asdict())


def _lists(change: Edited) -> Change:
    return Change(summary(change.before), summary(change.after))


async def _tagged(document: dict[str, Any], ids: Sequence[str]) -> Response:
    """An answer about a list of removed ids."""
    tag = await asyncio.to_thread(etag, ids)
    return Response(orjson.dumps(document | {"etag": tag}), headers={"ETag": tag}, media_type="application/json")


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


_DENIED: dict[Role | None, Sequence[int]] = {None: (), "retrieve": (401,), "admin": (401, 403)}
_ETAG = {"ETag": {"description": "Of the list of removed ids.", "required": True, "schema": {"type": "string"}}}
_PROBLEMS = {
    401: "No API key, or one that is not known.",
    403: "The key's role does not reach here, or the admin routes are off.",
    404: "No such model, or the version is not loaded.",
    408: "The body did not arrive in time.",
    409: "The models' state does not allow it; `detail` says why.",
    412: "The list of removed ids is another one than If-Match or If-None-Match says; ETag has its tag.",
    413: "The body is too large.",
    415: "The content type is another than the route takes.",
    422: "A value is wrong; `errors` lists the fields, the values and what was expected.",
    429: "Too many requests wait already; Retry-After says when to try again.",
    500: "Something unexpected; the log says what.",
    503: "The model is not ready, or the service is shutting down.",
    504: "The deadline passed before the answer was there.",
}
