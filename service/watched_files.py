"""Detection of changed files: files of keys, certificates, desired state and bundles. Knows files, not their content."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_S = 1.0
"""Seconds between two looks."""

Signature = tuple[int, int, int]
"""Modification time in ns, inode and size of a file, or of the target of a link. It changes when the file is written or replaced."""


class FromFiles(Generic[T]):
    """A value that is read from files, and read again when one of them, or the target of a link, has changed. If they are wrong then, the
    former value stays in use, and the log says so once. The files are checked once in LOOK_S. One thread uses it.

    read   reads the files. Raises ValueError or OSError
    noun   plural noun of the content, for the log
    clock  seconds, for looking at the files
    """

    def __init__(self, files: Sequence[Path], read: Callable[[], T], noun: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._files, self._read, self._noun, self._clock = files, read, noun, clock
        self._last_signatures, self._next_look = self._signatures(), clock() + LOOK_S
        self._value: T | None = None
        self._problem = ""  # that was logged last

    def current(self) -> T:
        """Raises the error of `read` if there is no former value."""
        if self._value is not None and not self._have_changed():
            return self._value
        try:
            value = self._read()
        except (ValueError, OSError) as error:
            if self._value is None:
                raise
            if isinstance(error, OSError) or isinstance(error.__cause__, OSError):  # it may pass, and nothing in the files changes then
                self._last_signatures = []  # the next check reports a change
            if self._problem != (problem := str(error)):
                log.error("the changed %s are invalid, so the former ones stay in use: %s", self._noun, error)
            self._problem = problem
            return self._value
        if self._value is not None:
            log.info("%s have changed: %s", self._noun, ", ".join(map(str, self._files)))
        self._value, self._problem = value, ""
        return value

    def _have_changed(self) -> bool:
        """Whether a file has changed since the last check. False within LOOK_S of it."""
        if self._clock() < self._next_look:
            return False
        self._next_look = self._clock() + LOOK_S
        previous, self._last_signatures = self._last_signatures, self._signatures()
        return self._last_signatures != previous

    def _signatures(self) -> list[Signature | None]:
        """With the time of the last change of content or permissions: a file that could not be read is read once it can be."""
        statuses = map(_status, self._files)
        return [None if status is None else (status.st_ctime_ns, status.st_ino, status.st_size) for status in statuses]


def _status(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except OSError:
        return None


def signature(file: Path) -> Signature | None:
    """The signature of a file; None if it is missing or unreadable."""
    status = _status(file)
    return None if status is None else signature_of(status)


def signature_of(status: os.stat_result) -> Signature:
    return status.st_mtime_ns, status.st_ino, status.st_size
