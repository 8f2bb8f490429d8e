"""PUT, GET and DELETE of one item of the live catalogue, and the feed of changes. bulk_route.py has many items in one request.

`ItemRoute` is an ASGI application of its own (direct.py). Knows requests and answers. Does not know how an operation is stored or placed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import parse_qs

import orjson
from fastapi import Query, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from espalier.errors import InvalidInput
from espalier.live.operations import Operation

from ..entity_tags import Condition, matches
from ..errors import NotReady, QueueFull
from ..http.dependencies import Name, Service, service_of
from ..http.direct import item_path
from ..http.item_bodies import ItemReader, check_path_id, written, written_time
from ..http.item_schemas import MAX_SOURCE_VERSION
from ..http.memory_budget import Budget, Held
from ..http.middleware import RequestInfo
from ..http.request_bodies import JSON_TYPES, check_type, parsed, read_body
from ..http.retrieve_route import BODIES_BYTES, FREE_BYTES, send_body
from ..live.catalogue import LiveCatalogue
from ..live.catalogue_types import Delete, Outcome, Placed, StoredItem, tag_of
from ..problems import document_of
from ..watch.live_metrics import REFUSED, LiveMetrics

MAX_CHANGES = 1000
"""Most operations in one answer of the feed."""
CHANGES_BYTES = 8 << 20
"""The feed's answer ends with the operation that makes it larger than this."""
CHANGES_STEP = 32
"""Operations that are read at a time, so that no more than so many large ones are in memory beside the answer."""


class WriteRoute:
    """What both routes that write need. bodies: the memory that their requests share."""

    def __init__(self, service: Service) -> None:
        self.settings, self.registry, self.keys = service.settings, service.registry, service.keys
        self.bodies = Budget(max(BODIES_BYTES, self.settings.max_body_bytes), FREE_BYTES)
        self._metrics, self._live_metrics = service.metrics, dict[str, LiveMetrics]()

    def reader(self, model: str) -> ItemReader:
        """How requests of a model are read, by its default version. Raises ModelNotFound, NotReady."""
        return ItemReader(self.registry.choose(model, None).bundle.manifest.query, self.settings)

    def catalogue(self, model: str) -> LiveCatalogue:
        """Raises ModelNotFound, IsShard."""
        self.registry.check_whole(model)
        return self.registry.catalogues.of(model)

    def refused(self, model: str, status: int) -> None:
        """Count a write that was refused."""
        if status in REFUSED and model in self.registry.entries:
            self._of(model).refused(status)

    def visible(self, model: str, outcome: Outcome, began: float) -> None:
        """Note how long a write took from its arrival until all workers answered by it."""
        if outcome.visible and outcome.outcome not in ("unchanged", "stale"):
            self._of(model).visible(time.perf_counter() - began)

    def _of(self, model: str) -> LiveMetrics:
        if model not in self._live_metrics:
            self._live_metrics[model] = LiveMetrics(self._metrics, model)
        return self._live_metrics[model]


