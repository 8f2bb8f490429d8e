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

_FRONTIER = re.compile(r"/models/([^/]+)/frontier")
_ITEMS = re.compile(r"/models/([^/]+)/items(?:/(.+))?", re.DOTALL)


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
        """The application of a request, None where it is the framework's."""
        path: str = scope["path"]
        if path.startswith("/models/"):
            found = _ITEMS.fullmatch(path)
            if found is not None:
                path = ITEMS if found[2] is None else ITEM
            elif _FRONTIER.fullmatch(path):
                path = FRONTIER
            else:
                return None
        return self._routes.get((scope["method"], path))


def model_of(scope: Scope) -> str:
    """The model's name of a path like FRONTIER."""
    found = _FRONTIER.fullmatch(scope["path"])
    return found[1] if found else ""


def item_path(scope: Scope) -> tuple[str, str]:
    """The model's name and the item's id of a path like ITEM; the id is empty in a path like ITEMS."""
    found = _ITEMS.fullmatch(scope["path"])
    return (found[1], found[2] or "") if found else ("", "")
