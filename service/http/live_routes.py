"""PUT, GET and DELETE of one item of the live catalogue, and the feed of changes. bulk_route.py writes many items in one request.

`ItemRoute` is an ASGI application of its own (middleware.py). Knows requests and answers. Does not know how an operation is stored or
placed.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import orjson
from fastapi import Query, Request
from starlette.datastructures import Headers, QueryParams
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from espalier.errors import InvalidInput
from espalier.live.operations import Operation

from ..entity_tags import Condition, matches
from ..errors import NotReady, QueueFull
from ..http.dependencies import Name, Service, as_json, service_of
from ..http.item_bodies import ItemReader, body_json, check_path_id, time_text
from ..http.item_schemas import MAX_SOURCE_VERSION
from ..http.memory_budget import Budget, Reservation
from ..http.middleware import RequestInfo
from ..http.request_bodies import JSON_TYPES, check_head, parameters_of, parse_body, read_body
from ..http.retrieve_route import BODIES_BYTES, FREE_BYTES, send_body
from ..live.catalogue import LiveCatalogue
from ..live.catalogue_types import Delete, ItemOutcome, StoredItem, tag_of
from ..problems import document_of
from ..watch.metrics import REFUSED_WRITES

MAX_CHANGES = 1000
"""Most operations in one answer of the feed."""
CHANGES_BYTES = 8 << 20
"""An answer of the feed ends with the operation that makes it larger than this."""
CHANGES_STEP = 32
"""Operations that are read from the journal at a time. It limits the memory that large operations take besides the answer."""


class WriteRoute:
    """The common part of both routes that write. bodies: the memory budget that their requests share."""

    def __init__(self, service: Service) -> None:
        self.settings, self.registry, self.keys = service.settings, service.registry, service.keys
        self.bodies = Budget(max(BODIES_BYTES, self.settings.max_body_bytes), FREE_BYTES)
        self._metrics = service.metrics

    def reader(self, model: str) -> ItemReader:
        """The reader of a model's write requests, for its default version. Raises NotFound, NotReady."""
        return ItemReader(self.registry.choose(model, None).bundle.manifest.query, self.settings)

    def catalogue(self, model: str) -> LiveCatalogue:
        """The live catalogue of a model. Raises NotFound, Conflict."""
        self.registry.check_whole(model)
        return self.registry.catalogue(model)

    def refused(self, model: str, status: int) -> None:
        """Count a refused write."""
        if status in REFUSED_WRITES and model in self.registry.entries:
            self._metrics.count("espalier_live_refused_total", model, status)

    def visible(self, model: str, outcome: ItemOutcome, began: float) -> None:
        """Note the time from the arrival of a write until all workers had applied it."""
        if outcome.visible and outcome.outcome not in ("unchanged", "stale"):
            self._metrics.observe("espalier_live_visible_seconds", time.perf_counter() - began, model)


