"""The audit log: denied requests, and changes of what is served. Its lines come from the logger `service.audit`.

A line is a set of fields. logs.py writes them as JSON, or as `name=value` with every value quoted as in JSON, so that no value can end a
line or look like another field. Lines never hold keys, only their names or ids. Knows requests, outcomes and fields, not their meaning.

Anybody can cause denials. Their lines are therefore rationed (logs.py); `left_out` counts denials without a line. The metric counts all.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple, TypeVar

from starlette.types import Scope

from ..errors import Denied
from ..problems import document_of
from ..watch.logs import Ration, plain
from ..watch.metrics import Metrics

log = logging.getLogger("service.audit")

T = TypeVar("T")


class BeforeAfter(NamedTuple):
    before: Any
    after: Any


class Origin(NamedTuple):
    """The sender of a request. key: name or id of its key."""

    client: str
    request_id: str
    key: str | None = None


class Audit:
    """The audit log of one process, for use in its event loop only. `clock` is in seconds."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._denial_lines = Ration(_write_left_out, clock=clock)
        self._changes: set[asyncio.Task[Any]] = set()

    def denied(self, scope: Scope, request_id: str, error: Denied) -> None:
        """Count a denied request, and write a line unless there were too many."""
        self._metrics.count("espalier_auth_failures_total", error.role, error.reason)
        left_out = self._denial_lines.take()
        if left_out is None:
            return
        _write(
            logging.WARNING,
            {
                "action": "authenticate",
                "outcome": "denied",
                "role": error.role,
                "reason": error.reason,
                "method": plain(scope["method"]),
                "path": plain(_path(scope)),
                **origin(scope, request_id, error.key)._asdict(),
                "left_out": left_out or None,
            },
        )

    async def change(
        self,
        action: str,
        model: str,
        by: Origin,
        change: Coroutine[Any, Any, T],
        describe: Callable[[T], BeforeAfter],
        **details: Any,
    ) -> T:
        """Make a change and write its line: the served state before and after, or why the change failed.

        The line is written when the change is done, even if the client has hung up. `describe` is called in a thread.
        """
        task = asyncio.ensure_future(_change(action, model, by, change, describe, details))
        self._changes.add(task)
        task.add_done_callback(self._done)
        try:
            return await asyncio.shield(task)
        finally:
            del task  # its error holds this frame

    def bulk(self, model: str, by: Origin, statuses: Mapping[int, int]) -> None:
        """Write the line of a bulk request that has ended: the number of its lines by status.

        Single writes have no lines: there may be hundreds a second, and the journal has every effective operation.
        """
        counts = {str(status): count for status, count in sorted(statuses.items())}
        _write(logging.INFO, {"action": "bulk", "model": plain(model), "outcome": "ended", "statuses": counts, **by._asdict()})

    def write_left_out(self) -> None:
        """Write how many denials had no line since the last line."""
        self._denial_lines.write_left_out()

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # read it, so that asyncio does not log it when the client has gone


def origin(scope: Scope, request_id: str, key: str | None = None) -> Origin:
    """The client's address, or the one that a trusted proxy gave (docs/operate.md), with the request's id and key."""
    client = scope.get("client")
    if not client:
        return Origin("", request_id, key)
    host, port = client
    return Origin(plain(f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"), request_id, key)


async def _change(
    action: str, model: str, by: Origin, change: Coroutine[Any, Any, T], describe: Callable[[T], BeforeAfter], details: dict[str, Any]
) -> T:
    fields = {"action": action, "model": plain(model)} | {name: plain(v) if isinstance(v, str) else v for name, v in details.items()}
    try:
        result = await change
        before, after = await asyncio.to_thread(describe, result)
    except Exception as error:
        document, _ = document_of(error) or ({"status": 500, "detail": type(error).__name__}, {})
        failure = {"outcome": "failed", "status": document["status"], "detail": plain(document["detail"])}
        _write(logging.WARNING, {**fields, **failure, **by._asdict()})
        raise
    outcome = "unchanged" if before == after else "changed"
    _write(logging.INFO, {**fields, "outcome": outcome, "before": before, "after": after, **by._asdict()})
    return result


def _write_left_out(left_out: int) -> None:
    _write(logging.WARNING, {"action": "authenticate", "outcome": "denied", "left_out": left_out})


def _write(level: int, fields: dict[str, Any]) -> None:
    fields = {name: value for name, value in fields.items() if value is not None}
    text = " ".join([f"{name}={json.dumps(value)}" for name, value in fields.items()])
    log.log(level, "%s", text, extra={"fields": fields})


def _path(scope: Scope) -> str:
    """The path as the client wrote it: percent-encoded, without the query."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.decode("latin-1")
