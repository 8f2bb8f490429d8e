"""The SQLite file of a journal: opening, schema, locking and errors.

Every commit and every checkpoint holds a lock on a file of its own, `.live.lock` beside the journal: SQLite 3.7.0 to 3.51.2 can lose
commits when one connection checkpoints while another one commits and so resets the write-ahead log (sqlite.org/wal.html#walresetbug). For
the same reason automatic checkpoints are off. Readers take no lock.

The lock's file holds a note of the last committed operation. SQLite takes a damaged frame of the write-ahead log for the log's end, so
without the note a damaged log would lose operations unnoticed. The note is not flushed: after a power cut it may be older than the journal,
never newer. Knows files and SQL. Does not know operations (journal.py).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from espalier.durable import flush
from espalier.errors import JournalBusy, JournalCorrupt, JournalError, JournalFull, JournalReadOnly, UnsupportedJournal

FILE = "live.db"
APPLICATION = 0x4573704A
"""SQLite's application_id of a journal: "EspJ"."""
SCHEMA_VERSION = 4
"""SQLite's user_version of a journal. Journals of other schemas are refused."""
TABLES = (
    "CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE ops(seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL, "
    "source_version INTEGER, at REAL NOT NULL)",
    "CREATE TABLE latest(id TEXT PRIMARY KEY, seq INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE placements(version INTEGER NOT NULL, seq INTEGER NOT NULL, tree INTEGER NOT NULL, parent INTEGER NOT NULL, "
    "slot INTEGER NOT NULL, row BLOB NOT NULL, PRIMARY KEY(version, seq, tree)) WITHOUT ROWID",
)
"""The statements of its tables; SQLite stores their text."""
WITHOUT_OPERATION = "SELECT 1 FROM latest WHERE NOT EXISTS (SELECT 1 FROM ops WHERE ops.seq = latest.seq AND ops.id = latest.id) LIMIT 1"
"""Finds a damaged row of `latest`, whose item would be missing in all reads. SQLite's checks do not find all."""
MAX_VALUE_BYTES = 32 << 20
"""Largest value that SQLite reads or writes."""
LOCK_S = 5.0
"""Longest wait for a lock that other processes pass on among themselves."""
HELD_S = 2.0
"""Longest wait for a holder that shows no progress. A step of its work takes milliseconds, but a commit waits for the disk, which may take
a second. A stopped process would hold it for ever."""
LOCK_POLL_S = 0.0005
BUSY_MS = 5000
"""Longest wait for readers that hold up a commit, which they do only on network file systems."""
NETWORK = ("nfs", "cifs", "smb", "ceph", "glusterfs", "lustre", "afs", "9p", "beegfs", "gpfs", "ocfs2", "gfs2", "fuse.sshfs", "fuse.s3")
"""Prefixes of the names of network file systems. On them a write-ahead log does not work, because hosts do not share memory."""
PROBE_BYTES = 64 << 10
_NOTE = re.compile(r"(\d{19}) (.+)\n")


class Reader(NamedTuple):
    """A connection that only reads. is_reusable: whether later readings may use it, too."""

    connection: sqlite3.Connection
    is_reusable: bool


def lock_of(file: Path) -> Path:
    """The file whose lock commits and checkpoints hold: `.live.lock` of `live.db`."""
    return file.with_name(f".{file.stem}.lock")


