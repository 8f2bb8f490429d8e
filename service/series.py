"""Numbers that several processes count and any of them can read: time series as float64 slots of mapped memory.

Counting is a list access, whether the memory is the process's own or a file of the run folder: a tenth of a lock-and-file write per
number, and never stale. Every process writes its own file; a reader adds them up. What a dead process counted stays. Knows slots,
not what they mean.

    <pid>.series   one JSON line per series: [name, label values, first slot, slots]
    <pid>.values   float64 slots, in the machine's byte order
"""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from service.workers import living

BLOCK_SLOTS = 1 << 15
"""Slots that are mapped at once, 256 KiB."""
SLOT_BYTES = 8

Labels = tuple[str, ...]
Key = tuple[str, Labels]
Slots: TypeAlias = "memoryview[float]"


@dataclass
class _Block:
    values: Slots
    first: int
    used: int = 0


class Store:
    """The series of this process, and the sums over all.

    folder  the run folder of several processes; None: this process is alone
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._series: dict[Key, tuple[Slots, int]] = {}
        self._lock = threading.Lock()
        self._file: int | None = None
        self._index: int | None = None
        if folder is not None:
            self._file = os.open(folder / f"{os.getpid()}.values", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._index = os.open(folder / f"{os.getpid()}.series", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._block = self._map(0)

    def close(self) -> None:
        """Give the files back; what was counted stays in them."""
        for descriptor in (self._file, self._index):
            if descriptor is not None:
                os.close(descriptor)
        self._file = self._index = None

    def series(self, name: str, labels: Labels, slots: int) -> Slots:
        """The slots of one series, zero at first: memory of `slots` float64 to be counted in. The same series, the same memory."""
        with self._lock:
            known = self._series.get((name, labels))
            if known is not None:
                return known[0]
            if self._block.used + slots > BLOCK_SLOTS:
                self._block = self._map(self._block.first + BLOCK_SLOTS)
            block = self._block
            values = block.values[block.used : block.used + slots]
            first = block.first + block.used
            block.used += slots
            self._series[name, labels] = values, first
            if self._index is not None:
                os.write(self._index, json.dumps([name, labels, first, slots]).encode() + b"\n")
            return values

    def sums(self, of_the_living: Iterable[str] = ()) -> dict[Key, list[float]]:
        """Every series of every process, slot by slot added up.

        of_the_living  names of series in which a dead process does not count any more: what is, not what was
        """
        with self._lock:
            own = {key: list(values) for key, (values, _) in self._series.items()}
        if self.folder is None:
            return own
        total: defaultdict[Key, list[float]] = defaultdict(list, own)
        alive, current = {os.getpid(), *living(self.folder)}, set(of_the_living)
        for file in self.folder.glob("*.series"):
            pid = int(file.stem)
            if pid == os.getpid():
                continue
            with suppress(FileNotFoundError):
                for key, values in _read(file, file.with_suffix(".values")):
                    if pid in alive or key[0] not in current:
                        added = total[key]
                        total[key] = [a + b for a, b in zip(added, values, strict=True)] if added else values
        return dict(total)

    def _map(self, first: int) -> _Block:
        size = BLOCK_SLOTS * SLOT_BYTES
        if self._file is None:
            return _Block(memoryview(mmap.mmap(-1, size)).cast("d"), first)
        os.ftruncate(self._file, first * SLOT_BYTES + size)
        return _Block(memoryview(mmap.mmap(self._file, size, offset=first * SLOT_BYTES)).cast("d"), first)


def _read(index: Path, values: Path) -> list[tuple[Key, list[float]]]:
    """The series of another process. A line that is still being written is left for the next time."""
    lines = index.read_bytes().split(b"\n")[:-1]
    slots = memoryview(bytearray(values.read_bytes())).cast("d")
    found = []
    for line in lines:
        name, labels, first, count = json.loads(line)
        found.append(((name, tuple(labels)), list(slots[first : first + count])))
    return found
