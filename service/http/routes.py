"""The table of routes: method, path, role and documentation of each. admin.py has the functions of the admin routes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request, params
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route, compile_path

from espalier.shards.messages import MEDIA_TYPE

from ..batching.priority import HEADER
from ..http import admin, console_routes, schemas
from ..http.api_keys import Access
from ..http.dependencies import Name, as_json, describe, info_of, service_of
from ..http.documentation import ACCESS, NEEDS_KEY, SCHEMA_OF
from ..http.frontier_route import FrontierRequest
from ..http.item_bodies import ItemId
from ..http.item_schemas import MAX_SOURCE_VERSION, ChangesAnswer, LiveItem, PutRequest
from ..http.live_routes import changes
from ..http.middleware import FRONTIER, ITEMS, RETRIEVE, SEARCH, STREAM
from ..http.request_bodies import LINES_TYPES, parameters_of
from ..http.shard_routes import Shards, search_shard, shards
from ..live.catalogue_types import ItemOutcome
from ..retrieval.completion import completions
from ..retrieval.schemas import RetrieveRequest, RetrieveResponse
from ..retrieval.trial import GROUP, USER
from ..watch.metrics import CONTENT_TYPE

ITEM_PATH = "/models/{name}/items/{id:item_id}"
ItemIfMatch = Annotated[
    str | None, Header(alias="If-Match", description="Entity tags: the item must have one of them, or with `*` any; else 412.")
]
ItemIfNoneMatch = Annotated[
    str | None, Header(alias="If-None-Match", description="Entity tags that the item must not have; with `*` there must be none. Else 412.")
]
ItemIfChanged = Annotated[
    str | None, Header(alias="If-None-Match", description="Entity tags: the answer is 304 if the item has one of them.")
]

Priority = Annotated[
    Literal["background"] | None,
    Header(alias=HEADER, description="`background`: the request waits behind all others and does not count in customers' metrics."),
]
User = Annotated[
    str | None, Header(alias=USER, description="The user of the request. During a trial, all requests of a user go to the same version.")
]
Group = Annotated[str | None, Header(alias=GROUP, description="The group of the request. A candidate may answer certain groups.")]


class _Route(NamedTuple):
    """One route.

    answer           class or OpenAPI response of status 200; also that of other_successes
    statuses         statuses of its problem documents, except those about keys
    """

    method: str
    path: str
    function: Callable[..., Any]
    tag: str
    answer: Any
    statuses: tuple[int, ...] = ()
    access: Access | None = None
    other_successes: tuple[int, ...] = ()


def add_routes(app: FastAPI) -> None:
    """Add every route to the application. Requests to those of middleware.py never get here; these are added for the documentation."""
    app.router.routes += _framework_routes()


@cache
def _framework_routes() -> Sequence[BaseRoute]:
    """The framework's routes. They refer to no application, so all applications of a process share them."""
    router = APIRouter()
    for route in _routes():
        router.add_api_route(
            route.path,
            route.function,
            methods=[route.method],
            responses=_responses(route),
            tags=[route.tag],
            dependencies=[*_key_check(route.access), *_parameter_check(route.function)] if route.access else None,
            openapi_extra=_openapi_extra(route),
        )
    return router.routes


def _openapi_extra(route: _Route) -> dict[str, Any]:
    """Documentation that a route's function cannot express: the key that it needs, and a body that has no class."""
    extra: dict[str, Any] = {"security": NEEDS_KEY, ACCESS: route.access} if route.access else {}
    content = {id(_ANSWERED_LINES): _LINES, id(_ANSWERED_SEARCH): _MESSAGE}.get(id(route.answer))
    if (body := _admin_body(route)) is not None:
        content = _content_of(body)["content"]
    return extra if content is None else extra | {"requestBody": {"content": content, "required": True}}


def _admin_body(route: _Route) -> type[BaseModel] | None:
    """The class of the body that an admin route reads by `body_of`, which the framework cannot document."""
    return get_type_hints(route.function).get("body") if route.access == "admin" else None


