"""Files that survive a crash: flushed to disk, and replaced in one step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def flush(path: Path) -> None:
    """Flush a file's content, or a folder's names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """A hidden path to write to, which replaces `file` at the end, once it is on the disk. After an error it is deleted: the disk may be
    full."""
    part_file = file.with_name(f".{file.name}.part")
    part_file.unlink(missing_ok=True)  # of a killed process, perhaps another user's
    try:
        yield part_file
        flush(part_file)
        part_file.replace(file)
    finally:
        part_file.unlink(missing_ok=True)
