"""The documentation of the interface: /openapi.json, and /docs, which shows it. Each is made once, by the first request for it.

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
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from ..http.api_keys import Keys
from ..http.single_flight import SingleFlight

TITLE = "Espalier"
ACCESS = "x-access"
"""Where the framework's description says which key an operation needs; it is left out of the answer."""
OPENAPI, DOCS, STATIC = "/openapi.json", "/docs", "/static-offline-docs"
NEEDS_KEY: Sequence[Mapping[str, Sequence[str]]] = [{"HTTPBearer": []}]
_KEYS = {"HTTPBearer": {"type": "http", "description": "An API key; needed where the service has some.", "scheme": "bearer"}}
SCHEMA_OF = "#/components/schemas/{model}"
NO_SNIFF = {"X-Content-Type-Options": "nosniff"}
_INLINE = re.compile(rb"<script>(.*?)</script>", re.S)


def add_pages(app: FastAPI) -> None:
    """Put the pages on the application, with the scripts of /docs, which so needs no CDN."""
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

    app.mount(STATIC, _Scripts(directory=Path(fastapi_offline.__file__).parent / "static"))
    app.add_route(OPENAPI, show_openapi, include_in_schema=False)
    app.add_route(DOCS, show_docs, include_in_schema=False)


def policy_of(page: bytes) -> str:
    """The Content-Security-Policy of a page of Swagger UI: what it needs of this service, and the scripts that stand in it."""
    scripts = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in _INLINE.findall(page)]
    allowed = " ".join(["'self'", *(f"'sha256-{digest}'" for digest in scripts)])
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class _Scripts(StaticFiles):
    """The files of Swagger UI, which no browser takes for anything else."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        answer = super().file_response(*args, **kwargs)
        answer.headers.update(NO_SNIFF)
        return answer


def as_answered(document: dict[str, Any], answers: Sequence[type[BaseModel]], keys: Keys) -> dict[str, Any]:
    """The framework's OpenAPI document with answers as they are: the schemas of their classes, no other form of 422, and no key where none
    is needed."""
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
    _, found = models_json_schema([(answer, "serialization") for answer in answers], ref_template=SCHEMA_OF)
    for name, schema in found["$defs"].items():
        schemas[name] = jsonable_encoder(Schema(**schema), by_alias=True, exclude_none=True)  # as the framework writes its own
    document["components"] = {"schemas": dict(sorted(schemas.items())), "securitySchemes": _KEYS}
    return document
