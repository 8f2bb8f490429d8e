"""Locks between processes, released when their process ends. Knows files and folders."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def file_lock(path: Path, busy: Exception | None = None) -> Iterator[None]:
    """Hold the lock of a folder, or of a file, which is created if it is missing.

    busy  raised if another process holds the lock; None: wait for that process
    """
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT  # NFS locks only what can be written to
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if busy is None else fcntl.LOCK_NB))
        except BlockingIOError as error:
            if busy is None:
                raise
            raise busy from error
        yield
    finally:
        os.close(descriptor)


def try_lock(file: Path, mode: int = 0o644) -> int | None:
    """Lock a file, which is made if it is missing, until the returned descriptor is closed. None if another process holds the lock.

    Raises OSError if the file cannot be made, or its file system has no locks.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor
