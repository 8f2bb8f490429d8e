"""The folder that the worker processes of one service share: which of them live.

Every worker holds a lock on `<pid>.lock` in it as long as it lives; the system releases the lock however the worker ends. Knows process ids
and the names of files. Does not know what the workers say in theirs.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def forget(folder: Path, pid: int) -> None:
    """Drop the files of a worker that has ended."""
    for kind in ("lock", "json", "live", "sock"):
        (folder / f"{pid}.{kind}").unlink(missing_ok=True)


def living(folder: Path) -> list[int]:
    """Process ids of the workers that live."""
    return sorted(int(name.partition(".")[0]) for name in names(folder, ".lock") if _is_held(f"{folder}/{name}"))


def names(folder: Path, ending: str) -> list[str]:
    """The names of the workers' files of one kind, in no order; none where the folder is gone."""
    try:
        return [name for name in os.listdir(folder) if name.endswith(ending)]
    except FileNotFoundError:
        return []


def _is_held(file: str) -> bool:
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
