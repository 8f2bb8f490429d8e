"""What goes wrong over HTTP, and how it is said: RFC 9457 problem documents.

    EspalierError
    └── ServiceError              each class states its status
        ├── Denied                      says which role was asked for, and why it was not granted
        │   ├── Unauthorized      401   no key, or one that is not known
        │   └── Forbidden         403   the key's role does not reach here
        ├── ModelNotFound         404   no such model, or the version is not loaded
        ├── SlowBody              408   the body did not arrive in time
        ├── Conflict              409   the models' state does not allow it
        │   └── BeingChanged      409   somebody else changes the model; Retry-After says when to try again
        ├── PreconditionFailed    412   the list is another one than the client has read
        ├── BodyTooLarge          413
        ├── NotJson               415
        ├── InvalidRequest        422   a body with wrong values
        ├── QueueFull             429   too many queries wait already
        ├── ClientGone            499   nobody reads the answer; only the metrics see it
        ├── EngineFailed          500   the engine call that held the query
        ├── NotReady              503   the model is not ready, or the service is draining
        ├── Busy                  503   the memory for large requests is in use
        └── DeadlinePassed        504   the answer would have been too late

InvalidInput is 422 and lists {field, value, expected}. What nobody expected is 500 without internals; the log has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, cast

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Send

from espalier.errors import DeviceUnavailable, EspalierError, InvalidInput

Body = TypeVar("Body", bound=BaseModel)
Role = Literal["retrieve", "admin"]
DenialReason = Literal["missing", "malformed", "unknown", "role", "off"]

MAX_LISTED = 20
"""Wrong values that one problem document lists."""


class ServiceError(EspalierError):
    """Base of the service's own errors."""

    status: ClassVar[int] = 500
    headers: tuple[tuple[str, str], ...] = ()


class Denied(ServiceError):
    """A key does not open a route.

    role    what the route asks for
    reason  why it was not granted: `missing` (no Authorization header), `malformed` (not `Bearer KEY`), `unknown` (a key that nobody has),
            `role` (a key of a role that does not reach there), `off` (the admin routes are off)
    key     the name or id of the key, where it is known
    """

    def __init__(self, detail: str, role: Role, reason: DenialReason, key: str | None = None) -> None:
        super().__init__(detail)
        self.role, self.reason, self.key = role, reason, key


class Unauthorized(Denied):
    """No key, or one that is not known."""

    status = 401
    headers = (("WWW-Authenticate", "Bearer"),)


class Forbidden(Denied):
    """The key's role does not reach here, or the route is off."""

    status = 403


class ModelNotFound(ServiceError):
    """No such model, or the version is not loaded."""

    status = 404


class SlowBody(ServiceError):
    """The body did not arrive in time; the rest of it is not read, so the connection ends."""

    status = 408
    headers = (("Connection", "close"),)


class Conflict(ServiceError):
    """What was asked for does not fit the state of the models."""

    status = 409


class BeingChanged(Conflict):
    """Somebody else changes the model at the moment."""

    headers = (("Retry-After", "1"),)


class PreconditionFailed(ServiceError):
    """What the client has read, and says so in If-Match or If-None-Match, is not what is there; `etag` is what is there."""

    status = 412

    def __init__(self, detail: str, etag: str) -> None:
        super().__init__(detail)
        self.headers = (("ETag", etag),)


class BodyTooLarge(ServiceError):
    """The request body is over the limit; the rest of it is not read, so the connection ends."""

    status = 413
    headers = (("Connection", "close"),)


class NotJson(ServiceError):
    """The content type is not JSON's."""

    status = 415


class InvalidRequest(ServiceError):
    """A body with wrong values."""

    status = 422

    def __init__(self, errors: Sequence[InvalidInput]) -> None:
        super().__init__(str(errors[0]))
        self.errors = errors


class QueueFull(ServiceError):
    """Too many queries, or other requests of one kind, wait already."""

    status = 429

    def __init__(self, reason: str, retry_after_s: int) -> None:
        super().__init__(reason)
        self.headers = (("Retry-After", str(retry_after_s)),)


class ClientGone(ServiceError):
    """The client hung up before the answer."""

    status = 499


class EngineFailed(ServiceError):
    """The engine raised; every query of that call fails."""

    status = 500


class NotReady(ServiceError):
    """The model is not ready, or the service is draining."""

    status = 503
    headers = (("Retry-After", "1"),)


class Busy(ServiceError):
    """The memory that large requests share is in use. The rest of the body is not read, so the connection ends."""

    status = 503
    headers = (("Retry-After", "1"), ("Connection", "close"))


class DeadlinePassed(ServiceError):
    """`timeout_ms` passed before the answer was there."""

    status = 504


