"""What goes wrong over HTTP, and how it is said: RFC 9457 problem documents.

    EspalierError
    └── ServiceError              each class states its status
        ├── ModelNotFound         404   no such model, or the version is not loaded
        ├── BodyTooLarge          413
        ├── NotJson               415
        ├── ClientGone            499   nobody reads the answer; only the metrics see it
        ├── EngineFailed          500   the engine call that held the query
        └── NotReady              503   the model is not ready, or the service is draining

InvalidInput is 422 and lists {field, value, expected}. What nobody expected is 500 without internals; the log has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, ClassVar, cast

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from espalier.errors import DeviceUnavailable, EspalierError, InvalidInput
from service.schemas import Query, RetrieveRequest

MAX_LISTED = 20
"""Wrong values that one problem document lists."""


class ServiceError(EspalierError):
    """Base of the service's own errors."""

    status: ClassVar[int] = 500
    headers: ClassVar[Mapping[str, str]] = {}


class ModelNotFound(ServiceError):
    """No such model, or the version is not loaded."""

    status = 404


class BodyTooLarge(ServiceError):
    """The request body is over the limit; the rest of it is not read, so the connection ends."""

    status = 413
    headers: ClassVar[Mapping[str, str]] = {"Connection": "close"}


class NotJson(ServiceError):
    """The content type is not JSON's."""

    status = 415


class ClientGone(ServiceError):
    """The client hung up before the answer."""

    status = 499


class EngineFailed(ServiceError):
    """The engine raised; every query of that call fails."""

    status = 500


class NotReady(ServiceError):
    """The model is not ready, or the service is draining."""

    status = 503
    headers: ClassVar[Mapping[str, str]] = {"Retry-After": "1"}


def problem(status: int, detail: str, errors: Sequence[Mapping[str, str]] = (), headers: Mapping[str, str] | None = None) -> Response:
    """A problem document; `errors` lists {field, value, expected}."""
    title = "Client Closed Request" if status == ClientGone.status else HTTPStatus(status).phrase
    document: dict[str, Any] = {"type": "about:blank", "title": title, "status": status, "detail": detail}
    if errors:
        document["errors"] = errors
    return Response(orjson.dumps(document), status, headers, media_type="application/problem+json")


def internal_problem() -> Response:
    """What a client learns of an unexpected exception."""
    return problem(500, "Something failed inside the service. Its log says more under this X-Request-Id.")


def install(app: FastAPI) -> None:
    """Answer every error with a problem document."""
    app.add_exception_handler(EspalierError, _espalier_error)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _hung_up)


async def _espalier_error(_: Request, error: Exception) -> Response:
    if isinstance(error, InvalidInput):
        return _invalid([error])
    if isinstance(error, EngineFailed):
        return internal_problem()
    if isinstance(error, ServiceError):
        return problem(error.status, str(error), headers=error.headers)
    if isinstance(error, DeviceUnavailable):
        return problem(503, str(error))
    raise error


async def _invalid_request(_: Request, error: Exception) -> Response:
    return _invalid([_from_pydantic(found) for found in cast(RequestValidationError, error).errors()[:MAX_LISTED]])


async def _hung_up(_: Request, error: Exception) -> Response:
    return problem(ClientGone.status, "The client hung up before its request was complete.")


async def _http_error(_: Request, error: Exception) -> Response:
    known = cast(HTTPException, error)
    detail = {404: "No such route; see /docs.", 405: "This route does not take this method."}.get(known.status_code, str(known.detail))
    return problem(known.status_code, detail, headers=known.headers)


def _invalid(errors: Sequence[InvalidInput]) -> Response:
    listed = [{"field": _printable(error.field), "value": _printable(error.value), "expected": error.expected} for error in errors]
    first = listed[0]
    return problem(422, f"{first['field']}: got {first['value']}, expected {first['expected']}", listed)


def _from_pydantic(error: Mapping[str, Any]) -> InvalidInput:
    """pydantic's error with its path written as `queries[0].history[3]`. The first part of `loc` (body, query, path) is dropped."""
    path = error["loc"][1:]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "body"
    match error["type"]:
        case "missing":
            return InvalidInput(field, None, "a value; it is required")
        case "extra_forbidden":
            known = Query.model_fields if len(path) > 1 else RetrieveRequest.model_fields
            return InvalidInput(field, error["input"], f"only the fields {', '.join(known)}")
        case "json_invalid":
            return InvalidInput(field, error["input"], f"a JSON document ({error['ctx']['error']})")
    message: str = error["msg"]
    expected = message.removeprefix("Input should be ").removeprefix("Value error, ")
    return InvalidInput(field, error["input"], "an object" if error["type"].startswith("model_") else expected)


def _printable(text: str) -> str:
    """Lone surrogates, which JSON may hold and UTF-8 may not, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()
