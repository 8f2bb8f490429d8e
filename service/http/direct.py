"""Routes that bypass the framework, because requests to them are many or large. Each is an ASGI application of its own.

The framework's layers would cost more than the work itself. It only documents these routes and answers the other methods of their paths.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from starlette.types import ASGIApp, Scope

RETRIEVE, STREAM = "/retrieve", "/retrieve/stream"
ITEMS, ITEM = "/models/{name}/items", "/models/{name}/items/{id}"
FRONTIER = "/models/{name}/frontier"
SEARCH = "/internal/search"

_MODEL_PATH = re.compile(r"/models/([^/]+)/(?:(frontier)|items(?:/(.+))?)", re.DOTALL)


class Direct(NamedTuple):
    """An application.

    route           the route's name in logs
    streams         whether its body may have any size, because it is read in parts
    max_body_bytes  largest body; None: that of all routes
    """

    application: ASGIApp
    route: str
    streams: bool = False
    max_body_bytes: int | None = None


DirectRoutes = Mapping[tuple[str, str], Direct]
"""The applications by (method, route)."""


def find_direct(routes: DirectRoutes, scope: Scope) -> Direct | None:
    """The application of a request; None: the framework. Sets `path_params` to the `name` and the `id` in the path."""
    path: str = scope["path"]
    if path.startswith("/models/"):
        matched_path = _MODEL_PATH.fullmatch(path)
        if matched_path is None:
            return None
        name, frontier, item_id = matched_path.groups()
        path = FRONTIER if frontier else ITEMS if item_id is None else ITEM
        scope["path_params"] = {"name": name, "id": item_id}
    return routes.get((scope["method"], path))