def parse(kind: type[Body], content: bytes) -> Body:
    """A body straight from its bytes. Raises InvalidRequest.

    That refuses what JSON refuses, names the field of a NaN, and costs a third of parsing first and validating then.
    """
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        found = error.errors(include_url=False)[:MAX_LISTED]
        raise InvalidRequest([_from_pydantic(item, item["loc"], kind) for item in found]) from error


def describe(error: Exception) -> tuple[dict[str, Any], Mapping[str, str]] | None:
    """The problem document of an error that is raised on purpose, and the headers that go with it; None for any other."""
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
    """What a client learns of an unexpected exception."""
    return problem(500, "Something failed inside the service. Its log says more under this X-Request-Id.")


def response(document: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    """A problem document as an answer."""
    return Response(orjson.dumps(document), document["status"], headers, media_type="application/problem+json")


async def answer(send: Send, document: Mapping[str, Any], headers: Mapping[str, str]) -> None:
    """The same without the framework, whose layers cost more than saying no should: in overload most answers are refusals."""
    body = orjson.dumps(document)
    lines = [(b"content-type", b"application/problem+json"), (b"content-length", b"%d" % len(body))]
    lines += [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": document["status"], "headers": lines})
    await send({"type": "http.response.body", "body": body})


def install(app: FastAPI) -> None:
    """Answer every error of the framework's routes with a problem document."""
    app.add_exception_handler(EspalierError, _espalier_error)
    app.add_exception_handler(ClientDisconnect, _espalier_error)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(HTTPException, _http_error)


async def _espalier_error(_: Request, error: Exception) -> Response:
    described = describe(error)
    if described is None:
        raise error
    return response(*described)


async def _invalid_request(_: Request, error: Exception) -> Response:
    found = cast(RequestValidationError, error).errors()[:MAX_LISTED]
    return response(_invalid([_from_pydantic(item, item["loc"][1:], None) for item in found]))  # loc begins with body, query or path


async def _http_error(request: Request, error: Exception) -> Response:
    known = cast(HTTPException, error)
    if known.status_code == 400:  # the framework could not decode a body
        return response(_invalid([InvalidInput("body", "other bytes", "a JSON document in UTF-8")]))
    detail = {404: "No such route; see /docs.", 405: "This route does not take this method."}.get(known.status_code, str(known.detail))
    headers = {**(known.headers or {})}
    if known.status_code == 405 and (methods := allowed(request)):
        headers["Allow"] = ", ".join(methods)
    return response(problem(known.status_code, detail), headers)


def allowed(request: Request) -> list[str]:
    """The methods that a path takes, of all its routes: the framework names those of the first alone. Empty inside a folder of files."""
    methods: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


def _invalid(errors: Sequence[InvalidInput]) -> dict[str, Any]:
    listed = [{"field": printable(error.field), "value": printable(error.value), "expected": error.expected} for error in errors]
    first = listed[0]
    return problem(422, f"{first['field']}: got {first['value']}, expected {first['expected']}", listed)


def _from_pydantic(error: Mapping[str, Any], path: Sequence[int | str], kind: type[BaseModel] | None) -> InvalidInput:
    """pydantic's error with its path written as `queries[0].history[3]`. kind is the body's class, where it is known."""
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "body"
    match error["type"]:
        case "missing":
            return InvalidInput(field, None, "a value; it is required")
        case "extra_forbidden":
            return InvalidInput(field, error["input"], f"only the fields {', '.join(_fields(kind, path))}" if kind else "no such field")
        case "json_invalid":
            given = error["input"]
            text = given.decode("utf-8", "replace") if isinstance(given, bytes) else given
            return InvalidInput(field, text, f"a JSON document ({error['ctx']['error']})")
    message: str = error["msg"]
    expected = message.removeprefix("Input should be ").removeprefix("Value error, ")
    return InvalidInput(field, error["input"], "an object" if error["type"].startswith("model_") else expected)


def _fields(kind: type[BaseModel], path: Sequence[int | str]) -> Sequence[str]:
    """The fields of the part of a body in which an unknown one was found."""
    annotation: Any = kind
    for part in path[:-1]:
        if isinstance(part, str) and isinstance(annotation, type) and issubclass(annotation, BaseModel):
            annotation = annotation.model_fields[part].annotation
        elif isinstance(part, int):
            annotation = annotation.__args__[0]
        if isinstance(annotation, UnionType):  # one that may be left out
            annotation = next(kind for kind in annotation.__args__ if issubclass(kind, BaseModel))
    return list(annotation.model_fields)


def printable(text: str) -> str:
    """Lone surrogates, which JSON may hold and UTF-8 may not, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()
