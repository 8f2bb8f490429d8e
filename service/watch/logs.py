"""The log: lines of text, or one JSON object a line. A ration limits the lines that any client can cause.

Knows log records. A record's `fields` (`extra={"fields": {...}}`) become keys of the object.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

MAX_PLAIN = 200
"""Most characters of a value from outside."""
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
BURST, PER_S = 20, 1.0
SUMMARY_S = 10.0


class JsonFormatter(logging.Formatter):
    """time (UTC, ISO 8601), level, logger, the record's fields or message, and its exception if any."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        if record.name not in ("service.requests", "service.audit"):  # their messages repeat the fields
            entry["message"] = record.getMessage()
        if fields is not None:
            entry |= {name: value for name, value in fields.items() if value is not None}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(entry, default=str).decode()


def configure(level: str, form: Literal["text", "json"]) -> None:
    """Log messages of this process from `level` on to standard error."""
    handler = logging.StreamHandler(sys.__stderr__)  # the process's own, even if sys.stderr was replaced
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("service.audit").setLevel(logging.INFO)  # at any `level`
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLevelName(level)))


def plain(text: str) -> str:
    """A text without control characters, which could act on a terminal or end a line, and cut to MAX_PLAIN characters."""
    printable = "".join([letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text[: MAX_PLAIN + 1]])
    return printable if len(printable) <= MAX_PLAIN else printable[: MAX_PLAIN - 1] + "…"


class Ration:
    """A token bucket for log lines of one kind: a burst at once, then `per_s` a second. Other lines are omitted and counted.

    The next line, or a summary after SUMMARY_S, tells how many were omitted. For one event loop. `clock` is in seconds.

    summary  writes a line with the number of omitted lines
    """

    def __init__(
        self, summary: Callable[[int], None], burst: int = BURST, per_s: float = PER_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._summary, self._burst, self._per_s, self._clock = summary, float(burst), per_s, clock
        self._lines_left, self._filled_at = float(burst), clock()
        self._omitted_lines = 0
        self._timer: asyncio.TimerHandle | None = None

    def take(self) -> int | None:
        """How many lines were omitted since the last one. None: omit this line too."""
        now = self._clock()
        self._lines_left = min(self._burst, self._lines_left + (now - self._filled_at) * self._per_s)
        self._filled_at = now
        if self._lines_left < 1:
            self._omitted_lines += 1
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(SUMMARY_S, self.write_left_out)
            return None
        self._lines_left -= 1
        return self._reset_omitted_lines()

    def write_left_out(self) -> None:
        """Write the summary, if lines were omitted since the last line."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if count := self._reset_omitted_lines():
            self._summary(count)

    def _reset_omitted_lines(self) -> int:
        count, self._omitted_lines = self._omitted_lines, 0
        return count
