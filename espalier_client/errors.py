"""Every error that the client raises on purpose.

    ClientError
    ├── ConnectionFailed          no whole answer arrived; `sent` says whether the request may have reached the service
    │   └── TimedOut              within the client's time
    ├── InvalidAnswer             the answer is not one of this service, or is too long
    └── RequestFailed             the service refused, with a problem document (RFC 9457)
        ├── InvalidRequest        400, 413, 415, 422   the request is wrong; `errors` says where
        ├── NotAllowed            401, 403             no key, an unknown one, or one without the role
        ├── NotFound              404, 410             no such model, version or item; or changes that are not kept any more
        ├── Conflict              409, 412             not in the state that the model is in, or not as it was when it was read
        ├── Overloaded            429                  the queue is full; `retry_after_s` says when to come back
        ├── ServiceFailed         500, 502             something broke; its log says more under `request_id`
        ├── Unavailable           503                  not ready, or shutting down; `retry_after_s` too
        ├── DeadlineExceeded      504                  `timeout_ms` passed before the search was done
        └── CatalogueFull         507                  the live catalogue has no room for another item

Arguments that cannot be sent at all are ValueError or TypeError, as everywhere in Python. What is retried: see retry.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar


class ClientError(Exception):
    """Base of all errors raised on purpose."""


class ConnectionFailed(ClientError):
    """No whole answer arrived: the connection was refused, broke, or ended too early.

    Attributes: `detail`; `sent`, whether the request may have reached the service; `request_id`.
    """

    def __init__(self, detail: str, sent: bool, request_id: str) -> None:
        super().__init__(detail, sent, request_id)  # all arguments, so that the error survives pickling
        self.detail = detail
        self.sent = sent
        self.request_id = request_id

    def __str__(self) -> str:
        return f"{self.detail} (request {self.request_id})"


class TimedOut(ConnectionFailed):
    """The connection, a piece of the answer, or the whole call took longer than the client waits."""


class InvalidAnswer(ClientError):
    """The answer is not one of this service (a wrong address, or another generation of it), or is longer than accepted."""


@dataclass(frozen=True, slots=True)
class WrongValue:
    """One wrong value of a request: where it is (`queries[0].history[3]`), what it is, what would have been right."""

    field: str
    value: str
    expected: str


class RequestFailed(ClientError):
    """The service refused. Raised; in a stream, yielded in place of the answer.

    Attributes: `status` and `title` of HTTP, `detail` (a sentence), `errors` (the wrong values, for InvalidRequest), `request_id` (what the
    service's log knows the request by), `retry_after_s` (how long to wait before trying again, None where the service does not say).
    """

    statuses: ClassVar[tuple[int, ...]] = ()

    def __init__(
        self,
        status: int,
        title: str = "",
        detail: str = "",
        errors: tuple[WrongValue, ...] = (),
        request_id: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(status, title, detail, errors, request_id, retry_after_s)
        self.status = status
        self.title = title
        self.detail = detail
        self.errors = errors
        self.request_id = request_id
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        said = ": ".join(part for part in (f"{self.status} {self.title}".strip(), self.detail) if part)
        return f"{said} (request {self.request_id})" if self.request_id else said


class InvalidRequest(RequestFailed):
    statuses = (400, 413, 415, 422)


class NotAllowed(RequestFailed):
    statuses = (401, 403)


class NotFound(RequestFailed):
    statuses = (404, 410)


class Conflict(RequestFailed):
    statuses = (409, 412)


class Overloaded(RequestFailed):
    statuses = (429,)


class ServiceFailed(RequestFailed):
    statuses = (500, 502)


class Unavailable(RequestFailed):
    statuses = (503,)


class DeadlineExceeded(RequestFailed):
    statuses = (504,)


class CatalogueFull(RequestFailed):
    statuses = (507,)


_BY_STATUS = {status: kind for kind in RequestFailed.__subclasses__() for status in kind.statuses}


def from_problem(status: int, document: object, request_id: str | None, retry_after_s: float | None = None) -> RequestFailed:
    """The error that a problem document tells of; anything else, like a proxy's page, tells only its status."""
    problem = document if isinstance(document, Mapping) else {}
    listed = problem.get("errors")
    errors = tuple(_wrong_value(one) for one in listed if isinstance(one, Mapping)) if isinstance(listed, list) else ()
    kind = _BY_STATUS.get(status, RequestFailed)
    title = _text(problem, "title") or (HTTPStatus(status).phrase if status in HTTPStatus.__members__.values() else "")
    return kind(status, title, _text(problem, "detail"), errors, request_id, retry_after_s)


def _wrong_value(one: Mapping[str, Any]) -> WrongValue:
    return WrongValue(_text(one, "field"), _text(one, "value"), _text(one, "expected"))


def _text(document: Mapping[str, Any], name: str) -> str:
    value = document.get(name)
    return plain(value if isinstance(value, str) else str(value)) if isinstance(value, str | int | float) else ""


def plain(text: str, most: int = 2000) -> str:
    """Untrusted text made safe for one line of a log: cut to `most` characters, with a space for each that cannot be printed."""
    cut = text if len(text) <= most else f"{text[:most]}…"
    return cut if cut.isprintable() else "".join(letter if letter.isprintable() else " " for letter in cut)
