"""The live items of a version as a training run sees them: the operations of the journal that it does not hold, placed and applied.

Operations that were placed in this version keep their places. Others are placed here, as a service places them that loads the version;
nothing is stored.
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

NAMED = 5
"""Ids of items without a place that a warning names."""


def held_by(bundle: Bundle) -> int:
    """The last operation that a version holds."""
    return 0 if bundle.manifest.live is None else bundle.manifest.live.through


def replayed(bundle: Bundle, file: Path, operations: Iterable[Operation], now: float) -> LiveState:
    """The state of a version at a time, seconds since 1970.

    file        the journal, for the places that it has stored
    operations  ascending; of each id its last one is enough
    An item that cannot be placed is left out, with a warning.
    """
    replay, left_out = _Replay(bundle), []
    wanted = [operation for operation in operations if operation.sequence > replay.state.sequence]
    journal = Journal(file, "read")
    try:
        stored = journal.placements(bundle.manifest.version, [operation.sequence for operation in wanted])
        for operation in wanted:
            if not replay.apply(operation, stored.get(operation.sequence, ()), now):
                left_out.append(operation.id)
    finally:
        journal.close()
        replay.close()
    if left_out:
        named = ", ".join(map(repr, left_out[:NAMED]))
        log.warning("%d items are left out, since nothing says where they belong in %s: %s", len(left_out), bundle.path, named)
    replay.state.expire(now)
    return replay.state


class _Replay:
    def __init__(self, bundle: Bundle) -> None:
        self.bundle, self.state, self._columns = bundle, LiveState(bundle), Columns(bundle.items)
        self.state.skip_to(held_by(bundle))
        self._opened: tuple[Pipeline, Placer] | None = None  # where something must be placed

    def close(self) -> None:
        if self._opened is not None:
            self._opened[0].close()

    def apply(self, operation: Operation, stored: tuple[Placement, ...], now: float) -> bool:
        """Apply an operation at the places that are stored, or at new ones; whether its item has a place."""
        change = Change.of(operation, stored, self._columns, now)
        if stored or change.kind == "delete":
            try:
                self.state.apply([change])
                return True
            except InvalidData as error:
                log.info("operation %d is placed anew: %s", operation.sequence, error)
        is_trained = bool(self.bundle.items.rows_of([operation.id])[0] >= 0)
        placements: tuple[Placement, ...] = ()
        if not is_trained or (self.bundle.manifest.live is not None and operation.body.has_evidence):  # else training knew it better
            placements = self._placed(operation, is_trained)
        if not placements and not is_trained:
            self.state.skip_to(operation.sequence)
            return False
        self.state.apply([replace(change, placements=placements)])
        return True

    def _placed(self, operation: Operation, is_trained: bool) -> tuple[Placement, ...]:
        """A leaf in each tree under the best parent with room, of a trained item its own; empty where its evidence says nothing."""
        found = []
        try:
            for tree, parents in enumerate(self._candidates(operation)):
                if not parents.nodes:
                    return ()
                row_there = parents.row(parents.nodes[0])
                where = chain(parents, ((near, row_there) for near in self.state.near(tree, parents.nodes[0])))
                parent, row = next(((node, row) for node, row in where if is_trained or self.state.has_room(tree, node)), (-1, row_there))
                if parent < 0:
                    return ()
                found.append(Placement(tree, parent, 0 if is_trained else self.state.next_slot(tree, parent), row))
        except EspalierError as error:
            log.info("%r: %s", operation.id, error)
            return ()
        return tuple(found)

    def _candidates(self, operation: Operation) -> Candidates:
        """Where an item may go, by all that is known of it. Raises what `Placer.place` finds."""
        if self._opened is None:
            self._opened = open_engine(self.bundle, "cpu"), Placer(self.bundle)
        engine, placer = self._opened
        body, entry, overlay = operation.body, self.state.table.entry(operation.id), self.state.overlay()
        if body.fields is None and entry is not None and not entry.is_deleted:
            body = replace(body, fields=entry.fields)
        engine.set_overlay(overlay)
        (found,) = placer.place([body], self.state.table, overlay, engine.parents)
        if isinstance(found, EspalierError):
            raise found
        return found
