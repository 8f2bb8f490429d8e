"""Every error that Espalier raises on purpose.

    EspalierError
    ├── MissingExtra          a call needs a package that is not installed; says what to install
    ├── InvalidInput          a value from outside is wrong; says the field, the value and the expected value
    │   ├── InvalidQuery      a query or a search parameter
    │   ├── InvalidMessage    a message between a router and a shard
    │   ├── InvalidConfig     a training configuration or a command-line option
    │   └── InvalidData       a log, an item table or another data file; EndlessQuotes: a quote begins a field, and none ends it
    ├── InvalidTree           arrays that are not a tree
    ├── BundleError           a bundle on disk
    │   ├── BundleNotFound    nothing there, or a part is missing
    │   ├── BundleExists      a version is never overwritten
    │   ├── BundleCorrupt     a checksum, a size, a shape or a golden query does not match
    │   └── UnsupportedSchema written by another generation of this software
    ├── JournalError          the journal of a live catalogue
    │   ├── JournalCorrupt    damaged, or no journal
    │   ├── UnsupportedJournal  written by another generation of this software
    │   ├── JournalFull       the disk or a quota has no room for the commit; nothing of it was kept
    │   ├── JournalReadOnly   the folder or the file cannot be written to, or is a copy of another host's
    │   └── JournalBusy       another process held the lock for too long
    ├── NoRoom                no node of a tree takes one more live item
    ├── StoreError            models on object storage
    │   ├── StoreUnavailable  not reachable, or it refuses the request
    │   ├── StoreMissing      no such folder, model, version or blob
    │   ├── StoreConflict     the version exists with other content, or another process changes the same object
    │   ├── StoreDamaged      an object does not match its manifest
    │   └── CacheFull         the disk has no room for the version
    ├── UnsupportedGraph      an engine does not know an operator of a bundle's graphs; other engines may
    ├── NotCompiled           a compiled function was called with types that it was not compiled for, where nothing may compile
    └── DeviceUnavailable     the requested device or engine is not available

`expectation` says in plain words what pydantic expected of a value that it refused. Nothing in this file knows about HTTP; the service
maps these classes to status codes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pydantic import ValidationError


class _Missing(Enum):  # unlike an object, a member is the same one after pickling
    MISSING = "missing"


MISSING: Final = _Missing.MISSING
"""Stands for the value of a field that is not there."""


class EspalierError(Exception):
    """Base of all errors raised on purpose."""


class MissingExtra(EspalierError):
    """A call needs a package that is not installed; the message names the extra."""


class InvalidInput(EspalierError):
    """A value from outside is wrong.

    Attributes: `field` (the path of the value), `value` (MISSING if there is none), `expected` (a right value, in words).
    """

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(field, value, expected)
        self.field, self.value, self.expected = field, value, expected

    def __str__(self) -> str:
        return self.sentence(is_json=False)

    def sentence(self, is_json: bool) -> str:
        """The message. is_json: values are spelled as in JSON, else as in Python."""
        if self.value is MISSING:
            return f"{self.field} is missing; expected {self.expected}"
        return f"{self.field}: got {spelled(self.value, is_json)}, expected {self.expected}"


class InvalidQuery(InvalidInput):
    """A query or a search parameter."""


class InvalidMessage(InvalidInput):
    """A message between a router and a shard."""


class InvalidConfig(InvalidInput):
    """A training configuration or a command-line option."""


class InvalidData(InvalidInput):
    """A log, an item table or another data file."""

    def sentence(self, is_json: bool) -> str:
        """The message. None is spelled `null`, as which data files have it."""
        return super().sentence(is_json or self.value is None)


class InvalidTree(EspalierError):
    """Arrays that do not describe a tree."""


class BundleError(EspalierError):
    """A bundle on disk."""


class BundleNotFound(BundleError):
    """Nothing there, or a part of it is missing."""


class BundleExists(BundleError):
    """The version is there already; a version is never overwritten."""


class BundleCorrupt(BundleError):
    """A checksum, a size, a shape or a golden query does not match."""


class UnsupportedSchema(BundleError):
    """The bundle was written by another generation of this software."""


class JournalError(EspalierError):
    """The journal of a live catalogue. After any of these errors the operation in progress has no effect. Reading continues if it can."""


class JournalCorrupt(JournalError):
    """Damaged, or no journal."""


class UnsupportedJournal(JournalError):
    """The journal was written by another generation of this software."""


class JournalFull(JournalError):
    """The disk or a quota has no room for the commit."""


class JournalReadOnly(JournalError):
    """The folder or the file cannot be written to."""


class JournalBusy(JournalError):
    """Another process held the lock for too long."""


class NoRoom(EspalierError):
    """No node of a tree takes one more live item."""


class StoreError(EspalierError):
    """Models on object storage. The text names the store by its URL, which holds no secrets."""


class StoreUnavailable(StoreError):
    """Not reachable, or it refuses the request."""


class StoreMissing(StoreError):
    """No such folder, model, version or blob."""


class StoreConflict(StoreError):
    """The version exists with other content, or another process changes the same object."""


class StoreDamaged(StoreError):
    """An object does not match its manifest, or is no valid manifest."""


class CacheFull(StoreError):
    """The disk has no room for the version."""


class UnsupportedGraph(EspalierError):
    """An engine does not know an operator of a bundle's graphs, or a use of one; the message names it. Other engines may."""