def _routes() -> Sequence[_Route]:
    retrieval, item = (404, 408, 413, 415, 422, 429, 500, 503, 504), (404, 409, 412, 422, 503)
    scan = (404, 422, 429, 503, 504)
    change, write = (404, 408, 409, 413, 415, 422, 503), (404, 409, 412, 422, 429, 500, 503)
    return (
        _Route("POST", RETRIEVE, retrieve_items, "retrieval", RetrieveResponse, retrieval, "retrieve"),
        _Route("POST", STREAM, retrieve_stream, "retrieval", _ANSWERED_LINES, (408, 415), "retrieve"),
        _Route("GET", "/models", models, "models", schemas.Models, (), "retrieve"),
        _Route("GET", "/models/{name}", model, "models", schemas.Model, (404,), "retrieve"),
        _Route("GET", "/models/{name}/items", complete_items, "models", schemas.Completions, scan, "retrieve"),
        _Route("GET", "/models/{name}/facets", console_routes.facets, "models", schemas.Facets, scan, "retrieve"),
        _Route("GET", "/models/{name}/tree", console_routes.tree_path, "models", schemas.ItemPath, scan, "retrieve"),
        _Route("GET", "/models/{name}/tree/{node}", console_routes.tree_node, "models", schemas.Node, scan, "retrieve"),
        _Route("GET", "/models/{name}/heldout", console_routes.heldout, "quality", schemas.HeldOutQueries, scan, "private"),
        _Route("GET", "/models/{name}/health", console_routes.health, "quality", schemas.Health, scan, "private"),
        _Route("GET", "/models/{name}/samples", console_routes.samples, "quality", schemas.Samples, (404, 422), "admin"),
        _Route("POST", FRONTIER, frontier, "quality", _ANSWERED_BEAMS, (404, 408, 409, 413, 415, 422, 429, 503), "private"),
        _Route("PUT", ITEM_PATH, put_item, "items", ItemOutcome, (408, 413, 415, *write, 507), "write", (201, 202)),
        _Route("GET", ITEM_PATH, get_item, "items", LiveItem, (404, 422, 500, 503), "write"),
        _Route("DELETE", ITEM_PATH, delete_item, "items", ItemOutcome, write, "write", (202,)),
        _Route("POST", ITEMS, put_items, "items", _ANSWERED_LINES, (404, 408, 415, 429, 503), "write"),
        _Route("GET", "/models/{name}/changes", changes, "items", ChangesAnswer, (404, 410, 422, 429, 503), "admin"),
        _Route("POST", "/models/{name}/load", admin.load, "admin", schemas.Model, change, "admin"),
        _Route("POST", "/models/{name}/unload", admin.unload, "admin", schemas.Model, change, "admin"),
        _Route("POST", "/models/{name}/default", admin.set_default, "admin", schemas.Model, change, "admin"),
        _Route("PUT", "/models/{name}/candidate", admin.set_candidate, "admin", schemas.Model, change, "admin"),
        _Route("DELETE", "/models/{name}/candidate", admin.drop_candidate, "admin", schemas.Model, (404, 409, 503), "admin"),
        _Route("GET", "/models/{name}/candidate", admin.trial, "admin", schemas.Trial, (404,), "admin"),
        _Route("PUT", "/models/{name}/removed", admin.set_removed, "admin", schemas.Removed, (*change, 412), "admin", (202,)),
        _Route("GET", "/models/{name}/removed", admin.removed, "admin", schemas.RemovedIds, (404,), "admin"),
        _Route("PUT", "/models/{name}/removed/{id:item_id}", admin.remove_item, "admin", schemas.RemovedId, item, "admin", (202,)),
        _Route("DELETE", "/models/{name}/removed/{id:item_id}", admin.restore_item, "admin", schemas.RemovedId, item, "admin", (202,)),
        _Route("POST", SEARCH, search_shard, "shards", _ANSWERED_SEARCH, (408, 409, 410, 413, 415, 422, 429, 500, 503, 504), "internal"),
        _Route("GET", "/internal/shards", shards, "shards", Shards, (), "internal"),
        _Route("GET", "/livez", livez, "operation", {}),
        _Route("GET", "/readyz", readyz, "operation", schemas.Readiness),
        _Route("GET", "/metrics", metrics, "operation", {"content": {"text/plain": {}}}),
    )


@cache
def for_customers() -> re.Pattern[str]:
    """The paths that the customers' address answers if operators have an address of their own: /livez, /readyz, and the routes of all roles
    except admin and private. Paths that are not in this table, such as pages for people, are for operators."""
    paths = [route.path for route in _routes() if route.access in _CUSTOMERS or route.path in _PROBES]
    return re.compile("|".join(re.sub(r"\?P<\w+>", "?:", compile_path(path)[0].pattern[1:-1]) for path in paths))  # without ^ and $


_CUSTOMERS: tuple[Access, ...] = ("retrieve", "write", "internal")
_PROBES = ("/livez", "/readyz")


