"""Routes that show what is in a model, for the console and for people: held-out queries.

Knows requests and answers. Does not know how they are found.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request
from starlette.responses import Response

from service.http.dependencies import Name, service_of
from service.retrieval.heldout import heldout_queries

MAX_LISTED = 1000
"""Most queries, values or items in one answer."""
MAX_VERSION = (1 << 63) - 1

Version = Annotated[int | None, Query(ge=1, le=MAX_VERSION, description="Version of the model; without it the default.")]


async def heldout(
    request: Request,
    name: Name,
    version: Version = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED, description="Most queries to return.")] = 20,
) -> Response:
    """Held-out queries, at even distances among all: what the model was measured on, and what it should find.

    They show what people did. So an admin key is needed where the service has any keys.
    """
    service = service_of(request)
    bundle = service.registry.choose(name, version).bundle
    found = await service.scans.run(lambda _: heldout_queries(bundle, limit))
    return Response(b'{"queries":[%s]}' % b",".join(found), media_type="application/json")
