"""One file of desired state as this process follows it: its last valid content, and why it is invalid now.

If the file is malformed or unreadable, or its folder is gone, its last content stays in force, and `problem` says so. A deleted
removed.json stays in force too, so that no accident brings items back; an empty list brings them back. Deleting serving.json from a folder
with versions lets the highest version serve. Knows one file, not its consequences.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic

from ..models.desired_state import DesiredState, InvalidState, Removed, State
from ..watched_files import Signature

DELETED_S = 0.5
"""A serving.json counts as deleted after this time: a folder may be renamed and renamed back, or a file deleted and written again."""


class FollowedFile(Generic[State]):
    """A file of `disk`.

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
