"""Messages about commits: a process sends them to others, so that these need not read the journal.

A message holds the operations of one transaction and their placements. It is empty if they are too large; then receivers read the journal.
Knows rows of the journal. Does not know how messages travel.
"""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from espalier.errors import InvalidData
from espalier.live.operations import ItemBody, Operation
from espalier.live.rows import LiveRow, Placement

MOST_BYTES = 32 << 10
"""Largest message. Larger ones are sent empty."""


class PlacedOperation(NamedTuple):
    """An operation, and its placements by the fingerprint of a version."""

    operation: Operation
    placements: Mapping[int, tuple[Placement, ...]]


class Message:
    """A message that is filled while a transaction appends."""

    def __init__(self) -> None:
        self._bytes_left, self._operations = MOST_BYTES, list[object]()

    def add(self, operation: Operation, body: bytes, rows: Sequence[tuple[int, int, int, int, bytes]]) -> None:
        """Add an appended operation. rows: fingerprint, tree, parent, slot and row of each placement."""
        self._bytes_left -= len(body) + sum(len(row) for *_, row in rows)
        if self._bytes_left >= 0:
            placements = [(*numbers, b2a_base64(row, newline=False).decode()) for *numbers, row in rows]
            columns = operation.sequence, operation.id, operation.kind, body.decode(), operation.source_version, operation.at
            self._operations.append((*columns, placements))

    def to_bytes(self) -> bytes:
        """The message; empty if there are no operations, or too many."""
        message = orjson.dumps(self._operations) if self._operations and self._bytes_left >= 0 else b""
        return message if len(message) <= MOST_BYTES else b""


def read_message(message: bytes) -> list[PlacedOperation]:
    """The operations of a message, in their order. Raises InvalidData for other bytes."""
    try:
        return [_operation(*columns) for columns in orjson.loads(message)]
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidData("message", message[:100], "operations") from error


def _operation(sequence: int, item_id: str, kind: Any, body: str, source_version: int | None, at: float, rows: Any) -> PlacedOperation:
    placements: dict[int, tuple[Placement, ...]] = {}
    for fingerprint, tree, parent, slot, row in rows:
        placements[fingerprint] = (*placements.get(fingerprint, ()), Placement(tree, parent, slot, LiveRow.from_bytes(a2b_base64(row))))
    return PlacedOperation(Operation(sequence, item_id, kind, ItemBody.from_bytes(body.encode()), source_version, at), placements)
