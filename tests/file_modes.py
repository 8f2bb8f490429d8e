"""Who may read the files that a test writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """That of whoever writes."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def assert_every_user_can_read(folder: Path) -> None:
    """The folder and all in it; at least a few files, and nobody else may write."""
    written = [folder, *folder.rglob("*")]
    assert len(written) > 5
    assert {path: oct(path.stat().st_mode & 0o7777) for path in written} == {
        path: oct(0o755 if path.is_dir() else 0o644) for path in written
    }
