"""One file of desired state as this process follows it: its last valid content, and what is wrong with it now.

A file that is malformed, unreadable, or gone with its folder changes nothing: its last content stays in force, and `wrong` says so. The
same holds for a removed.json that is deleted alone, so that no accident brings items back; an empty list does. A serving.json that is
deleted from a folder with versions ends the pin. Knows one file, not its consequences.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic

from ..models.desired_state import DesiredState, InvalidState, Removed, Signature, State

DELETED_S = 0.5
"""A serving.json counts as deleted after this time: a folder may be renamed and back, or a file deleted and written again."""


class FollowedFile(Generic[State]):
    """A file of `disk`.

    state    what is in force; None: what holds where there is no file
    wrong    why the file does not say so now
    known    whether `state` has ever been known. Until then nothing may serve: an answer might hold removed items
    recall   returns what this service had read before this process started; called where the file is not valid now
    """

    def __init__(self, disk: DesiredState, kind: type[State], recall: Callable[[], State | None] = lambda: None) -> None:
        self._disk = disk
        self._kind: type[State] = kind
        self._recall: Callable[[], State | None] = recall
        self.state: State | None = None
        self.wrong: str | None = None
        self.known = False
        self._seen: Signature | None = None
        self._deleted_at: float | None = None

    def look(self) -> bool:
        """Read the file. True where state, wrong or known has changed."""
        before = self.state, self.wrong, self.known
        try:
            signature = self._disk.signature(self._kind)
            if signature is None:
                self._seen = None
                self._without_file()
            elif signature != self._seen:
                self._read(signature)
        except InvalidState as error:
            self.wrong, self._seen = str(error), None
        if self.wrong and not self.known and (recalled := self._recall()) is not None:
            self.state, self.known = recalled, True
        return (self.state, self.wrong, self.known) != before

    def _read(self, signature: Signature) -> None:
        self._deleted_at = None
        try:
            state = self._disk.read(self._kind)
        except InvalidState as error:
            if not error.readable:
                raise
            self.wrong, self._seen = str(error), signature  # it is parsed once, not at every look
            return
        if state is not None:  # else it went since: the next look sees that
            self.state, self.wrong, self.known, self._seen = state, None, True, signature

    def _without_file(self) -> None:
        name = self._disk.name_of(self._kind)
        if not self._disk.has_versions():
            self._deleted_at = None
            self.wrong = f"{name}: the folder is gone, or holds no version any more; its last content stays in force"
            return
        now = time.monotonic()
        self._deleted_at = self._deleted_at or now
        if isinstance(self.state, Removed) or self._kind is Removed:
            state = self.state or self._recall()
            gone = isinstance(state, Removed) and state.ids
            self.state = state
            self.wrong = (
                f"{name}: the file is gone; the {len(gone)} ids that it listed stay removed. Put it back, or set the list anew "
                f"(PUT /models/{self._disk.folder.name}/removed)"
                if gone
                else None
            )
            self.known = True
        elif not self.known or now - self._deleted_at >= DELETED_S:
            self.state, self.wrong, self.known = None, None, True
