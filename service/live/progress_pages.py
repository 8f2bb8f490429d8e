"""The last operation that each worker of a service answers by, for each model: a file for each worker in the run folder, `<pid>.live`.

A file has an entry for each model that its worker has ever served: 8 bytes of a hash of its name, then the sequence + 1, 0 where it does
not serve the model now, then that number's complement, because a reader may see half of a write. Entries are appended and keep their
places, so that one read of one entry says how far a worker is. A worker with a `<pid>.lock` that could not make its file is behind.
Knows files. Does not know which workers live.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from struct import Struct, error

ENDING, LOCK = ".live", ".lock"
ENTRY = Struct("<8sQQ")
MASK = (1 << 64) - 1
ROOM = 4096 // ENTRY.size
"""Entries that a file has room for on the disk from the start, so that a full disk later changes nothing. It grows where needed."""
READS = 50
"""Attempts to read an entry that is being written."""
SETTLED_NS = 100_000_000
"""Of a change that was so long ago when the folder was listed, the time is not that of a later one: clocks of files are coarse."""
UNKNOWN = -1
"""Progress of a worker whose file cannot be read."""
UNUSED = bytes(8)


class OwnPage:
    """This worker's file. Used by one thread at a time."""

    def __init__(self, folder: Path, pid: int) -> None:
        """Raises OSError."""
        self._places: dict[str, int] = {}
        new = folder / f"{pid}{ENDING}.new"
        self._file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(self._file, bytes(ROOM * ENTRY.size))
            new.rename(folder / f"{pid}{ENDING}")
        except BaseException:
            os.close(self._file)
            raise

    def write(self, model: str, sequence: int | None) -> None:
        """Say by which operation of a model this worker answers; None: it does not serve it. Raises OSError."""
        place = self._places.setdefault(model, len(self._places))
        value = 0 if sequence is None else sequence + 1
        os.pwrite(self._file, ENTRY.pack(_key(model), value, value ^ MASK), place * ENTRY.size)

    def close(self) -> None:
        os.close(self._file)


class Pages:
    """The files of all workers, as one of them reads them. Used by one thread at a time.

    pids  the workers whose files there were when the folder was last looked at
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._listed_ns = folder, -1  # which change of the folder the files are those of
        self._open: dict[tuple[int, int], int] = {}  # pid and inode → descriptor: a later worker may have the same pid
        self._places: dict[tuple[int, str], int] = {}  # descriptor and model → number of the entry
        self._lacking: set[int] = set()  # workers without a file
        self.pids: list[int] = []

    def look(self) -> None:
        """See which files there are. Raises FileNotFoundError where the folder is gone, OSError where one cannot be opened."""
        now_ns, changed_ns = time.time_ns(), os.stat(self._folder).st_mtime_ns
        if changed_ns == self._listed_ns:
            return
        self._listed_ns = -1
        found: dict[tuple[int, int], str] = {}
        workers: set[int] = set()
        with os.scandir(self._folder) as entries:
            for entry in entries:
                pid, ending = os.path.splitext(entry.name)
                if pid.isdecimal() and ending == ENDING:
                    found[int(pid), entry.inode()] = entry.path
                elif pid.isdecimal() and ending == LOCK:
                    workers.add(int(pid))
        self._lacking = workers - {pid for pid, _ in found}
        for key in self._open.keys() - found.keys():
            self._forget(key)
        for key in found.keys() - self._open.keys():
            with suppress(FileNotFoundError):  # it has ended meanwhile
                self._open[key] = os.open(found[key], os.O_RDONLY | os.O_CLOEXEC)
        self.pids = [pid for pid, _ in self._open]
        if now_ns - changed_ns > SETTLED_NS:
            self._listed_ns = changed_ns

    def read(self, model: str) -> dict[int, int]:
        """By process id, the last operation that each worker with a file answers by which serves the model; UNKNOWN of unreadable ones."""
        found = dict.fromkeys(self._lacking, UNKNOWN)
        for (pid, _), file in self._open.items():
            sequence = self._read(file, model)
            if sequence is not None:
                found[pid] = sequence
        return found

    def close(self) -> None:
        for key in [*self._open]:
            self._forget(key)

    def _forget(self, key: tuple[int, int]) -> None:
        file = self._open.pop(key)
        os.close(file)
        self._places = {known: place for known, place in self._places.items() if known[0] != file}

    def _read(self, file: int, model: str) -> int | None:
        """The progress in a file; None where its worker does not serve the model."""
        for _ in range(READS):
            try:
                place = self._places.get((file, model))
                if place is None:
                    place = self._places[file, model] = self._find(file, _key(model))
                key, value, check = ENTRY.unpack(os.pread(file, ENTRY.size, place * ENTRY.size))
            except LookupError:
                return None
            except (OSError, ValueError, error):
                return UNKNOWN
            if key == _key(model) and value == check ^ MASK:
                return int(value) - 1 if value else None
        return UNKNOWN

    def _find(self, file: int, key: bytes) -> int:
        """The number of an entry. Raises LookupError where there is none, ValueError where that is no file of entries."""
        content = os.pread(file, os.fstat(file).st_size, 0)
        if len(content) < ENTRY.size:
            raise ValueError("not a file of entries")
        for place, (own, _, _) in enumerate(ENTRY.iter_unpack(content[: len(content) // ENTRY.size * ENTRY.size])):
            if own == key:
                return place
            if own == UNUSED:
                break
        raise LookupError(key)


@cache
def _key(model: str) -> bytes:
    return blake2b(model.encode(), digest_size=8).digest()
