"""A host that follows another one's live catalogues: it copies the writer's operations into its own journals, under their numbers.

One thread a process, and of the processes of a host the one that holds a model's lock file. Operations are durable here before they are
applied, so a restart goes on where it was. There is one writer and no agreement among hosts: docs/live.md says what a failover is.
"""

from __future__ import annotations

import fcntl
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Protocol

from espalier.errors import EspalierError
from espalier.live.operations import Operation
from service.live.writer_feed import FeedFailed, WriterFeed

log = logging.getLogger(__name__)

POLL_S = 0.2
"""Between two looks where nothing is new."""
MAX_WAIT_S = 30.0
"""Longest wait after failures, which doubles from POLL_S."""
LOCK = ".live.following"
"""A file in a model's folder: who holds its lock follows."""
ANOTHER = "it is another journal, as after a backup was put in place; put a copy of it here (docs/live.md)"


class Copies(Protocol):
    """What takes copied operations."""

    def copy(self, operations: Sequence[Operation]) -> None:
        """Commit operations of another journal, and apply them. Those that are here already are left out. Raises EspalierError."""
        ...

    def last_sequence(self) -> int:
        """The last operation that is committed here."""
        ...


class Following:
    """See the module.

    feed    the writer's
    folder  of the models
    models  the names of those that this host has
    copies  what takes the operations of a model
    """

    def __init__(self, feed: WriterFeed, folder: Path, models: Callable[[], Sequence[str]], copies: Callable[[str], Copies]) -> None:
        self._feed, self._folder, self._models, self._copies = feed, folder, models, copies
        self._identity: dict[str, str] = {}
        self._locks: dict[str, IO[bytes]] = {}
        self._failed: dict[str, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="following", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish what is being copied, and end."""
        self._stop.set()
        self._thread.join()
        self._feed.close()
        for lock in self._locks.values():
            lock.close()

    def _run(self) -> None:
        wait_s = POLL_S
        while not self._stop.wait(wait_s):
            results = [self._look(model) for model in self._models()]
            wait_s = POLL_S if all(results) else min(2 * wait_s, MAX_WAIT_S)

    def _look(self, model: str) -> bool:
        """Copy what is new of a model. False where that failed."""
        try:
            if self._holds(model):
                while not self._stop.is_set() and self._copied(model):
                    pass
        except Exception as error:  # no failure may end this thread
            if not isinstance(error, EspalierError | OSError):
                log.exception("%s: copying operations from %s goes on after", model, self._feed.url)
            elif self._failed.get(model) != str(error):
                log.warning("%s: operations are not copied, it is tried again: %s", model, error)
            self._failed[model] = str(error)
            return False
        if self._failed.pop(model, None) is not None:
            log.info("%s: operations are copied again", model)
        return True

    def _copied(self, model: str) -> bool:
        """Copy one page; whether there may be more."""
        copies = self._copies(model)
        after = copies.last_sequence()
        page = self._feed.changes(model, after)
        if page.sequence < after:
            raise FeedFailed(f"the writer has operations up to {page.sequence}, and this host has {after}: {ANOTHER}")
        if page.operations:
            copies.copy(page.operations)
            return page.operations[-1].sequence < page.sequence
        return False

    def _holds(self, model: str) -> bool:
        """Whether this process is the one that follows; it stays so until it ends."""
        if model not in self._locks:
            lock = (self._folder / model / LOCK).open("ab")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                return False
            self._locks[model] = lock
        return True
