"""Errors as RFC 9457 problem documents: type, title, status, a sentence, and for 422 the wrong values.

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

from espalier.errors import MISSING, DeviceUnavailable, InvalidInput, InvalidQuery, expectation, spelled

from .errors import ClientGone, EngineFailed, InvalidRequest, ServiceError

NO_ROUTE = "No such route; see /docs."
MAX_LISTED = 20
"""Most wrong values in one problem document."""


def document_of(error: Exception) -> tuple[dict[str, Any], Mapping[str, str]] | None:
    """(problem document, headers) of an error that is raised on purpose; None for any other exception."""
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
    """Answer with a problem document. It bypasses the framework, because in overload most answers are refusals, which must be cheap."""
    body = orjson.dumps(document)
    lines = [(b"content-type", b"application/problem+json"), (b"content-length", b"%d" % len(body))]
    lines += [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": document["status"], "headers": lines})
    await send({"type": "http.response.body", "body": body})


def invalid_body(error: ValidationError, kind: type[BaseModel]) -> InvalidRequest:
    """The error for a body that pydantic refused as a `kind`."""
    errors = error.errors(include_url=False)[:MAX_LISTED]
    return InvalidRequest([_invalid_query(item, item["loc"], kind) for item in errors])


def install(app: FastAPI) -> None:
    """Answer the framework's own errors with problem documents. (middleware.py answers those that its routes raise.)"""
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)


async def _validation_error(_: Request, error: Exception) -> Response:
    errors = cast(RequestValidationError, error).errors()[:MAX_LISTED]
    return _response(_invalid([_invalid_query(item, item["loc"][1:], None) for item in errors]))  # loc begins with query or path


async def _http_error(request: Request, error: Exception) -> Response:
    http_error = cast(HTTPException, error)
    detail = {404: NO_ROUTE, 405: "This route does not take this method."}.get(http_error.status_code, str(http_error.detail))
    headers = {**(http_error.headers or {})}
    if http_error.status_code == 405 and (methods := _allowed_methods(request)):
        headers["Allow"] = ", ".join(methods)
    return _response(problem(http_error.status_code, detail), headers)


def _response(document: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(document), document["status"], headers, media_type="application/problem+json")


def _allowed_methods(request: Request) -> list[str]:
    """The methods of all routes of a path (the framework names only those of the first). Empty for paths in a folder of files."""
    methods: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


def _invalid(errors: Sequence[InvalidInput]) -> dict[str, Any]:
    return problem(422, errors[0].sentence(is_json=True), [_entry(error) for error in errors])


def _entry(error: InvalidInput) -> dict[str, str]:
    """{field, value, expected} of a wrong value; a missing field has no value."""
    value = {} if error.value is MISSING else {"value": printable(spelled(error.value))}
    return {"field": printable(error.field), **value, "expected": error.expected}


def _invalid_query(error: Mapping[str, Any], path: Sequence[int | str], kind: type[BaseModel] | None) -> InvalidQuery:
    """A pydantic error as InvalidQuery, with a field like `queries[0].history[3]`. kind: class of the body; None for parameters."""
    field = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".") or "body"
    value, expected = error["input"], expectation(error)
    match error["type"]:
        case "missing" if kind is not None:
            annotation = _object_at(kind, path[:-1]).model_fields[str(path[-1])].annotation
            value, expected = MISSING, _TYPES.get(getattr(annotation, "__name__", ""), "a value")
        case "missing":
            value, expected = MISSING, f"?{field}=… in the address"
        case "extra_forbidden" if kind is not None:
            expected = f"only the fields {', '.join(_object_at(kind, path[:-1]).model_fields)}"
        case "json_invalid":
            content: bytes = value
            value = content.decode("utf-8", "replace") or MISSING
            expected = f"a JSON document ({error['ctx']['error']})" if content else "a JSON document"
        case "model_type" | "model_attributes_type":
            expected = "an object"
        case "literal_error":
            expected = expected.replace("'", '"')
    return InvalidQuery(field, value, expected)


_TYPES = {"list": "a valid array", "str": "a valid string", "int": "a valid integer"}
"""The expected value of a required field, by the name of its type."""


def _object_at(kind: type[BaseModel], path: Sequence[int | str]) -> type[BaseModel]:
    """The class of the object at `path` in a body."""
    annotation: Any = kind
    for step in path:
        if isinstance(step, str) and isinstance(annotation, type) and issubclass(annotation, BaseModel):
            annotation = annotation.model_fields[step].annotation
        elif isinstance(step, int):
            annotation = annotation.__args__[0]
        if isinstance(annotation, UnionType):  # `X | None`
            annotation = next(kind for kind in annotation.__args__ if issubclass(kind, BaseModel))
    found: type[BaseModel] = annotation
    return found


def printable(text: str) -> str:
    """The text with lone surrogates as escapes: they are valid in JSON, but not in UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
