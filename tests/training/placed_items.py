"""New items that are put into a trained model all at once, and folded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.errors import EspalierError
from espalier.live.operations import ItemBody
from espalier.live.rows import Placement
from espalier.live.state import Change, LiveState
from espalier.placement.placer import Placer
from training.live.publish_fold import publish_fold


def put_and_fold(bundle: Bundle, bodies: Mapping[str, ItemBody], out: Path) -> Bundle:
    """A version with new items, put all at once and each in the first place with room."""
    state, engine = LiveState(bundle), open_engine(bundle, "cpu")
    found = Placer(bundle).place(list(bodies.values()), state.table, None, engine.parents)
    for number, ((item, body), trees) in enumerate(zip(bodies.items(), found, strict=True), 1):
        assert not isinstance(trees, EspalierError)
        placements = []
        for tree, parents in enumerate(trees):
            parent, row = next((parent, row) for parent, row in parents if state.has_room(tree, parent))
            placements.append(Placement(tree, parent, state.next_slot(tree, parent), row))
        state.apply([Change(number, item, "put", body.fields, tuple(placements))])
    return publish_fold(bundle, state, out)


def of_features(dense: Any, ids: list[str] | None = None) -> dict[str, ItemBody]:
    """New items of a model of features, [n, F]: each with an event of its own features."""
    events = [{"indices": np.flatnonzero(row).tolist(), "values": row[row != 0].tolist()} for row in np.asarray(dense, np.float64)]
    return {item: ItemBody(events=(event,)) for item, event in zip(ids or [f"new-{i}" for i in range(len(events))], events, strict=True)}
