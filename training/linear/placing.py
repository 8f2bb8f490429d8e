"""Place new items in a trained model of linear scorers, without training: items that have a text but no queries yet.

They are put as live items are, all at once and without a journal, and folded: each goes to the best of the nodes above the leaves that the
search for its own text leads to and that still have room, with the weights that `espalier.placement.linear_rows` says.

All other weights and all item rows stay, so answers over old items alone do not change. Texts of old items are read from the item table.
A model of features has no texts, so neighbours give its new items nothing. In a forest new items are placed in each tree. In a tail the row
of a new item is x, as if its text were its only training point.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from espalier.bundle import Bundle
from espalier.bundle_writer import LinearContent
from espalier.engines import open_engine
from espalier.errors import InvalidConfig, InvalidData
from espalier.live.fold import folded
from espalier.live.rows import Placement
from espalier.live.state import Change, LiveState
from espalier.manifest import LinearScorer, ManifestDraft
from espalier.placement.evidence import Evidence
from espalier.placement.linear_placement import LinearPlacement
from espalier.placement.parents import Parents
from espalier.queries import QueryBatch, blank_queries
from training.linear.new_items import NewItems, read_new_items
from training.live.publish_fold import fitted, publish_content

log = logging.getLogger(__name__)


def place(model: Path, file: Path, columns: Sequence[str], out: Path) -> Bundle:
    """Write models/NAME/VERSION, a model with the new items of `file` beside its own, verified and measured on its held-out queries.

    columns  of the item table that are an item's text; none for a model of features
    Raises what `read_new_items` does; InvalidConfig where the model has no linear scorers; InvalidData where its clusters are full.
    """
    begin = time.perf_counter()
    bundle = Bundle.open(model)
    if not isinstance(bundle.manifest.scorer, LinearScorer):
        raise InvalidConfig("--model", str(model), f"a model of linear scorers, not of {bundle.manifest.scorer.kind}")
    if bundle.stacking is not None:
        log.warning("the new version has no stacking, which knows nothing of new items: train a new model for one")
    new = read_new_items(bundle, file, columns)
    state = with_new_items(bundle, new, columns, file)
    content = fitted(bundle, folded(bundle, state.overlay(), state.table))
    if isinstance(content, LinearContent):
        content = replace(content, stacking=None)
    log.info("%d items placed in each of %d trees, %.1f s after the start", len(new), len(bundle.trees), time.perf_counter() - begin)
    return publish_content(bundle, _draft(bundle, out, file, columns, len(new)), content, out)


def with_new_items(bundle: Bundle, new: NewItems, columns: Sequence[str], file: Path) -> LiveState:
    """The state of a version with the new items put. Raises InvalidData where no node that an item may go to has room."""
    state, kind = LiveState(bundle), bundle.manifest.query
    nothing, unlike = blank_queries(kind, 0), np.empty(0, np.int64)
    evidence = [Evidence(nothing, unlike, QueryBatch(kind, new.own.between(i, i + 1)), None) for i in range(len(new))]
    engine = open_engine(bundle, "cpu")
    try:
        found = LinearPlacement(bundle, columns).place(evidence, state.table, None, engine.parents)
    finally:
        engine.close()
    placed = 0
    for item, trees in zip(new.table.to_pylist(), found, strict=True):
        placements = _placements(state, trees)
        if len(placements) == len(trees):
            placed += 1
            item_id = item.pop("id")
            state.apply([Change(placed, item_id, "put", item, placements)])
    if placed < len(new):
        expected = f"at most {placed} items like these, since the clusters near them are full; train a new model"
        raise InvalidData(str(file), f"{len(new)} items", expected)
    return state


def _placements(state: LiveState, trees: Sequence[Parents]) -> tuple[Placement, ...]:
    """A leaf under the best parent with room in each tree that has one."""
    placements = []
    for tree, parents in enumerate(trees):
        best = next(((parent, row) for parent, row in parents if state.has_room(tree, parent)), None)
        if best is not None:
            parent, row = best
            placements.append(Placement(tree, parent, state.next_slot(tree, parent), row))
    return tuple(placements)


def _draft(bundle: Bundle, out: Path, file: Path, columns: Sequence[str], count: int) -> ManifestDraft:
    """The model's manifest, with the placed items added to its data."""
    manifest = bundle.manifest
    with file.open("rb") as stream:
        fingerprint = hashlib.file_digest(stream, "sha256").hexdigest()
    placed = {"items": count, "sha256": fingerprint, "text": list(columns), "into": f"{manifest.name}/{manifest.version}"}
    data = manifest.data | {"items": len(bundle.items) + count, "placed": [*manifest.data.get("placed", []), placed]}
    fields = {name: getattr(manifest, name) for name in ManifestDraft.model_fields}
    changed = {"name": out.absolute().parent.name, "version": int(out.name), "created": datetime.now(UTC), "data": data, "metrics": {}}
    return ManifestDraft(**fields | changed)
