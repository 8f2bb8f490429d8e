"""Bodies of PUT and lines of a bulk: from JSON to operations on the live catalogue, within limits.

Knows JSON, the model's query kind and the limits. Does not know the items and columns of the catalogue, which checks them itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import unquote_to_bytes

import orjson
from fastapi import Path
from starlette.convertors import Convertor, register_url_convertor
from starlette.types import Scope

from espalier.errors import InvalidInput, InvalidQuery
from espalier.items import MAX_ID_BYTES
from espalier.live.operations import ItemBody
from espalier.manifest import LARGEST
from espalier.queries import FeaturesKind, HistoryKind, Kind, TextKind, VectorKind

from ..http.item_schemas import A_TIME, BulkLine, ItemRequest, Text, Vector
from ..http.request_bodies import validate
from ..live.catalogue_types import Delete, Put
from ..models.removals import check_id
from ..retrieval.schemas import Features, Ids
from ..settings import Settings

MAX_FIELDS_BYTES = 64 << 10
"""Largest `fields` of an item, as compact JSON."""
INTEGERS = range(-(1 << 63), 1 << 64)
YEAR_10000 = 253_402_300_800.0
"""In Unix time, s. Later times cannot be written as text."""
VALUES = "a string, a number, a boolean, null, or a list of them"

_PUTS: Mapping[type[Kind], type[ItemRequest[Any]]] = {
    HistoryKind: ItemRequest[Ids],
    VectorKind: ItemRequest[Vector],
    FeaturesKind: ItemRequest[Features],
    TextKind: ItemRequest[Text],
}
_LINES: Mapping[type[Kind], type[BulkLine[Any]]] = {
    HistoryKind: BulkLine[Ids],
    VectorKind: BulkLine[Vector],
    FeaturesKind: BulkLine[Features],
    TextKind: BulkLine[Text],
}
ItemId = Annotated[str, Path(alias="id", description="Id of an item, percent-encoded; it may hold `/`.")]


class ItemReader:
    """Reads the write requests of one model. Its methods raise InvalidRequest and InvalidInput."""

    def __init__(self, kind: Kind, settings: Settings) -> None:
        self._kind, self._settings = kind, settings
        self._put, self._line = _PUTS[type(kind)], _LINES[type(kind)]

    def put(self, item_id: str, content: bytes) -> Put:
        """The operation of PUT /models/{name}/items/{id}, from its body."""
        return self._checked_put(item_id, validate(self._put, content))

    def line(self, content: bytes) -> Put | Delete:
        """The operation of a line of POST /models/{name}/items."""
        line = validate(self._line, content)
        check_id(line.id, "id")
        if not line.delete:
            return self._checked_put(line.id, line)
        if needless := line.model_fields_set - {"id", "delete", "source_version"}:
            raise InvalidQuery("delete", True, f"an id and perhaps a source_version beside it, and no {' and no '.join(sorted(needless))}")
        return Delete(line.id, line.source_version)

    def _checked_put(self, item_id: str, request: ItemRequest[Any]) -> Put:
        if request.fields is not None:
            _check_fields(request.fields)
        if request.text is not None:
            self._check_text("text", request.text)
        for i, other in enumerate(request.like):
            check_id(other, f"like[{i}]")
        for i, event in enumerate(request.events):
            self._check_event(f"events[{i}]", event)
        if request.count is not None and request.count < len(request.events):
            raise InvalidInput("count", request.count, f"at least {len(request.events)}, the number of events in the body")
        body = ItemBody(
            request.fields,
            request.text,
            tuple(request.like),
            tuple({"indices": event.indices, "values": event.values} if isinstance(event, Features) else event for event in request.events),
            tuple(request.users),
            None if request.valid_until is None else _unix_time(request.valid_until),
            request.count,
        )
        return Put(item_id, body, request.source_version, "valid_until" in request.model_fields_set and request.valid_until is None)

    def _check_event(self, field: str, event: Any) -> None:
        """Raise InvalidInput for an event that the model cannot take as a query."""
        kind = self._kind
        if isinstance(kind, HistoryKind):
            if not 1 <= len(event) <= kind.length:
                raise InvalidInput(field, f"{len(event)} ids", f"1 to {kind.length} ids, the length of this model's histories")
            for i, item_id in enumerate(event):
                if not 1 <= len(item_id) <= MAX_ID_BYTES:  # counted in characters; an id with too many bytes is only unknown
                    raise InvalidInput(f"{field}[{i}]", item_id, f"an item id of 1 to {MAX_ID_BYTES} bytes")
        elif isinstance(kind, VectorKind):
            if len(event) != kind.width:
                raise InvalidInput(field, f"{len(event)} numbers", f"{kind.width} numbers")
            _check_numbers(field, event)
        elif isinstance(kind, FeaturesKind):
            self._check_features(field, event, kind)
        else:
            self._check_text(field, event)

    def _check_features(self, field: str, event: Features, kind: FeaturesKind) -> None:
        indices, count = event.indices, len(event.indices)
        if not 1 <= count <= self._settings.max_features:
            raise InvalidInput(f"{field}.indices", f"{count} features", f"1 to {self._settings.max_features} features")
        if len(event.values) != count:
            raise InvalidInput(f"{field}.values", f"{len(event.values)} numbers", f"{count}, one for each index")
        low, high = min(indices), max(indices)
        if low < 0 or high >= kind.width:
            raise InvalidInput(f"{field}.indices", high if high >= kind.width else low, f"feature numbers from 0 to {kind.width - 1}")
        if len(set(indices)) < count:
            raise InvalidInput(f"{field}.indices", f"{count - len(set(indices))} repeated", "each feature number once")
        _check_numbers(f"{field}.values", event.values)

    def _check_text(self, field: str, text: str) -> None:
        if len(text) > self._settings.max_text:
            raise InvalidInput(field, f"{len(text)} characters", f"at most {self._settings.max_text} characters")


def body_json(body: ItemBody, source_version: int | None) -> dict[str, Any]:
    """A body in the form of a PUT, for answers. Unknown fields are left out."""
    fields = {
        "fields": body.fields,
        "text": body.text,
        "like": body.like or None,
        "events": body.events or None,
        "users": body.users or None,
        "source_version": source_version,
        "valid_until": None if body.valid_until is None else time_text(body.valid_until),
        "count": body.count,
    }
    return {name: value for name, value in fields.items() if value is not None}


def time_text(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


def _check_fields(fields: Mapping[str, Any]) -> None:
    """Raise InvalidInput for values that no column can have, or too many bytes of them."""
    for name, value in fields.items():
        if not all(map(_is_scalar, value if isinstance(value, list) else [value])):
            raise InvalidQuery(f"fields.{name}", value, VALUES)
    size = len(orjson.dumps(fields))
    if size > MAX_FIELDS_BYTES:
        raise InvalidInput("fields", f"{size} bytes", f"at most {MAX_FIELDS_BYTES} bytes of JSON")


def _is_scalar(value: object) -> bool:
    if value is None or isinstance(value, str | bool):
        return True
    return value in INTEGERS if isinstance(value, int) else isinstance(value, float) and math.isfinite(value)


def _check_numbers(field: str, numbers: Sequence[float]) -> None:
    largest = max(numbers, key=abs)
    if abs(largest) > LARGEST:
        raise InvalidInput(field, largest, "32-bit numbers")


def _unix_time(text: str) -> float:
    try:
        seconds = datetime.fromisoformat(text.upper()).timestamp()
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < YEAR_10000:
        raise InvalidInput("valid_until", text, A_TIME)
    return seconds


class _ItemIds(Convertor[str]):
    """Matches the rest of a path. The framework's own convertor stops at a line break."""

    regex = "(?s:.+)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("item_id", _ItemIds())


def check_path_id(scope: Scope, item_id: str) -> None:
    """Raise InvalidInput for an id that no item can have, or that is not UTF-8: the server has replaced its invalid bytes."""
    try:
        unquote_to_bytes(scope.get("raw_path") or b"").decode()
    except UnicodeDecodeError:
        raise InvalidInput("id", item_id, "an item id in UTF-8, percent-encoded") from None
    check_id(item_id, "id")
