"""A host that follows another one's live catalogues: it copies the writer's operations into its own journals, under their numbers.

One thread a process, and of the processes of a host the one that holds a model's lock file. Operations are durable here before they are
applied, so a restart goes on where it was. There is one writer and no agreement among hosts: docs/live.md says what a failover is.
"""

from __future__ import annotations

import fcntl
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from espalier.errors import EspalierError
from espalier.live.journal import Journal
from espalier.live.operations import Operation

from ..live.catalogue import LiveCatalogue
from ..live.writer_feed import FeedFailed, WriterFeed

log = logging.getLogger(__name__)

POLL_S = 0.2
"""Between two looks where nothing is new."""
MAX_WAIT_S = 30.0
"""Longest wait after failures, which doubles from POLL_S."""
LOCK = ".live.following"
"""A file in a model's folder: who holds its lock follows."""
ANOTHER = "Was a backup put in place? Then delete live.db here: all of it is copied again."
TOO_LATE = "Delete live.db here: all of it is copied again, without what was deleted meanwhile."
BEHIND = "Nothing is copied until it has more. Does a host answer there that itself follows, or was an older copy of its file put in place?"


class Following:
    """See the module.

    feed     the writer's
    folder   of the models
    copies   by model: what takes its operations; the models that this host has
    """

    def __init__(self, feed: WriterFeed, folder: Path, copies: Callable[[], Mapping[str, LiveCatalogue]]) -> None:
        self._feed, self._folder, self._copies = feed, folder, copies
        self._locks: dict[str, IO[bytes]] = {}
        self._failed: dict[str, _Failure] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="following", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish what is being copied, and end."""
        self._stop.set()
        self._feed.abort()
        self._thread.join()
        self._feed.close()
        for lock in self._locks.values():
            lock.close()

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            for model, copies in self._copies().items():
                failure = self._failed.get(model)
                if failure is None or time.monotonic() >= failure.until:
                    self._look(model, copies)

    def _look(self, model: str, copies: LiveCatalogue) -> None:
        """Copy what is new of a model."""
        try:
            if self._holds(model):
                while not self._stop.is_set() and self._copied(model, copies):
                    pass
        except Exception as error:  # no failure may end this thread
            if self._stop.is_set():
                return
            before = self._failed.get(model)
            if not isinstance(error, EspalierError | OSError):
                log.exception("%s: copying operations from %s goes on after", model, self._feed.url)
            elif before is None or before.text != str(error):
                log.warning("%s: operations are not copied; it is tried again. %s", model, error)
            wait_s = POLL_S if before is None else min(2 * before.wait_s, MAX_WAIT_S)
            self._failed[model] = _Failure(str(error), wait_s, time.monotonic() + wait_s)
            copies.note(None, str(error))
        else:
            if self._failed.pop(model, None) is not None:
                log.info("%s: operations are copied again", model)

    def _copied(self, model: str, copies: LiveCatalogue) -> bool:
        """Copy one page; whether there may be more."""
        after, own = copies.journal.last_sequence(), copies.journal.identity()
        page = self._feed.changes(model, after)
        if after and page.identity is not None and own != page.identity:
            raise FeedFailed(f"The journal of {self._feed.url} is not the one that was copied here up to operation {after}. {ANOTHER}")
        if page.sequence < after:
            raise FeedFailed(f"{self._feed.url} has {page.sequence} operations, fewer than the {after} that are here. {BEHIND}")
        if after and page.dropped > max(after, copies.journal.dropped()):
            raise FeedFailed(f"{self._feed.url} has dropped deletes up to operation {page.dropped}; {after} were copied here. {TOO_LATE}")
        if page.operations:
            copy(copies.journal, page.operations, page.identity, page.dropped)
            copies.copied()
            after = page.operations[-1].sequence
        copies.note(page.sequence - after)
        return bool(page.operations) and after < page.sequence

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


def copy(journal: Journal, operations: Sequence[Operation], identity: str | None, dropped: int = 0) -> None:
    """Commit operations of another journal under their numbers, but those that are here already.

    identity  of that journal; dropped: the last delete that is missing there. Raises JournalError.
    """
    with journal.writing() as transaction:
        last = transaction.last_sequence()
        if not last and identity is not None:
            transaction.identify(identity, dropped)
        for operation in operations:
            if operation.sequence > last:
                transaction.append(operation)


class _Failure(NamedTuple):
    """text; wait_s: until the next attempt; until: when that is, of time.monotonic()."""

    text: str
    wait_s: float
    until: float
