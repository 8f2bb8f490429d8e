"""Upkeep of a journal while other processes use it: compaction, backups, the erasure of a person's events.

All work is in short transactions, so that writers wait only milliseconds. Knows what may be dropped. Does not know commands
(service/journal.py).
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from espalier.bundle import parse_manifest, versions_in
from espalier.durable import flush
from espalier.errors import BundleError, InvalidInput, JournalBusy
from espalier.live.journal import Journal, Transaction
from espalier.live.journal_file import check, empty_log, errors_of, named, new_identity, open_reader, open_writer, os_error

BLOCK = 500
"""Operations that one transaction examines."""
FREE_PAGES = 2000
"""Pages that one transaction returns to the disk."""
READERS_S, PAUSE_S = 5.0, 0.02
"""How long an erasure waits for readers, and the pause between two attempts."""
LEFT_OUT = 1 << 32
"""Sequence numbers to skip if some may be in use that the journal does not know of."""
NUMBERS_PER_S = 1 << 20
"""More sequence numbers than a journal can use in a second."""
TOMBSTONES_S = 30 * 86400.0
"""How long a delete stays that no version needs: for followers that were offline, and for late writes of a lower source version."""


class OnDisk(NamedTuple):
    """A version on disk: its fingerprint, None where its manifest cannot be read, and the last operation that it holds."""

    fingerprint: int | None
    through: int


Versions = Callable[[], Sequence[OnDisk]]
"""Returns the versions that are on disk now. Raises OSError if they cannot be read."""


@dataclass(frozen=True)
class Compacted:
    """Counts of what a compaction has dropped: replaced operations, tombstones, and placements that nothing needs any more."""

    operations: int
    tombstones: int
    placements: int


def compact(journal: Journal, versions: Versions, keep_from: int | None = None) -> Compacted:
    """Drop operations that a later one of the same id has replaced, old tombstones, and placements in versions that are gone.

    The last operation of every id stays, so that any version on disk can be brought up to date. A delete is dropped when all versions hold
    it and it is TOMBSTONES_S old. keep_from: from this sequence on all operations stay; None: no such sequence. versions: called under the
    journal's lock before each drop, because a version may be published meanwhile; its errors are raised.
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
            held_by_all = min((version.through for version in versions()), default=0)
            operations += transaction.connection.execute(f"DELETE FROM ops WHERE {replaced}", (first, after, end)).rowcount
            tombstones += _drop_tombstones(transaction, first, min(after, end - 1, held_by_all))
    while True:
        with journal.writing() as transaction:
            fingerprints, unused = [version.fingerprint for version in versions()], "seq NOT IN (SELECT seq FROM ops)"
            if None not in fingerprints:
                unused += f" OR version NOT IN ({', '.join(map(str, fingerprints))})"
            keys = f"SELECT version, seq, tree FROM placements WHERE {unused} LIMIT {BLOCK}"
            dropped = transaction.connection.execute(f"DELETE FROM placements WHERE (version, seq, tree) IN ({keys})").rowcount
        placements += dropped
        if dropped < BLOCK:
            break
    _shrink(journal)
    return Compacted(operations, tombstones, placements)


def versions_on_disk(folder: Path) -> Versions:
    """The versions in the folder of a model. A version with an unreadable manifest counts as one that needs every operation."""
    read: dict[tuple[int, int, int], OnDisk] = {}  # by number, inode and time of a manifest

    def versions() -> Sequence[OnDisk]:
        present = []
        for version in versions_in(folder):
            manifest = folder / str(version) / "manifest.json"
            with suppress(FileNotFoundError):  # it has gone since it was listed
                status = manifest.stat()
                key = version, status.st_ino, status.st_mtime_ns
                if key not in read:
                    read[key] = _on_disk(manifest)
                present.append(read[key])
        return present

    return versions


def _on_disk(file: Path) -> OnDisk:
    try:
        manifest = parse_manifest(file.read_bytes(), str(file))
    except BundleError:
        return OnDisk(None, 0)
    return OnDisk(manifest.fingerprint, 0 if manifest.live is None else manifest.live.through)


def _drop_tombstones(transaction: Transaction, first: int, last: int) -> int:
    """Drop the old deletes after `first` and up to `last`, and note the last one in `dropped`: followers may lack them."""
    condition = "seq > ? AND seq <= ? AND kind = 'delete' AND at < ?"
    before = time.time() - TOMBSTONES_S
    tombstones = transaction.connection.execute(f"SELECT seq, id FROM ops WHERE {condition}", (first, last, before)).fetchall()
    if tombstones:
        transaction.connection.executemany("DELETE FROM ops WHERE seq = ?", ((seq,) for seq, _ in tombstones))
        transaction.connection.executemany("DELETE FROM latest WHERE seq = ? AND id = ?", tombstones)
        transaction.note("dropped", max(transaction.dropped(), *(seq for seq, _ in tombstones)))
    return len(tombstones)


