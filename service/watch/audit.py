"""The audit log: who was not let in, and who changed what is served. Its lines come from the logger `service.audit`.

A line is a set of fields; logs.py writes them as JSON, or as `name=value` with every value in JSON's quotes, so that no value can end a
line or look like another field. Keys are in no line, only their names or ids. Knows requests, outcomes and fields, not what they mean.

Who has no key can make lines, so those of denials are limited: BURST at once, PER_S a second from then on. What was left out is counted,
and the next line, or one LATER_S later, says how many it was. The metric counts all of them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from starlette.types import Scope

from service.errors import Denied
from service.problems import document_of
from service.watch.metrics import Metrics

log = logging.getLogger("service.audit")

BURST, PER_S = 20, 1.0
LATER_S = 10.0
LONGEST = 200
"""Characters of a value that a client chose."""

T = TypeVar("T")


class Change(NamedTuple):
    """What a change found, and what it left."""

    before: Any
    after: Any


class Origin(NamedTuple):
    """Where a request came from. `key` is the name or id of its key."""

    client: str
    request_id: str
    key: str | None = None


class Audit:
    """The audit log of one process; used from its event loop alone. `clock` is in seconds."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics, self._clock = metrics, clock
        self._allowance, self._filled_at = float(BURST), clock()
        self._left_out = 0
        self._later: asyncio.TimerHandle | None = None
        self._changes: set[asyncio.Task[Any]] = set()

    def denied(self, scope: Scope, request_id: str, error: Denied) -> None:
        """Count a request that was not let in, and write a line of it where there is room."""
        self._metrics.auth_failure(error.role, error.reason)
        if not self._room():
            self._left_out += 1
            if self._later is None:
                self._later = asyncio.get_running_loop().call_later(LATER_S, self.tell_left_out)
            return
        _write(
            logging.WARNING,
            {
                "action": "authenticate",
                "outcome": "denied",
                "role": error.role,
                "reason": error.reason,
                "method": _plain(scope["method"]),
                "path": _plain(_path(scope)),
                **origin(scope, request_id, error.key)._asdict(),
                "left_out": self._taken() or None,
            },
        )

    async def change(
        self,
        action: str,
        model: str,
        by: Origin,
        change: Coroutine[Any, Any, T],
        described: Callable[[T], Change],
        **what: Any,
    ) -> T:
        """Make a change of what is served and write its line: what was there and what is there now, or why it failed.

        The line is written when the change is done, even if the client has hung up by then. `described` is called in a thread.
        """
        task = asyncio.ensure_future(_changed(action, model, by, change, described, what))
        self._changes.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    def tell_left_out(self) -> None:
        """Write how many denials have got no line since the last one that did."""
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if left_out := self._taken():
            _write(logging.WARNING, {"action": "authenticate", "outcome": "denied", "left_out": left_out})

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, in case that nobody waits for it any more

    def _room(self) -> bool:
        now = self._clock()
        self._allowance = min(float(BURST), self._allowance + (now - self._filled_at) * PER_S)
        self._filled_at = now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True

    def _taken(self) -> int:
        left_out, self._left_out = self._left_out, 0
        return left_out


def origin(scope: Scope, request_id: str, key: str | None = None) -> Origin:
    """The address that the connection came from, or that a trusted proxy named (docs/service.md), with the request's id and key."""
    client = scope.get("client")
    if not client:
        return Origin("", request_id, key)
    host, port = client
    return Origin(_plain(f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"), request_id, key)


async def _changed(
    action: str, model: str, by: Origin, change: Coroutine[Any, Any, T], described: Callable[[T], Change], what: dict[str, Any]
) -> T:
    fields = {"action": action, "model": _plain(model)} | {name: _plain(v) if isinstance(v, str) else v for name, v in what.items()}
    try:
        changed = await change
        before, after = await asyncio.to_thread(described, changed)
    except Exception as error:
        document, _ = document_of(error) or ({"status": 500, "detail": type(error).__name__}, {})
        failed = {"outcome": "failed", "status": document["status"], "detail": _plain(document["detail"])}
        _write(logging.WARNING, {**fields, **failed, **by._asdict()})
        raise
    outcome = "unchanged" if before == after else "changed"
    _write(logging.INFO, {**fields, "outcome": outcome, "before": before, "after": after, **by._asdict()})
    return changed


def _write(level: int, fields: dict[str, Any]) -> None:
    told = {name: value for name, value in fields.items() if value is not None}
    said = " ".join([f"{name}={json.dumps(value)}" for name, value in told.items()])
    log.log(level, "%s", said, extra={"fields": told})


def _path(scope: Scope) -> str:
    """As it was sent: percent-encoded, without the query."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.decode("latin-1")


def _plain(text: str) -> str:
    """Without characters that a terminal or a reader of lines would act on, and not too long."""
    shown = "".join([letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text[: LONGEST + 1]])
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"
