"""Reads operations and placements from the tables of a journal, and checks each.

Knows rows of SQLite. Does not know files or locks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any

from espalier.errors import InvalidData, JournalCorrupt, JournalReadOnly
from espalier.live.journal_file import named
from espalier.live.operations import ItemBody, Operation
from espalier.live.rows import LiveRow, Placement

MAX_TREES = 16
PAGE_BYTES = 16 << 20
"""Bytes of bodies after which `since` and `current` return no further operation."""
IDS = 500
"""Most ids or sequences of one SQL statement."""
EXPIRES = b'"valid_until":'
"""What a body with an expiry has. A text in another body may have it, too."""
COLUMNS = "seq, id, kind, body, source_version, at"


class JournalTables(ABC):
    """The tables as a transaction sees them, or as they are between transactions. Raises JournalError and its subclasses."""

    file: Path

    @abstractmethod
    def _selected(self, statement: str, values: tuple[object, ...] = ()) -> AbstractContextManager[Iterator[Any]]:
        """The rows of a SELECT; none if there is no journal yet."""

    def last_sequence(self) -> int:
        """The last sequence number in use; 0 before the first."""
        with self._selected("SELECT seq FROM sqlite_sequence WHERE name = 'ops'") as rows:
            return int(next(rows, (0,))[0])

    def identity(self) -> str | None:
        """The identity of the journal's sequence numbers. It changes when a backup is put in place. None before the first operation."""
        return self._meta("identity")

    def dropped(self) -> int:
        """The sequence of the last delete that was dropped because no version needed it any more; 0 if none was."""
        return int(self._meta("dropped") or 0)

    def erasures(self) -> int:
        """How often events of a person were erased, which changes operations without changing their sequences."""
        return int(self._meta("erasures") or 0)

    def since(self, sequence: int, limit: int) -> list[Operation]:
        """Operations after a sequence, ascending, at most `limit`, fewer if they are large; empty if there are none."""
        return self._operations("seq > ? ORDER BY seq LIMIT ?", (sequence, limit), PAGE_BYTES)

    def current(self, sequence: int, limit: int) -> list[Operation]:
        """As `since`, but only the last operation of each id, which is all that a replay needs."""
        condition = "seq > ? AND seq = (SELECT latest.seq FROM latest WHERE latest.id = ops.id) ORDER BY seq LIMIT ?"
        return self._operations(condition, (sequence, limit), PAGE_BYTES)

    def expiring(self, sequence: int, until: int, limit: int) -> list[Operation]:
        """As `current`, but only puts up to the sequence `until` whose items expire."""
        condition = "seq > ? AND seq <= ? AND instr(body, ?) AND seq = (SELECT latest.seq FROM latest WHERE latest.id = ops.id)"
        values = (sequence, until, EXPIRES, limit)
        return self._operations(f"{condition} ORDER BY seq LIMIT ?", values, PAGE_BYTES)

    def latest(self, item_id: str) -> Operation | None:
        """The last operation of an id."""
        return self.read((item_id,)).get(item_id)

    def read(self, ids: Sequence[str]) -> dict[str, Operation]:
        """The last operation of each id that has one."""
        operations: list[Operation] = []
        for chunk in _chunks(ids):
            operations += self._operations(f"seq IN (SELECT seq FROM latest WHERE id IN ({_marks(chunk)}))", chunk)
        return {operation.id: operation for operation in operations}

    def placements(self, fingerprint: int, sequences: Sequence[int]) -> dict[int, tuple[Placement, ...]]:
        """Stored placements in the version of a fingerprint, by sequence, in order of trees; without operations that have none."""
        lists: dict[int, list[Placement]] = {}
        for chunk in _chunks(sequences):
            condition = f"version = ? AND seq IN ({_marks(chunk)}) ORDER BY seq, tree"
            statement = f"SELECT seq, tree, parent, slot, row FROM placements WHERE {condition}"
            with self._selected(statement, (fingerprint, *chunk)) as rows:
                for seq, tree, parent, slot, row in rows:
                    try:
                        if not 0 <= tree < MAX_TREES or parent < 0 or slot < 0:
                            raise InvalidData("placement", (tree, parent, slot), "a tree, a node and a slot")
                        lists.setdefault(seq, []).append(Placement(tree, parent, slot, LiveRow.from_bytes(row)))
                    except (InvalidData, TypeError) as error:
                        raise JournalCorrupt(f"{named(self.file)}: placement of operation {seq}: {error}") from error
        return {sequence: tuple(placements) for sequence, placements in lists.items()}

    def _operations(self, condition: str, values: tuple[object, ...], most_bytes: float = float("inf")) -> list[Operation]:
        """The operations that a condition selects, up to and with the first at which their bodies exceed `most_bytes`."""
        operations: list[Operation] = []
        with self._selected(f"SELECT {COLUMNS} FROM ops WHERE {condition}", values) as rows:
            for seq, item, kind, body, source_version, at in rows:
                try:
                    operations.append(Operation(seq, item, kind, ItemBody.from_bytes(body), source_version, at))
                except (InvalidData, TypeError, AttributeError) as error:
                    raise JournalCorrupt(f"{named(self.file)}: operation {seq}: {error}") from error
                most_bytes -= len(body)
                if most_bytes < 0:
                    break
        return operations

    def is_copy(self) -> bool:
        """Whether the numbers are another host's, from which operations are copied."""
        return self._meta("copy") is not None

    def check_own(self) -> None:
        """Raises JournalReadOnly if the numbers are another host's: then new operations may get none here."""
        if self.is_copy():
            command = f"`espalier journal take-over --model {self.file.parent.name}`"
            text = f"{named(self.file)}: it is a copy of another host's journal, which takes the writes; run {command} first"
            raise JournalReadOnly(text)

    def _meta(self, key: str) -> str | None:
        with self._selected("SELECT value FROM meta WHERE key = ?", (key,)) as rows:
            value: str | None = next(rows, (None,))[0]
        return value


def _chunks(values: Iterable[object]) -> Iterator[tuple[object, ...]]:
    iterator = iter(values)
    while chunk := tuple(islice(iterator, IDS)):
        yield chunk


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))
