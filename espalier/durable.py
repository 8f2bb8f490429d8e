"""Flushes files and folders to disk."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Flush a file's content, or a folder's names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