class ItemRoute(WriteRoute):
    """/models/{name}/items/{id}."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        info: RequestInfo = scope[RequestInfo.KEY]
        info.key = self.keys.check("write", info.authorization)
        info.model, item_id = item_path(scope)
        self.keys.admit(info.key, info.model, "write")
        if scope["method"] == "GET":
            check_path_id(scope, item_id)
            await self._get(scope, send, item_id)
            return
        try:
            check_path_id(scope, item_id)
            outcome = await (self._put if scope["method"] == "PUT" else self._delete)(scope, receive, item_id)
        except Exception as error:
            if described := document_of(error):
                self.refused(info.model, described[0]["status"])
            raise
        self.visible(info.model, outcome, info.began)
        await _send(send, status_of(outcome), outcome.sequence, outcome_json(outcome))

    async def _put(self, scope: Scope, receive: Receive, item_id: str) -> Outcome:
        info: RequestInfo = scope[RequestInfo.KEY]
        check_type(info.content_type, JSON_TYPES)
        catalogue, reader = self.catalogue(info.model), self.reader(info.model)
        with Held(self.bodies) as memory:
            body = await read_body(receive, self.settings.body_timeout_s, memory)
            put = await parsed(body, lambda content: reader.put(item_id, content))
            return await catalogue.put(put, _condition(scope))

    async def _delete(self, scope: Scope, _: Receive, item_id: str) -> Outcome:
        delete = Delete(item_id, _source_version(scope))
        return await self.catalogue(scope[RequestInfo.KEY].model).delete(delete, _condition(scope))

    async def _get(self, scope: Scope, send: Send, item_id: str) -> None:
        item = await self.catalogue(scope[RequestInfo.KEY].model).get(item_id)
        condition = _condition(scope)
        if condition.if_none_match is not None and matches(condition.if_none_match, tag_of(item.sequence)):
            await _send(send, 304, item.sequence, None)
        else:
            await _send(send, 200, item.sequence, _item_json(item))


async def changes(
    request: Request,
    name: Name,
    after: Annotated[int, Query(ge=0, le=MAX_SOURCE_VERSION, description="The last sequence that the caller has.")] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_CHANGES, description="Most changes to return.")] = MAX_CHANGES,
) -> Response:
    """What happened to the live catalogue after a sequence, for another host that follows this one.

    Ask again with the sequence of the last change until that is `sequence`.
    """
    service = service_of(request)
    service.registry.check_whole(name)
    catalogue, held = service.registry.catalogues.of(name), Held(service.feeds)
    if not held.take(1):
        raise QueueFull(f"{service.feeds.units} answers of a feed are being made or sent already.", 1)
    try:
        return _FeedAnswer(await _feed(catalogue, after, limit), held, service.settings.write_timeout_s)
    except BaseException:
        held.give(1)
        raise


async def _feed(catalogue: LiveCatalogue, after: int, limit: int) -> bytes:
    end = await catalogue.committed()  # not what this worker has applied: it may be behind the others
    dropped = await catalogue.dropped()
    found: list[bytes] = []
    size = 0
    while len(found) < limit and size < CHANGES_BYTES:
        step = await catalogue.changes(after, min(CHANGES_STEP, limit - len(found)))
        for operation in step:
            found.append(orjson.dumps(_change_json(operation)))
            size += len(found[-1])
            after = operation.sequence
            if size >= CHANGES_BYTES:
                break
        if not step:
            break
    if await catalogue.dropped() != dropped:
        raise NotReady("The journal was compacted while it was read; ask again.")
    last, journal = max(end, after if found else 0), orjson.dumps(await catalogue.identity())
    return b'{"changes":[%s],"sequence":%d,"dropped":%d,"journal":%s}' % (b",".join(found), last, dropped, journal)


class _FeedAnswer(Response):
    """An answer that counts as one of those under way until its client has taken it, or is cut off."""

    media_type = "application/json"

    def __init__(self, body: bytes, held: Held, timeout_s: float) -> None:
        super().__init__(body)
        self._held, self._timeout_s = held, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send_body(send, scope, bytes(self.body), self._timeout_s)


def status_of(outcome: Outcome) -> int:
    """202: durable, but a worker was still behind. 201: there was no such item."""
    if not outcome.visible:
        return 202
    return 201 if outcome.outcome == "inserted" else 200


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "sequence": outcome.sequence,
        "outcome": outcome.outcome,
        "visible": outcome.visible,
        "placed": _placed_json(outcome.placed),
        "unknown": list(outcome.unknown),
    }


def _item_json(item: StoredItem) -> dict[str, Any]:
    return {
        "id": item.id,
        "sequence": item.sequence,
        "live": item.live,
        "at": None if item.at is None else written_time(item.at),
        "placed": _placed_json(item.placed),
        **written(item.body, item.source_version),
    }


def _change_json(operation: Operation) -> dict[str, Any]:
    said = {"sequence": operation.sequence, "id": operation.id, "kind": operation.kind, "at": written_time(operation.at)}
    return said | written(operation.body, operation.source_version)


def _placed_json(placed: Placed | None) -> dict[str, Any] | None:
    return None if placed is None else placed._asdict()


def _condition(scope: Scope) -> Condition:
    """The conditional headers; of several with one name, all their tags."""
    found: dict[bytes, str] = {}
    for name, value in scope["headers"]:
        if name in (b"if-match", b"if-none-match"):
            text = value.decode("latin-1")
            found[name] = f"{found[name]}, {text}" if name in found else text
    return Condition(found.get(b"if-match"), found.get(b"if-none-match"))


def _source_version(scope: Scope) -> int | None:
    """`?source_version=` of a DELETE. Raises InvalidInput."""
    values = parse_qs(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True).get("source_version")
    if values is None:
        return None
    text = values[-1]
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= MAX_SOURCE_VERSION):
        raise InvalidInput("source_version", text, f"an integer from 0 to {MAX_SOURCE_VERSION}")
    return int(text)


async def _send(send: Send, status: int, sequence: int, document: Mapping[str, Any] | None) -> None:
    body = b"" if document is None else orjson.dumps(document)
    headers = [(b"etag", tag_of(sequence).encode())]
    if document is not None:
        headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
