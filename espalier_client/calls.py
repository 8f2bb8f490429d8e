"""The routes: the request of each, and the parser of its answer. Sends nothing: both clients have a method that sends each request."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar, Unpack
from urllib.parse import quote
from uuid import uuid4

import httpx

from espalier_client import items, messages
from espalier_client.errors import ClientError, ConnectionFailed, InvalidAnswer, TimedOut, from_problem, plain
from espalier_client.messages import UNREADABLE, Document, from_bytes, integer, read, to_bytes

T = TypeVar("T")
Value = str | int | bool

JSON = "application/json"
NDJSON = "application/x-ndjson"

REFUSAL_BYTES = 1 << 20
"""Most bytes that are read of a refusal. A longer body is ignored; the status is enough."""

YEAR_S = 365 * 86_400.0

LOADING_S = 600.0
"""Default time-out of admin calls that may load a version."""


@dataclass(frozen=True)
class Call(Generic[T]):
    """One HTTP request and the parser of its answer. The request id stays the same when the request is sent again.

    `repeatable`: sending it twice has the same effect as once. `statuses`: those besides 2xx whose body is the answer. `patience_s`: time
    to wait for the answer, instead of the client's `timeout_s`. `media_type`: of the body, and of a stream's answer.
    """

    method: str
    path: str
    parse: Callable[[Any], T]
    body: bytes | None = None
    params: Mapping[str, Value] = field(default_factory=dict)
    media_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True
    statuses: tuple[int, ...] = ()
    patience_s: float | None = None
    request_id: str = field(default_factory=lambda: uuid4().hex)

    def arguments(self, timeout_s: float, left_s: float) -> dict[str, Any]:
        """Arguments of httpx's `stream`. `timeout_s`: longest time of an operation; `left_s`: time left for the whole call."""
        headers = {"X-Request-Id": self.request_id, **self.headers}
        if self.body is not None:
            headers["Content-Type"] = self.media_type
        return {
            "method": self.method,
            "url": self.path,
            "params": self.params or None,
            "content": self.body,
            "headers": headers,
            "timeout": httpx.Timeout(min(timeout_s, left_s), read=min(timeout_s if self.patience_s is None else self.patience_s, left_s)),
        }

    def check(self, response: httpx.Response) -> None:
        """Raise InvalidAnswer if the headers of a response show that its body is not an answer."""
        header = response.headers.get("Content-Type")
        media_type = "" if header is None else header.partition(";")[0].strip().lower()
        if header is not None and media_type not in {JSON, NDJSON}:
            raise InvalidAnswer(f"{self}: expected an answer of the type {JSON}, got {plain(media_type, 100)!r}")
        if encoded(response):
            raise InvalidAnswer(
                f"{self}: expected an answer that is not compressed, got {plain(response.headers['Content-Encoding'], 100)!r}"
            )

    def read(self, response: httpx.Response, content: bytes) -> T:
        """Parse the answer. `content`: the body, read by Body. Raises RequestFailed or InvalidAnswer."""
        if not response.is_success and response.status_code not in self.statuses:
            raise self.refusal(response, content)
        try:
            return self.parse(from_bytes(content))
        except UNREADABLE as error:
            if not response.is_success:
                raise self.refusal(response, content) from error
            raise self.misread(error) from error

    def refusal(self, response: httpx.Response, content: bytes) -> ClientError:
        """The error of a response without an answer. `content`: the body, read by Body."""
        try:
            document = from_bytes(content)
        except UNREADABLE:
            document = None
        request_id = plain(response.headers.get("X-Request-Id", self.request_id), 200)
        return from_problem(response.status_code, document, request_id, _retry_after_s(response.headers))

    def too_long(self, max_bytes: int) -> InvalidAnswer:
        return InvalidAnswer(f"{self}: expected an answer of at most {max_bytes} bytes (max_answer_bytes), got more")

    def misread(self, error: Exception) -> InvalidAnswer:
        return InvalidAnswer(
            f"{self}: expected an answer of the retrieval service, got another ({type(error).__name__}: {plain(str(error), 200)})"
        )

    def failure(self, error: httpx.RequestError | ClientError) -> ClientError:
        """The client's error for an error of httpx."""
        if isinstance(error, ClientError):
            return error
        detail = f"{self.method} {error.request.url}: {plain(str(error), 500) or type(error).__name__}"
        if not isinstance(error, httpx.TransportError):
            return InvalidAnswer(detail)
        sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout | httpx.ProxyError)
        kind = TimedOut if isinstance(error, httpx.TimeoutException) else ConnectionFailed
        return kind(detail, sent, self.request_id)

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


