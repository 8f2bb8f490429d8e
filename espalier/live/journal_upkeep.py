"""Upkeep of a journal beside the processes that use it: compaction, backups, the erasure of a person's events.

Each works in short transactions, so that writers wait for milliseconds. Knows what may be dropped. Does not know commands
(service/journal.py).
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from espalier.bundle import parse_manifest, versions_in
from espalier.durable import flush
from espalier.errors import BundleError, InvalidInput, JournalBusy
from espalier.live.journal import Journal, Transaction
from espalier.live.journal_file import check, empty_log, errors_of, named, new_identity, open_reader, open_writer, os_error

BLOCK = 500
"""Operations that one transaction looks at."""
FREE_PAGES = 2000
"""Pages that one transaction gives back to the disk."""
READERS_S, PAUSE_S = 5.0, 0.02
"""How long an erasure waits for readers, and between two looks."""
LEFT_OUT = 1 << 32
"""Sequence numbers that are left out where some may have been given that the journal does not know of."""
NUMBERS_PER_S = 1 << 20
"""More sequence numbers than a journal can give in a second."""
TOMBSTONES_S = 30 * 86400.0
"""How long a delete stays that no version needs: for hosts that follow and were away, and for late writes of a lower source version."""

Versions = Callable[[], Mapping[int, int]]
"""The versions that are on disk now: number → the last operation that each holds. Raises OSError where nobody can say."""


@dataclass(frozen=True)
class Compacted:
    """What a compaction has dropped: operations that were replaced, tombstones, and placements that nothing needs any more."""

    operations: int
    tombstones: int
    placements: int


def compact(journal: Journal, versions: Versions, keep_from: int | None = None) -> Compacted:
    """Drop operations that a later one of the same id has replaced, old tombstones, and placements in versions that are gone.

    The last operation of every id stays, so that any version on disk can be brought to the present state; but a delete goes once all of
    them hold it and it is TOMBSTONES_S old. keep_from: the first sequence of which everything stays; None: there is none. versions: asked
    under the journal's lock, before anything is dropped that a version may need: one may be published meanwhile. Raises what it raises.
    """
    if not journal.exists():
        return Compacted(0, 0, 0)
    end = journal.last_sequence() + 1 if keep_from is None else keep_from
    operations = tombstones = placements = 0
    after = 0
    while block := journal.since(after, BLOCK):
        first, after = after, block[-1].sequence
        with journal.writing() as transaction:
            replaced = "seq > ? AND seq <= ? AND seq < ? AND seq <> (SELECT latest.seq FROM latest WHERE latest.id = ops.id)"
            operations += transaction.connection.execute(f"DELETE FROM ops WHERE {replaced}", (first, after, end)).rowcount
            tombstones += _drop_tombstones(transaction, first, min(after, end - 1, min(versions().values(), default=0)))
    while True:
        with journal.writing() as transaction:
            kept = ", ".join(str(int(version)) for version in versions())
            unused = f"version NOT IN ({kept}) OR seq NOT IN (SELECT seq FROM ops)"
            some = f"SELECT version, seq, tree FROM placements WHERE {unused} LIMIT {BLOCK}"
            dropped = transaction.connection.execute(f"DELETE FROM placements WHERE (version, seq, tree) IN ({some})").rowcount
        placements += dropped
        if dropped < BLOCK:
            break
    _give_back(journal)
    return Compacted(operations, tombstones, placements)


def versions_on_disk(folder: Path) -> Versions:
    """Those in the folder of a model. One whose manifest cannot be read needs every operation."""
    held: dict[int, int] = {}  # a manifest never changes

    def now() -> Mapping[int, int]:
        found = versions_in(folder)
        held.update((version, _holds(folder / str(version) / "manifest.json")) for version in found if version not in held)
        return {version: held[version] for version in found}

    return now


def _holds(manifest: Path) -> int:
    """The last operation that a version holds."""
    try:
        live = parse_manifest(manifest.read_bytes(), str(manifest)).live
    except BundleError:
        return 0
    return 0 if live is None else live.through


def _drop_tombstones(transaction: Transaction, first: int, last: int) -> int:
    """Drop the old deletes after a sequence and up to another, and note up to which they are gone: hosts that follow may lack them."""
    tombstone = "seq > ? AND seq <= ? AND kind = 'delete' AND at < ?"
    old = time.time() - TOMBSTONES_S
    found = transaction.connection.execute(f"SELECT seq, id FROM ops WHERE {tombstone}", (first, last, old)).fetchall()
    if found:
        transaction.connection.executemany("DELETE FROM ops WHERE seq = ?", ((seq,) for seq, _ in found))
        transaction.connection.executemany("DELETE FROM latest WHERE seq = ? AND id = ?", found)
        transaction.note("dropped", max(transaction.dropped(), *(seq for seq, _ in found)))
    return len(found)


def backup(journal: Journal, to: Path) -> None:
    """Write a copy of the journal as of now, one file, which can be put in its place.

    The copy has another identity, and goes on LEFT_OUT sequence numbers later: those given between the backup and its use are not given
    again. Raises InvalidInput where `to` is there already, its folder is not, or there is no journal, JournalFull where there is no room.
    """
    if to.exists():
        raise InvalidInput("to", str(to), "a file that is not there yet")
    if not to.parent.is_dir():
        raise InvalidInput("to", str(to), "a file in a folder that is there")
    found = open_reader(journal.file)
    if found is None:
        raise InvalidInput("journal", named(journal.file), "a journal; nothing was ever written to this model")
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


def put_in_place(copy: Path, now: float) -> None:
    """Make a copy that `backup` wrote a journal that takes writes: check all of it, and leave sequence numbers out.

    Any number may have been given since the backup, by the journal of then or by one that came from the same backup. So numbers go on as if
    NUMBERS_PER_S had been given in each second since 1970, and LEFT_OUT more in case clocks differ; they stay below 2^53 for 200 years.
    now: Unix seconds. Raises JournalError.
    """
    check(copy)
    with errors_of(copy), closing(open_writer(copy)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("UPDATE sqlite_sequence SET seq = MAX(seq, ?) WHERE name = 'ops'", (int(now * NUMBERS_PER_S),))
        connection.execute("COMMIT")
        _leave_out(connection)
        connection.execute("PRAGMA journal_mode = DELETE")
    flush(copy)


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
        with journal.writing() as transaction:
            for operation in found:
                body = operation.body.without(user).to_bytes()
                transaction.connection.execute("UPDATE ops SET body = ? WHERE seq = ?", (body, operation.sequence))
                changed[operation.id] = None
            transaction.note("erasures", transaction.erasures() + 1)
    until = time.monotonic() + READERS_S
    while journal.exists():
        with journal.exclusive() as connection:
            if empty_log(connection):
                break
        if time.monotonic() >= until:
            raise JournalBusy(f"{named(journal.file)}: readers kept its write-ahead log in use; try again")
        time.sleep(PAUSE_S)  # without the lock: whoever holds it and does nothing is taken for a process that has stopped
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
