"""What a training run takes along from an earlier model: what its journal says of items, and its bundle with the live items in it.

Live items have a leaf and a row in the earlier model, so they start from there as trained ones do. Both are written once into the run's
work folder; see catalogue.py for why.
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
from ..live.publish_fold import fitted
from ..live.replay import held_by, replayed

ITEMS, EARLIER = "journal.ndjson", "earlier"


@dataclass(frozen=True)
class TakenAlong:
    """items: what the journal says; held: the last operation that the earlier model held; models: the folder of the model's versions."""

    items: JournalItems
    held: int
    models: Path

    def info(self, out: Path) -> LiveInfo | None:
        """What the manifest of models/NAME/VERSION says; None for a model of another name, which has another journal."""
        return LiveInfo(through=self.items.through) if out.absolute().parent == self.models else None


def take_along(earlier: Path, work: Path) -> TakenAlong | None:
    """What the journal of an earlier model says, read once for a run; None where there is no journal."""
    kept, bundle = work / ITEMS, Bundle.open(earlier)
    if not kept.is_file():
        items = read_items(journal_of(earlier), time.time())
        if items is None:
            return None
        items.write(kept)
    return TakenAlong(JournalItems.read(kept), held_by(bundle), earlier.absolute().parent)


def with_live_items(earlier: Path, items: JournalItems, work: Path) -> Path:
    """The bundle of an earlier model with live items in it, written once for a run. Raises what `replayed` does."""
    bundle = Bundle.open(earlier)
    path = work / EARLIER / bundle.manifest.name / str(bundle.manifest.version)
    if not path.exists():
        state = replayed(bundle, journal_of(earlier), items.operations, time.time())
        write_bundle(path, fold_draft(bundle, path, state.sequence), fitted(bundle, folded(bundle, state.overlay(), state.table)))
    return path
