"""Every error that the client raises on purpose.

    ClientError
    ├── ConnectionFailed          no complete answer arrived; `sent`: the request may have reached the service
    │   └── TimedOut              no complete answer within the client's time-outs
    ├── InvalidAnswer             the answer is not one of this service, or is too long
    └── RequestFailed             the service refused, with a problem document (RFC 9457)
        ├── InvalidRequest        400, 413, 415, 422   the request is wrong; `errors` says where
        ├── NotAllowed            401, 403             no key, an unknown one, or one without the role
        ├── NotFound              404, 410             no such model, version or item; or changes that are no longer kept
        ├── Conflict              409, 412             not possible in the model's state, or the object has changed since it was read
        ├── Overloaded            429                  the queue is full; retry after `retry_after_s`
        ├── ServiceFailed         500, 502             an error in the service; see its log for `request_id`
        ├── Unavailable           503                  not ready, or shutting down; retry after `retry_after_s`
        ├── DeadlineExceeded      504                  `timeout_ms` passed before the search was done
        └── CatalogueFull         507                  the live catalogue has no room for another item

Arguments that cannot be sent raise ValueError or TypeError. retry.py says which requests are retried.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar


class ClientError(Exception):
    """Base of all errors raised on purpose."""


class ConnectionFailed(ClientError):
    """No complete answer arrived: the connection was refused, broke, or ended too early.

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
    """One wrong value of a request: its path (`queries[0].history[3]`), the value as JSON (None: it is missing), and the expected value."""

    field: str
    value: str | None
    expected: str

    def __str__(self) -> str:
        found = f"{self.field} is missing;" if self.value is None else f"{self.field}: got {self.value},"
        return f"{found} expected {self.expected}"


class RequestFailed(ClientError):
    """The service refused. Raised; in a stream, yielded instead of the answer.

    Attributes: `status` and `title` of HTTP, `detail` (a sentence), `errors` (the wrong values, for InvalidRequest), `request_id` (of
    the request in the service's log), `retry_after_s` (seconds to wait before trying again; None if the service does not say).
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
        text = ": ".join(part for part in (f"{self.status} {self.title}".strip(), self.detail) if part)
        return f"{text} (request {self.request_id})" if self.request_id else text


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
    """The error in a problem document. From any other document, such as a proxy's page, only the status is used."""
    problem = document if isinstance(document, Mapping) else {}
    entries = problem.get("errors")
    errors = tuple(_wrong_value(entry) for entry in entries if isinstance(entry, Mapping)) if isinstance(entries, list) else ()
    kind = _BY_STATUS.get(status, RequestFailed)
    title = _text(problem, "title") or (HTTPStatus(status).phrase if status in HTTPStatus.__members__.values() else "")
    return kind(status, title, _text(problem, "detail"), errors, request_id, retry_after_s)


def _wrong_value(entry: Mapping[str, Any]) -> WrongValue:
    return WrongValue(_text(entry, "field"), _text(entry, "value") if "value" in entry else None, _text(entry, "expected"))


def _text(document: Mapping[str, Any], name: str) -> str:
    value = document.get(name)
    return plain(value if isinstance(value, str) else str(value)) if isinstance(value, str | int | float) else ""


def plain(text: str, max_length: int = 2000) -> str:
    """Untrusted text made safe for one line of a log: cut to `max_length` characters, with a space for each that cannot be printed."""
    cut = text if len(text) <= max_length else f"{text[:max_length]}…"
    return cut if cut.isprintable() else "".join(letter if letter.isprintable() else " " for letter in cut)
