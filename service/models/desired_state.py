"""The desired state of one model on disk: which versions should serve, and which items are removed. Its files are beside the versions.

    models/<name>/serving.json   {"generation": 4, "versions": [2, 3], "default": 3}, perhaps a "candidate": espalier/serving.py; absent:
                                 the highest version alone
    models/<name>/removed.json   {"generation": 2, "ids": ["b12"]}; absent from the start: nothing is removed
    models/<name>/.lock, .removed.lock   locked while serving.json, removed.json is changed
    models/<name>/.serving.before  the content of serving.json before the change that is under way

Every worker process follows these files; a generation says which state a worker has reached. A file is replaced as a whole (written under
another name, flushed, renamed), so that a reader never sees half of it. A change of serving.json whose lock is free was left by a process
that ended: the next process that sees it takes it back. Knows files, not engines and not the consequences of a state.

A process follows each file: if the file is malformed or unreadable, or its folder is gone, its last content stays in force. A deleted
removed.json stays in force too, so that no accident brings items back; an empty list brings them back. Deleting serving.json from a folder
with versions lets the highest version serve.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from espalier.durable import atomic_write, flush
from espalier.errors import InvalidData, expectation, spelled
from espalier.file_lock import try_lock
from espalier.serving import FORMER, DesiredFile, Former, Serving, as_file

from ..errors import BeingChanged, Conflict
from ..watched_files import Signature, signature_of

log = logging.getLogger(__name__)

MAX_BYTES = 256 << 20
"""Largest file that is read."""
DELETED_S = 0.5
"""A serving.json counts as deleted after this time: a folder may be renamed and renamed back, or a file deleted and written again."""


class Removed(DesiredFile):
    """Ids of items that no answer may hold, whatever the version."""

    ids: tuple[str, ...]


class InvalidState(InvalidData):
    """A file of desired state is invalid (readable), or the system cannot read it (not readable)."""

    def __init__(self, file: str, value: object, expected: str, readable: bool = True) -> None:
        super().__init__(file, value, expected)
        self.readable = readable


State = TypeVar("State", Serving, Removed)
_FILES: dict[type[DesiredFile], str] = {Serving: "serving.json", Removed: "removed.json"}
_LOCKS: dict[type[DesiredFile], str] = {Serving: ".lock", Removed: ".removed.lock"}


class DesiredState:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def name_of(self, kind: type[State]) -> str:
        """The file's path in messages, relative to the models folder."""
        return f"{self.folder.name}/{_FILES[kind]}"

    def has_versions(self) -> bool:
        """Whether the folder exists and holds versions. An empty folder may be one that is not mounted."""
        try:
            return any(name.isdecimal() for name in os.listdir(self.folder))
        except OSError:
            return False

    def signature(self, kind: type[State]) -> Signature | None:
        """The signature of the file now; None without a file. Raises InvalidState when the system cannot say."""
        try:
            return signature_of(self._file(kind).stat())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise InvalidState(self.name_of(kind), error.strerror, "a readable file", readable=False) from error

    def read(self, kind: type[State]) -> State | None:
        """The state; None without a file. Raises InvalidState, which names the file, the wrong value and what was expected."""
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
            field = ".".join(str(key) for key in first["loc"])
            expected = "a JSON document" if first["type"] == "json_invalid" else expectation(first)
            raise InvalidState(f"{name}: {field}" if field else name, first["input"], expected) from error

    def write(self, state: Serving | Removed) -> None:
        """Replace the file. Raises Conflict when the folder is not writable."""
        self._replace(self._file(type(state)), state)

    def begin_change(self, before: Serving | None, after: Serving) -> None:
        """Write what should serve; `take_back` can undo it until `end_change`. The caller holds the lock. Raises Conflict."""
        self._replace(self.folder / FORMER, Former(generation=after.generation, serving=before))
        self.write(after)

    def end_change(self) -> None:
        """Make the change final. The caller holds the lock. Raises Conflict."""
        with self._writable():
            (self.folder / FORMER).unlink(missing_ok=True)
            flush(self.folder)

    @property
    def is_changing(self) -> bool:
        return os.path.exists(self.folder / FORMER)  # False where the folder cannot be read

    def take_back(self) -> bool:
        """Undo the change that has not ended: write the former state, as a newer generation. The caller holds the lock. Raises Conflict.

        False if serving.json is not of this change any more: then it stays.
        """
        with self._writable():
            content = (self.folder / FORMER).read_bytes()
        try:
            former, now = Former.model_validate_json(content), self.read(Serving)
        except (InvalidData, ValidationError):  # one of the files was written by hand
            is_current = False
        else:
            is_current = now is not None and now.generation == former.generation
            if is_current and former.serving is None:
                self.delete(Serving)
            elif is_current and former.serving is not None:
                self.write(former.serving.model_copy(update={"generation": former.generation + 1}))
        self.end_change()
        return is_current

    def _replace(self, file: Path, state: BaseModel) -> None:
        with self._writable():
            with atomic_write(file) as part:
                part.write_text(as_file(state))
                part.chmod(0o644)
            flush(self.folder)

    def delete(self, kind: type[Serving] | type[Removed]) -> None:
        """Delete the file; its default state holds then. Raises Conflict."""
        with self._writable():
            self._file(kind).unlink(missing_ok=True)
            flush(self.folder)

    @contextmanager
    def locked(self, kind: type[Serving] | type[Removed]) -> Iterator[None]:
        """Hold the lock of this file. A change whose author has ended is taken back first.

        Raises BeingChanged when another process or thread holds the lock, Conflict when the folder is not writable.
        """
        with self._writable():
            descriptor = try_lock(self.folder / _LOCKS[kind])
        if descriptor is None:
            raise BeingChanged(f"Another change of {spelled(self.folder.name)} is under way; try again when it is done.")
        try:
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
            remedy = "make it writable for the service, or change serving.json and removed.json where it is"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                remedy = "make room on its disk"
            raise Conflict(
                f"The folder of {spelled(self.folder.name)} in the models folder cannot be written ({error.strerror}), so what is served "
                f"cannot be changed from here: {remedy}."
            ) from error


