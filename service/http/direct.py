"""Requests that go past the framework, to applications of their own: those whose number or size matters.

The framework's layers would cost more than the work itself. It documents these routes and answers the other methods of their paths.
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

_OF_MODEL = re.compile(r"/models/([^/]+)/(?:(frontier)|items(?:/(.+))?)", re.DOTALL)


class Direct(NamedTuple):
    """An application.

    route           by which its requests are logged
    streams         whether its body may have any size, because it is read in parts
    max_body_bytes  largest body, where it is not that of all routes
    """

    application: ASGIApp
    route: str
    streams: bool = False
    max_body_bytes: int | None = None


class DirectRoutes:
    """The applications by (method, route)."""

    def __init__(self, routes: Mapping[tuple[str, str], Direct]) -> None:
        self._routes = routes

    def find(self, scope: Scope) -> Direct | None:
        """The application of a request, None where it is the framework's. Puts the `name` and the `id` of its path into `path_params`."""
        path: str = scope["path"]
        if path.startswith("/models/"):
            found = _OF_MODEL.fullmatch(path)
            if found is None:
                return None
            name, frontier, item_id = found.groups()
            path = FRONTIER if frontier else ITEMS if item_id is None else ITEM
            scope["path_params"] = {"name": name, "id": item_id}
        return self._routes.get((scope["method"], path))
