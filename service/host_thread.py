"""A background thread of which one works on a host: that of the process that holds a lock on the models folder.

Knows the thread and the lock. Does not know the work.
"""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from pathlib import Path

from espalier.file_lock import try_lock

log = logging.getLogger(__name__)


class Stopped(Exception):
    """The service ends while a version is being downloaded, or a backup sent."""


class HostThread(ABC):
    """The thread."""

    def __init__(self, name: str, lock_file: Path, task: str) -> None:
        """task: a line of the log, written when this process gets the lock."""
        self._lock_file, self._task = lock_file, task
        self._lock: int | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop soon: what is being sent or downloaded is abandoned, and never appears as complete."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            self._work()
        except Stopped:
            return
        finally:
            if self._lock is not None:
                os.close(self._lock)

    @abstractmethod
    def _work(self) -> None:
        """The work of the thread. Returns, or raises Stopped, soon after `_stopped` is set."""

    def _check_stopped(self) -> None:
        if self._stopped.is_set():
            raise Stopped

    def _elected(self) -> bool:
        """Whether this process does the work, from now on until it ends."""
        if self._lock is None and self._lock_file.parent.is_dir():  # it may be missing until a model comes from the store
            self._lock = try_lock(self._lock_file)
            if self._lock is not None:
                log.info("%s", self._task)
        return self._lock is not None