class FollowedFile(Generic[State]):
    """A file of `disk` as this process follows it.

    state     the state in force; None is the state without a file
    problem   why the file does not say this state now
    is_known  whether `state` was ever read. Until then nothing may serve: an answer might hold removed items
    recall    returns the state that other workers read before this process started; called if the file is not valid
    """

    def __init__(self, disk: DesiredState, kind: type[State], recall: Callable[[], State | None] = lambda: None) -> None:
        self._disk = disk
        self._kind: type[State] = kind
        self._recall: Callable[[], State | None] = recall
        self.state: State | None = None
        self.problem: str | None = None
        self.is_known = False
        self._last_signature: Signature | None = None
        self._deleted_at: float | None = None

    def look(self) -> bool:
        """Read the file. True if state, problem or is_known has changed."""
        before = self.state, self.problem, self.is_known
        try:
            signature = self._disk.signature(self._kind)
            if signature is None:
                self._last_signature = None
                self._without_file()
            elif signature != self._last_signature:
                self._read(signature)
        except InvalidState as error:
            self.problem, self._last_signature = str(error), None
        if self.problem and not self.is_known and (recalled := self._recall()) is not None:
            self.state, self.is_known = recalled, True
        return (self.state, self.problem, self.is_known) != before

    def _read(self, signature: Signature) -> None:
        self._deleted_at = None
        try:
            state = self._disk.read(self._kind)
        except InvalidState as error:
            if not error.readable:
                raise
            self.problem, self._last_signature = str(error), signature  # so that it is parsed once, not at every look
            return
        if state is not None:  # None if it was deleted meanwhile: the next look sees that
            self.state, self.problem, self.is_known, self._last_signature = state, None, True, signature

    def _without_file(self) -> None:
        name = self._disk.name_of(self._kind)
        if not self._disk.has_versions():
            self._deleted_at = None
            self.problem = f"{name}: the folder is gone, or holds no version any more; its last content stays in force"
            return
        now = time.monotonic()
        self._deleted_at = self._deleted_at or now
        if isinstance(self.state, Removed) or self._kind is Removed:
            state = self.state or self._recall()
            removed_ids = isinstance(state, Removed) and state.ids
            self.state = state
            self.problem = (
                f"{name}: the file is gone; the {len(removed_ids)} ids that it listed stay removed. Put it back, or set the list anew "
                f"(PUT /models/{self._disk.folder.name}/removed)"
                if removed_ids
                else None
            )
            self.is_known = True
        elif not self.is_known or now - self._deleted_at >= DELETED_S:
            self.state, self.problem, self.is_known = None, None, True
