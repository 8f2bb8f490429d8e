"""The last operation that each worker of a service has applied, for each model: one file for each worker in the run folder, `<pid>.live`.

A file has an entry for each model that its worker has ever served: 8 bytes of a hash of the model's name, the sequence + 1 (0: the worker
does not serve the model now), and that number's complement, because a reader may see half of a write. Entries are appended and never move,
so that a reader reads only one entry. A worker with a `<pid>.lock` but without a file counts as behind. Knows files. Does not know which
workers live.
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
"""Entries that a file reserves on the disk from the start, so that a disk that is full later does no harm. More entries make it grow."""
READS = 50
"""Attempts to read an entry that is being written."""
SETTLED_NS = 100_000_000
"""A listing is trusted if the folder's last change was this long before it: file times are coarse, so a later change may have the same."""
UNKNOWN = -1
"""Progress of a worker whose file cannot be read."""
UNUSED = bytes(8)


class WorkerPage:
    """This worker's file. Used by one thread at a time."""

    def __init__(self, folder: Path, pid: int) -> None:
        """Raises OSError."""
        self._entry_numbers: dict[str, int] = {}
        new = folder / f"{pid}{ENDING}.new"
        self._file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(self._file, bytes(ROOM * ENTRY.size))
            new.rename(folder / f"{pid}{ENDING}")
        except BaseException:
            os.close(self._file)
            raise

    def write(self, model: str, sequence: int | None) -> None:
        """Write the last operation of a model that this worker has applied; None: it does not serve the model. Raises OSError."""
        number = self._entry_numbers.setdefault(model, len(self._entry_numbers))
        value = 0 if sequence is None else sequence + 1
        os.pwrite(self._file, ENTRY.pack(_key(model), value, value ^ MASK), number * ENTRY.size)

    def close(self) -> None:
        os.close(self._file)


class WorkerPages:
    """The files of all workers, as one of them reads them. Used by one thread at a time.

    pids  the workers with files when the folder was last listed
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._listed_ns = folder, -1  # time of the folder's last change that was listed
        self._open: dict[tuple[int, int], int] = {}  # pid and inode → descriptor: a later worker may have the same pid
        self._entry_numbers: dict[tuple[int, str], int] = {}  # descriptor and model → number of the entry
        self._without_file: set[int] = set()  # pids of workers
        self.pids: list[int] = []

    def look(self) -> None:
        """List the files, if the folder has changed. Raises FileNotFoundError if the folder is gone, OSError if a file cannot be opened."""
        now_ns, changed_ns = time.time_ns(), os.stat(self._folder).st_mtime_ns
        if changed_ns == self._listed_ns:
            return
        self._listed_ns = -1
        paths: dict[tuple[int, int], str] = {}
        workers: set[int] = set()
        with os.scandir(self._folder) as entries:
            for entry in entries:
                pid, ending = os.path.splitext(entry.name)
                if pid.isdecimal() and ending == ENDING:
                    paths[int(pid), entry.inode()] = entry.path
                elif pid.isdecimal() and ending == LOCK:
                    workers.add(int(pid))
        self._without_file = workers - {pid for pid, _ in paths}
        for key in self._open.keys() - paths.keys():
            self._forget(key)
        for key in paths.keys() - self._open.keys():
            with suppress(FileNotFoundError):  # it has ended meanwhile
                self._open[key] = os.open(paths[key], os.O_RDONLY | os.O_CLOEXEC)
        self.pids = [pid for pid, _ in self._open]
        if now_ns - changed_ns > SETTLED_NS:
            self._listed_ns = changed_ns

    def read(self, model: str) -> dict[int, int]:
        """By process id, the last operation that each worker that serves a model has applied; UNKNOWN if its file cannot be read."""
        progress = dict.fromkeys(self._without_file, UNKNOWN)
        for (pid, _), file in self._open.items():
            sequence = self._read(file, model)
            if sequence is not None:
                progress[pid] = sequence
        return progress

    def close(self) -> None:
        for key in [*self._open]:
            self._forget(key)

    def _forget(self, key: tuple[int, int]) -> None:
        file = self._open.pop(key)
        os.close(file)
        self._entry_numbers = {of: number for of, number in self._entry_numbers.items() if of[0] != file}

    def _read(self, file: int, model: str) -> int | None:
        """The progress in a file; None if its worker does not serve the model."""
        for _ in range(READS):
            try:
                number = self._entry_numbers.get((file, model))
                if number is None:
                    number = self._entry_numbers[file, model] = self._find(file, _key(model))
                key, value, check = ENTRY.unpack(os.pread(file, ENTRY.size, number * ENTRY.size))
            except LookupError:
                return None
            except (OSError, ValueError, error):
                return UNKNOWN
            if key == _key(model) and value == check ^ MASK:
                return int(value) - 1 if value else None
        return UNKNOWN

    def _find(self, file: int, key: bytes) -> int:
        """The number of an entry. Raises LookupError if there is none, ValueError if that is no file of entries."""
        content = os.pread(file, os.fstat(file).st_size, 0)
        if len(content) < ENTRY.size:
            raise ValueError("not a file of entries")
        for number, (entry_key, _, _) in enumerate(ENTRY.iter_unpack(content[: len(content) // ENTRY.size * ENTRY.size])):
            if entry_key == key:
                return number
            if entry_key == UNUSED:
                break
        raise LookupError(key)


@cache
def _key(model: str) -> bytes:
    return blake2b(model.encode(), digest_size=8).digest()