class Body:
    """The bytes of one response, at most `max_bytes`, piece by piece.

    wanted  whether to read the body. A compressed body is not read: the client did not ask for it, and a kilobyte may unpack to a gigabyte
    """

    def __init__(self, call: Call[Any], response: httpx.Response, max_bytes: int) -> None:
        self._call = call
        self._is_answer = response.is_success or response.status_code in call.statuses
        self._max_bytes = max_bytes if self._is_answer else min(max_bytes, REFUSAL_BYTES)
        self.wanted = not encoded(response)
        self._pieces: list[bytes] = []
        self._bytes = 0
        if response.is_success:
            call.check(response)

    def take(self, piece: bytes) -> bool:
        """Add a piece. Returns whether to read on. Raises InvalidAnswer if an answer is too long."""
        self._bytes += len(piece)
        if self._bytes > self._max_bytes:
            if self._is_answer:
                raise self._call.too_long(self._max_bytes)
            self._pieces.clear()
            return False
        self._pieces.append(piece)
        return True

    @property
    def content(self) -> bytes:
        return b"".join(self._pieces)


def encoded(response: httpx.Response) -> bool:
    """Whether the body is compressed, which the client never asks for."""
    return response.headers.get("Content-Encoding", "identity").strip().lower() not in {"", "identity"}


def retrieve(
    queries: Iterable[messages.Query], *, user: str | None = None, group: str | None = None, **options: Unpack[messages.Options]
) -> Call[messages.Answer]:
    """The best items for each query. `options` are the fields of `Request`.

    `user`: the user of the request: during a trial, all requests of a user go to the same version. `group`: a group that a trial may
    select.
    """
    request = messages.Request(queries, **options)
    read = partial(messages.answer, queries=len(tuple(request.queries)))
    values = {"Espalier-User": None if user is None else quote(user), "Espalier-Group": group}
    headers = {name: value for name, value in values.items() if value is not None}
    return Call("POST", "/retrieve", read, request.to_bytes(), headers=headers)


def models() -> Call[tuple[messages.Model, ...]]:
    """Every model of the service, ready or not."""
    return Call("GET", "/models", messages.models)


def model(name: str) -> Call[messages.Model]:
    """One model."""
    return Call("GET", model_path(name), messages.model)


def complete(name: str, prefix: str, limit: int = 10) -> Call[tuple[messages.Completion, ...]]:
    """Items of a model whose id or title starts with `prefix`."""
    return Call("GET", model_path(name, "items"), messages.completions, params={"prefix": prefix, **_integers(limit=limit)})


def facets(
    name: str, column: str, *, filter: Mapping[str, Any] | None = None, limit: int = 20, version: int | None = None
) -> Call[Document]:
    """For each value of a column, the number of items that a query may get; `filter` as in a request, but for that column itself."""
    params: dict[str, Value] = {"column": column, **_integers(limit=limit, version=version)}
    if filter:
        params["filter"] = to_bytes(filter).decode()
    return Call("GET", model_path(name, "facets"), messages.document, params=params)


def node(name: str, number: int = 0, *, tree: int = 0, limit: int = 50, version: int | None = None) -> Call[Document]:
    """A node of a tree (`tree`: its index in a forest, from 0), its children, some of its items, and their typical values."""
    params = _integers(tree=tree, limit=limit, version=version)
    return Call("GET", model_path(name, "tree", str(integer("number", number))), messages.document, params=params)


