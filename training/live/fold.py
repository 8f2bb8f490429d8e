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
    name, now = new_version(out), time.time()
    bundle = Bundle.open(model)
    if out.absolute().parent != model.absolute().parent:
        raise InvalidConfig(
            "--out", str(out), f"another version of {model.absolute().parent.name}, not of {name}: a journal is one model's"
        )
    items = read_items(journal_of(model), now)
    if items is None or items.through <= held_by(bundle):
        found = "no journal" if items is None else f"operations up to {items.through}"
        raise InvalidConfig(
            "--model", str(model), f"a model with live items to fold; it has {found}, and the version holds {held_by(bundle)}"
        )
    state = replayed(bundle, journal_of(model), items.operations, now)
    log.info("%d live items and %d tombstones, through operation %d", state.live_items, state.tombstones, state.sequence)
    return publish_fold(bundle, state, out)
