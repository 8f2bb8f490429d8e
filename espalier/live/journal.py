"""The journal of a live catalogue: every operation in order, and where each item was placed in each version, in one SQLite file.

    ops         sequence, id, kind, body, source version, time; sequences are never given twice
    latest      the last operation of every id, but for old deletes (journal_upkeep.py)
    placements  (version, sequence, tree) → parent, slot, row: stored, so that every process and every replay agrees
    meta        identity of the sequence numbers; the last delete that was dropped

An operation that `writing` has committed survives the death of the process and of the machine. There is no file until the first one. Knows
operations and their order; journal_file.py knows SQLite's files and locks. Used by one process with several threads, and by many processes.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from espalier.errors import InvalidData, JournalBusy, JournalCorrupt, JournalError, JournalFull, JournalReadOnly
from espalier.live import journal_file
from espalier.live.journal_file import LOCK_S, empty_log, errors_of, locked, log_bytes, named, open_reader, open_writer
from espalier.live.journal_messages import Message
from espalier.live.journal_tables import COLUMNS, MAX_TREES, JournalTables
from espalier.live.operations import Operation
from espalier.live.rows import Placement

log = logging.getLogger(__name__)

MAX_ROW_BYTES = 16 << 20
"""Largest row of a leaf."""
CHECKPOINT_BYTES = 8 << 20
"""Size of the write-ahead log from which a commit is followed by a checkpoint."""
INSERT_PLACEMENT = "INSERT OR IGNORE INTO placements(version, seq, tree, parent, slot, row) VALUES (?, ?, ?, ?, ?, ?)"
MAX_LOG_BYTES = 256 << 20
"""Size of the write-ahead log from which nothing is committed: a process that stands still while it reads keeps it from being emptied."""


class Transaction(JournalTables):
    """What a writer does under the lock: reads what others have committed, then appends. Everything is committed together.

    message  of what was appended, for other processes, once it is committed
    """

    def __init__(self, connection: sqlite3.Connection, file: Path) -> None:
        self.connection, self.file = connection, file
        self.message = Message()
        self._last: int | None = None  # sequence, once it was asked for: nobody else writes meanwhile

    @contextmanager
    def _selected(self, statement: str, values: tuple[object, ...] = ()) -> Iterator[Iterator[Any]]:
        yield self.connection.execute(statement, values)

    def last_sequence(self) -> int:
        """See `JournalTables`."""
        if self._last is None:
            self._last = super().last_sequence()
        return self._last

    def note(self, key: str, value: object) -> None:
        """Set a row of `meta`."""
        self.connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, str(value)))

    def identify(self, identity: str, dropped: int = 0) -> None:
        """Give the sequence numbers another identity: they are those of the journal that this one copies. dropped: of that journal."""
        self.note("identity", identity)
        self.note("dropped", dropped)

    def append(self, operation: Operation, places: Mapping[int, Sequence[Placement]] | None = None) -> Operation:
        """Add an operation, and where it was placed in some versions; returns it with its sequence and time.

        Sequence 0 takes the next one. An operation copied from another journal brings its own, which must be above all of this journal.
        Nothing is added where it raises InvalidData.
        """
        journal_file.show_progress(self.file)
        body = operation.body.to_bytes()
        rows = [(version, *row) for version, own in (places or {}).items() for row in _rows_of(own)]
        given = operation.sequence
        if given and given <= self.last_sequence():
            raise InvalidData("sequence", given, f"above {self.last_sequence()}, the last one")
        at = operation.at or time.time()
        values = (given or None, operation.id, operation.kind, body, operation.source_version, at)
        sequence = self.connection.execute(f"INSERT INTO ops({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", values).lastrowid
        if sequence is None:
            raise JournalCorrupt(f"{named(self.file)}: it gives no sequence numbers")
        self._last = sequence
        self.connection.execute("INSERT OR REPLACE INTO latest(id, seq) VALUES (?, ?)", (operation.id, sequence))
        for version, *row in rows:
            self.connection.execute(INSERT_PLACEMENT, (version, sequence, *row))
        stored = Operation(sequence, operation.id, operation.kind, operation.body, operation.source_version, at)
        self.message.add(stored, body, rows)
        return stored

    def store_placements(self, version: int, found: Mapping[int, Sequence[Placement]]) -> dict[int, tuple[Placement, ...]]:
        """Store where operations were placed in a version, by sequence, unless another process did before; returns those that hold.

        An operation of an item whose row stays as it was needs its placement stored again: the earlier operation may be compacted away.
        """
        for sequence, placements in found.items():
            rows = _rows_of(placements)
            stored = "SELECT 1 FROM placements WHERE version = ? AND seq = ?"
            if self.connection.execute(stored, (version, sequence)).fetchone() is None:
                self.connection.executemany(INSERT_PLACEMENT, ((version, sequence, *row) for row in rows))
        return self.placements(version, [*found])


def _rows_of(placements: Sequence[Placement]) -> list[tuple[int, int, int, bytes]]:
    """Tree, parent, slot and row of each, as they are stored. Raises InvalidData."""
    rows = [(p.tree, p.parent, p.slot, p.row.to_bytes()) for p in placements]
    for tree, parent, slot, row in rows:
        if not 0 <= tree < MAX_TREES or parent < 0 or slot < 0 or len(row) > MAX_ROW_BYTES:
            found = tree, parent, slot, len(row)
            raise InvalidData("placement", found, f"a node, a slot and a row of at most {MAX_ROW_BYTES} bytes")
    return rows


class Journal(JournalTables):
    """A journal, opened when it is first needed. All methods may be called from any thread, and raise JournalError and its kinds."""

    def __init__(self, file: Path, mode: Literal["read", "write"] = "write") -> None:
        self.file, self._mode = file, mode
        self._inode: int | None = None
        self._damage: JournalCorrupt | None = None
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self._checkpoint_at = CHECKPOINT_BYTES

    @staticmethod
    def open(file: Path, mode: Literal["read", "write"] = "write") -> Journal:
        """The journal of a file that need not be there yet. Reads all of it.

        Raises JournalCorrupt where it is damaged, UnsupportedJournal where it has another schema.
        """
        journal = Journal(file, mode)
        journal.check()
        return journal

    def check(self) -> None:
        """What `open` does with the file. A damaged journal is neither read nor written afterwards."""
        if self._mode == "write" and self.exists():
            try:
                with self.exclusive():
                    pass
            except (JournalFull, JournalReadOnly) as error:
                log.warning("%s; it is read all the same", error)
        try:
            journal_file.check(self.file)
        except JournalCorrupt as error:
            self._damage = error
            raise

    # -- reading --------------------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Whether anything was ever written."""
        return self.file.exists()

    @contextmanager
    def _selected(self, statement: str, values: tuple[object, ...] = ()) -> Iterator[Iterator[Any]]:
        with self._reading:
            self._check_file()
            found = (self._reader, True) if self._reader is not None else open_reader(self.file)
            if found is None:
                yield iter(())
                return
            connection, keep = found
            if keep:
                self._reader = connection
                self._inode = self._inode or os.stat(self.file).st_ino
            try:
                with errors_of(self.file):
                    yield connection.execute(statement, values)
            finally:
                if not keep:
                    connection.close()

    # -- writing --------------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self, timeout_s: float = LOCK_S) -> Iterator[Transaction]:
        """Hold the lock, and commit what the block appends when it ends; nothing of it where it raises.

        Raises JournalFull, JournalReadOnly or JournalBusy, after which a later attempt may succeed.
        """
        with self.exclusive(timeout_s) as connection:
            self._check_log(connection)
            connection.execute("BEGIN IMMEDIATE")
            yield Transaction(connection, self.file)
            connection.execute("COMMIT")
            self._checkpoint(connection)

    def store_placements(self, version: int, found: Mapping[int, Sequence[Placement]]) -> dict[int, tuple[Placement, ...]]:
        """As `Transaction.store_placements`, in a transaction of its own."""
        with self.writing() as transaction:
            return transaction.store_placements(version, found)

    @contextmanager
    def exclusive(self, timeout_s: float = LOCK_S) -> Iterator[sqlite3.Connection]:
        """Hold the lock, with the connection that writes. A transaction that is open in the end is rolled back."""
        if self._mode == "read":
            raise JournalReadOnly(f"{named(self.file)}: it was opened to be read")
        with self._writing, locked(self.file, timeout_s):
            self._check_file()
            if self._writer is None:
                self._writer = self._open_writer()
                self._inode = self.file.stat().st_ino
            try:
                with errors_of(self.file):
                    yield self._writer
            except JournalError:
                self._close_writer()  # what SQLite keeps in memory of a failed transaction goes with its connection
                raise
            finally:
                if self._writer is not None and self._writer.in_transaction:
                    with suppress(sqlite3.Error):
                        self._writer.execute("ROLLBACK")

    def _open_writer(self) -> sqlite3.Connection:
        """The connection that writes. Holds the lock."""
        try:
            return open_writer(self.file)
        except JournalReadOnly:  # a reader that was opened in a read-only folder has read-only memory, which all of a process share
            with self._reading:
                self._close_reader()
            return open_writer(self.file)

    def close(self, timeout_s: float = LOCK_S) -> None:
        """Close the file. A later call opens it again."""
        with self._reading:
            self._close_reader()
        with self._writing:
            if self._writer is None:
                return
            try:
                with locked(self.file, timeout_s):  # the last connection to close checkpoints
                    self._close_writer()
            except JournalError as error:
                log.warning("%s; its log stays for the next process that opens it", error)

    def _check_log(self, connection: sqlite3.Connection) -> None:
        """Raise JournalBusy where the write-ahead log has reached its bound and cannot be emptied. Holds the lock."""
        if log_bytes(self.file) < MAX_LOG_BYTES:
            return
        self._checkpoint_at = 0
        self._checkpoint(connection)
        if (size := log_bytes(self.file)) >= MAX_LOG_BYTES:
            found = f"its write-ahead log has {size >> 20} MiB, and a process that stands still while it reads keeps it from being emptied"
            raise JournalBusy(f"{named(self.file)}: {found}. Writes are taken again when that process goes on or ends")

    def _checkpoint(self, connection: sqlite3.Connection) -> None:
        """Move a long write-ahead log into the database. Holds the lock. Its failure changes nothing that was committed."""
        size = log_bytes(self.file)
        if size < self._checkpoint_at:
            return
        try:
            empty_log(connection)
        except sqlite3.Error as error:
            log.warning("%s: its write-ahead log of %d bytes stays: %s", named(self.file), size, error)
        self._checkpoint_at = log_bytes(self.file) + CHECKPOINT_BYTES

    def _check_file(self) -> None:
        """Raises JournalCorrupt where the file is damaged, or was replaced or deleted while open: what is written to it would be lost."""
        if self._damage is not None:
            raise JournalCorrupt(str(self._damage))
        if self._inode is None:
            return
        try:
            found = os.stat(self.file).st_ino
        except OSError:
            found = None
        if found != self._inode:
            raise JournalCorrupt(f"{named(self.file)}: it was deleted or replaced while in use; restart the service")

    def _close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _close_writer(self) -> None:
        if self._writer is not None:
            with suppress(sqlite3.Error):
                self._writer.close()
            self._writer = None
