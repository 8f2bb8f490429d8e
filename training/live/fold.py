"""`python -m training fold`: the live items of a version become part of the next one."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from espalier.bundle import Bundle
from espalier.errors import InvalidConfig
from training.live.catalogue import journal_of, read_items
from training.live.publish_fold import publish_fold
from training.live.replay import held_by, replayed
from training.versions import new_version

log = logging.getLogger(__name__)


def fold(model: Path, out: Path) -> Bundle:
    """Write models/NAME/VERSION (`out`), a version with all items of its journal in it, verified and measured on its held-out queries.

    Raises InvalidConfig where `out` is of another model, or the journal has nothing that the version does not hold.
    """
    new_version(out)
    bundle, now = Bundle.open(model), time.time()
    if out.absolute().parent != model.absolute().parent:
        raise InvalidConfig("--out", str(out), f"another version of {model.absolute().parent.name}: a journal is one model's")
    items, held = read_items(journal_of(model), now), held_by(bundle)
    if items is None or items.through <= held:
        found = "no journal" if items is None else f"a journal through operation {items.through}, all of which it holds"
        raise InvalidConfig("--model", f"{model} with {found}", "a version with live items that it does not hold")
    state = replayed(bundle, journal_of(model), items.operations, now)
    log.info("%d live items and %d tombstones, through operation %d", state.live_items, state.tombstones, state.sequence)
    return publish_fold(bundle, state, out)
