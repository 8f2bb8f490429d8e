"""Metric values that the processes of a service keep in files of one folder, so that any of them can sum the values of all.

Every process writes its own files through memory maps, one for each kind of metric (`counter_<pid>.db`, `gauge_livesum_<pid>.db`). The
format is that of prometheus_client's multiprocess mode: int32 bytes in use, 4 bytes of padding, then records of int32 key length, the key,
padding to 8 bytes, float64 value, float64 timestamp.

prometheus_client's own writer is not used. It maps a file before its disk space is allocated, so that a full disk ends the process with
SIGBUS. Here zeros are written first, and a full disk is an error: values without space stay in memory until there is some. Records of
forgotten keys are reused. Knows keys and values. Does not know metrics.
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)

FIRST_BYTES = 1 << 16
"""Size of a new file. It doubles when it is full."""
FREE = "espalier_free"
"""Metric name in free records; readers skip it."""
ENDED = 0
"""Process id of the files with the sums of all ended processes."""
SUMMED_KINDS = ("counter", "histogram")
"""Kinds of metrics whose values outlive their process."""
RETRY_S = 1.0
"""Seconds between two attempts to get disk space."""
PATIENCE_S = 0.5
"""How long to wait for readers before adding to the sums of ended processes is given up."""
_HEAD = 8
_INTEGER, _NUMBERS = struct.Struct("i"), struct.Struct("dd")


def key_of(metric: str, sample: str, labels: Mapping[str, str], documentation: str) -> str:
    """The key of a value, as prometheus_client writes it."""
    return json.dumps([metric, sample, dict(labels), documentation], sort_keys=True)


class CountsFile:
    """Keys and values in a file that only this process writes. Other processes may read a value while it changes.

    lock  held while a value is read, changed and written
    """

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, threading.Lock()
        self._map: mmap.mmap | None = None
        self._descriptor = -1
        self._used_bytes = _HEAD
        self._offsets: dict[str, int] = {}  # key → offset of its value
        self._free_offsets: dict[int, list[int]] = {}  # padded key length → offsets of free records
        self._values_without_space: dict[str, float] = {}
        self._retry_at = 0.0

    def write(self, key: str, value: float) -> None:
        """Set a value. The caller holds the lock."""
        offset = self._offsets.get(key)
        if offset is None:
            offset = self._allocate(key)
            if offset is None:
                self._values_without_space[key] = value
                return
            self._values_without_space.pop(key, None)
        self._write_value(offset, value)

    def settle(self) -> None:
        """Write the values that had to wait for disk space."""
        with self.lock:
            for key in [*self._values_without_space]:
                offset = self._allocate(key)
                if offset is None:
                    return
                self._write_value(offset, self._values_without_space.pop(key))

    def forget(self, labels: Mapping[str, str]) -> None:
        """Drop all values that have these labels."""
        label_texts = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in labels.items()]
        with self.lock:
            keys = [key for key in (*self._offsets, *self._values_without_space) if all(text in key for text in label_texts)]
            for key in keys:
                self._values_without_space.pop(key, None)
                offset = self._offsets.pop(key, None)
                if offset is not None and self._map is not None:
                    length = len(key.encode())
                    begin = offset - _padded(length) - 4
                    free_key = json.dumps([FREE, FREE, {}, ""]).encode().ljust(length)
                    self._map[begin + 4 : begin + 4 + length] = free_key
                    self._free_offsets.setdefault(_padded(length), []).append(begin)

    def complete(self) -> bool:
        return not self._values_without_space

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            os.close(self._descriptor)
        self._map = None

    def _write_value(self, offset: int, value: float) -> None:
        if self._map is not None:
            self._map[offset : offset + _NUMBERS.size] = _NUMBERS.pack(value, 0.0)

    def _allocate(self, key: str) -> int | None:
        """Allocate a record for a key, and return the offset of its value. None without disk space, and for RETRY_S after that."""
        encoded = key.encode()
        padded = _padded(len(encoded))
        record = _INTEGER.pack(len(encoded)) + encoded.ljust(padded) + _NUMBERS.pack(0.0, 0.0)
        begin = self._free_offsets[padded].pop() if self._free_offsets.get(padded) else self._used_bytes
        if begin == self._used_bytes and not self._has_room(begin + len(record)):
            return None
        if self._map is None:
            return None
        self._map[begin : begin + len(record)] = record
        if begin == self._used_bytes:
            self._used_bytes += len(record)
            self._map[: _INTEGER.size] = _INTEGER.pack(self._used_bytes)
        offset = self._offsets[key] = begin + 4 + padded
        return offset

    def _has_room(self, min_bytes: int) -> bool:
        """Grow the file to at least `min_bytes`. False if the disk is full, or fails for another reason."""
        if self._map is not None and min_bytes <= len(self._map):
            return True
        now = time.monotonic()
        if now < self._retry_at:
            return False
        size = FIRST_BYTES if self._map is None else len(self._map)
        while size < min_bytes:
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
        """Write zeros, then map them. A new file is renamed once its head is written, so that no reader sees an empty one."""
        is_new = self._map is None
        path = self.path.with_suffix(".new") if is_new else self.path
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if is_new else 0), 0o600)
        try:
            end = os.fstat(descriptor).st_size
            while end < size:
                end += os.pwrite(descriptor, bytes(size - end), end)
            new_map = mmap.mmap(descriptor, size)
            if is_new:
                new_map[: _INTEGER.size] = _INTEGER.pack(self._used_bytes)
                path.rename(self.path)
        except OSError:
            os.close(descriptor)
            if is_new:
                with suppress(OSError):
                    path.unlink()
            raise
        self.close()
        self._map, self._descriptor = new_map, descriptor


def read(path: Path) -> Iterator[tuple[str, float]]:
    """The keys and values of a file."""
    content = path.read_bytes()
    [used_bytes] = _INTEGER.unpack_from(content)
    offset = _HEAD
    while offset < used_bytes:
        [length] = _INTEGER.unpack_from(content, offset)
        key = content[offset + 4 : offset + 4 + length].decode()
        offset += 4 + _padded(length)
        yield key, _NUMBERS.unpack_from(content, offset)[0]
        offset += _NUMBERS.size


def remove_process(folder: Path, pid: int) -> None:
    """Remove the files of an ended process. Add its counters and histograms to the sums of ended processes.

    Values of single versions (label `version`) are dropped, because no process would forget them when the version is unloaded. If there is
    no space for the sums, or a reader takes too long, the files stay and are counted as before.
    """
    summed_files = [folder / f"{kind}_{pid}.db" for kind in SUMMED_KINDS]
    for file in folder.glob(f"*_{pid}.*"):
        if file not in summed_files:
            file.unlink(missing_ok=True)
    try:
        with locked(folder, fcntl.LOCK_EX):
            for file in summed_files:
                _add(file, file.with_name(file.name.replace(f"_{pid}.", f"_{ENDED}.")))
    except (OSError, struct.error) as error:
        log.warning("the counts of process %d stay in files of their own: %s", pid, error)


def _add(file: Path, sums_file: Path) -> None:
    """Move the values of a file to the sums of ended processes."""
    if not file.exists():
        return
    sums: dict[str, float] = {}
    for source in (sums_file, file):
        for key, value in read(source) if source.exists() else ():
            name, _, labels, _ = json.loads(key)
            if name != FREE and "version" not in labels:
                sums[key] = sums.get(key, 0.0) + value
    new_sums = CountsFile(sums_file.with_suffix(".sums"))
    try:
        with new_sums.lock:
            for key, value in sums.items():
                new_sums.write(key, value)
        if not new_sums.complete():
            raise OSError("no space")
        new_sums.path.rename(sums_file)
        file.unlink()
    finally:
        new_sums.close()
        new_sums.path.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path, lock_kind: int) -> Iterator[None]:
    """Hold the folder's lock, which the system releases when the process ends. Raises OSError if another process holds it too long.

    Readers share it. Meanwhile no values move to the sums of ended processes: a reader would miss them or count them twice.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        give_up = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(descriptor, lock_kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= give_up:
                    raise
                time.sleep(PATIENCE_S / 20)
        yield
    finally:
        os.close(descriptor)


def _padded(length: int) -> int:
    """Bytes of a key of this length with its padding."""
    return length + 8 - (length + 4) % 8
