"""The folder that the worker processes of one service share: it shows which of them live, and holds a page of each for the others.

Every worker holds a lock on `<pid>.lock` in it while it lives, and their parent a lock on `owner`. The system releases a lock however its
process ends. Knows process ids and file names. Does not know what the pages say.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
from binascii import crc32
from pathlib import Path

PREFIX, OWNER = "espalier-", "owner"
ROOM = 1 << 14
"""Bytes that a page reserves on the disk from the start, so that a disk that is full later does no harm: enough for some hundred models. A
longer page takes more."""
READS, PAUSE_S = 50, 0.001
"""Attempts to read a page that is being written, and the pause before each but the first: its writer may have lost its processor in the
middle of it."""


def make() -> tuple[Path, int]:
    """(new folder in the temporary folder, descriptor with the lock on `owner`)."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    descriptor = os.open(folder / f"{OWNER}.new", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    (folder / f"{OWNER}.new").rename(folder / OWNER)  # so that `owner` never exists without its lock
    return folder, descriptor


def remove_dead() -> None:
    """Remove the folders of killed services: those of this user whose owner and workers hold no lock."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            descriptor = os.open(folder / OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # not a run folder, or removed meanwhile
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not living(folder):
                shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)


def forget(folder: Path, pid: int) -> None:
    """Delete the files of a worker that has ended."""
    for kind in ("lock", "json", "live", "sock"):
        (folder / f"{pid}.{kind}").unlink(missing_ok=True)


def living(folder: Path) -> list[int]:
    """Process ids of the living workers."""
    return sorted(int(name.partition(".")[0]) for name in names(folder, ".lock") if _is_held(f"{folder}/{name}"))


def names(folder: Path, ending: str) -> list[str]:
    """The names of the workers' files with an ending, in any order; empty if the folder no longer exists."""
    try:
        return [name for name in os.listdir(folder) if name.endswith(ending)]
    except FileNotFoundError:
        return []


class Page:
    """A text of this worker that others read, `<pid>.<ending>`. Used by one thread at a time. Its methods raise OSError.

    A checksum comes first, because a reader may see half of a write, and spaces follow. If the disk is full, the text stays as it was.
    """

    def __init__(self, folder: Path, pid: int, ending: str) -> None:
        new = folder / f"{pid}.{ending}.new"
        self._file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._room = self._longest = 0
        try:
            self.write(b"{}")
            new.rename(folder / f"{pid}.{ending}")
        except BaseException:
            self.close()
            raise

    def write(self, text: bytes) -> None:
        """Replace the text, which does not end in spaces."""
        page = b"%08x" % crc32(text) + text
        if len(page) > self._room:
            room = -(-len(page) // ROOM) * ROOM
            if os.pwrite(self._file, b" " * (room - self._room), self._room) < room - self._room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._room = room
        self._longest = max(self._longest, len(page))
        os.pwrite(self._file, page.ljust(self._longest), 0)

    def close(self) -> None:
        os.close(self._file)


def read_page(folder: Path, pid: int, ending: str) -> bytes:
    """A worker's text. Raises FileNotFoundError without a page, ValueError if it cannot be read whole, and OSError."""
    for attempt in range(READS):
        if attempt:
            time.sleep(PAUSE_S)
        with open(f"{folder}/{pid}.{ending}", "rb", buffering=0) as file:
            page = file.read()
        text = page[8:].rstrip(b" ")
        if page[:8] == b"%08x" % crc32(text):
            return text
    raise ValueError("half of a page")


def _is_held(file: str) -> bool:
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