def backup(journal: Journal, to: Path) -> None:
    """Write a copy of the present journal, one file, which can replace the journal.

    The copy has another identity and skips LEFT_OUT sequence numbers, so that numbers used between the backup and its use are not used
    again. Raises InvalidInput if `to` exists, its folder does not exist, or there is no journal; JournalFull if there is no room.
    """
    if to.exists():
        raise InvalidInput("to", str(to), "a file that is not there yet")
    if not to.parent.is_dir():
        raise InvalidInput("to", str(to), "a file in a folder that is there")
    reader = open_reader(journal.file)
    if reader is None:
        raise InvalidInput("journal", named(journal.file), "a journal; nothing was ever written to this model")
    temporary = to.with_name(f".{to.name}.{os.getpid()}")
    try:
        with errors_of(to):
            with closing(reader.connection) as connection:
                connection.execute("PRAGMA query_only = OFF")
                connection.execute("VACUUM INTO ?", (str(temporary),))
            temporary.chmod(0o640)
            with closing(open_writer(temporary)) as copy:
                copy.execute("BEGIN IMMEDIATE")
                _leave_out(copy)
                copy.execute("COMMIT")
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
    """Skip LEFT_OUT sequence numbers, and take another identity: for a copy of a journal whose original is lost. It then takes writes."""
    with journal.writing() as transaction:
        _leave_out(transaction.connection)


def put_in_place(copy: Path, now: float) -> None:
    """Turn a copy that `backup` wrote into a journal that takes writes: check all of it, and skip sequence numbers.

    Any number may have been used since the backup, by the original journal or by another copy. So numbers continue as if NUMBERS_PER_S had
    been used in each second since 1970, and LEFT_OUT more in case clocks differ; they stay below 2^53 for 200 years. now: Unix seconds.
    Raises JournalError.
    """
    check(copy)
    with errors_of(copy), closing(open_writer(copy)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("UPDATE sqlite_sequence SET seq = MAX(seq, ?) WHERE name = 'ops'", (int(now * NUMBERS_PER_S),))
        _leave_out(connection)
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode = DELETE")
    flush(copy)


def erase_user(journal: Journal, user: str) -> list[str]:
    """Erase the events that carry a person's tag, from every operation in the journal and from the pages that SQLite has freed.

    Placements and rows of the items stay. Returns the ids of the items whose operations were changed. Raises JournalBusy if readers kept
    the write-ahead log in use: the old bytes may still be in it, and the caller must call again.
    """
    changed: dict[str, None] = {}
    after = 0
    while block := journal.since(after, BLOCK):
        first, after = after, block[-1].sequence
        if not any(user in operation.body.users for operation in block):
            continue
        with journal.writing() as transaction:
            for operation in transaction.since(first, BLOCK):  # read anew: another person's events may have been erased meanwhile
                if user in operation.body.users:
                    body = operation.body.without(user).to_bytes()
                    transaction.connection.execute("UPDATE ops SET body = ? WHERE seq = ?", (body, operation.sequence))
                    changed[operation.id] = None
            transaction.note("erasures", transaction.erasures() + 1)
    if not changed and journal.exists():  # services still forget recent queries, which may be the person's
        with journal.writing() as transaction:
            transaction.note("erasures", transaction.erasures() + 1)
    until = time.monotonic() + READERS_S
    while journal.exists():
        with journal.exclusive() as connection:
            if empty_log(connection):
                break
        if time.monotonic() >= until:
            raise JournalBusy(f"{named(journal.file)}: readers kept its write-ahead log in use; try again")
        time.sleep(PAUSE_S)  # without the lock: other processes take an idle holder for a stopped process
    return [*changed]


def _leave_out(connection: sqlite3.Connection) -> None:
    if not connection.execute("UPDATE sqlite_sequence SET seq = seq + ? WHERE name = 'ops'", (LEFT_OUT,)).rowcount:
        connection.execute("INSERT INTO sqlite_sequence(name, seq) VALUES ('ops', ?)", (LEFT_OUT,))
    connection.execute("UPDATE meta SET value = ? WHERE key = 'identity'", (new_identity(),))
    connection.execute("DELETE FROM meta WHERE key = 'copy'")


def _shrink(journal: Journal) -> None:
    """Return the file's free pages to the disk, some at a time."""
    while True:
        with journal.exclusive() as connection:
            (free,) = connection.execute("PRAGMA freelist_count").fetchone()
            connection.execute(f"PRAGMA incremental_vacuum({FREE_PAGES})").fetchall()
            (remaining,) = connection.execute("PRAGMA freelist_count").fetchone()
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if not 0 < remaining < free:
            return
