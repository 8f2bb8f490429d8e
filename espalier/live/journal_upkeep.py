"""Upkeep of a journal beside the processes that use it: compaction, backups, the erasure of a person's events.

Each works in short transactions, so that writers wait for milliseconds. Knows what may be dropped. Does not know commands
(service/journal.py).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from espalier.errors import InvalidInput, JournalBusy, JournalError
from espalier.live.journal import Journal
from espalier.live.journal_file import BUSY_MS, errors_of, named, new_identity, open_reader, open_writer, os_error

BLOCK = 500
"""Operations that one transaction looks at."""
FREE_PAGES = 2000
"""Pages that one transaction gives back to the disk."""
LEFT_OUT = 1 << 32
"""Sequence numbers that are left out where some may have been given that the journal does not know of."""


@dataclass(frozen=True)
class Compacted:
    """What a compaction has dropped: operations, and placements of versions that are gone or of operations dropped."""

    operations: int
    placements: int


def compact(journal: Journal, versions: Collection[int], keep_from: int | None = None) -> Compacted:
    """Drop operations that a later one of the same id has replaced, and placements in versions other than `versions`.

    The last operation of every id stays, also of a deleted one, so that any version can be brought to the present state. keep_from: the
    first sequence of which everything stays; None: everything replaced goes.
    """
    if not journal.exists():
        return Compacted(0, 0)
    end = journal.last_sequence() + 1 if keep_from is None else keep_from
    operations = placements = 0
    after = 0
    while block := journal.since(after, BLOCK):
        first, after = after, block[-1].sequence
        with journal.exclusive() as connection:
            connection.execute("BEGIN IMMEDIATE")
            replaced = "seq > ? AND seq <= ? AND seq < ? AND seq <> (SELECT latest.seq FROM latest WHERE latest.id = ops.id)"
            operations += connection.execute(f"DELETE FROM ops WHERE {replaced}", (first, after, end)).rowcount
            connection.execute("COMMIT")
    kept = ", ".join(str(int(version)) for version in versions)
    while True:
        with journal.exclusive() as connection:
            connection.execute("BEGIN IMMEDIATE")
            unused = f"version NOT IN ({kept}) OR seq NOT IN (SELECT seq FROM ops)"
            some = f"DELETE FROM placements WHERE rowid IN (SELECT rowid FROM placements WHERE {unused} LIMIT {BLOCK})"
            dropped = connection.execute(some).rowcount
            connection.execute("COMMIT")
        placements += dropped
        if dropped < BLOCK:
            break
    _give_back(journal)
    return Compacted(operations, placements)


def backup(journal: Journal, to: Path) -> None:
    """Write a copy of the journal as of now, one file, which can be put in its place.

    The copy has another identity, and goes on LEFT_OUT sequence numbers later: those given between the backup and its use are not given
    again. Raises InvalidInput where `to` is there already, its folder is not, or there is no journal, JournalFull where there is no room.
    """
    found = open_reader(journal.file)
    if found is None:
        raise InvalidInput("journal", named(journal.file), "a journal; nothing was ever written to this model")
    if to.exists():
        found[0].close()
        raise InvalidInput("to", str(to), "a file that is not there yet")
    if not to.parent.is_dir():
        found[0].close()
        raise InvalidInput("to", str(to), "a file in a folder that is there")
    temporary = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        with errors_of(to):
            with closing(found[0]) as connection:
                connection.execute("PRAGMA query_only = OFF")
                connection.execute("VACUUM INTO ?", (str(temporary),))
            temporary.chmod(0o640)
            with closing(open_writer(temporary)) as copy:
                _leave_out(copy)
                copy.execute("PRAGMA journal_mode = DELETE")
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.link(temporary, to)  # unlike a rename, this replaces nothing
    except OSError as error:
        raise os_error(to, error) from error
    finally:
        for ending in ("", "-wal", "-shm", "-journal"):
            temporary.with_name(temporary.name + ending).unlink(missing_ok=True)


def leave_out(journal: Journal) -> None:
    """Go on LEFT_OUT sequence numbers later, under another identity: for a copy of a journal whose original is lost."""
    with journal.exclusive() as connection:
        _leave_out(connection)


def erase_user(journal: Journal, user: str) -> list[str]:
    """Drop the events that carry a person's tag, from every operation that is kept, and from the pages that SQLite has freed.

    Items stay where they are, and so do the rows of their leaves. Returns the ids of the items whose operations were changed. Raises
    JournalBusy where readers kept the write-ahead log in use, so that the old bytes may still be in it; then it is to be called again.
    """
    changed: dict[str, None] = {}
    after = 0
    while block := journal.since(after, BLOCK):
        after = block[-1].sequence
        found = [operation for operation in block if user in operation.body.users]
        if not found:
            continue
        with journal.exclusive() as connection:
            connection.execute("BEGIN IMMEDIATE")
            for operation in found:
                body = operation.body.without(user).to_bytes()
                connection.execute("UPDATE ops SET body = ? WHERE seq = ?", (body, operation.sequence))
                changed[operation.id] = None
            connection.execute("COMMIT")
    if journal.exists():
        with journal.exclusive() as connection:
            _empty_log(connection, journal.file)
    return [*changed]


def _leave_out(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    if not connection.execute("UPDATE sqlite_sequence SET seq = seq + ? WHERE name = 'ops'", (LEFT_OUT,)).rowcount:
        connection.execute("INSERT INTO sqlite_sequence(name, seq) VALUES ('ops', ?)", (LEFT_OUT,))
    connection.execute("UPDATE meta SET value = ? WHERE key = 'identity'", (new_identity(),))
    connection.execute("COMMIT")


def _give_back(journal: Journal) -> None:
    """Shrink the file by its free pages, some at a time."""
    while True:
        with journal.exclusive() as connection:
            (free,) = connection.execute("PRAGMA freelist_count").fetchone()
            connection.execute(f"PRAGMA incremental_vacuum({FREE_PAGES})").fetchall()
            (left,) = connection.execute("PRAGMA freelist_count").fetchone()
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if not 0 < left < free:
            return


def _empty_log(connection: sqlite3.Connection, file: Path) -> None:
    connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    try:
        (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.Error as error:
        raise JournalError(f"{named(file)}: its write-ahead log cannot be emptied: {error}") from error
    if busy:
        raise JournalBusy(f"{named(file)}: readers kept its write-ahead log in use; try again")
