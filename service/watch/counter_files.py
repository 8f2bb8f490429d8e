"""Numbers that the processes of a service keep in files of one folder, so that any of them can add all up.

Every process writes files of its own, one for each kind of number (`counter_<pid>.db`, `gauge_livesum_<pid>.db`), through a memory map, in
the format that prometheus_client's multiprocess mode reads: int32 bytes in use, 4 bytes of padding, then records of int32 key length, the
key, padding to 8 bytes, float64 value, float64 timestamp.

prometheus_client's own writer is not used: it maps the file before the disk has space for it, so a full disk ends the process with SIGBUS.
Here zeros are written first, and a full disk is an error. Numbers without space stay in memory and go to the file once there is some.
Records of forgotten keys are used again. Knows keys and numbers. Does not know metrics.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)

FIRST_BYTES = 1 << 16
"""Size of a new file, which doubles when it is full."""
FREE = "espalier_free"
"""Name of the metric in free records; readers skip it."""
ENDED = 0
"""In place of a process id: the sums of all processes that have ended."""
RETRY_S = 1.0
"""Between two attempts to get disk space."""
PATIENCE_S = 0.5
"""How long to wait for a reader before the sums of ended processes are left as they are."""
_HEAD = 8
_INTEGER, _NUMBERS = struct.Struct("i"), struct.Struct("dd")


def key_of(metric: str, sample: str, labels: Mapping[str, str], documentation: str) -> str:
    """The key of a number, as prometheus_client writes it."""
    return json.dumps([metric, sample, dict(labels), documentation], sort_keys=True)


class CountsFile:
    """Keys and numbers in a file that this process alone writes; a number may be changed while it is read elsewhere.

    lock  held while a number is read, changed and written
    """

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, threading.Lock()
        self._map: mmap.mmap | None = None
        self._descriptor = -1
        self._used = _HEAD
        self._at: dict[str, int] = {}
        self._free: dict[int, list[int]] = {}
        self._held: dict[str, float] = {}
        self._retry_at = 0.0

    def write(self, key: str, value: float) -> None:
        """Set a number. Holds the lock."""
        at = self._at.get(key)
        if at is None:
            at = self._place(key)
            if at is None:
                self._held[key] = value
                return
            self._held.pop(key, None)
        self._put(at, value)

    def settle(self) -> None:
        """Write the numbers that had to wait for disk space."""
        with self.lock:
            for key in [*self._held]:
                at = self._place(key)
                if at is None:
                    return
                self._put(at, self._held.pop(key))

    def forget(self, labels: Mapping[str, str]) -> None:
        """Drop all numbers that have these labels."""
        parts = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in labels.items()]
        with self.lock:
            for key in [key for key in (*self._at, *self._held) if all(part in key for part in parts)]:
                self._held.pop(key, None)
                at = self._at.pop(key, None)
                if at is not None and self._map is not None:
                    length = len(key.encode())
                    begin = at - _padded(length) - 4
                    free = json.dumps([FREE, FREE, {}, ""]).encode().ljust(length)
                    self._map[begin + 4 : begin + 4 + length] = free
                    self._free.setdefault(_padded(length), []).append(begin)

    def complete(self) -> bool:
        return not self._held

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            os.close(self._descriptor)
        self._map = None

    def _put(self, at: int, value: float) -> None:
        if self._map is not None:
            self._map[at : at + _NUMBERS.size] = _NUMBERS.pack(value, 0.0)

    def _place(self, key: str) -> int | None:
        """Take a record for a key, and return the offset of its number. None where there is no space, and for RETRY_S after that."""
        encoded = key.encode()
        padded = _padded(len(encoded))
        record = _INTEGER.pack(len(encoded)) + encoded.ljust(padded) + _NUMBERS.pack(0.0, 0.0)
        begin = self._free[padded].pop() if self._free.get(padded) else self._used
        if begin == self._used and not self._has_room(begin + len(record)):
            return None
        if self._map is None:
            return None
        self._map[begin : begin + len(record)] = record
        if begin == self._used:
            self._used += len(record)
            self._map[: _INTEGER.size] = _INTEGER.pack(self._used)
        at = self._at[key] = begin + 4 + padded
        return at

    def _has_room(self, needed: int) -> bool:
        """Grow the file to at least `needed` bytes. False where the disk is full, or fails for another reason."""
        if self._map is not None and needed <= len(self._map):
            return True
        now = time.monotonic()
        if now < self._retry_at:
            return False
        size = FIRST_BYTES if self._map is None else len(self._map)
        while size < needed:
            size *= 2
        try:
            self._grow(size)
        except OSError as error:
            if not self._retry_at:
                log.error("%s has no space (%s): new numbers are kept in memory until it has some", self.path.parent, error.strerror)
            self._retry_at = now + RETRY_S
            return False
        self._retry_at = 0.0
        return True

    def _grow(self, size: int) -> None:
        """Write zeros, then map them. A new file appears with its head written, so that no reader finds an empty one."""
        new = self._map is None
        path = self.path.with_suffix(".new") if new else self.path
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if new else 0), 0o600)
        try:
            at = os.fstat(descriptor).st_size
            while at < size:
                at += os.pwrite(descriptor, bytes(size - at), at)
            mapped = mmap.mmap(descriptor, size)
            if new:
                mapped[: _INTEGER.size] = _INTEGER.pack(self._used)
                path.rename(self.path)
        except OSError:
            os.close(descriptor)
            if new:
                with suppress(OSError):
                    path.unlink()
            raise
        self.close()
        self._map, self._descriptor = mapped, descriptor


class Counts:
    """The files of this process in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, CountsFile] = {}

    def file(self, kind: str) -> CountsFile:
        found = self._files.get(kind)
        if found is None:
            found = self._files.setdefault(kind, CountsFile(self.folder / f"{kind}_{os.getpid()}.db"))
        return found

    def settle(self) -> None:
        for file in [*self._files.values()]:
            file.settle()

    def forget(self, labels: Mapping[str, str]) -> None:
        for file in [*self._files.values()]:
            file.forget(labels)


