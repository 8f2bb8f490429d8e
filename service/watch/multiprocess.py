"""prometheus_client's multiprocess mode, with its values in the files of counter_files.py.

prometheus_client's own files are not used. They are mapped before their disk space is allocated, so that a full disk ends the process with
SIGBUS, and they keep the series of unloaded versions for ever.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from prometheus_client import Metric, values
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from ..watch import counter_files

READS = 3
"""Attempts to read the files of all workers. An attempt fails if a worker is writing a key."""


class _SharedValue:
    """A metric's value in a file that other processes read, in place of prometheus_client's value in memory."""

    _multiprocess = True
    folder: ClassVar[Path | None] = None
    files: ClassVar[dict[str, counter_files.CountsFile]] = {}  # of this process, by kind of metric

    def __init__(
        self,
        kind: str,
        metric: str,
        sample: str,
        label_names: Sequence[str],
        label_values: Sequence[str],
        documentation: str,
        multiprocess_mode: str = "",
        **_: Any,
    ) -> None:
        if self.folder is None:
            raise RuntimeError("count_in: not called, expected before the first metric is made")
        kind = f"{kind}_{multiprocess_mode}" if multiprocess_mode else kind
        self._file = self.files.setdefault(kind, counter_files.CountsFile(self.folder / f"{kind}_{os.getpid()}.db"))
        self._key = counter_files.key_of(metric, sample, dict(zip(label_names, label_values, strict=True)), documentation)
        self._value = 0.0
        self.inc(0.0)

    def inc(self, amount: float) -> None:
        with self._file.lock:
            self._value += amount
            self._file.write(self._key, self._value)

    def set(self, value: float, timestamp: float | None = None) -> None:
        with self._file.lock:
            self._value = value
            self._file.write(self._key, value)

    def get(self) -> float:
        return self._value


def count_in(folder: Path) -> None:
    """Count in this folder from now on, together with other processes. Call it before the first metric is made."""
    _SharedValue.folder = folder
    values.ValueClass = _SharedValue


def settle() -> None:
    """Write the values that had to wait for disk space, if this process counts in a folder."""
    for file in [*_SharedValue.files.values()]:
        file.settle()


def forget(labels: Mapping[str, str]) -> None:
    """Drop all values that have these labels, if this process counts in a folder."""
    for file in [*_SharedValue.files.values()]:
        file.forget(labels)


class AllWorkers(Collector):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Metric]:
        with counter_files.locked(self._folder, fcntl.LOCK_SH):
            for attempt in range(READS):
                try:
                    collector = MultiProcessCollector(None, str(self._folder))
                    metrics = [*collector.collect()]
                    break
                except ValueError:
                    if attempt == READS - 1:
                        raise
        yield from (metric for metric in metrics if metric.name != counter_files.FREE)
