"""What should be served, on disk: the desired state of one model, in files beside its versions.

    models/<name>/serving.json   {"generation": 4, "versions": [2, 3], "default": 3}, perhaps a "candidate": espalier/serving.py; absent:
                                 the highest version alone
    models/<name>/removed.json   {"generation": 2, "ids": ["b12"]}; absent from the start: nothing is removed
    models/<name>/.lock, .removed.lock   held by whoever changes serving.json, removed.json
    models/<name>/.serving.before  what serving.json said before the change that is under way

Every worker process follows these files; a generation says which state a worker has reached. They are replaced as a whole (written
beside their place, flushed, renamed), so that a reader never sees half of one. A change of serving.json whose lock nobody holds was left by
a process that ended: whoever finds it takes it back. followed_file.py says what becomes of a state whose file is gone. Knows files, not
engines.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from espalier.durable import flush
from espalier.errors import InvalidData, expectation
from espalier.serving import DesiredFile, Serving

from ..errors import BeingChanged, Conflict

log = logging.getLogger(__name__)

MAX_BYTES = 256 << 20
"""Largest file that is read."""

Signature = tuple[int, int, int]
"""Modification time in ns, inode and size of a file: another one means that it was written."""


class Removed(DesiredFile):
    """Ids of items that no answer may hold, whatever the version."""

    ids: tuple[str, ...]


class Former(BaseModel):
    """What serving.json said before a change; None: there was no file. generation: of the state that the change writes."""

    generation: int
    serving: Serving | None = None


class InvalidState(InvalidData):
    """A file of desired state says nothing that can be followed. readable: its content is wrong; otherwise the system does not give it."""

    def __init__(self, file: str, value: object, expected: str, readable: bool = True) -> None:
        super().__init__(file, value, expected)
        self.readable = readable


State = TypeVar("State", Serving, Removed)
_FILES: dict[type[DesiredFile], str] = {Serving: "serving.json", Removed: "removed.json"}
_LOCKS: dict[type[DesiredFile], str] = {Serving: ".lock", Removed: ".removed.lock"}
_FORMER = ".serving.before"


class DesiredState:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def name_of(self, kind: type[State]) -> str:
        """The file as messages call it: relative to the models folder."""
        return f"{self.folder.name}/{_FILES[kind]}"

    def has_versions(self) -> bool:
        """Whether the folder is there and holds versions: an empty one is where nothing is mounted."""
        try:
            return any(name.isdecimal() for name in os.listdir(self.folder))
        except OSError:
            return False

    def signature(self, kind: type[State]) -> Signature | None:
        """Of the file as it is now; None where there is none. Raises InvalidState where the system does not say."""
        try:
            return _signed(self._file(kind).stat())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise InvalidState(self.name_of(kind), error.strerror, "a readable file", readable=False) from error

    def read(self, kind: type[State]) -> State | None:
        """The state, None where there is no file. Raises InvalidState, saying which file, what is wrong, and what was expected."""
        file, name = self._file(kind), self.name_of(kind)
        try:
            if (size := file.stat().st_size) > MAX_BYTES:
                raise InvalidState(name, f"{size} bytes", f"at most {MAX_BYTES}")
            content = file.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise InvalidState(name, error.strerror, "a readable file", readable=False) from error
        try:
            return kind.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            expected = "a JSON document" if first["type"] == "json_invalid" else expectation(first)
            raise InvalidState(f"{name}: {where}" if where else name, first["input"], expected) from error

    def write(self, state: Serving | Removed) -> None:
        """Replace the file. Raises Conflict where the folder cannot be written to."""
        self._replace(self._file(type(state)), state)

    def begin_change(self, before: Serving | None, after: Serving) -> None:
        """Write what should serve, so that it can be taken back until `end_change`. Holds the lock. Raises Conflict."""
        self._replace(self.folder / _FORMER, Former(generation=after.generation, serving=before))
        self.write(after)

    def end_change(self) -> None:
        """The change stays. Holds the lock. Raises Conflict."""
        with self._writable():
            (self.folder / _FORMER).unlink(missing_ok=True)
            flush(self.folder)

    @property
    def is_changing(self) -> bool:
        return os.path.exists(self.folder / _FORMER)  # False where the folder cannot be read

    def take_back(self) -> bool:
        """Write what serving.json said before the change that has not ended, as a newer state. Holds the lock. Raises Conflict.

        False where there is no such change, or the file is another one by now: then it stays.
        """
        with self._writable():
            content = (self.folder / _FORMER).read_bytes()
        try:
            former, now = Former.model_validate_json(content), self.read(Serving)
        except (InvalidData, ValidationError):  # one of the files was written by hand
            found = False
        else:
            found = now is not None and now.generation == former.generation
            if found and former.serving is None:
                self.delete(Serving)
            elif found and former.serving is not None:
                self.write(former.serving.model_copy(update={"generation": former.generation + 1}))
        self.end_change()
        return found

    def _replace(self, file: Path, state: BaseModel) -> None:
        with self._writable():
            descriptor, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=self.folder)
            try:
                with os.fdopen(descriptor, "w") as stream:
                    json.dump(state.model_dump(mode="json", exclude_none=True), stream)
                    stream.write("\n")
                    stream.flush()
                    os.fchmod(stream.fileno(), 0o644)
                    os.fsync(stream.fileno())
                os.rename(temporary, file)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
            flush(self.folder)

    def delete(self, kind: type[Serving] | type[Removed]) -> None:
        """Back to the state of no file."""
        with self._writable():
            self._file(kind).unlink(missing_ok=True)
            flush(self.folder)

    @contextmanager
    def locked(self, kind: type[Serving] | type[Removed]) -> Iterator[None]:
        """Nobody else changes this file meanwhile. A change whose author has ended is taken back first.

        Raises BeingChanged when somebody changes it, Conflict where the folder cannot be written.
        """
        with self._writable():
            descriptor = os.open(self.folder / _LOCKS[kind], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BeingChanged(f"Another change of {self.folder.name!r} is under way; try again when it is done.") from error
            if kind is Serving and self.is_changing and self.take_back():
                log.error("%s: a change of versions is taken back: the process that made it has ended", self.folder.name)
            yield
        finally:
            os.close(descriptor)

    def _file(self, kind: type[DesiredFile]) -> Path:
        return self.folder / _FILES[kind]

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Conflict(
                f"The folder of {self.folder.name!r} in the models folder cannot be written to ({error.strerror}), so that what is served "
                "cannot be changed from here: make it writable for the service, or change serving.json and removed.json where it is."
            ) from error


def signature(file: Path) -> Signature | None:
    """Changes when the file is written or replaced; None where there is none."""
    try:
        return _signed(file.stat())
    except OSError:
        return None


def _signed(found: os.stat_result) -> Signature:
    return found.st_mtime_ns, found.st_ino, found.st_size
