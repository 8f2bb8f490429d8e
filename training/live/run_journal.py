"""The run's copies of a journal and of the earlier model's bundle with the live items in it.

Live items have a leaf and a row in the earlier model, so training starts from these, as it does for trained items. Both copies are written
once into the run's work folder; catalogue.py says why.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from espalier.bundle import Bundle
from espalier.bundle_writer import write_bundle
from espalier.live.fold import fold_draft, folded
from espalier.manifest import LiveInfo

from ..live.catalogue import JournalItems, journal_of, read_items
from ..live.publish_fold import storable_content
from ..live.replay import held_through, replay_operations

ITEMS, EARLIER = "journal.ndjson", "earlier"


@dataclass(frozen=True)
class RunJournal:
    """items: the journal's items; held_through: the last operation in the earlier model; models: the folder of its versions."""

    items: JournalItems
    held_through: int
    models: Path

    @property
    def identity(self) -> str:
        """Of which model the journal is, and which operations it adds to the earlier version."""
        return f"{self.models}, after operation {self.held_through}"

    def info(self, out: Path) -> LiveInfo | None:
        """The manifest entry for models/NAME/VERSION; None for a model of another name, which has another journal."""
        return LiveInfo(through=self.items.through) if out.absolute().parent == self.models else None


def read_run_journal(earlier: Path, work: Path) -> RunJournal | None:
    """The journal of an earlier model, read once for a run; None without a journal."""
    copy, bundle = work / ITEMS, Bundle.open(earlier)
    if not copy.is_file():
        items = read_items(journal_of(earlier), time.time())
        if items is None:
            return None
        items.write(copy)
    return RunJournal(JournalItems.read(copy), held_through(bundle), earlier.absolute().parent)


def with_live_items(earlier: Path, items: JournalItems, work: Path) -> Path:
    """The path of the earlier model's bundle with live items in it, written once for a run. Raises the errors of `replay_operations`."""
    bundle = Bundle.open(earlier)
    path = work / EARLIER / bundle.manifest.name / str(bundle.manifest.version)
    if not path.exists():
        state = replay_operations(bundle, journal_of(earlier), items.operations, time.time())
        overlay = state.overlay()
        write_bundle(path, fold_draft(bundle, path, overlay), storable_content(bundle, folded(bundle, overlay, state.table)))
    return path
