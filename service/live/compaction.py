"""Compacts a journal that has grown, beside the writes: an item that is written for ever does not fill the disk.

Knows the journal's file. Does not know who writes.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from espalier.errors import JournalError
from espalier.live.journal import Journal
from espalier.live.journal_upkeep import compact, versions_on_disk

log = logging.getLogger(__name__)

LEAST_BYTES = 64 << 20
"""A smaller journal is left as it is."""


class Compaction:
    """Of one journal, in a thread of its own; asked for by one thread.

    A journal is compacted when it is twice as large as after the last time, and LEAST_BYTES more: all compactions together cost about as
    much as the writes. Workers of one service may do it at once; that costs time, not operations.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._from = file, LEAST_BYTES
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Begin where the journal has grown. To be called after a commit."""
        if self._thread is not None and self._thread.is_alive():
            return
        try:
            if self._file.stat().st_size < self._from:
                return
        except OSError:
            return
        self._thread = threading.Thread(target=self._run, name=f"compaction-{self._file.parent.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait until none is under way."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        folder = self._file.parent
        try:
            journal = Journal(self._file)
            try:
                dropped = compact(journal, versions_on_disk(folder))
            finally:
                journal.close()
            self._from = 2 * self._file.stat().st_size + LEAST_BYTES
            replaced = "%s: its journal is compacted; %d operations were replaced by later ones, %d deletes are held by all versions"
            log.info(replaced, folder.name, dropped.operations, dropped.tombstones)
        except (JournalError, OSError) as error:
            self._from = 2 * self._from
            log.warning("%s: its journal is not compacted: %s", folder.name, error)
