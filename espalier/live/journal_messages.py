"""What was committed to a journal, as one process tells it to another, so that nobody need read what somebody has just written.

A message holds the operations of one transaction and their places, or nothing where they are too large: the journal says what no message
does. Knows rows of the journal. Does not know how messages travel.
"""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from collections.abc import Sequence
from typing import Any

import orjson

from espalier.errors import InvalidData
from espalier.live.operations import ItemBody, Operation
from espalier.live.rows import LiveRow, Placement

MOST_BYTES = 32 << 10
"""Of a message. Larger ones are not made."""
PlacedOperation = tuple[Operation, dict[int, tuple[Placement, ...]]]
"""An operation, and by version its places."""


class Message:
    """Made while a transaction appends."""

    def __init__(self) -> None:
        self._left, self._operations = MOST_BYTES, list[object]()

    def add(self, operation: Operation, body: bytes, rows: Sequence[tuple[int, int, int, int, bytes]]) -> None:
        """An operation that was appended. rows: version, tree, parent, slot and row of each place."""
        self._left -= len(body) + sum(len(row) for *_, row in rows)
        if self._left >= 0:
            places = [(*numbers, b2a_base64(row, newline=False).decode()) for *numbers, row in rows]
            said = operation.sequence, operation.id, operation.kind, body.decode(), operation.source_version, operation.at
            self._operations.append((*said, places))

    def to_bytes(self) -> bytes:
        """Empty where there is nothing to say, or too much."""
        message = orjson.dumps(self._operations) if self._operations and self._left >= 0 else b""
        return message if len(message) <= MOST_BYTES else b""


def read_message(message: bytes) -> list[PlacedOperation]:
    """The operations of a message, in their order. Raises InvalidData where it is none."""
    try:
        return [_operation(*said) for said in orjson.loads(message)]
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidData("message", message[:100], "operations") from error


def _operation(sequence: int, item_id: str, kind: Any, body: str, source_version: int | None, at: float, places: Any) -> PlacedOperation:
    found: dict[int, tuple[Placement, ...]] = {}
    for version, tree, parent, slot, row in places:
        found[version] = (*found.get(version, ()), Placement(tree, parent, slot, LiveRow.from_bytes(a2b_base64(row))))
    return Operation(sequence, item_id, kind, ItemBody.from_bytes(body.encode()), source_version, at), found
