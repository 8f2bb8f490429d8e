"""Compacts a journal that has grown, while writes go on, so that endless updates of an item do not fill the disk.

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
"""Smaller journals are not compacted."""


class Compaction:
    """Compacts one journal, in a separate thread. Used by one thread.

    A journal is compacted when it is LEAST_BYTES larger than twice its size after the last compaction. So all compactions together cost
    about as much as the writes. Several workers of a service may compact at the same time; that costs time, but loses no operation.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._threshold_bytes = file, LEAST_BYTES
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Begin a compaction if the journal has grown. To be called after a commit."""
        if self._thread is not None and self._thread.is_alive():
            return
        try:
            if self._file.stat().st_size < self._threshold_bytes:
                return
        except OSError:
            return
        self._thread = threading.Thread(target=self._run, name=f"compaction-{self._file.parent.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait until no compaction is running."""
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
            self._threshold_bytes = 2 * self._file.stat().st_size + LEAST_BYTES
            compacted = "%s: its journal is compacted; %d operations were replaced by later ones, %d deletes are held by all versions"
            log.info(compacted, folder.name, dropped.operations, dropped.tombstones)
        except (JournalError, OSError) as error:
            self._threshold_bytes = 2 * self._threshold_bytes
            log.warning("%s: its journal is not compacted: %s", folder.name, error)