def read(path: Path) -> Iterator[tuple[str, float]]:
    """The keys and numbers of a file."""
    content = path.read_bytes()
    [used] = _INTEGER.unpack_from(content)
    at = _HEAD
    while at < used:
        [length] = _INTEGER.unpack_from(content, at)
        key = content[at + 4 : at + 4 + length].decode()
        at += 4 + _padded(length)
        yield key, _NUMBERS.unpack_from(content, at)[0]
        at += _NUMBERS.size


@contextmanager
def being_read(folder: Path) -> Iterator[None]:
    """Meanwhile no numbers move to the sums of ended processes, where they would be missing or counted twice."""
    with _locked(folder, fcntl.LOCK_SH):
        yield


def remove_process(folder: Path, pid: int, summed: Sequence[str]) -> None:
    """Remove the files of a process that has ended. Its numbers of the kinds `summed` are added to the sums of ended processes.

    Numbers of single versions (label `version`) are dropped, because no process would forget them when the version is unloaded. Where there
    is no space for the sums, or a reader takes too long, the files stay as they are and are counted as before.
    """
    kept = [folder / f"{kind}_{pid}.db" for kind in summed]
    for file in folder.glob(f"*_{pid}.*"):
        if file not in kept:
            file.unlink(missing_ok=True)
    try:
        with _locked(folder, fcntl.LOCK_EX):
            for file in kept:
                _add(file, file.with_name(file.name.replace(f"_{pid}.", f"_{ENDED}.")))
    except (OSError, struct.error) as error:
        log.warning("the counts of process %d stay in files of their own: %s", pid, error)


def _add(file: Path, ended: Path) -> None:
    """Move the numbers of a file to those of ended processes."""
    if not file.exists():
        return
    sums: dict[str, float] = {}
    for source in (ended, file):
        for key, value in read(source) if source.exists() else ():
            name, _, labels, _ = json.loads(key)
            if name != FREE and "version" not in labels:
                sums[key] = sums.get(key, 0.0) + value
    written = CountsFile(ended.with_suffix(".sums"))
    try:
        with written.lock:
            for key, value in sums.items():
                written.write(key, value)
        if not written.complete():
            raise OSError("no space")
        written.path.rename(ended)
        file.unlink()
    finally:
        written.close()
        written.path.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    """Hold the folder's lock, which the system releases when the process ends. Raises OSError when another process keeps it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        give_up = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(descriptor, how | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= give_up:
                    raise
                time.sleep(PATIENCE_S / 20)
        yield
    finally:
        os.close(descriptor)


def _padded(length: int) -> int:
    """Bytes of a key of this length with the padding behind it."""
    return length + 8 - (length + 4) % 8
