"""Which versions a process was opening when it ended: where memory has no room for another version, the system kills who opens it.

    models/<name>/.opening.<name>.<version>.<random>   in the run folder where the model's folder takes none

A process holds a lock on its note until the version is open or has failed, and then deletes the note. The system releases the lock however
the process ends. So a note that nobody holds was left by a process that ended while it opened the version. A note holds for one boot of the
machine and for the files that the version had. Knows notes, not engines.
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

    run_folder  of the workers of this service; None: this process alone
    """

    def __init__(self, run_folder: Path | None) -> None:
        self._run_folder = run_folder
        self._notes: dict[int, Path] = {}
        self._stopped, self._lock = False, threading.Lock()

    @contextmanager
    def noted(self, version: Path) -> Iterator[None]:
        """Keep a note while the version in this folder is opened. Without a folder that takes one there is none."""
        with self._lock:
            descriptor = None if self._stopped else self._note(version)
        try:
            yield
        finally:
            if descriptor is not None:
                self._forget(descriptor)

    def ended(self, version: Path) -> int:
        """How many processes have ended while they opened the version as it is now."""
        left = [content for note in self._found(version) if (content := _left(note)) is not None]
        return left.count(_stamp(version)) if left else 0

    def forgive(self, version: Path) -> None:
        """Delete the notes that others have left: the version was opened, or an admin asks for it again."""
        for note in self._found(version):
            if _left(note) is not None:
                with suppress(OSError):
                    note.unlink(missing_ok=True)

    def stop(self) -> None:
        """This process ends on purpose: it leaves no note, also of a version that it begins to open in the meantime."""
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
            except OSError:  # the file system has no locks: what nobody can hold says nothing
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
                os.ftruncate(descriptor, 0)  # for who has opened it by now
                note.unlink(missing_ok=True)
            os.close(descriptor)

    def _found(self, version: Path) -> list[Path]:
        found = []
        for folder in self._folders(version):
            with suppress(OSError):
                found += [folder / name for name in os.listdir(folder) if name.startswith(_prefix(version))]
        return found


def _prefix(version: Path) -> str:
    model, number = version.parts[-2:]
    return f".opening.{model}.{number}."


def _stamp(version: Path) -> bytes:
    """Another one after the next boot, or where a file of the version was written or replaced."""
    try:
        boot = BOOT.read_text()
    except OSError:
        boot = ""
    return hashlib.sha256(f"{boot}{list(files_of(version).values())}".encode()).hexdigest().encode()


def _left(note: Path) -> bytes | None:
    """What a note says that nobody holds; None where its process lives."""
    try:
        with note.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return stream.read()
    except OSError:  # it is held, or gone
        return None
