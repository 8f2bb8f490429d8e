"""The log: lines of text, or one JSON object a line.

Knows log records. A record's `fields` (`extra={"fields": {...}}`) become keys of the object.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

LONGEST = 200
"""Characters of a value that somebody else chose."""
TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """time (UTC, ISO 8601), level, logger, the record's fields or its message, and the exception where there is one."""

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
    handler = logging.StreamHandler(sys.__stderr__)  # the process's own, even where sys.stderr was replaced
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("service.audit").setLevel(logging.INFO)  # whatever the level is
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLevelName(level)))


def plain(text: str) -> str:
    """Without control characters, which could act on a terminal or end a line, and not too long."""
    shown = "".join([letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text[: LONGEST + 1]])
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"
