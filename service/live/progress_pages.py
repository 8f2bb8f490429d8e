"""The last operation that each worker of a service has applied, for each model: one file for each worker in the run folder, `<pid>.live`.

A file has an entry for each model that its worker has ever served: 8 bytes of a hash of the model's name, the sequence + 1 (0: the worker
does not serve the model now), and that number's complement, because a reader may see half of a write. A worker with a `<pid>.lock` but
without a file counts as behind. Knows files. Does not know which workers live.
"""

from __future__ import annotations

import os
from functools import cache
from hashlib import blake2b
from pathlib import Path
from struct import Struct

ENDING, LOCK = "live", "lock"
ENTRY = Struct("<8sQQ")
MASK = (1 << 64) - 1
ROOM = 4096 // ENTRY.size
"""Entries that a file reserves on the disk from the start, so that a disk that is full later does no harm. More entries make it grow."""
READS = 50
"""Attempts to read an entry that is being written."""
UNKNOWN = -1
"""Progress of a worker whose file cannot be read."""
UNUSED = bytes(8)


class WorkerPage:
    """This worker's file. Used by one thread at a time."""

    def __init__(self, folder: Path, pid: int) -> None:
        """Raises OSError."""
        self._entry_numbers: dict[str, int] = {}
        new = folder / f"{pid}.{ENDING}.new"
        self._file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(self._file, bytes(ROOM * ENTRY.size))
            new.rename(folder / f"{pid}.{ENDING}")
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


def read_progress(folder: Path, model: str) -> dict[int, int]:
    """By process id, the last operation that each worker that serves a model has applied; UNKNOWN if its file cannot be read.

    Raises FileNotFoundError if the folder is gone.
    """
    with_file, workers = set[int](), set[int]()
    for name in os.listdir(folder):
        pid, _, ending = name.partition(".")
        if pid.isdecimal() and ending in (ENDING, LOCK):
            (with_file if ending == ENDING else workers).add(int(pid))
    progress = dict.fromkeys(workers - with_file, UNKNOWN)
    for number in with_file:
        sequence = _read(f"{folder}/{number}.{ENDING}", _key(model))
        if sequence is not None:
            progress[number] = sequence
    return progress


def _read(path: str, key: bytes) -> int | None:
    """The progress in a file; None if its worker does not serve the model, or has ended."""
    for _ in range(READS):
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return _find(os.read(file, os.fstat(file).st_size), key)
            finally:
                os.close(file)
        except FileNotFoundError:
            return None
        except OSError:
            return UNKNOWN
        except ValueError:
            continue
    return UNKNOWN


def _find(content: bytes, key: bytes) -> int | None:
    """The progress in a file's content. Raises ValueError if an entry is being written, or the content is no entries."""
    if len(content) < ENTRY.size:
        raise ValueError("not a file of entries")
    for entry_key, value, check in ENTRY.iter_unpack(content[: len(content) // ENTRY.size * ENTRY.size]):
        if entry_key == UNUSED:
            break
        if value != check ^ MASK:
            raise ValueError("half of an entry")
        if entry_key == key:
            return int(value) - 1 if value else None
    return None


@cache
def _key(model: str) -> bytes:
    return blake2b(model.encode(), digest_size=8).digest()