def _responses(route: _Route) -> dict[int | str, dict[str, Any]]:
    answer = route.answer if isinstance(route.answer, dict) else _content_of(route.answer)
    responses: dict[int | str, dict[str, Any]] = {200: {**answer}}
    for status in route.other_successes:
        responses[status] = {"description": _OTHER_SUCCESSES[status], **answer}
    for status in (200, *route.other_successes):
        if route.answer in (schemas.Removed, schemas.RemovedId, schemas.RemovedIds):
            responses[status]["headers"] = _ETAG
        elif route.answer in (ItemOutcome, LiveItem):
            responses[status]["headers"] = _ITEM_ETAG
    for status in (*UNREADABLE, *((401, 403) if route.access else ()), *route.statuses):
        responses[status] = {"description": _PROBLEMS[status], **_content_of(schemas.Problem, "application/problem+json")}
    if route.function is search_shard:
        digests = {"schema": {"type": "array", "items": {"type": "string"}}}
        responses[409] = {"description": "The digests of masks that the shard does not hold.", "content": {"application/json": digests}}
    if route.function is admin.removed:
        responses[304] = {"description": "The list is the one that If-None-Match names.", "headers": _ETAG}
    if route.function is get_item:
        responses[304] = {"description": "The item is the one that If-None-Match names.", "headers": _ITEM_ETAG}
    if route.function is readyz:
        responses[503] = {"description": "Not ready; `reasons` says why.", **_content_of(schemas.Readiness)}
    return responses


def _content_of(model: type[Any], media_type: str = "application/json") -> dict[str, Any]:
    """The documented content of an answer: a reference to the schema of the class, which documentation.py adds once.

    If it got the class instead, the framework would build a validator for each status of each route, which would take most of the start.
    """
    return {"content": {media_type: {"schema": {"$ref": SCHEMA_OF.format(model=model.__name__)}}}}


def documented_classes() -> Sequence[tuple[type[Any], JsonSchemaMode]]:
    """The classes that the documentation refers to: those of answers, and those of admin bodies."""
    answers = (schemas.Problem, *(route.answer for route in _routes() if not isinstance(route.answer, dict)))
    bodies = [body for route in _routes() if (body := _admin_body(route)) is not None]
    return [*((answer, "serialization") for answer in answers), *((body, "validation") for body in bodies)]


def _key_check(access: Access) -> Sequence[Any]:
    """The dependency that checks the key of a request, and then that there is the model that its path names. An admin may name one that is
    new in the models folder.
    """

    async def check(request: Request) -> None:
        service, info, name = service_of(request), info_of(request), request.path_params.get("name")
        info.key = service.keys.check(access, info.authorization)
        service.keys.admit(info.key, name, "admin" if access == "private" else access)
        if name is not None and not (access == "admin" and service.registry.changes.is_on_disk(name)):
            service.registry.entry(name)

    return [Depends(check)]


def _parameter_check(function: Callable[..., Any]) -> Sequence[Any]:
    """The dependency that refuses parameters that a route's function does not have; none for functions without any: probes and scrapers may
    add some.
    """
    hints = get_type_hints(function, include_extras=True)
    names = [name for name, hint in hints.items() if any(isinstance(mark, params.Query) for mark in getattr(hint, "__metadata__", ()))]

    async def check(request: Request) -> None:  # the framework would run another function in a thread
        parameters_of(request.scope, names)

    return [Depends(check)] if names else []


def retrieve_items(body: RetrieveRequest, priority: Priority = None, user: User = None, group: Group = None) -> None:
    """The top m items of each query, best first, and the milliseconds of each stage.

    Queries of concurrent requests share engine calls: `timing.batch` is their number, `timing.ms_per_query` the engine time of each.
    """


def retrieve_stream(user: User = None, group: Group = None) -> None:
    """Many requests in one: each line is a body of `POST /retrieve`. For each, the answer has one line, in order: an answer or a problem.

    Lines are read only as fast as they are answered and the client reads the answers. A faulty line does not affect other lines.
    """


async def models(request: Request) -> Response:
    """Every model of the models folder, ready or not."""
    service = service_of(request)
    models = None if (key := info_of(request).key) is None else key.models
    documents = [describe(entry, service) for name, entry in service.registry.entries.items() if models is None or name in models]
    return as_json({"models": documents, "keys": sorted(service.keys.roles)})


async def model(request: Request, name: Name) -> Response:
    """One model: state, versions, engine, query kind, search defaults and limits, tree size, metrics at training."""
    service = service_of(request)
    return as_json(describe(service.registry.entry(name), service))


async def complete_items(
    request: Request,
    name: Name,
    prefix: Annotated[str, Query(max_length=200, description="Start of an id or a title; upper and lower case are the same.")] = "",
    limit: Annotated[int, Query(ge=1, le=100, description="Most items to return.")] = 10,
) -> Response:
    """Items whose id or title starts with `prefix`, in catalogue order."""
    service = service_of(request)
    model = service.registry.choose(name, None)
    items = await service.completions.run(lambda check: completions(model.bundle.items, model.live.state.table, prefix, limit, check))
    return as_json({"items": items})