class ItemRoute(WriteRoute):
    """/models/{name}/items/{id}."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        info: RequestInfo = scope[RequestInfo.KEY]
        info.key = self.keys.check("write", info.authorization)
        info.model, item_id = scope["path_params"]["name"], scope["path_params"]["id"]
        self.keys.admit(info.key, info.model, "write")
        try:
            catalogue = self.catalogue(info.model)
            check_path_id(scope, item_id)
            parameters = parameters_of(scope, ("source_version",) if scope["method"] == "DELETE" else ())
            if scope["method"] == "GET":
                answer = await _get(catalogue, scope, item_id)
                await answer(scope, receive, send)
                return
            if scope["method"] == "PUT":
                outcome = await self._put(catalogue, scope, receive, item_id)
            else:
                outcome = await catalogue.write(Delete(item_id, _source_version(parameters)), _condition(scope))
        except Exception as error:
            if scope["method"] != "GET" and (problem := document_of(error)):
                self.refused(info.model, problem[0]["status"])
            raise
        self.visible(info.model, outcome, info.began)
        answer = as_json(outcome, status_of(outcome), {"ETag": tag_of(outcome.sequence)})
        await answer(scope, receive, send)

    async def _put(self, catalogue: LiveCatalogue, scope: Scope, receive: Receive, item_id: str) -> ItemOutcome:
        info: RequestInfo = scope[RequestInfo.KEY]
        check_head(scope, info.content_type, JSON_TYPES)
        reader = self.reader(info.model)
        with Reservation(self.bodies) as memory:
            body = await read_body(receive, self.settings.body_timeout_s, memory)
            put = await parse_body(body, lambda content: reader.put(item_id, content))
            return await catalogue.write(put, _condition(scope))


async def _get(catalogue: LiveCatalogue, scope: Scope, item_id: str) -> Response:
    item = await catalogue.get(item_id)
    tag, if_none_match = tag_of(item.sequence), _condition(scope).if_none_match
    if if_none_match is not None and matches(if_none_match, tag):
        return Response(None, 304, {"ETag": tag})
    return as_json(_item_json(item), 200, {"ETag": tag})


async def changes(
    request: Request,
    name: Name,
    after: Annotated[int, Query(ge=0, le=MAX_SOURCE_VERSION, description="The last sequence that the caller has.")] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_CHANGES, description="Most changes to return.")] = MAX_CHANGES,
) -> Response:
    """The operations on the live catalogue after a sequence, for another host that follows this one.

    Repeat the request with the sequence of the last change until that equals `sequence`.
    """
    service = service_of(request)
    service.registry.check_whole(name)
    catalogue, slot = service.registry.catalogue(name), Reservation(service.feeds)
    if not slot.take(1):
        raise QueueFull(f"{service.feeds.units} answers of a feed are being made or sent already.", 1)
    try:
        return _FeedAnswer(await _feed(catalogue, after, limit), slot, service.settings.write_timeout_s)
    except BaseException:
        slot.give(1)
        raise


async def _feed(catalogue: LiveCatalogue, after: int, limit: int) -> bytes:
    committed = await catalogue.committed()  # not this worker's last applied operation: other workers may have committed more
    dropped = await catalogue.dropped()
    lines: list[bytes] = []
    size, last = 0, committed
    while len(lines) < limit and size < CHANGES_BYTES:
        step = await catalogue.changes(after, min(CHANGES_STEP, limit - len(lines)))
        for operation in step:
            lines.append(orjson.dumps(change_json(operation)))
            size += len(lines[-1])
            after = operation.sequence
            if size >= CHANGES_BYTES:
                break
        if not step:
            last = after  # later numbers have no operation: they were skipped, or of deletes that were dropped
            break
    if await catalogue.dropped() != dropped:
        raise NotReady("The journal was compacted while it was read; ask again.")
    journal = orjson.dumps(await catalogue.identity())
    return b'{"changes":[%s],"sequence":%d,"dropped":%d,"journal":%s}' % (b",".join(lines), max(last, after), dropped, journal)


class _FeedAnswer(Response):
    """An answer that keeps its slot until its client has read it or is cut off."""

    media_type = "application/json"

    def __init__(self, body: bytes, slot: Reservation, timeout_s: float) -> None:
        super().__init__(body)
        self._slot, self._timeout_s = slot, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._slot:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send_body(send, scope, bytes(self.body), self._timeout_s)


def status_of(outcome: ItemOutcome) -> int:
    """202: durable, but not yet applied by every worker. 201: the item is new."""
    if not outcome.visible:
        return 202
    return 201 if outcome.outcome == "inserted" else 200


def _item_json(item: StoredItem) -> dict[str, Any]:
    return {
        "id": item.id,
        "sequence": item.sequence,
        "live": item.live,
        "at": None if item.at is None else time_text(item.at),
        "placed": item.placed,
        **body_json(item.body, item.source_version),
    }


def change_json(operation: Operation) -> dict[str, Any]:
    """An operation in the feed."""
    document = {"sequence": operation.sequence, "id": operation.id, "kind": operation.kind, "at": time_text(operation.at)}
    if operation.body.evidence_from is not None:
        sequence, at = operation.body.evidence_from
        document["evidence_from"] = {"sequence": sequence, "at": time_text(at)}
    return document | body_json(operation.body, operation.source_version)


def _condition(scope: Scope) -> Condition:
    """The conditional headers. Several headers of one name count as one with all their tags."""
    headers = Headers(scope=scope)
    tags_by_header = [headers.getlist(name) for name in ("If-Match", "If-None-Match")]
    return Condition(*(", ".join(tags) if tags else None for tags in tags_by_header))


def _source_version(parameters: QueryParams) -> int | None:
    """`?source_version=` of a DELETE. Raises InvalidInput."""
    text = parameters.get("source_version")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= MAX_SOURCE_VERSION):
        raise InvalidInput("source_version", text, f"an integer from 0 to {MAX_SOURCE_VERSION}")
    return int(text)
