"""The documentation of the interface: /openapi.json, which the first request builds, and /docs, which shows it.

Knows the framework's description of the routes. Does not know what they do.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fastapi_offline
import orjson
from fastapi import FastAPI
from fastapi.encoders import jsonable_encoder
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.models import Schema
from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from ..http.api_keys import Keys
from ..http.single_flight import SingleFlight

TITLE = "Espalier"
ACCESS = "x-access"
"""The key of an operation under which routes.py notes its access. It is removed from the published document."""
OPENAPI, DOCS, STATIC = "/openapi.json", "/docs", "/static-offline-docs"
NEEDS_KEY: Sequence[Mapping[str, Sequence[str]]] = [{"HTTPBearer": []}]
_KEYS = {"HTTPBearer": {"type": "http", "description": "An API key; needed if the service has keys.", "scheme": "bearer"}}
SCHEMA_OF = "#/components/schemas/{model}"
NO_SNIFF = {"X-Content-Type-Options": "nosniff"}
_INLINE = re.compile(rb"<script>(.*?)</script>", re.S)


def add_pages(app: FastAPI) -> None:
    """Add both pages to the application, and the scripts of /docs, so that it needs no CDN."""
    openapi = SingleFlight(lambda: orjson.dumps(app.openapi()), keep=True)
    docs = get_swagger_ui_html(
        openapi_url=OPENAPI,
        title=TITLE,
        swagger_js_url=f"{STATIC}/swagger-ui-bundle.js",
        swagger_css_url=f"{STATIC}/swagger-ui.css",
        swagger_favicon_url=f"{STATIC}/favicon.png",
    ).body
    headers = NO_SNIFF | {"Content-Security-Policy": policy_of(bytes(docs)), "Referrer-Policy": "no-referrer"}

    async def show_openapi(_: Request) -> Response:
        return Response(await openapi.get(), media_type="application/json", headers=NO_SNIFF)

    async def show_docs(_: Request) -> Response:
        return Response(docs, media_type="text/html", headers=headers)

    app.mount(STATIC, _SwaggerFiles(directory=Path(fastapi_offline.__file__).parent / "static"))
    app.add_route(OPENAPI, show_openapi, include_in_schema=False)
    app.add_route(DOCS, show_docs, include_in_schema=False)


def policy_of(page: bytes) -> str:
    """The Content-Security-Policy of a page of Swagger UI: files of this service, and the page's inline scripts by their hashes."""
    scripts = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in _INLINE.findall(page)]
    allowed = " ".join(["'self'", *(f"'sha256-{digest}'" for digest in scripts)])
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class _SwaggerFiles(StaticFiles):
    """The files of Swagger UI, with the header that keeps browsers from guessing other media types. It sends them whole."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [header for header in scope["headers"] if header[0] != b"range"]
        await super().__call__({**scope, "headers": headers}, receive, send)

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        answer = super().file_response(*args, **kwargs)
        answer.headers.update(NO_SNIFF)
        return answer


def completed(document: dict[str, Any], classes: Sequence[tuple[type[Any], JsonSchemaMode]], keys: Keys) -> dict[str, Any]:
    """The framework's OpenAPI document with the schemas of `classes`, without its own form of 422, and no keys where none is needed."""
    for methods in document["paths"].values():
        for operation in methods.values():
            documented = operation["responses"]
            if "HTTPValidationError" in str(documented.get("422")):
                del documented["422"]
            access = operation.pop(ACCESS, None)
            if (keys.public and access == "retrieve") or (keys.open and access == "internal") or (keys.shows_all and access == "private"):
                operation.pop("security", None)
                for status in ("401", "403"):
                    documented.pop(status, None)
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    _, definitions = TypeAdapter.json_schemas([(kind.__name__, mode, TypeAdapter(kind)) for kind, mode in classes], ref_template=SCHEMA_OF)
    for name, schema in definitions["$defs"].items():
        schemas[name] = jsonable_encoder(Schema(**schema), by_alias=True, exclude_none=True)  # the form of the framework's own schemas
    document["components"] = {"schemas": dict(sorted(schemas.items())), "securitySchemes": _KEYS}
    return document
