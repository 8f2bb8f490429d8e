"""What was written is on the disk. Knows files and folders."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Have what was written to a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
