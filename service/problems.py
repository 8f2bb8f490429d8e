"""Errors as RFC 9457 problem documents: a type, a title, a status, a sentence, and for 422 the wrong values.

Knows the errors of errors.py and pydantic's. Does not know routes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from types import UnionType
from typing import Any, cast

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Send

from espalier.errors import DeviceUnavailable, InvalidInput, expectation

from .errors import ClientGone, EngineFailed, InvalidRequest, ServiceError

NO_ROUTE = "No such route; see /docs."
MAX_LISTED = 20
"""Wrong values that one problem document lists."""


def document_of(error: Exception) -> tuple[dict[str, Any], Mapping[str, str]] | None:
    """The problem document and the headers of an error that is raised on purpose; None for any other exception."""
    if isinstance(error, InvalidInput):
        return _invalid([error]), {}
    if isinstance(error, InvalidRequest):
        return _invalid(error.errors), {}
    if isinstance(error, EngineFailed):
        return internal_problem(), {}
    if isinstance(error, ServiceError):
        return problem(error.status, str(error)), dict(error.headers)
    if isinstance(error, DeviceUnavailable):
        return problem(503, str(error)), {}
    if isinstance(error, ClientDisconnect):
        return problem(ClientGone.status, "The client hung up before its request was complete."), {}
    return None


def problem(status: int, detail: str, errors: Sequence[Mapping[str, str]] = ()) -> dict[str, Any]:
    """A problem document; `errors` lists {field, value, expected}."""
    title = "Client Closed Request" if status == ClientGone.status else HTTPStatus(status).phrase
    document: dict[str, Any] = {"type": "about:blank", "title": title, "status": status, "detail": printable(detail)}
    if errors:
        document["errors"] = errors
    return document


def internal_problem() -> dict[str, Any]:
    """The answer to an unexpected exception."""
    return problem(500, "Something failed inside the service. Its log says more under this X-Request-Id.")


async def send_problem(send: Send, document: Mapping[str, Any], headers: Mapping[str, str]) -> None:
    """Answer with a problem document, without the framework: in overload most answers are refusals, so they must be cheap."""
    body = orjson.dumps(document)
    lines = [(b"content-type", b"application/problem+json"), (b"content-length", b"%d" % len(body))]
    lines += [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": document["status"], "headers": lines})
    await send({"type": "http.response.body", "body": body})


def invalid_body(error: ValidationError, kind: type[BaseModel]) -> InvalidRequest:
    """A body that pydantic refused as a `kind`."""
    found = error.errors(include_url=False)[:MAX_LISTED]
    return InvalidRequest([_invalid_input(item, item["loc"], kind) for item in found])


def install(app: FastAPI) -> None:
    """Answer the framework's own errors with problem documents. (middleware.py answers those that its routes raise.)"""
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)


async def _validation_error(_: Request, error: Exception) -> Response:
    found = cast(RequestValidationError, error).errors()[:MAX_LISTED]
    return _response(_invalid([_invalid_input(item, item["loc"][1:], None) for item in found]))  # loc begins with body, query or path


async def _http_error(request: Request, error: Exception) -> Response:
    known = cast(HTTPException, error)
    if known.status_code == 400:  # the framework could not decode a body
        return _response(_invalid([InvalidInput("body", "other bytes", "a JSON document in UTF-8")]))
    detail = {404: NO_ROUTE, 405: "This route does not take this method."}.get(known.status_code, str(known.detail))
    headers = {**(known.headers or {})}
    if known.status_code == 405 and (methods := _allowed(request)):
        headers["Allow"] = ", ".join(methods)
    return _response(problem(known.status_code, detail), headers)


def _response(document: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(document), document["status"], headers, media_type="application/problem+json")


def _allowed(request: Request) -> list[str]:
    """The methods that a path takes, of all its routes; the framework names only those of the first. Empty inside a folder of files."""
    methods: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


def _invalid(errors: Sequence[InvalidInput]) -> dict[str, Any]:
    listed = [{"field": printable(error.field), "value": printable(error.value), "expected": error.expected} for error in errors]
    first = listed[0]
    return problem(422, f"{first['field']}: got {first['value']}, expected {first['expected']}", listed)


def _invalid_input(error: Mapping[str, Any], path: Sequence[int | str], kind: type[BaseModel] | None) -> InvalidInput:
    """pydantic's error, its path written as `queries[0].history[3]`. kind: class of the body, where it is known."""
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "body"
    match error["type"]:
        case "missing":
            return InvalidInput(field, None, expectation(error))
        case "extra_forbidden":
            return InvalidInput(field, error["input"], f"only the fields {', '.join(_fields(kind, path))}" if kind else "no such field")
        case "json_invalid":
            given = error["input"]
            text = given.decode("utf-8", "replace") if isinstance(given, bytes) else given
            return InvalidInput(field, text, f"a JSON document ({error['ctx']['error']})")
    return InvalidInput(field, error["input"], "an object" if error["type"].startswith("model_") else expectation(error))


def _fields(kind: type[BaseModel], path: Sequence[int | str]) -> Sequence[str]:
    """The fields of the part of a body in which an unknown field was found."""
    annotation: Any = kind
    for part in path[:-1]:
        if isinstance(part, str) and isinstance(annotation, type) and issubclass(annotation, BaseModel):
            annotation = annotation.model_fields[part].annotation
        elif isinstance(part, int):
            annotation = annotation.__args__[0]
        if isinstance(annotation, UnionType):  # `X | None`
            annotation = next(kind for kind in annotation.__args__ if issubclass(kind, BaseModel))
    return list(annotation.model_fields)


def printable(text: str) -> str:
    """Lone surrogates as escapes: JSON may hold them, UTF-8 may not."""
    return text.encode("utf-8", "backslashreplace").decode()
