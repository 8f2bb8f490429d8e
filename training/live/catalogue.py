"""The items of a model's journal, for a training run: which live items exist, with their fields and events, and which items are gone.

A run reads the journal once and keeps a copy beside its checkpoints. So all processes of the run, and the run after a resume, train with
the same items, whatever the service writes meanwhile. Knows operations. Does not know logs or trees.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from espalier.durable import atomic_write
from espalier.errors import InvalidData
from espalier.live.journal import Journal
from espalier.live.operations import ItemBody, Operation

JOURNAL = "live.db"
"""A model's journal, in its folder beside its versions."""
PAGE = 1000
"""Operations that are read at a time."""


@dataclass(frozen=True)
class JournalItems:
    """The last operation of every id.

    through  the sequence of the last operation of all
    put      id → operation, of the items that exist
    gone     id → operation, of the items that were deleted or have expired
    """

    through: int
    put: Mapping[str, Operation]
    gone: Mapping[str, Operation]

    @staticmethod
    def of(operations: Iterable[Operation], now: float) -> JournalItems:
        """The items after some operations (ascending) at the time `now`: an item past its `valid_until` is gone."""
        last = {operation.id: operation for operation in operations}
        put = {item_id: operation for item_id, operation in last.items() if operation.kind == "put" and not operation.has_expired(now)}
        gone = {item_id: operation for item_id, operation in last.items() if item_id not in put}
        return JournalItems(max((operation.sequence for operation in last.values()), default=0), put, gone)

    @property
    def operations(self) -> list[Operation]:
        """The last operations of all ids, ascending."""
        return sorted([*self.put.values(), *self.gone.values()], key=lambda operation: operation.sequence)

    def write(self, file: Path) -> None:
        """Write to a file, in one step."""
        with atomic_write(file) as part, part.open("w") as stream:
            for operation in self.operations:
                body, is_gone = operation.body.to_bytes().decode(), operation.id in self.gone
                values = operation.sequence, operation.id, operation.kind, body, operation.source_version, operation.at, is_gone
                stream.write(json.dumps(values) + "\n")

    @staticmethod
    def read(file: Path) -> JournalItems:
        """Read a file that `write` wrote. Raises InvalidData."""
        put: dict[str, Operation] = {}
        gone: dict[str, Operation] = {}
        through = 0
        with file.open() as stream:
            for line in stream:
                try:
                    sequence, item_id, kind, body, source_version, at, is_gone = json.loads(line)
                except ValueError as error:
                    raise InvalidData(str(file), line[:100], "a line of an operation") from error
                operation = Operation(sequence, item_id, kind, ItemBody.from_bytes(body.encode()), source_version, at)
                (gone if is_gone else put)[item_id] = operation
                through = max(through, sequence)
        return JournalItems(through, put, gone)


def journal_of(model: Path) -> Path:
    """The journal of models/NAME/VERSION."""
    return model.absolute().parent / JOURNAL


def read_items(file: Path, now: float) -> JournalItems | None:
    """The items of a journal at a time; None if nothing was ever written to it. Raises JournalError and its kinds."""
    if not file.exists():
        return None
    journal, operations = Journal.open(file, "read"), list[Operation]()
    try:
        while page := journal.current(operations[-1].sequence if operations else 0, PAGE):
            operations += page  # an id that is written meanwhile may come twice, its last operation last
    finally:
        journal.close()
    items = JournalItems.of(operations, now)
    return items if items.through else None