def put_item(name: Name, item_id: ItemId, body: PutRequest, if_match: ItemIfMatch = None, if_none_match: ItemIfNoneMatch = None) -> None:
    """Put an item into the running model, or change one. After 200 or 201, every later answer of every worker takes it into account.

    A new item needs evidence of where it belongs, else 422. Evidence for an existing item gives it a new row; without evidence, the row
    stays. The same body again is `unchanged`, so a request may be repeated.
    """


def get_item(name: Name, item_id: ItemId, if_none_match: ItemIfChanged = None) -> None:
    """The current state of an item: trained, live, or both. 404 if it was deleted."""


def delete_item(
    name: Name,
    item_id: ItemId,
    if_match: ItemIfMatch = None,
    if_none_match: ItemIfNoneMatch = None,
    source_version: Annotated[int | None, Query(ge=0, le=MAX_SOURCE_VERSION, description="As in a PUT.")] = None,
) -> None:
    """Delete an item, trained or live. A PUT brings it back; a trained item then needs no evidence."""


def put_items(name: Name) -> None:
    """Many writes in one request: each line is `{"id": …}` with the body of a PUT, or with `"delete": true` and perhaps a `source_version`.

    The answer has a line for each, in order: `{"id", "status", "sequence", "outcome"}`, with `unknown` ids of its evidence if there were
    any, or a problem document with the `id`. A faulty line does not affect others. Lines are committed in groups of 256 or of 5 ms.
    """


def frontier(name: Name, body: FrontierRequest) -> None:
    """Recall and time of each beam on held-out queries: a line a beam, as soon as it is measured.

    `{"beam_size", "m", "recall", "recall_ci", "ms_per_query", "queries", "default"}`: mean recall@m with its 95 % interval, engine time
    per query, and whether it is the model's default beam. If a beam cannot be measured, a problem document ends the answer. The queries
    wait behind all others. One such request is answered at a time.
    """


async def livez() -> Response:
    """The process runs."""
    return as_json({"alive": True})


async def readyz(request: Request) -> Response:
    """200 once every worker has loaded, verified and warmed every model.

    503 with the reasons before that, after a failure, and while shutting down.
    """
    reasons = service_of(request).registry.not_ready()
    return as_json({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


async def metrics(request: Request) -> Response:
    """Prometheus metrics. Simultaneous requests get the same answer."""
    return Response(await service_of(request).exposition.get(), media_type=CONTENT_TYPE)


_LINES: dict[str, Any] = {LINES_TYPES[0]: {"schema": {"type": "string"}}}
_MESSAGE: dict[str, Any] = {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}
_ANSWERED_SEARCH = {"content": _MESSAGE, "description": "The answer, in the same format as the query."}
_ANSWERED_LINES = {"content": _LINES, "description": "One answer or problem document a line."}
_ANSWERED_BEAMS = {"content": _LINES, "description": "One beam a line."}
_OTHER_SUCCESSES = {201: "There was no such item.", 202: "The change is durable, and a worker was still behind after a second."}
_ETAG = {"ETag": {"description": "Of the list of removed ids.", "required": True, "schema": {"type": "string"}}}
_ITEM_ETAG = {"ETag": {"description": "Of the item: its sequence.", "required": True, "schema": {"type": "string"}}}


def match_whole_paths(app: FastAPI) -> None:
    """End the framework's path patterns with `\\Z` instead of `$`, which also matches before a final line feed, as in `/retrieve%0A`."""
    for route in app.router.routes:
        if isinstance(route, Route | Mount):
            route.path_regex = re.compile(re.sub(r"\$$", r"\\Z", route.path_regex.pattern))


UNREADABLE = (400, 408, 431)
"""Statuses that connection.py answers, before any route."""
_PROBLEMS = {
    400: "The request is not HTTP/1.1.",
    401: "No API key, or an unknown one.",
    403: "The key's role does not allow this route, or the role has no keys, so that its routes are off.",
    404: "No such model, item or node, or the version is not loaded.",
    408: "The head or the body did not arrive in time.",
    409: "The models' state does not allow it; `detail` says why.",
    410: "Changes after that sequence are no longer kept; or the shard, its version or its layout is not served here.",
    412: "The list of removed ids, or the item, does not match If-Match or If-None-Match; ETag has its current tag.",
    413: "The body is too large.",
    415: "The route does not take this content type.",
    422: "A value is wrong; `errors` lists the fields, the values and what was expected.",
    429: "Too many requests wait already, or the key is over its limit; Retry-After says when to try again.",
    431: "The head of the request is too large.",
    500: "An unexpected failure; the log has the reason.",
    503: "The model is not ready, or the service is shutting down.",
    507: "The live catalogue has no room for another item.",
    504: "The deadline passed before the answer was there.",
}
