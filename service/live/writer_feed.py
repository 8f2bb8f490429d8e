"""Reads the changes feed of another host's service over HTTP, for a host that follows it.

Knows the route `GET /models/{name}/changes`, keys and the limits of an answer. Does not know journals.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlsplit

from espalier.errors import EspalierError, InvalidData
from espalier.live.operations import MAX_SEQUENCE, ItemBody, Operation

from ..tls import Certificates, calling

TIMEOUT_S = 10.0
"""Timeout of connecting, and of each read."""
LIMIT = 500
"""Most operations of one answer."""
MAX_ANSWER_BYTES = 64 << 20
"""Largest answer that is read."""


class FeedFailed(EspalierError):
    """The writer did not answer, or its answer is invalid. A later attempt may succeed."""


@dataclass(frozen=True)
class Page:
    """Operations after a sequence, ascending.

    sequence  the last one that the writer has committed
    identity  of its journal
    dropped   see `Journal.dropped`
    """

    operations: tuple[Operation, ...]
    sequence: int
    identity: str | None
    dropped: int


class WriterFeed:
    """Used by one thread. url: of the writer's service, see `Settings.follow`; key: with the role `admin`; certificates: for https, None:
    the system's CAs."""

    def __init__(self, url: str, key: str | None, certificates: Certificates | None = None) -> None:
        split_url = urlsplit(url)
        self.url, self._path = url, split_url.path
        self._headers = {"Accept": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        self._is_secure, self._host, self._port = split_url.scheme == "https", split_url.hostname or "", split_url.port
        self._certificates = certificates or calling(None, None, None)
        self._connection: http.client.HTTPConnection | None = None

    def changes(self, model: str, after: int) -> Page:
        """The operations of a model after a sequence. Raises FeedFailed, with the writer's reason if it refuses."""
        address = f"{self._path}/models/{quote(model, safe='')}/changes?after={after}&limit={LIMIT}"
        try:
            status, body = self._get(address)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise FeedFailed(f"{self.url} does not answer: {error or type(error).__name__}") from error
        try:
            answer = json.loads(body)
            if status != http.client.OK:
                detail = answer.get("detail") if isinstance(answer, dict) else None
                raise FeedFailed(f"{self.url} answers {status}: {detail or 'no reason'}")
            operations = tuple(map(operation_of, answer["changes"]))
            last = after
            for operation in operations:
                if operation.sequence <= last:
                    raise InvalidData("sequence", operation.sequence, f"above {last}, the one before")
                last = operation.sequence
            dropped = _number("dropped", answer.get("dropped", 0))
            return Page(operations, _number("sequence", answer["sequence"]), answer.get("journal"), dropped)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, InvalidData) as error:
            raise FeedFailed(f"{self.url} answers {status} with something else than changes: {error}") from error

    def abort(self) -> None:
        """End the request in progress. From any thread."""
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):  # it has ended
                connection.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. A later call opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _get(self, address: str) -> tuple[int, bytes]:
        if self._connection is None:
            if self._is_secure:
                context = self._certificates.current()
                self._connection = http.client.HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=context)
            else:
                self._connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        self._connection.request("GET", address, headers=self._headers)
        answer = self._connection.getresponse()
        body = answer.read(MAX_ANSWER_BYTES + 1)
        if len(body) > MAX_ANSWER_BYTES:
            raise http.client.HTTPException(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        return answer.status, body


def operation_of(change: Mapping[str, Any]) -> Operation:
    """An operation from its JSON in the feed. Raises InvalidData, or KeyError, TypeError or ValueError for another form.

    The operation can be read from a journal again: invalid data of a writer must not end up in one.
    """
    until, evidence_from = change.get("valid_until"), change.get("evidence_from")
    if evidence_from is not None:
        evidence_from = _number("evidence_from", evidence_from["sequence"]), datetime.fromisoformat(evidence_from["at"]).timestamp()
    body = ItemBody(
        fields=change.get("fields"),
        text=change.get("text"),
        like=tuple(change.get("like") or ()),
        events=tuple(change.get("events") or ()),
        users=tuple(change.get("users") or ()),
        valid_until=None if until is None else datetime.fromisoformat(until).timestamp(),
        count=change.get("count"),
        evidence_from=evidence_from,
    )
    at = datetime.fromisoformat(change["at"]).timestamp()
    version = change.get("source_version")
    version = None if version is None else _number("source_version", version)
    body = ItemBody.from_bytes(body.to_bytes())
    return Operation(_number("sequence", change["sequence"]), change["id"], change["kind"], body, version, at)


def _number(name: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_SEQUENCE:
        raise InvalidData(name, value, f"an integer from 0 to {MAX_SEQUENCE}")
    return value
