"""Processes and what they have started, as the kernel tells it."""

from __future__ import annotations

from contextlib import suppress
from glob import glob
from pathlib import Path


def children(pid: int) -> list[int]:
    """Process ids of all that a process has started; empty if it has ended."""
    found: list[int] = []
    for file in glob(f"/proc/{pid}/task/*/children"):
        with suppress(OSError):  # a thread that has ended
            found += map(int, Path(file).read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Process ids of all that a process has started, and of what these have."""
    found = [pid]
    for parent in found:
        found += children(parent)
    return found[1:]


def command_line(pid: int) -> bytes:
    """Empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def workers_of(pid: int) -> list[int]:
    """Process ids of a service's workers."""
    return [child for child in children(pid) if b"spawn_main" in command_line(child)]