def item_path(name: str, item_id: str, *, tree: int = 0, version: int | None = None) -> Call[tuple[int, ...]]:
    """The nodes from the root of a tree to an item's leaf."""
    params: dict[str, Value] = {"item": item_id, **_integers(tree=tree, version=version)}
    return Call("GET", model_path(name, "tree"), messages.item_path, params=params)


def ready() -> Call[messages.Readiness]:
    """Whether the service is ready, and the reasons if it is not. Not being ready is no error."""
    return Call("GET", "/readyz", partial(read, messages.Readiness), statuses=(503,))


def load(name: str, version: int, *, default: bool = True, timeout_s: float = LOADING_S) -> Call[messages.Model]:
    """Open, verify and warm up a version while the others serve. `default`: then make it the default. Needs an admin key.

    Returns when the version is loaded, which may take minutes, or raises TimedOut after `timeout_s`. A failed load changes nothing.
    """
    return _change("POST", model_path(name, "load"), messages.model, {**_integers(version=version), "default": default}, timeout_s)


def unload(name: str, version: int, *, timeout_s: float = LOADING_S) -> Call[messages.Model]:
    """Drop a version that is not the default, when its requests are answered. Needs an admin key."""
    return _change("POST", model_path(name, "unload"), messages.model, _integers(version=version), timeout_s)


def set_default(name: str, version: int, *, timeout_s: float = LOADING_S) -> Call[messages.Model]:
    """Make a version the default; load it first if needed. Needs an admin key."""
    return _change("POST", model_path(name, "default"), messages.model, _integers(version=version), timeout_s)


def set_candidate(
    name: str,
    version: int,
    *,
    share: float = 0.0,
    keys: Iterable[str] = (),
    groups: Iterable[str] = (),
    shadow: float = 0.0,
    timeout_s: float = LOADING_S,
) -> Call[messages.Model]:
    """Try a version on a share of the users, on the requests of some keys and groups, or unseen as a shadow. Needs an admin key."""
    body = {**_integers(version=version), "share": share, "keys": list(keys), "groups": list(groups), "shadow": shadow}
    return _change("PUT", model_path(name, "candidate"), messages.model, body, timeout_s)


def drop_candidate(name: str) -> Call[messages.Model]:
    """End the trial of a version: all requests go to the default one again. Needs an admin key."""
    return Call("DELETE", model_path(name, "candidate"), messages.model, repeatable=False)


def trial(name: str) -> Call[Document]:
    """The candidate of a model beside its default version, in figures. Needs an admin key."""
    return Call("GET", model_path(name, "candidate"), messages.document)


def set_removed(name: str, ids: Iterable[str], *, if_match: str | None = None) -> Call[messages.Removal]:
    """Keep these items, and no others, out of every answer of a model. Needs an admin key.

    `if_match`: the `etag` of the list that these ids were made from; raises Conflict if the list has changed since.
    """
    if isinstance(ids, str):
        raise TypeError(f"ids: got {ids!r}, expected a list")
    call = _change("PUT", model_path(name, "removed"), partial(read, messages.Removal), {"ids": list(ids)})
    return call if if_match is None else replace(call, headers={"If-Match": _tag(if_match)})


def remove_item(name: str, item_id: str) -> Call[messages.RemovedItem]:
    """Keep one more item out of every answer of a model. Other removals stay as they are. Needs an admin key."""
    return Call("PUT", _item_path(name, "removed", item_id), partial(read, messages.RemovedItem), repeatable=False)


def restore_item(name: str, item_id: str) -> Call[messages.RemovedItem]:
    """Let answers of a model have an item again. Needs an admin key."""
    return Call("DELETE", _item_path(name, "removed", item_id), partial(read, messages.RemovedItem), repeatable=False)