class NotCompiled(EspalierError):
    """A compiled function was called with types that it was not compiled for, where nothing may compile."""


class DeviceUnavailable(EspalierError):
    """The requested device or engine is not available."""


_JSON = json.JSONEncoder(ensure_ascii=False, default=str, skipkeys=True, check_circular=False)  # which would keep values in a cycle


def spelled(value: object, is_json: bool = True, limit: int = 200) -> str:
    """A value for a message, shortened. is_json: as in JSON; else as in Python, but True and False are `true` and `false` in any case."""
    if isinstance(value, str):
        value = value[: limit + 1]
    if not is_json and not isinstance(value, bool):
        text = repr(value)
    else:  # no more of a large value than is shown
        text = ""
        for piece in _JSON.iterencode(value):
            text += "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in piece[: limit + 1])
            if len(text) > limit:
                break
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def expectation(error: Mapping[str, Any]) -> str:
    """The words after “expected” for an error of `ValidationError.errors()`.

    Our own validators raise ValueError with these words; a leading “expected” is removed.
    """
    kind, context, message = error["type"], error.get("ctx", {}), str(error["msg"])
    match kind:
        case "missing":
            return "a value; it is required"
        case "extra_forbidden":
            return "no such key"
        case "path_type":
            return "a path"
        case "timezone_aware":
            return "a time with its offset from UTC, such as 2030-01-01T00:00:00Z"
        case "string_pattern_mismatch":
            return f"text of the form {context['pattern']}"
        case "too_short" | "string_too_short":
            return f"at least {_count(context['min_length'], kind)}"
        case "too_long" | "string_too_long":
            return f"at most {_count(context['max_length'], kind)}"
        case "int_parsing_size":
            return "an integer of fewer digits"
        case "string_type":
            value = error.get("input")
            return f'a valid string: "{value}"' if isinstance(value, int | float) and not isinstance(value, bool) else "a valid string"
        case "bool_type" | "bool_parsing":
            return "true or false"
        case "int_parsing" | "float_parsing" | "int_from_float":
            message = message.partition(",")[0]  # pydantic says after the comma how it tried to parse
    return message.removeprefix("Value error, ").removeprefix("expected ").removeprefix("Input should be ")


def first_of(error: ValidationError) -> str:
    """The first error of pydantic in a file of JSON: path, value, and the expected value in words."""
    first = error.errors(include_url=False)[0]
    location = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"{location} is missing"
    return f"{location + ': ' if location else ''}got {spelled(first['input'])}, expected {expectation(first)}"


def _count(number: int, kind: str) -> str:
    """A number of characters, or of values in a list or an object."""
    singular, plural = ("character", "characters") if kind.startswith("string") else ("value", "values")
    return f"{number} {singular if number == 1 else plural}"
