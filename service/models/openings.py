"""Which versions a process was opening when it ended. If memory has no room for a version, the system kills the process that opens it.

    models/<name>/.opening.<name>.<version>.<random>   in the run folder if the model's folder is not writable

A process locks its note until the version is open or has failed, and then deletes it. The system releases the lock however the process
ends. An unlocked note therefore means that its process ended while it opened the version. A note is valid for one boot of the machine and
for the files that the version had. Knows notes, not engines.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..models.loading import files_of

BOOT = Path("/proc/sys/kernel/random/boot_id")


class Openings:
    """The notes of this process and of others.

    run_folder  the run folder that this service's workers share; None if this process is the only one
    """

    def __init__(self, run_folder: Path | None) -> None:
        self._run_folder = run_folder
        self._notes: dict[int, Path] = {}
        self._stopped, self._lock = False, threading.Lock()

    @contextmanager
    def noted(self, version: Path) -> Iterator[None]:
        """Keep a note while the version in this folder is opened. If no folder is writable, keep none."""
        with self._lock:
            descriptor = None if self._stopped else self._note(version)
        try:
            yield
        finally:
            if descriptor is not None:
                self._forget(descriptor)

    def deaths(self, version: Path) -> int:
        """How many processes have ended while they opened the version with its present files."""
        stamps = [stamp for note in self._notes_of(version) if (stamp := _abandoned_stamp(note)) is not None]
        return stamps.count(_stamp(version)) if stamps else 0

    def forgive(self, version: Path) -> None:
        """Delete the notes of ended processes: the version was opened, or an admin asks for it again."""
        for note in self._notes_of(version):
            if _abandoned_stamp(note) is not None:
                with suppress(OSError):
                    note.unlink(missing_ok=True)

    def stop(self) -> None:
        """Delete this process's notes and write no more: it ends on purpose."""
        with self._lock:
            self._stopped = True
        for descriptor in tuple(self._notes):
            self._forget(descriptor)

    def _folders(self, version: Path) -> list[Path]:
        return [version.parent] + ([] if self._run_folder is None else [self._run_folder])

    def _note(self, version: Path) -> int | None:
        for folder in self._folders(version):
            try:
                descriptor, name = tempfile.mkstemp(prefix=_prefix(version), dir=folder)
            except OSError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError:  # the file system has no locks, so that an unlocked note would mean nothing
                os.close(descriptor)
                Path(name).unlink(missing_ok=True)
                continue
            self._notes[descriptor] = Path(name)
            with suppress(OSError):  # the disk is full
                os.write(descriptor, _stamp(version))
            return descriptor
        return None

    def _forget(self, descriptor: int) -> None:
        note = self._notes.pop(descriptor, None)
        if note is not None:
            with suppress(OSError):
                os.ftruncate(descriptor, 0)  # another process may have the note open already
                note.unlink(missing_ok=True)
            os.close(descriptor)

    def _notes_of(self, version: Path) -> list[Path]:
        notes = []
        for folder in self._folders(version):
            with suppress(OSError):
                notes += [folder / name for name in os.listdir(folder) if name.startswith(_prefix(version))]
        return notes


def _prefix(version: Path) -> str:
    model, number = version.parts[-2:]
    return f".opening.{model}.{number}."


def _stamp(version: Path) -> bytes:
    """A digest that changes with the next boot, and when a file of the version is written or replaced."""
    try:
        boot = BOOT.read_text()
    except OSError:
        boot = ""
    return hashlib.sha256(f"{boot}{list(files_of(version).values())}".encode()).hexdigest().encode()


def _abandoned_stamp(note: Path) -> bytes | None:
    """The stamp in the note of an ended process; None if its process lives or the note is gone."""
    try:
        with note.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return stream.read()
    except OSError:  # locked, or gone
        return None