def removed(name: str) -> Call[messages.RemovedIds]:
    """The items that are kept out of every answer of a model. Needs an admin key."""
    return Call("GET", model_path(name, "removed"), partial(read, messages.RemovedIds))


def put_item(
    name: str, item_id: str, *, if_match: str | None = None, if_none_match: str | None = None, **options: Unpack[items.ItemOptions]
) -> Call[items.ItemOutcome]:
    """Put an item into a running model, or change one. `options` are the fields of `Put`. Needs a write key.

    `if_match`: the `etag` of the item that the change was made from; `if_none_match` "*": only insert. Raises Conflict if the
    condition does not hold. Without a condition the call is sent again when its connection breaks: the second put is `unchanged`.
    """
    headers = _conditions(if_match, if_none_match)
    # With a condition a second attempt would fail on the item that the first one put.
    body = to_bytes(items.Put(item_id, **options).to_json())
    return Call("PUT", _item_path(name, "items", item_id), items.outcome(item_id), body, headers=headers, repeatable=not headers)


def delete_item(name: str, item_id: str, *, source_version: int | None = None, if_match: str | None = None) -> Call[items.ItemOutcome]:
    """Delete an item, trained or live. The outcome of deleting it again is `unchanged`. Needs a write key."""
    headers = _conditions(if_match, None)
    params = _integers(source_version=source_version)
    return Call(
        "DELETE", _item_path(name, "items", item_id), items.outcome(item_id), params=params, headers=headers, repeatable=not headers
    )


def get_item(name: str, item_id: str) -> Call[items.LiveItem]:
    """An item as it is now, trained or live. Needs a write key."""
    return Call("GET", _item_path(name, "items", item_id), items.live_item)


def changes(name: str, after: int = 0, limit: int = 1000) -> Call[items.Changes]:
    """The operations of a model's live catalogue after a sequence, at most `limit`. Needs an admin key."""
    return Call("GET", model_path(name, "changes"), items.changes, params=_integers(after=after, limit=limit))


def check_timeout_s(value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"timeout_s: got {value!r}, expected a finite number above 0")
    return value


def _change(method: str, path: str, parse: Callable[[Any], T], document: Mapping[str, Any], timeout_s: float | None = None) -> Call[T]:
    patience_s = None if timeout_s is None else check_timeout_s(timeout_s)
    # Not repeatable: another client may have changed it back between two attempts.
    return Call(method, path, parse, to_bytes(document), repeatable=False, patience_s=patience_s)


def _integers(**values: int | None) -> dict[str, Value]:
    """The values that are not None, by name. Raises TypeError unless they are integers."""
    return {name: integer(name, value) for name, value in values.items() if value is not None}


def model_path(name: str, *segments: str) -> str:
    if name in {"", ".", ".."}:
        raise ValueError(f"name: got {name!r}, expected the name of a model")
    return "/".join(("/models", quote(name, safe=""), *segments))


def _item_path(name: str, folder: str, item_id: str) -> str:
    if not item_id:
        raise ValueError("item_id: got '', expected the id of an item")
    segment = quote(item_id, safe="")
    return model_path(name, folder, segment.replace(".", "%2E") if segment in {".", ".."} else segment)  # a path cannot have these segments


def _conditions(if_match: str | None, if_none_match: str | None) -> dict[str, str]:
    conditions = {"If-Match": (if_match, "if_match"), "If-None-Match": (if_none_match, "if_none_match")}
    return {header: _tag(value, name) for header, (value, name) in conditions.items() if value is not None}


def _tag(value: str, name: str = "if_match") -> str:
    if not re.fullmatch(r'\*|"[!#-~]*"', value):
        raise ValueError(f"{name}: got {value!r}, expected an etag as the service gave it")
    return value


def _retry_after_s(headers: httpx.Headers) -> float | None:
    value = headers.get("Retry-After", "")
    return min(float(value), YEAR_S) if re.fullmatch(r"[0-9]{1,300}(\.[0-9]{1,300})?", value) else None
