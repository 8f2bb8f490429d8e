"""Replays a journal over a version for a training run: places and applies the operations that the version does not hold.

An operation whose placement in this version is stored in the journal keeps it. Others are placed here, as a service does when it loads the
version; the new placements are not stored.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.engines.pipeline import Pipeline
from espalier.errors import EspalierError, InvalidData
from espalier.live.fields import Columns
from espalier.live.journal import Journal
from espalier.live.operations import Operation
from espalier.live.rows import Placement
from espalier.live.state import Change, LiveState
from espalier.placement.placer import Candidates, Placer

log = logging.getLogger(__name__)

LISTED_IDS = 5
"""Most ids that the warning about items without a placement lists."""


def held_through(bundle: Bundle) -> int:
    """The last operation that a version holds."""
    return 0 if bundle.manifest.live is None else bundle.manifest.live.through


def replay_operations(bundle: Bundle, file: Path, operations: Iterable[Operation], now: float) -> LiveState:
    """The state of a version at the time `now`, in seconds since 1970.

    file        the journal, which holds stored placements
    operations  ascending; the last one of each id is enough
    An item that cannot be placed is left out, with a warning.
    """
    replay, left_out = _Replay(bundle), []
    pending = [operation for operation in operations if operation.sequence > replay.state.sequence]
    journal = Journal(file, "read")
    try:
        stored = journal.placements(bundle.manifest.version, [operation.sequence for operation in pending])
        for operation in pending:
            if not replay.apply(operation, stored.get(operation.sequence, ()), now):
                left_out.append(operation.id)
    finally:
        journal.close()
        replay.close()
    if left_out:
        ids = ", ".join(map(repr, left_out[:LISTED_IDS]))
        log.warning("%d items are left out, since they have no evidence for a placement in %s: %s", len(left_out), bundle.path, ids)
    replay.state.expire(now)
    return replay.state


class _Replay:
    def __init__(self, bundle: Bundle) -> None:
        self.bundle, self.state, self._columns = bundle, LiveState(bundle), Columns(bundle.items)
        self.state.skip_to(held_through(bundle))
        self._engine_and_placer: tuple[Pipeline, Placer] | None = None  # opened when the first operation must be placed

    def close(self) -> None:
        if self._engine_and_placer is not None:
            self._engine_and_placer[0].close()

    def apply(self, operation: Operation, stored: tuple[Placement, ...], now: float) -> bool:
        """Apply an operation with its stored placements, or with new ones. Returns whether its item has a leaf."""
        change = Change.of(operation, stored, self._columns, now)
        if stored or change.kind == "delete":
            try:
                self.state.apply([change])
                return True
            except InvalidData as error:
                log.info("operation %d gets a new placement: %s", operation.sequence, error)
        is_trained = bool(self.bundle.items.rows_of([operation.id])[0] >= 0)
        placements: tuple[Placement, ...] = ()
        if not is_trained or (self.bundle.manifest.live is not None and operation.body.has_evidence):  # else the trained row stays
            placements = self._place(operation, is_trained)
        if not placements and not is_trained:
            self.state.skip_to(operation.sequence)
            return False
        self.state.apply([replace(change, placements=placements)])
        return True

    def _place(self, operation: Operation, is_trained: bool) -> tuple[Placement, ...]:
        """A leaf in each tree: under the best parent with room, for a trained item its own; empty if its evidence is unusable."""
        placements = []
        try:
            for tree, parents in enumerate(self._candidates(operation)):
                if not parents.nodes:
                    return ()
                best_row = parents.row(parents.nodes[0])
                choices = chain(parents, ((near, best_row) for near in self.state.near(tree, parents.nodes[0])))
                parent, row = next(((node, row) for node, row in choices if is_trained or self.state.has_room(tree, node)), (-1, best_row))
                if parent < 0:
                    return ()
                placements.append(Placement(tree, parent, 0 if is_trained else self.state.next_slot(tree, parent), row))
        except EspalierError as error:
            log.info("%r: %s", operation.id, error)
            return ()
        return tuple(placements)

    def _candidates(self, operation: Operation) -> Candidates:
        """The parents to choose from, by the item's evidence. Raises the error that `Placer.place` returns."""
        if self._engine_and_placer is None:
            self._engine_and_placer = open_engine(self.bundle, "cpu"), Placer(self.bundle)
        engine, placer = self._engine_and_placer
        body, entry, overlay = operation.body, self.state.table.entry(operation.id), self.state.overlay()
        if body.fields is None and entry is not None and not entry.is_deleted:
            body = replace(body, fields=entry.fields)
        engine.set_overlay(overlay)
        (candidates,) = placer.place([body], self.state.table, overlay, engine.parents)
        if isinstance(candidates, EspalierError):
            raise candidates
        return candidates
