"""A host that follows another host's live catalogues: it copies the writer's operations into its journals, with their sequence numbers.

Of the processes of a host, the one that holds a lock on the models folder copies. Operations are durable here before they are applied, so a
restart continues where it stopped. There is one writer and no consensus: see failover in docs/live.md.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from espalier.errors import EspalierError
from espalier.live.journal import Journal
from espalier.live.operations import Operation

from ..host_thread import HostThread
from ..live.catalogue import LiveCatalogue
from ..live.writer_feed import FeedFailed, WriterFeed

log = logging.getLogger(__name__)

POLL_S = 0.2
"""Wait between two polls that found nothing new."""
SAME_S = 1e-3
"""Largest difference between the times of an operation and of its copy."""
MAX_WAIT_S = 30.0
"""Longest wait after failures. The wait doubles from POLL_S."""
LOCK = ".live.following"
"""A file in the models folder. The process that holds its lock follows."""
ANOTHER = "Was a backup put in place? Then delete live.db here: all of it is copied again."
TOO_LATE = "Delete live.db here: all of it is copied again, without what was deleted meanwhile."
BEHIND = "Nothing is copied until it has them. Does a host answer there that itself follows, or was an older copy of its file put in place?"


class Following(HostThread):
    """See the module.

    feed        the writer's changes
    folder      of the models
    catalogues  returns this host's catalogues by model
    """

    def __init__(self, feed: WriterFeed, folder: Path, catalogues: Callable[[], Mapping[str, LiveCatalogue]]) -> None:
        super().__init__("following", folder / LOCK, f"operations are copied from {feed.url}")
        self._feed, self._catalogues = feed, catalogues
        self._failures: dict[str, _Failure] = {}
        self._compared: dict[str, int] = {}  # model → its last operation here, known since the last failure to be the writer's

    def stop(self) -> None:
        """End the thread, after the page that is being copied."""
        super().stop()
        self._feed.abort()
        self._thread.join()
        self._feed.close()

    def _work(self) -> None:
        while not self._stopped.wait(POLL_S):
            for model, catalogue in self._catalogues().items():
                failure = self._failures.get(model)
                if failure is None or time.monotonic() >= failure.until:
                    self._copy_new(model, catalogue)

    def _copy_new(self, model: str, catalogue: LiveCatalogue) -> None:
        try:
            if self._elected():
                while not self._stopped.is_set() and self._copy_page(model, catalogue):
                    pass
        except Exception as error:  # no failure may end this thread
            self._compared.pop(model, None)
            if self._stopped.is_set():
                return
            last = self._failures.get(model)
            if not isinstance(error, EspalierError | OSError):
                log.exception("%s: copying operations from %s goes on after", model, self._feed.url)
            elif last is None or last.text != str(error):
                log.warning("%s: operations are not copied; it is tried again. %s", model, error)
            wait_s = POLL_S if last is None else min(2 * last.wait_s, MAX_WAIT_S)
            self._failures[model] = _Failure(str(error), wait_s, time.monotonic() + wait_s)
            catalogue.note(None, str(error))
        else:
            if self._failures.pop(model, None) is not None:
                log.info("%s: operations are copied again", model)

    def _copy_page(self, model: str, catalogue: LiveCatalogue) -> bool:
        """Copy one page. Returns whether there may be more."""
        after, identity = catalogue.journal.last_sequence(), catalogue.journal.identity()
        is_compared = self._compared.get(model) == after
        page = self._feed.changes(model, after if is_compared else max(after - 1, 0))  # with the last operation that is here
        if page.sequence < after and not is_compared:  # it was compacted away there and is the last one, or the writer is behind
            page = self._feed.changes(model, after)
        if after and page.identity is not None and identity != page.identity:
            raise FeedFailed(f"The journal of {self._feed.url} is not the one that was copied here up to operation {after}. {ANOTHER}")
        if page.sequence < after:
            raise FeedFailed(f"{self._feed.url} has {page.sequence} operations, fewer than the {after} that are here. {BEHIND}")
        if any(_differ(here, there) for here in catalogue.journal.since(after - 1, 1) for there in page.operations[:1]):
            raise FeedFailed(f"Operation {after} of {self._feed.url} is not the one that was copied here. {ANOTHER}")
        if after and page.dropped > max(after, catalogue.journal.dropped()):
            raise FeedFailed(f"{self._feed.url} has dropped deletes up to operation {page.dropped}; {after} were copied here. {TOO_LATE}")
        has_new = bool(page.operations) and page.operations[-1].sequence > after
        if has_new or (after and not is_compared and not catalogue.journal.is_copy()):
            copy(catalogue.journal, page.operations, page.identity, page.dropped)
        if has_new:
            catalogue.copied()
            after = page.operations[-1].sequence
        self._compared[model] = after
        catalogue.note(page.sequence - after)
        return has_new and after < page.sequence


def _differ(here: Operation, there: Operation) -> bool:
    """Whether two operations of one number are not the same. An erasure may have changed their events; the feed rounds their times."""
    return here.sequence == there.sequence and (here.id != there.id or abs(here.at - there.at) > SAME_S)


def copy(journal: Journal, operations: Sequence[Operation], identity: str | None, dropped: int = 0) -> None:
    """Commit operations of another journal with their sequence numbers, except those that are here already.

    identity  of that journal; dropped: the last delete that is missing there. Raises JournalError.
    """
    with journal.writing() as transaction:
        last = transaction.last_sequence()
        if not last and identity is not None:
            transaction.identify(identity, dropped)
        transaction.mark_copy()
        for operation in operations:
            if operation.sequence > last:
                transaction.append(operation)


class _Failure(NamedTuple):
    """An error's text, the wait until the next attempt, and the time of that attempt, of time.monotonic()."""

    text: str
    wait_s: float
    until: float