@contextmanager
def locked(file: Path, timeout_s: float = LOCK_S) -> Iterator[None]:
    """Hold the lock of the journal `file`. Raises JournalBusy, or JournalReadOnly if the lock's file cannot be created.

    The holder sets the time of the lock's file, so that waiting processes see progress.
    """
    try:
        descriptor = os.open(lock_of(file), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise os_error(file, error) from error
    try:
        began = progress_at = time.monotonic()
        worked_ns = None
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                now = time.monotonic()
                if worked_ns != (worked_ns := os.fstat(descriptor).st_mtime_ns):
                    progress_at = now
                if now - progress_at > HELD_S:
                    raise JournalBusy(f"{named(file)}: another process holds its lock and has done nothing for {HELD_S:g} s") from error
                if now - began > timeout_s:
                    raise JournalBusy(f"{named(file)}: other processes have held its lock for {timeout_s:g} s") from error
                time.sleep(LOCK_POLL_S)
        show_progress(file)
        yield
    finally:
        os.close(descriptor)


def show_progress(file: Path) -> None:
    """Show processes that wait for the lock that its holder, this process, is at work."""
    with suppress(OSError):  # a full disk
        os.utime(lock_of(file))


def note_last(file: Path, identity: str | None, sequence: int) -> None:
    """Note the last committed operation, and the identity of its journal. The caller holds the lock."""
    with suppress(OSError), lock_of(file).open("r+b", buffering=0) as stream:  # a full disk: the earlier note stays
        stream.write(f"{sequence:019} {identity}\n".encode())
        stream.truncate()


def _noted(file: Path) -> tuple[str, int] | None:
    """Identity and last sequence of the noted journal; None without a note, or for half of one."""
    with suppress(OSError):
        note = _NOTE.fullmatch(lock_of(file).read_text(errors="replace"))
        if note is not None:
            return note[2], int(note[1])
    return None


def open_writer(file: Path) -> sqlite3.Connection:
    """A connection that writes. Creates the file if it is missing. The caller holds the lock.

    Raises JournalError and its subclasses.
    """
    reader = open_reader(file)  # it checks, and leaves the files as they are
    if reader is not None:
        reader.connection.close()
    try:
        if not file.exists():
            with suppress(FileNotFoundError):
                os.truncate(lock_of(file), 0)  # the note of a journal that somebody deleted
            os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640))
    except OSError as error:
        raise os_error(file, error) from error
    with errors_of(file):
        connection = _connect(file, "rw")
        try:
            has_tables = _has_tables(connection, file)
            mode = "TRUNCATE" if on_network(file) else "WAL"
            if not has_tables:
                connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute(f"PRAGMA journal_mode = {mode}")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA wal_autocheckpoint = 0")
            connection.execute("PRAGMA secure_delete = ON")
            if not has_tables:
                _make_tables(connection)
                flush(file.parent)
            connection.execute("BEGIN IMMEDIATE")  # raises if nothing can be written
            connection.execute("ROLLBACK")
        except BaseException:
            connection.close()
            raise
    return connection


def open_reader(file: Path) -> Reader | None:
    """A connection that only reads. None if there is no journal, or if its creation was not finished.

    A write-ahead log needs shared memory in the folder, which fails if the folder is read-only or the disk is full. If the log is empty,
    the file is then read without one. Others may write at any time, so that connection is for one reading. On a network file system, which
    has no write-ahead log, a reader may have to roll back the transaction of a dead writer. Raises JournalError and its subclasses;
    JournalCorrupt also if the last noted operation is missing.
    """
    if (log_bytes(file) and not log_bytes(file, "")) or (log_bytes(file, "-journal") and not file.exists()):  # SQLite would delete the log
        raise JournalCorrupt(f"{named(file)}: it is empty or missing, but its log is not; put a backup in its place, or delete both")
    noted = _noted(file)
    if not file.exists():
        return None
    with errors_of(file):
        connection, is_reusable = _connect(file, "rw" if on_network(file) else "ro"), True
        try:
            try:
                connection.execute("PRAGMA query_only = ON")
                connection.execute("PRAGMA user_version").fetchone()
            except sqlite3.OperationalError:
                if log_bytes(file, "-wal") or log_bytes(file, "-journal"):
                    raise
                connection.close()
                connection, is_reusable = _connect(file, "ro", "&immutable=1"), False
            has_tables = _has_tables(connection, file)
            _check_noted(connection, file, has_tables, noted)
        except BaseException:
            connection.close()
            raise
    if has_tables:
        return Reader(connection, is_reusable)
    connection.close()
    return None


def check(file: Path) -> None:
    """Read all of a journal. Raises JournalCorrupt for a damaged one, UnsupportedJournal for another schema."""
    reader = open_reader(file)
    if reader is None:
        return
    with closing(reader.connection) as connection, errors_of(file):
        result = " ".join(connection.execute("PRAGMA quick_check(1)").fetchone()[0].split())
        if result == "ok" and connection.execute(WITHOUT_OPERATION).fetchone() is not None:
            result = "the last operation of an item is not there"
    if result != "ok":
        raise JournalCorrupt(f"{named(file)}: {result}; put a backup in its place")


def log_bytes(file: Path, ending: str = "-wal") -> int:
    """Size of the write-ahead log, or of another file of the journal by its ending; 0 if it is missing."""
    try:
        return os.stat(f"{file}{ending}").st_size
    except OSError:
        return 0


