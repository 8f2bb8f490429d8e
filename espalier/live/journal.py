"""The journal of a live catalogue: all operations in order, and each item's placements in each version, in one SQLite file.

    ops         sequence, id, kind, body, source version, time; no sequence is used twice
    latest      the last operation of every id, without old deletes (journal_upkeep.py)
    placements  (fingerprint of a version, sequence, tree) → parent, slot, row: stored, so that all processes and replays agree
    meta        identity of the sequence numbers; the last delete that was dropped; "copy" if they are another host's

An operation that `writing` has committed survives a crash of the process and of the machine. The first operation creates the file. Knows
operations and their order; journal_file.py knows SQLite's files and locks. Used by several threads of a process, and by many processes.
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
from espalier.live.journal_file import LOCK_S, Reader, empty_log, errors_of, locked, log_bytes, named, note_last, open_reader, open_writer
from espalier.live.journal_tables import COLUMNS, MAX_TREES, JournalTables
from espalier.live.operations import Operation
from espalier.live.rows import Placement

log = logging.getLogger(__name__)

MAX_ROW_BYTES = 16 << 20
"""Largest row of a leaf."""
CHECKPOINT_BYTES = 8 << 20
"""Size of the write-ahead log at which a commit is followed by a checkpoint."""
INSERT_PLACEMENT = "INSERT OR IGNORE INTO placements(version, seq, tree, parent, slot, row) VALUES (?, ?, ?, ?, ?, ?)"
MAX_LOG_BYTES = 256 << 20
"""Size of the write-ahead log at which commits are refused: a process that stands still while it reads keeps it from being emptied."""


class Transaction(JournalTables):
    """A writer's transaction under the lock: it reads what others have committed, then appends. Everything is committed together."""

    def __init__(self, connection: sqlite3.Connection, file: Path) -> None:
        self.connection, self.file = connection, file
        self._last: int | None = None  # cached last sequence: nobody else writes meanwhile

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
        """Take the identity and the `dropped` of another journal, which this one copies."""
        self.note("identity", identity)
        self.note("dropped", dropped)

    def mark_copy(self) -> None:
        """Note that the numbers of this journal are another host's. `leave_out` ends this."""
        self.note("copy", 1)

    def append(self, operation: Operation, placements: Mapping[int, Sequence[Placement]] | None = None) -> Operation:
        """Append an operation and its placements by the fingerprint of a version. Returns it with its sequence and time.

        Sequence 0 gets the next number. An operation copied from another journal keeps its sequence, which must be above all of this
        journal. Raises InvalidData, and then appends nothing.
        """
        journal_file.show_progress(self.file)
        body = operation.body.to_bytes()
        rows = [(fingerprint, *row) for fingerprint, of_trees in (placements or {}).items() for row in _rows_of(of_trees)]
        if operation.sequence and operation.sequence <= self.last_sequence():
            raise InvalidData("sequence", operation.sequence, f"above {self.last_sequence()}, the last one")
        at = operation.at or time.time()
        values = (operation.sequence or None, operation.id, operation.kind, body, operation.source_version, at)
        sequence = self.connection.execute(f"INSERT INTO ops({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", values).lastrowid
        if sequence is None:
            raise JournalCorrupt(f"{named(self.file)}: it gives no sequence numbers")
        self._last = sequence
        self.connection.execute("INSERT OR REPLACE INTO latest(id, seq) VALUES (?, ?)", (operation.id, sequence))
        for fingerprint, *row in rows:
            self.connection.execute(INSERT_PLACEMENT, (fingerprint, sequence, *row))
        return Operation(sequence, operation.id, operation.kind, operation.body, operation.source_version, at)

    def store_placements(self, fingerprint: int, placements: Mapping[int, Sequence[Placement]]) -> dict[int, tuple[Placement, ...]]:
        """Store placements of operations in the version of a fingerprint, by sequence. Returns the stored ones: an earlier process's hold.

        An operation that leaves its item's row as it was also needs its placements stored: the earlier operation may be compacted away.
        """
        for sequence, of_trees in placements.items():
            rows = _rows_of(of_trees)
            is_stored = "SELECT 1 FROM placements WHERE version = ? AND seq = ?"
            if self.connection.execute(is_stored, (fingerprint, sequence)).fetchone() is None:
                self.connection.executemany(INSERT_PLACEMENT, ((fingerprint, sequence, *row) for row in rows))
        return self.placements(fingerprint, [*placements])


def _rows_of(placements: Sequence[Placement]) -> list[tuple[int, int, int, bytes]]:
    """(tree, parent, slot, row) of each placement, as they are stored. Raises InvalidData."""
    rows = [(p.tree, p.parent, p.slot, p.row.to_bytes()) for p in placements]
    for tree, parent, slot, row in rows:
        if not 0 <= tree < MAX_TREES or parent < 0 or slot < 0 or len(row) > MAX_ROW_BYTES:
            expected = f"a node, a slot and a row of at most {MAX_ROW_BYTES} bytes"
            raise InvalidData("placement", (tree, parent, slot, len(row)), expected)
    return rows


