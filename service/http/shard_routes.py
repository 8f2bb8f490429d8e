"""A shard's routes for routers: POST /internal/search and GET /internal/shards.

The first is an ASGI application of its own (middleware.py), whose messages are bytes and not JSON. routes.py documents both. Knows
requests. Does not know how a search is answered.
"""

from __future__ import annotations

from fastapi import Request
from pydantic import BaseModel, Field
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from espalier.shards.messages import MEDIA_TYPE

from ..errors import ClientGone, QueueFull, UnknownMasks
from ..http.api_keys import may_use
from ..http.connection import CONNECTION
from ..http.dependencies import Service, as_json, service_of
from ..http.memory_budget import Budget, Reservation
from ..http.middleware import RequestInfo
from ..http.request_bodies import check_head, read_body
from ..http.retrieve_route import BODIES_BYTES, FREE_BYTES, CancelOnDisconnect, send_body
from ..shards.search import search

ANSWER_BYTES = 64 << 20
"""Most bytes of all larger answers that routers have not read yet."""


class SearchRoute:
    """POST /internal/search. bodies, answers: the memory budgets that its requests share."""

    def __init__(self, service: Service) -> None:
        self.settings, self.registry, self.keys = service.settings, service.registry, service.keys
        self.bodies = Budget(max(BODIES_BYTES, 4 * self.settings.max_search_bytes), FREE_BYTES)
        self.answers = Budget(max(ANSWER_BYTES, 32 * self.settings.max_search_values), FREE_BYTES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        info: RequestInfo = scope[RequestInfo.KEY]
        info.key = self.keys.check("internal", info.authorization)
        self.keys.admit(info.key, None, "internal")
        check_head(scope, info.content_type, (MEDIA_TYPE,))
        has_arrived = CONNECTION in scope and scope[CONNECTION].complete
        with Reservation(self.bodies) as body_memory, Reservation(self.answers) as answer_memory:
            body = await read_body(receive, None if has_arrived else self.settings.body_timeout_s, body_memory)
            try:
                async with CancelOnDisconnect(receive):
                    result = await search(self.registry, body, info.began)
            except UnknownMasks as error:
                await as_json(error.digests, 409)(scope, receive, send)
                return
            may_use(info.key, result.model, "internal")
            info.model, info.version, info.queries = result.model, result.version, result.queries
            info.m, info.beam_size, info.stages_ms = result.m, result.beam_size, result.stages_ms
            if not answer_memory.take(len(result.body)):
                raise QueueFull("Too many large answers are being sent.", 1)
            headers = [(b"content-type", MEDIA_TYPE.encode()), (b"content-length", b"%d" % len(result.body))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            is_sent = await send_body(send, scope, result.body, self.settings.write_timeout_s)
        if not is_sent:
            raise ClientGone("The router does not read its answer.")


class ShardEntry(BaseModel):
    """One version of a shard."""

    model: str = Field(description="Name of the model here: the shard's number.")
    of: str = Field(description="Name of the bundle that was cut into shards.")
    version: int
    digest: str = Field(description="SHA-256 of that bundle's manifest.json.")
    index: int
    count: int = Field(description="Number of shards of that bundle.")
    items: int = Field(description="Items of this shard.")
    engine: str
    ready: bool = Field(description="False while the service shuts down: it answers accepted requests; send it no more.")


class Shards(BaseModel):
    """The shards that a process serves."""

    shards: list[ShardEntry]
    process: str = Field(description="Changes with each start of the service.")


async def shards(request: Request) -> Response:
    """Every version of a shard that this service serves, for routers. While the service shuts down, none is ready."""
    registry = service_of(request).registry
    ready = {"ready": not (registry.leaving or registry.draining)}
    return as_json({"shards": [entry | ready for entry in registry.shards.described()], "process": registry.shards.process})


def search_shard() -> None:
    """A router's search of a shard: a query and its answer in the format of `espalier.shards.messages`, which is safetensors.

    The query names the bundle that was cut, its version, its manifest's digest, the shard and the number of shards. 410: this service does
    not serve that. 409 with digests: the shard lacks the masks of some filters; the router sends the query again, with these masks.
    """
