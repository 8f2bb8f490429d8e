"""What is read from the tables of a journal: operations and placements, each checked.

Knows rows of SQLite. Does not know files or locks.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from espalier.errors import InvalidData, JournalCorrupt
from espalier.live.journal_file import named
from espalier.live.operations import ItemBody, Operation
from espalier.live.rows import LiveRow, Placement

MAX_TREES = 16
PAGE_BYTES = 16 << 20
"""Bodies that `operations` returns; it ends with the one that exceeds this."""
IDS = 500
"""Ids or sequences of one SQL statement."""
COLUMNS = "seq, id, kind, body, source_version, at"


def last_sequence(connection: sqlite3.Connection) -> int:
    """The last sequence number that was given; 0 before the first."""
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'ops'").fetchone()
    return 0 if row is None else int(row[0])


def dropped(connection: sqlite3.Connection) -> int:
    """The last delete that is missing because no version needed it any more; 0 where none is."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'dropped'").fetchone()
    return 0 if row is None else int(row[0])


def set_dropped(connection: sqlite3.Connection, sequence: int) -> None:
    """Note that deletes up to a sequence may be missing."""
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('dropped', ?)", (str(max(sequence, dropped(connection))),))


def erasures(connection: sqlite3.Connection) -> int:
    """How often events of a person were erased."""
    row = connection.execute("SELECT value FROM meta WHERE key = 'erasures'").fetchone()
    return 0 if row is None else int(row[0])


def operations(connection: sqlite3.Connection, file: Path, where: str, values: tuple[object, ...], whole: bool = False) -> list[Operation]:
    """The operations that a condition selects. whole: all of them, however large."""
    found: list[Operation] = []
    left = float("inf") if whole else PAGE_BYTES
    for seq, item, kind, body, source_version, at in connection.execute(f"SELECT {COLUMNS} FROM ops WHERE {where}", values):
        try:
            found.append(Operation(seq, item, kind, ItemBody.from_bytes(body), source_version, at))
        except (InvalidData, TypeError, AttributeError) as error:
            raise JournalCorrupt(f"{named(file)}: operation {seq}: {error}") from error
        left -= len(body)
        if left < 0:
            break
    return found


def read(connection: sqlite3.Connection, file: Path, ids: Sequence[str]) -> dict[str, Operation]:
    """The last operation of each id that has one."""
    found: list[Operation] = []
    for some in _chunks(ids):
        where = f"seq IN (SELECT seq FROM latest WHERE id IN ({_marks(some)}))"
        found += operations(connection, file, where, some, whole=True)
    return {operation.id: operation for operation in found}


def placements(connection: sqlite3.Connection, file: Path, version: int, sequences: Sequence[int]) -> dict[int, tuple[Placement, ...]]:
    """Placements in a version by sequence, in order of trees."""
    found: dict[int, list[Placement]] = {}
    for some in _chunks(sequences):
        statement = f"SELECT seq, tree, parent, slot, row FROM placements WHERE version = ? AND seq IN ({_marks(some)}) ORDER BY seq, tree"
        for seq, tree, parent, slot, row in connection.execute(statement, (version, *some)):
            try:
                if not 0 <= tree < MAX_TREES or parent < 0 or slot < 0:
                    raise InvalidData("placement", (tree, parent, slot), "a tree, a node and a slot")
                found.setdefault(seq, []).append(Placement(tree, parent, slot, LiveRow.from_bytes(row)))
            except (InvalidData, TypeError) as error:
                raise JournalCorrupt(f"{named(file)}: placement of operation {seq} in version {version}: {error}") from error
    return {sequence: tuple(placements) for sequence, placements in found.items()}


def _chunks(values: Iterable[object]) -> Iterator[tuple[object, ...]]:
    rest = iter(values)
    while some := tuple(islice(rest, IDS)):
        yield some


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))