class Journal(JournalTables):
    """A journal, opened on first use. All methods may be called from any thread, and raise JournalError and its subclasses.

    What is still open when nothing refers to the journal any more is closed then.
    """

    _reader: sqlite3.Connection | None = None
    _writer: sqlite3.Connection | None = None

    def __init__(self, file: Path, mode: Literal["read", "write"] = "write") -> None:
        self.file, self._mode = file, mode
        self._inode: int | None = None
        self._damage: JournalCorrupt | None = None
        self._reader_lock, self._writer_lock = threading.Lock(), threading.Lock()
        self._checkpoint_at = CHECKPOINT_BYTES

    def __del__(self) -> None:
        self._close_reader()
        self._close_writer()

    @staticmethod
    def open(file: Path, mode: Literal["read", "write"] = "write") -> Journal:
        """The journal of a file that need not exist yet. Reads all of it.

        Raises JournalCorrupt for a damaged journal, UnsupportedJournal for one of another schema.
        """
        journal = Journal(file, mode)
        journal.check()
        return journal

    def check(self) -> None:
        """Check the file, as `open` does. Afterwards a damaged journal is neither read nor written."""
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
        with self._reader_lock:
            self._check_file()
            reader = Reader(self._reader, True) if self._reader is not None else open_reader(self.file)
            if reader is None:
                yield iter(())
                return
            if reader.is_reusable:
                self._reader = reader.connection
                self._inode = self._inode or os.stat(self.file).st_ino
            try:
                with errors_of(self.file):
                    yield reader.connection.execute(statement, values)
            finally:
                if not reader.is_reusable:
                    reader.connection.close()

    # -- writing --------------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self, timeout_s: float = LOCK_S) -> Iterator[Transaction]:
        """Hold the lock. Commits what the block appends when it ends; if it raises, nothing.

        Raises JournalFull, JournalReadOnly or JournalBusy, after which a later attempt may succeed.
        """
        with self.exclusive(timeout_s) as connection:
            self._check_log(connection)
            connection.execute("BEGIN IMMEDIATE")
            transaction = Transaction(connection, self.file)
            yield transaction
            identity, last = transaction.identity(), transaction.last_sequence()
            connection.execute("COMMIT")
            note_last(self.file, identity, last)
            self._checkpoint(connection)

    def store_placements(self, fingerprint: int, placements: Mapping[int, Sequence[Placement]]) -> dict[int, tuple[Placement, ...]]:
        """As `Transaction.store_placements`, in a separate transaction."""
        with self.writing() as transaction:
            return transaction.store_placements(fingerprint, placements)

    @contextmanager
    def exclusive(self, timeout_s: float = LOCK_S) -> Iterator[sqlite3.Connection]:
        """Hold the lock, with the connection that writes. A transaction that is still open at the end is rolled back."""
        if self._mode == "read":
            raise JournalReadOnly(f"{named(self.file)}: it was opened to be read")
        with self._writer_lock, locked(self.file, timeout_s):
            self._check_file()
            if self._writer is None:
                self._writer = self._open_writer()
                self._inode = self.file.stat().st_ino
            try:
                with errors_of(self.file):
                    yield self._writer
            except JournalError:
                self._close_writer()  # discards SQLite's cache of the failed transaction
                raise
            finally:
                if self._writer is not None and self._writer.in_transaction:
                    with suppress(sqlite3.Error):
                        self._writer.execute("ROLLBACK")

    def _open_writer(self) -> sqlite3.Connection:
        """The connection that writes. Holds the lock."""
        try:
            return open_writer(self.file)
        except JournalReadOnly:  # a reader opened in a read-only folder made SQLite's memory of this process read-only
            with self._reader_lock:
                self._close_reader()
            return open_writer(self.file)

    def close(self, timeout_s: float = LOCK_S) -> None:
        """Close the file. A later call opens it again."""
        with self._reader_lock:
            self._close_reader()
        with self._writer_lock:
            if self._writer is None:
                return
            try:
                with locked(self.file, timeout_s):  # the last connection to close checkpoints
                    self._close_writer()
            except JournalError as error:
                log.warning("%s; its log stays for the next process that opens it", error)

    def _check_log(self, connection: sqlite3.Connection) -> None:
        """Raise JournalBusy if the write-ahead log has reached its bound and cannot be emptied. Holds the lock."""
        if log_bytes(self.file) < MAX_LOG_BYTES:
            return
        self._checkpoint_at = 0
        self._checkpoint(connection)
        if (size := log_bytes(self.file)) >= MAX_LOG_BYTES:
            reason = f"its write-ahead log has {size >> 20} MiB, and a process that stands still while it reads keeps it from being emptied"
            raise JournalBusy(f"{named(self.file)}: {reason}. Writes are taken again when that process goes on or ends")

    def _checkpoint(self, connection: sqlite3.Connection) -> None:
        """Move a long write-ahead log into the database. Holds the lock. A failure does not affect committed operations."""
        size = log_bytes(self.file)
        if size < self._checkpoint_at:
            return
        try:
            empty_log(connection)
        except sqlite3.Error as error:
            log.warning("%s: its write-ahead log of %d bytes stays: %s", named(self.file), size, error)
        self._checkpoint_at = log_bytes(self.file) + CHECKPOINT_BYTES

    def _check_file(self) -> None:
        """Raise JournalCorrupt if the file is damaged, or was replaced or deleted while open: writes to it would be lost."""
        if self._damage is not None:
            raise JournalCorrupt(str(self._damage))
        if self._inode is None:
            return
        try:
            inode = os.stat(self.file).st_ino
        except OSError:
            inode = None
        if inode != self._inode:
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
