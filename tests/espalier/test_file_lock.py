"""A lock that is tried again and again leaves nothing open, whatever keeps it from being taken."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from espalier.file_lock import try_lock


def open_files(file: Path) -> int:
    return sum(os.path.realpath(f"/proc/self/fd/{number}") == str(file) for number in os.listdir("/proc/self/fd"))


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    first = try_lock(tmp_path / "lock")
    assert first is not None
    assert try_lock(tmp_path / "lock") is None
    assert open_files(tmp_path / "lock") == 1
    os.close(first)
    second = try_lock(tmp_path / "lock")
    assert second is not None
    os.close(second)


def test_a_file_system_without_locks_costs_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for _ in range(3):
        with pytest.raises(OSError, match="No locks available"):
            try_lock(tmp_path / "lock")
    assert open_files(tmp_path / "lock") == 0