def empty_log(connection: sqlite3.Connection) -> bool:
    """Move the write-ahead log into the database, unless a reader uses it. Returns whether it is empty. The caller holds the lock."""
    connection.execute("PRAGMA busy_timeout = 0")  # no wait for readers: the caller tries again later
    (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    return not busy


def new_identity() -> str:
    """A new identity of sequence numbers: journals of one identity never give the same number to two operations."""
    return secrets.token_hex(8)


def named(file: Path) -> str:
    """A journal's name in messages."""
    return f"{file.parent.name}/{file.name}"


@contextmanager
def errors_of(file: Path) -> Iterator[None]:
    """Turn SQLite's errors into JournalError and its subclasses."""
    try:
        yield
    except sqlite3.ProgrammingError:
        raise
    except sqlite3.Error as error:
        raise _error(file, error) from error


def os_error(file: Path, error: OSError) -> JournalError:
    """The JournalError for a system error of the journal's file or folder."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return JournalFull(f"{named(file)}: the disk or a quota has no room for another operation ({error.strerror})")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return JournalReadOnly(f"{named(file)}: it or its folder cannot be written to ({error.strerror})")
    return JournalError(f"{named(file)}: {error.strerror}")


def on_network(file: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether several hosts may share the file system of a file. False if the system does not tell."""
    folder = str(file.parent.resolve())
    kind, longest = "", -1
    with suppress(OSError):
        for line in mounts.read_text().splitlines():
            before, _, after = line.partition(" - ")
            point = before.split()[4].replace("\\040", " ")
            if len(point) >= longest and (folder == point or folder.startswith(point.rstrip("/") + "/")):
                kind, longest = after.split()[0], len(point)
    return kind.startswith(NETWORK)


def _connect(file: Path, mode: str, more: str = "") -> sqlite3.Connection:
    """A connection in autocommit mode, for one thread at a time, whichever, that trusts nothing in the file."""
    address = f"file:{quote(str(file.absolute()))}?mode={mode}{more}"
    connection = sqlite3.connect(address, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False, uri=True)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def _has_tables(connection: sqlite3.Connection, file: Path) -> bool:
    """Whether a file has the tables of a journal; False for an empty one. Changes nothing.

    Raises JournalCorrupt for other files, UnsupportedJournal for journals of another schema.
    """
    connection.execute("BEGIN")  # one snapshot: a writer may be creating the file
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        statement = (
            "SELECT CAST(sql AS BLOB) FROM sqlite_master WHERE sql IS NOT NULL AND name <> 'sqlite_sequence'"  # damage may be no UTF-8
        )
        tables = {sql for (sql,) in connection.execute(statement)}
    finally:
        if connection.in_transaction:  # some errors end it
            connection.execute("ROLLBACK")
    if not application and not version and not tables:
        return False
    if application != APPLICATION:
        raise JournalCorrupt(f"{named(file)}: it is a database of something else; put a backup in its place, or move it away")
    if version != SCHEMA_VERSION:
        raise UnsupportedJournal(
            f"{named(file)}: it has schema {version}, expected schema {SCHEMA_VERSION}. Another generation of this software wrote it, and "
            "it is left as it is: serve the model with that one, or move the file away and put its items again"
        )
    if tables != {table.encode() for table in TABLES}:
        raise JournalCorrupt(f"{named(file)}: its tables are not those of schema {version}; put a backup in its place")
    return True


def _check_noted(connection: sqlite3.Connection, file: Path, has_tables: bool, noted: tuple[str, int] | None) -> None:
    """Raise JournalCorrupt if the last operation of a note, which was read before the journal, is missing in it.

    A journal of another identity was put in place after the note.
    """
    if noted is None:
        return
    noted_identity, noted_sequence = noted
    last = 0
    if has_tables:
        values = "(SELECT value FROM meta WHERE key = 'identity'), (SELECT CAST(seq AS INTEGER) FROM sqlite_sequence WHERE name = 'ops')"
        identity, sequence = connection.execute(f"SELECT {values}").fetchone()
        last = (sequence or 0) if identity == noted_identity else noted_sequence
    if last >= noted_sequence or noted != _noted(file):  # another process may just have made a new journal
        return
    lost = f"its operations {last + 1} to {noted_sequence} are lost, because it or its log is damaged; put a backup in its place"
    command = f"`espalier journal take-over --model {file.parent.name}`"
    raise JournalCorrupt(f"{named(file)}: {lost}. To go on without them, stop the service, empty {lock_of(file).name}, and run {command}")


def _make_tables(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    for statement in TABLES:
        connection.execute(statement)
    connection.execute("INSERT INTO meta VALUES ('identity', ?)", (new_identity(),))
    connection.execute(f"PRAGMA application_id = {APPLICATION}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")


def _error(file: Path, error: sqlite3.Error) -> JournalError:
    kind = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    text = f"{named(file)}: {error}"
    if kind == sqlite3.SQLITE_FULL:
        return JournalFull(f"{named(file)}: the disk has no room for another operation")
    if kind in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT, sqlite3.SQLITE_TOOBIG):
        return JournalCorrupt(f"{text}; put a backup in its place")
    if kind in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return JournalBusy(text)
    if kind in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
        return _probed(file) or (JournalReadOnly(text) if kind == sqlite3.SQLITE_READONLY else JournalError(text))
    return JournalError(text)


def _probed(file: Path) -> JournalError | None:
    """The system's error of a write beside the journal, if it fails: SQLite does not distinguish a quota from a broken disk."""
    try:
        with tempfile.TemporaryFile(dir=file.parent) as probe:
            probe.write(b"\0" * PROBE_BYTES)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return os_error(file, error)
    return None
